"""Recorded attention weights and their statistics, against eager attention and plain sums."""

from __future__ import annotations

import csv

import pytest
import torch
import typer
from tiny import FAMILIES, prompt, tiny_model
from transformers import Gemma3TextConfig
from typer.testing import CliRunner

import attention_stats
import common
from attention_stats import record

TOKENS = 70
POSITIONS = [9, 31, 32, 68, 69]


def eager(family, ids):
    """Weights of every query, `[Hq, N, N]` a layer."""
    model = tiny_model(family, "eager")
    return [layer[0].cpu() for layer in model(ids, output_attentions=True).attentions]


@torch.inference_mode()
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma3"])
def test_weights_are_those_of_eager_attention(family):
    model, ids = tiny_model(family, "sdpa"), prompt(1, TOKENS)[0]
    want, plain = eager(family, ids), model(ids).logits
    got = record(model, ids, POSITIONS, [0, 2], chunk=32)
    assert sorted(got) == [0, 2]
    for layer, rows in got.items():
        for position, row in zip(POSITIONS, rows, strict=True):
            torch.testing.assert_close(row, want[layer][:, position, : position + 1], atol=1e-5, rtol=1e-4)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, plain)


@torch.inference_mode()
def test_layers_with_windows_are_refused_unless_left_out():
    model, ids = tiny_model("gemma3", "sdpa"), prompt(1, TOKENS)[0]
    assert len(record(model, ids, [69], [1, 3], chunk=32)[3]) == 1
    with pytest.raises(ValueError, match="layer 0 of Gemma3Attention has sliding_window: give other --layers"):
        record(model, ids, [69], [0], chunk=32)
    assert model.config._attn_implementation == "sdpa"


@torch.inference_mode()
def test_windows_sum_what_eager_attention_gives():
    ids = prompt(1, TOKENS)[0]
    rows = eager("llama", ids)[1]
    recorded = [rows[:, p, : p + 1] for p in POSITIONS]
    edges = attention_stats.sizes(TOKENS)
    assert edges == [0, 1, 2, 4, 8, 16, 32, 64, 70]
    sums = attention_stats.window_sums(recorded, edges, edges)
    for i, start in enumerate(edges):
        for j, recent in enumerate(edges):
            want = 0.0
            for p in POSITIONS:
                inside = [n < start or n > p - recent for n in range(p + 1)]
                want += float(rows[:, p, : p + 1][:, inside].sum(-1).mean()) / len(POSITIONS)
            assert sums[i, j] == pytest.approx(want, abs=1e-5)


def test_entries_that_hold_a_share():
    weights = torch.tensor([[0.1, 0.5, 0.2, 0.2], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0]])
    assert attention_stats.needed_share(weights, 0.85).tolist() == [0.75, 1.0, 0.25]
    assert attention_stats.needed_share(weights, 0.6).tolist() == [0.5, 0.75, 0.25]
    assert attention_stats.line_at(weights[0], 0.6) == pytest.approx(0.2)
    assert attention_stats.line_at(weights[2], 0.9) == 1.0


def test_how_near_to_normal_scores_are():
    quantiles = attention_stats.quantiles(4001)
    assert quantiles[2000] == pytest.approx(0, abs=1e-12)
    assert quantiles[-1] == pytest.approx(-float(quantiles[0]))
    bell = 1.5 * quantiles[torch.randperm(4001)] - 3
    skewed = torch.rand(4001, dtype=torch.float64).log().neg()  # exponential: skewness 2, excess kurtosis 6
    told = attention_stats.shape_of(torch.stack([bell, skewed]).softmax(-1))
    assert told["skewness"].tolist() == [pytest.approx(0, abs=1e-6), pytest.approx(2, abs=0.5)]
    assert told["excess_kurtosis"][0] == pytest.approx(0, abs=0.05)
    assert told["excess_kurtosis"][1] > 3
    assert told["quantile_correlation"][0] == pytest.approx(1, abs=1e-6)
    assert 0.85 < told["quantile_correlation"][1] < 0.95
    # Weights sum to 1, so that the log-sum-exp of the scores is 0; that of a bell is log n + mean + variance / 2.
    assert told["lse_gap"][0] == pytest.approx(0, abs=0.02)
    want = torch.log(torch.tensor(4001.0)) + skewed.mean() + skewed.var(correction=0) / 2 - skewed.logsumexp(0)
    assert told["lse_gap"][1] == pytest.approx(float(want), abs=1e-6)


def test_layers_are_chosen_among_those_without_windows():
    assert attention_stats.whole_layers(tiny_model("gemma3").config) == [1, 3]
    assert attention_stats.whole_layers(tiny_model("opt").config) == [0, 1, 2, 3]
    config = Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention"] * 2)
    with pytest.raises(typer.BadParameter, match="layers are sliding_attention; none attends all tokens"):
        attention_stats.whole_layers(config)


@torch.inference_mode()
def test_a_model_with_few_heads_and_with_windows_needs_no_options(tmp_path, monkeypatch):
    model, out = tiny_model("gemma3", "sdpa"), tmp_path / "stats.csv"
    monkeypatch.setattr(common, "load", lambda *_: (model, None))
    monkeypatch.setattr(common, "window", lambda text, tokenizer, start, tokens: prompt(1, tokens)[0])
    options = [f"--text={__file__}", "--tokens", "40", "--queries", "3", "--out", str(out)]
    result = CliRunner().invoke(common.command(attention_stats.main), options)
    assert result.exit_code == 0, result.output
    with out.open(encoding="utf-8") as file:
        assert {line["layer"] for line in csv.DictReader(file)} == {"1", "3"}
    with out.with_name("stats_positions.csv").open(encoding="utf-8") as file:
        assert {line["head"] for line in csv.DictReader(file)} == {"3"}


@torch.inference_mode()
def test_scores_between_the_ends_are_told_of(tmp_path, monkeypatch):
    model, ids, out = tiny_model("llama", "sdpa"), prompt(1, 700)[0], tmp_path / "stats.csv"
    monkeypatch.setattr(common, "load", lambda *_: (model, None))
    monkeypatch.setattr(common, "window", lambda text, tokenizer, start, tokens: ids)
    options = [f"--text={__file__}", "--tokens", "700", "--queries", "3", "--layers", "0,2", "--out", str(out)]
    result = CliRunner().invoke(common.command(attention_stats.main), options)
    assert result.exit_code == 0, result.output
    with out.with_name("stats_scores.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [(r["layer"], r["head"]) for r in lines] == [(layer, str(head)) for layer in "02" for head in range(4)]
    rows = [eager("llama", ids)[2][1, p, 64 : 700 - 3 - 256].double().log() for p in range(697, 700)]
    skewness = sorted(float(((row - row.mean()) / row.std(correction=0)).pow(3).mean()) for row in rows)
    assert float(lines[5]["skewness"]) == pytest.approx(skewness[1], abs=1e-3)
    assert out.with_name("stats_scores.png").stat().st_size > 0


@torch.inference_mode()
def test_figures_and_numbers_of_two_texts(tmp_path, monkeypatch):
    model = tiny_model("llama", "sdpa")
    texts = {name: prompt(1, TOKENS, seed)[0] for seed, name in enumerate(("one", "two"))}
    for name in texts:
        (tmp_path / f"{name}.txt").write_text(name, encoding="utf-8")
    monkeypatch.setattr(common, "load", lambda *_: (model, None))
    monkeypatch.setattr(common, "window", lambda text, tokenizer, start, tokens: texts[text][:, :tokens])
    out = tmp_path / "stats.csv"
    options = [f"--text={tmp_path / name}.txt" for name in texts]
    options += ["--tokens", str(TOKENS), "--queries", "5", "--head", "3", "--layer", "1", "--layers", "0,3"]
    result = CliRunner().invoke(common.command(attention_stats.main), [*options, "--chunk", "16", "--out", str(out)])
    assert result.exit_code == 0, result.output
    weights = {name: eager("llama", ids) for name, ids in texts.items()}
    with out.open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    line = next(r for r in lines if (r["layer"], r["first"], r["newest"]) == ("3", "4", "8"))
    rows = [weights["one"][3][:, p, : p + 1] for p in range(65, 70)]
    want = sum(float((row[:, :4].sum(-1) + row[:, -8:].sum(-1)).mean()) for row in rows) / 5
    assert float(line["weight"]) == pytest.approx(want, rel=1e-4)
    with out.with_name("stats_heads.csv").open(encoding="utf-8") as file:
        heads = list(csv.DictReader(file))
    assert [(r["text"], r["head"]) for r in heads] == [(name, str(head)) for name in texts for head in range(4)]
    rows = [weights["two"][1][2, p, : p + 1].sort(descending=True).values.cumsum(0) for p in range(65, 70)]
    want = sum((int((row < 0.99).sum()) + 1) / len(row) for row in rows) / 5
    assert float(heads[6]["share"]) == pytest.approx(want, rel=1e-2)
    with out.with_name("stats_positions.csv").open(encoding="utf-8") as file:
        heavy = list(csv.DictReader(file))
    late, early = weights["one"][1][3, 69], weights["one"][1][3, 51, :52]
    above = [float(r["weight"]) for r in heavy if r["above_line"] == "1"]
    assert 0.9 <= sum(above) <= 0.9 + min(above)
    assert [int(r["position"]) for r in heavy] == list(range(TOKENS))
    for position, r in enumerate(heavy):
        assert float(r["weight"]) == pytest.approx(float(late[position]), rel=1e-4)
        before = float(early[position]) if position < 52 else None
        assert r["weight_before"] == "" if before is None else float(r["weight_before"]) == pytest.approx(before, 1e-4)
    assert "no numbers of scores" in result.output
    for name in ("windows", "heads", "positions"):
        assert out.with_name(f"stats_{name}.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "0,4"], "has layers 0 to 3"),
        (["--head", "4"], "has heads 0 to 3"),
        (["--queries", "18", "--tokens", "70"], "at most a quarter"),
    ],
)
def test_what_the_model_does_not_have_is_refused(options, message, monkeypatch):
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama", "sdpa"), None))
    result = CliRunner().invoke(common.command(attention_stats.main), ["--head", "0", *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
