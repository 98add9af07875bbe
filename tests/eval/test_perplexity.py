"""Perplexities against a direct computation, and resumed runs."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch
from tiny import prompt, tiny_model
from tqdm import tqdm
from typer.testing import CliRunner

import common
import perplexity
from resume import Progress

STEPS = 90


@pytest.fixture
def texts():
    """Three sequences `[3, STEPS + 1]`."""
    return torch.cat([prompt(1, STEPS + 1, seed)[0] for seed in range(3)])


@pytest.fixture
def rows():
    """The rows by name, for sequences of `STEPS` tokens."""
    return {row.name: row for row in perplexity.make_rows(STEPS, [0.4, 0.9], [0.5, 1.0], None)}


def direct(model, ids):
    """Losses of one forward over everything."""
    logits = model(ids[:, :-1], use_cache=False).logits.double()
    return -logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].cpu()


def run(model, row, ids, folder, every=1000):
    """Losses of a row, with states in a folder."""
    with tqdm(disable=True) as bar:
        return perplexity.decode(model, row, ids, Progress(folder, {}), every, bar)


@torch.inference_mode()
def test_full_attention_is_that_of_one_forward(texts, rows, tmp_path):
    model = tiny_model("llama")
    want = direct(model, texts)
    torch.testing.assert_close(perplexity.reference(model, texts, 16).nll, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(run(model, rows["full-decoded"], texts, tmp_path).nll, want, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_windows_are_shares_of_the_length_in_whole_blocks(texts, rows, tmp_path):
    assert rows["hgca-0.4-0.5"].options["window"] == 64
    assert rows["hgca-0.9-1"].options == {"window": 96, "beta": 1.0, "block_size": 32}
    model = tiny_model("llama")
    want = direct(model, texts)
    assert not torch.allclose(run(model, rows["window-0.4"], texts, tmp_path / "a").nll, want, atol=1e-3)
    torch.testing.assert_close(run(model, rows["window-0.9"], texts, tmp_path / "b").nll, want, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["window-0.4", "scout-256", "hgca-0.4-1"])
def test_a_run_that_was_stopped_goes_on_as_it_would_have(texts, rows, tmp_path, monkeypatch, name):
    model = tiny_model("llama")
    whole = run(model, rows[name], texts, tmp_path / "whole", every=20)
    seen = []

    def stop(logits, following, loss=perplexity.loss):
        seen.append(following)
        if len(seen) == 70:
            raise KeyboardInterrupt
        return loss(logits, following)

    monkeypatch.setattr(perplexity, "loss", stop)
    with pytest.raises(KeyboardInterrupt):
        run(model, rows[name], texts, tmp_path / "cut", every=20)
    again = run(model, rows[name], texts, tmp_path / "cut", every=20)
    assert len(seen) == 70 + STEPS - 60
    assert torch.equal(again.nll, whole.nll)
    assert again.kept == whole.kept
    assert (whole.kept is None) == (not name.startswith("hgca"))
    third = run(model, rows[name], texts, tmp_path / "cut", every=20)
    assert len(seen) == 70 + STEPS - 60
    assert torch.equal(third.nll, whole.nll)
    assert third.seconds == again.seconds > 0


def test_a_line_and_the_grid(rows):
    generator = torch.Generator().manual_seed(0)
    full, mine = (torch.rand(3, STEPS, generator=generator, dtype=torch.float64) for _ in range(2))
    losses, reference = perplexity.Losses(mine, kept=0.25), perplexity.Losses(full)
    names = [name for name in rows if name.startswith("hgca")]
    lines = [perplexity.record(rows[name], "code", losses, reference, slice(1, 3)) for name in names]
    line, less = lines[0], (mine - full)[1:].numpy()
    assert line["perplexity"] == pytest.approx(float(mine[1:].mean().exp()))
    assert line["nll_more"] == pytest.approx(less.mean())
    assert line["nll_more_se"] == pytest.approx(less.std(ddof=1) / (2 * STEPS) ** 0.5)
    assert (line["ratio"], line["beta"], line["attended"], line["kept_share"]) == (0.4, 0.5, 64, 0.25)
    grid = perplexity.table_one(lines, "code")
    assert [list(cells) for cells in grid] == [["GPU ratio", "β = 0.5", "β = 1"]] * 2
    assert grid[1]["GPU ratio"] == "0.9"
    assert grid[0]["β = 1"].startswith(f"{line['perplexity']:.2f} (")


def test_the_script_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(perplexity, "load", lambda *_: (tiny_model("llama"), None))
    monkeypatch.setattr(perplexity, "text_of", lambda kind, prose: kind)
    monkeypatch.setattr(perplexity, "window", lambda text, tokenizer, start, n: prompt(1, n, start)[0])
    out = tmp_path / "ppl.csv"
    options = ["--rows", "window-0.8,full-decoded", "--tokens", "80", "--batch", "2", "--ratios", "0.8"]
    options += ["--row", "window:budget=64,sinks=8,block_size=8"]
    result = CliRunner().invoke(common.command(perplexity.main), [*options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    with out.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [(line["row"], line["kind"]) for line in lines] == [
        (name, kind) for name in ("full", "window-0.8", "full-decoded", options[-1]) for kind in ("prose", "code")
    ]
    assert all(line["sequences"] == "2" for line in lines)
    for line in lines[4:6]:
        assert float(line["perplexity"]) == pytest.approx(float(line["perplexity_full"]), rel=1e-2)
    assert not out.with_suffix(".state").exists()
    table = out.with_suffix(".md").read_text(encoding="utf-8").splitlines()
    assert table[2].startswith("`python ")
    assert [row.split(" | ")[0] for row in table[8:]] == ["| window-0.8", "| full-decoded", f"| {options[-1]}"]
    more = 100 * (float(lines[2]["perplexity"]) / float(lines[2]["perplexity_full"]) - 1)
    assert f"{more:+.2f} ± " in table[8]
    each = [json.loads(line) for line in out.with_suffix(".jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["kind"], line["sequence"]) for line in each] == 3 * [
        ("prose", 0),
        ("prose", 1),
        ("code", 0),
        ("code", 1),
    ]
    mean = sum(line["nll"] for line in each[:2]) / 2
    assert mean == pytest.approx(math.log(float(lines[2]["perplexity"])), rel=1e-4)
    assert out.with_suffix(".png").stat().st_size > 0


def test_full_attention_is_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(perplexity, "load", lambda *_: pytest.fail("a model was loaded"))
    options = ["--row", "dynamic", "--out", str(tmp_path / "ppl.csv")]
    result = CliRunner().invoke(common.command(perplexity.main), options)
    assert result.exit_code == 2
    assert "leave it out" in " ".join(result.output.replace("│", " ").split())
