"""Policies against full attention: what is measured, which rows are on a front, and a run that was stopped."""

from __future__ import annotations

import csv
from typing import Any

import pytest
import torch
import typer
from letters import letters
from tiny import prompt, tiny_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typer.testing import CliRunner

import common
import quality
from hf_offload import Scout
from hf_offload.tools import measuring

TOKEN = 2 * 4 * 2 * 16 * 4  # K and V, layers, heads, channels, bytes


def lines(*points: tuple[float, float, float, float]) -> list[dict[str, Any]]:
    names = ("kl", "host", "device", "ms")
    return [{"row": str(i), "read": None, **dict(zip(names, point, strict=True))} for i, point in enumerate(points)]


def test_fronts_and_the_cheapest() -> None:
    rows = lines((0.0, 9, 9, 9), (0.01, 2, 4, 5), (0.02, 2, 3, 6), (0.5, 1, 1, 1))
    quality.fronts(rows)
    assert [row["front"] for row in rows] == ["host device ms", "host device ms", "device", "host device ms"]
    table = {line["KL at most"]: line for line in quality.best(rows)}
    assert table[0.02]["device"] == "2 (3)"
    assert table[0.02]["ms"] == "1 (5)"
    assert table[0.005]["host"] == "0 (9)"
    assert table[0.005]["read"] is None


def test_divergence_by_hand() -> None:
    full = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    mine = torch.tensor([[0.2, 0.6, 0.2], [0.1, 0.1, 0.8]]).log()
    kl, top = measuring.divergence(mine, full)
    want = 0.5 * torch.tensor(0.5 / 0.2).log() + 0.3 * torch.tensor(0.3 / 0.6).log()
    torch.testing.assert_close(kl, torch.stack([want, torch.tensor(0.0)]))
    assert top == 0.5


@pytest.mark.parametrize(
    ("policy", "options", "tokens"),
    [
        ("full", {"resident": 64}, 310 - 64),  # what is not resident
        ("full", {"resident": 64, "host": "fetch"}, 310 - 64),
        ("window", {"budget": 128}, 0),
        ("window", {"budget": 128, "resident": 96}, 32),
        ("hgca", {"window": 64, "beta": 0.0}, 310 - 64),
    ],
)
def test_bytes_of_the_host(policy: str, options: dict[str, Any], tokens: int) -> None:
    """Around the middle of the steps 310 tokens are cached; blocks are whole."""
    model = tiny_model("llama")
    reading = measuring.read(model, prompt(1, 320)[0], 20)
    found = measuring.cost(model, policy, {"tier": "split", "block_size": 16, **options}, reading)
    assert found.host_bytes == pytest.approx(tokens * TOKEN, abs=24 * TOKEN)
    assert len(found.kl) == 20
    if policy in ("full", "hgca"):
        assert found.kl.max() < 1e-5
        assert found.top1 == 1
    one = measuring.cost(model, policy, {"block_size": 16, **options} | {"tier": "one"}, reading)
    assert one.host_bytes is None
    torch.testing.assert_close(one.kl, found.kl, atol=1e-4, rtol=1e-3)


def test_a_row_that_needs_two_memories_takes_the_tier_asked_for(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(1, 240)[0]
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama"), None))
    monkeypatch.setattr(common, "text_of", lambda kind, prose: kind)
    monkeypatch.setattr(common, "window", lambda text, tokenizer, start, tokens: ids[:, :tokens])
    asked = []

    def measures(context: Any, row: Any, *others: Any) -> dict[str, Any]:
        asked.append(row.options["tier"])
        return {"kl": 0.1, "top1": 1.0, "ms": 1.0, "read": 1.0}

    monkeypatch.setattr(quality, "measure", measures)
    rows = ["--row", "scout:budget=192,recent=0,lookahead=select"]
    options = [*rows, "--contexts", "220", "--steps", "2", "--kinds", "code", "--out", str(tmp_path / "quality.csv")]
    assert CliRunner().invoke(common.command(quality.main), options).exit_code != 0
    result = CliRunner().invoke(common.command(quality.main), [*options, "--tier", "split"])
    assert result.exit_code == 0, result.output
    assert asked == ["split"]


@pytest.mark.slow
def test_every_row_is_measured_and_a_stopped_run_goes_on(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(1, 240)[0]
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama"), None))
    monkeypatch.setattr(common, "text_of", lambda kind, prose: kind)
    monkeypatch.setattr(common, "window", lambda text, tokenizer, start, tokens: ids[:, :tokens])
    measure, asked = quality.measure, []

    def stops(model: Any, row: Any, *others: Any) -> dict[str, Any]:
        asked.append(row.name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return measure(model, row, *others)

    monkeypatch.setattr(quality, "measure", stops)
    out = tmp_path / "quality.csv"
    rows = ["--row", "full", "--row", "scout:budget=192,recent=0", "--row", "h2o:heavy=0.1"]
    options = [*rows, "--contexts", "220", "--steps", "6", "--kinds", "code", "--out", str(out)]
    assert CliRunner().invoke(common.command(quality.main), options).exit_code != 0
    result = CliRunner().invoke(common.command(quality.main), options)
    assert result.exit_code == 0, result.output
    assert asked == ["full", "scout:budget=192,recent=0", "scout:budget=192,recent=0", "h2o:heavy=0.1"]
    with out.open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [line["row"] for line in found] == rows[1::2]
    assert float(found[0]["kl"]) < 1e-5 < float(found[1]["kl"])
    assert float(found[0]["read"]) == pytest.approx(228 * TOKEN / 8 / 1024)
    assert out.with_suffix(".png").stat().st_size > 0
    assert not out.with_suffix(".jsonl").exists()


@torch.inference_mode()
@pytest.mark.parametrize("row", ["scout:samples=4096,sinks=16,recent=16,block_size=16", "full"])
def test_what_a_row_costs(row: str) -> None:
    """In both memories; every pair is drawn, so that nothing is missed."""
    model, ids = tiny_model("llama"), prompt(1, 300)[0]
    context = quality.Context(model, ids, [290], 290)
    full = context.decode(common.FULL, context.make_cache(common.FULL), 0, 6)[1]
    line = quality.measure(context, common.row_of(row), full, 6, None)
    assert max(line["kl"], line["kl_split"]) < 1e-5
    assert line["top1"] == 1
    assert line["read"] * 8 * 1024 >= 290 * TOKEN
    assert line["attended"] is None  # so few tokens are all attended
    assert line["device"] > 0
    assert line["ms"] > 0
    drawn = quality.measure(context, common.row_of("scout:samples=64,recent=16,sinks=16,block_size=16"), full, 6, None)
    assert 48 < drawn["attended"] < 290
    assert drawn["kl"] > line["kl"]


@torch.inference_mode()
def test_found_are_those_that_full_attention_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is asked for these alone, in one reading; what a row finds is its share."""
    asked = []

    def answers(reading: Any, row: Any, setup: str, prompt: Any, sample: Any, *_: Any) -> dict[str, Any]:
        asked.append((row.policy, id(reading), sample.name))
        return {"score": 100.0 if sample.name in {"full": "013", "window": "03"}[row.policy] else 0.0}

    monkeypatch.setattr(quality, "answer", answers)
    text = "A sentence that says little. Another one! " * 300
    hidden = quality.Needles(tiny_model("llama"), letters(), text, "code", 300, 4)
    assert hidden.found(common.row_of("window:budget=64")) == pytest.approx(2 / 3)
    assert [name for _, _, name in asked] == ["0", "1", "2", "3", "0", "1", "3"]
    assert [asked[i][1] for i in (0, 1, 3)] == [asked[i][1] for i in (4, 5, 6)]
    monkeypatch.setattr(quality, "answer", lambda *_: {"score": 0.0})
    assert quality.Needles(tiny_model("llama"), letters(), text, "code", 300, 2).found(common.FULL) is None
    with pytest.raises(typer.BadParameter, match="exceed the model's 1024 positions"):
        quality.Needles(tiny_model("llama"), letters(), text, "code", 1024, 2)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("nonesuch:budget=64", "policy='nonesuch' is unknown"),
        ("dynamic", "policy='dynamic' is unknown"),
        ("scout:64", "not a policy with options"),
        ("scout:budget=32", "--row scout:budget=32: budget=32 is less than"),
        ("fluxion:predictor=/there/none.safetensors", "--row fluxion:predictor=none.safetensors: "),
    ],
)
def test_what_cannot_be_run_is_told_before_a_text_is_read(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, row: str, told: str
) -> None:
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama"), None))
    monkeypatch.setattr(quality.Context, "__init__", lambda *_: pytest.fail("a text was read"))
    options = ["--row", "full", "--row", row, "--kinds", "code", "--out", str(tmp_path / "quality.csv")]
    result = CliRunner().invoke(common.command(quality.main), options)
    assert result.exit_code == 2, result.output
    assert told in " ".join(result.output.replace("│", " ").split())


def test_the_papers_form_is_that_of_scout() -> None:
    rows = quality.variants(1024)
    assert Scout(**{k: v for k, v in rows["paper"].options.items() if k != "tier"}) == Scout.paper(budget=1024)
    assert Scout(**rows["paper-off"].options) == Scout.paper(budget=1024, lookahead="off")
    assert all(("tier" in row.options) == (row.options.get("lookahead", "off") != "off") for row in rows.values())


@pytest.mark.parametrize("kind", quality.TABLES)
def test_rows_of_a_table_have_exactly_so_many_tokens(kind: str) -> None:
    width, tokenizer = quality.TABLES[kind], letters()
    ids = quality.table_of(width, tokenizer, 0, 10 * width)
    assert ids.shape == (1, 10 * width)
    end = tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
    assert [i for i, token in enumerate(ids[0].tolist()) if token == end] == list(range(width - 1, 10 * width, width))
    assert not torch.equal(ids, quality.table_of(width, tokenizer, 1, 10 * width))


@torch.inference_mode()
def test_noise_disturbs_the_queries_of_a_rows_steps() -> None:
    model, ids = tiny_model("llama"), prompt(1, 300)[0]
    context = quality.Context(model, ids, [290], 290)
    full = context.decode(common.FULL, context.make_cache(common.FULL), 0, 6)[1]
    row = common.row_of("scout:samples=64,recent=16,sinks=16,block_size=16,tier=one")
    kl = [quality.measure(context, row, full, 6, None, None, noise, seed)["kl"] for noise, seed in
          ((0.0, 0), (0.1, 0), (0.1, 0), (0.1, 1))]  # fmt: skip
    assert kl[1] == kl[2]
    assert len({kl[0], kl[1], kl[3]}) == 3
    assert quality.NAME not in ALL_ATTENTION_FUNCTIONS._local_mapping  # or later registrations would be ignored
