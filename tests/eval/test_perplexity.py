"""Perplexities against a direct computation, and resumed runs."""

from __future__ import annotations

import csv
import math

import pytest
import torch
from tiny import prompt, tiny_model
from typer.testing import CliRunner

import common
import perplexity

STEPS = 90


@pytest.fixture
def texts():
    """Three sequences `[3, STEPS + 1]`."""
    return torch.cat([prompt(1, STEPS + 1, seed)[0] for seed in range(3)])


@pytest.fixture
def rows():
    """The rows by name, for sequences of `STEPS` tokens."""
    found = perplexity.grid(STEPS, [0.4, 0.9], [0.5, 1.0], {})
    names = [*found.pop("grid"), "window-0.4", "window-0.9", "full"]
    return {row.name: row for row in common.rows_of(names, known=found)}


def direct(model, ids):
    """Losses of one forward over everything."""
    logits = model(ids[:, :-1], use_cache=False).logits.double()
    return -logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].cpu()


@torch.inference_mode()
def test_full_attention_is_that_of_one_forward(texts, rows):
    model = tiny_model("llama")
    want = direct(model, texts)
    torch.testing.assert_close(perplexity.reference(model, texts, 16), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(perplexity.decode(model, rows["full"], texts)[0], want, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_windows_are_shares_of_the_length_in_whole_blocks(texts, rows):
    assert rows["hgca-0.4-0.5"].options["window"] == 64
    assert rows["hgca-0.9-1"].options == {"window": 96, "beta": 1.0, "block_size": 32}
    model = tiny_model("llama")
    want = direct(model, texts)
    assert not torch.allclose(perplexity.decode(model, rows["window-0.4"], texts)[0], want, atol=1e-3)
    torch.testing.assert_close(perplexity.decode(model, rows["window-0.9"], texts)[0], want, atol=1e-5, rtol=1e-5)


def test_a_line_and_the_grid():
    generator = torch.Generator().manual_seed(0)
    full, mine = (torch.rand(3, STEPS, generator=generator, dtype=torch.float64) for _ in range(2))
    told = perplexity.told(mine[1:], full[1:])
    grid = [(0.4, 0.5), (0.4, 1.0), (0.9, 0.5), (0.9, 1.0)]
    lines = [{"kind": "code", "ratio": ratio, "beta": beta} | told for ratio, beta in grid]
    line, less = lines[0], (mine - full)[1:].numpy()
    assert line["perplexity"] == pytest.approx(float(mine[1:].mean().exp()))
    assert line["nll_more"] == pytest.approx(less.mean())
    assert line["nll_more_se"] == pytest.approx(less.std(ddof=1) / (2 * STEPS) ** 0.5)
    assert (line["tokens"], line["sequences"]) == (STEPS, 2)
    grid = perplexity.table_one(lines, "code")
    assert [list(cells) for cells in grid] == [["GPU ratio", "β = 0.5", "β = 1"]] * 2
    assert grid[1]["GPU ratio"] == "0.9"
    assert grid[0]["β = 1"].startswith(f"{line['perplexity']:.2f} (")


def test_the_script_runs_and_goes_on_with_the_row_at_which_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama"), None))
    monkeypatch.setattr(common, "text_of", lambda kind, prose: kind)
    monkeypatch.setattr(common, "window", lambda text, tokenizer, start, n: prompt(1, n, start)[0])
    decode, asked = perplexity.decode, []

    def stops(model, row, ids):
        asked.append(row.name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return decode(model, row, ids)

    monkeypatch.setattr(perplexity, "decode", stops)
    out, mine = tmp_path / "ppl.csv", "window:budget=64,sinks=8,block_size=8"
    options = ["--rows", f"window-0.8,full,hgca-0.4-1,{mine}", "--tokens", "80", "--batch", "2", "--ratios", "0.4,0.8"]
    app = common.command(perplexity.main)
    assert CliRunner().invoke(app, [*options, "--out", str(out)]).exit_code != 0
    result = CliRunner().invoke(app, [*options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert asked == ["window-0.8", "full", "full", "hgca-0.4-1", mine]
    with out.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [(line["row"], line["kind"]) for line in lines] == [
        (name, kind) for name in ("dynamic", "window-0.8", "full", "hgca-0.4-1", mine) for kind in ("prose", "code")
    ]
    assert all(line["sequences"] == "2" for line in lines)
    for line in lines[4:6]:
        assert float(line["perplexity"]) == pytest.approx(float(line["perplexity_full"]), rel=1e-2)
    hgca = lines[6]
    assert (hgca["ratio"], hgca["beta"], hgca["attended"], hgca["kept_share"] != "") == ("0.4", "1", "32", True)
    more = float(lines[2]["perplexity"]) / float(lines[2]["perplexity_full"])
    assert float(lines[2]["nll_more"]) == pytest.approx(math.log(more), rel=1e-3)
    assert out.with_suffix(".png").stat().st_size > 0
    assert not out.with_suffix(".jsonl").exists()


def test_full_attention_is_no_row(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "load", lambda *_: pytest.fail("a model was loaded"))
    options = ["--row", "dynamic", "--out", str(tmp_path / "ppl.csv")]
    result = CliRunner().invoke(common.command(perplexity.main), options)
    assert result.exit_code == 2
    assert "'dynamic' is unknown" in " ".join(result.output.replace("│", " ").split())
