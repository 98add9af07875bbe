"""Times a token: what rows are fed, what counts, and a long generation in turns."""

from __future__ import annotations

import csv

from tiny import prompt, tiny_model
from typer.testing import CliRunner

import common
import decode


def run(tmp_path, monkeypatch, *options):
    """The CSV's lines, and what was fed: row and tokens of each turn."""
    model, ids, seen = tiny_model("llama"), prompt(1, 200)[0], []
    real = common.decode

    def feed(model, cache, tokens):
        seen.append((type(cache).__name__, tokens[0].tolist()))
        times, logits = real(model, cache, tokens)
        return [1e6, 1e6, *range(1, len(times) - 1)], logits

    monkeypatch.setattr(common, "decode", feed)
    monkeypatch.setattr(common, "load", lambda *_: (model, None))
    monkeypatch.setattr(common, "text_of", lambda kind, prose: kind)
    monkeypatch.setattr(common, "window", lambda text, tokenizer, start, n: ids[:, :n])
    out = tmp_path / "decode.csv"
    result = CliRunner().invoke(common.command(decode.main), [*options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.with_suffix(".png").stat().st_size > 0
    with out.open(encoding="utf-8") as file:
        return list(csv.DictReader(file)), seen, ids[0].tolist()


def test_rows_take_turns_over_the_tokens_that_follow(tmp_path, monkeypatch):
    options = ["--contexts", "70", "--rows", "dynamic,window-512", "--steps", "3", "--rounds", "3"]
    lines, seen, ids = run(tmp_path, monkeypatch, *options)
    parts = [ids[start : start + 5] for start in (70, 75, 80)]
    ours, stock = "HybridCache", "DynamicCache"
    assert seen == [
        (stock, parts[0]), (ours, parts[0]), (ours, parts[1]), (stock, parts[1]), (stock, parts[2]), (ours, parts[2])
    ]  # fmt: skip
    assert [(line["row"], line["context"], line["steps"]) for line in lines] == [
        ("dynamic", "70", "9"), ("window-512", "70", "9")
    ]  # fmt: skip
    for line in lines:  # the first two steps of a turn do not count
        assert (line["p50"], line["p99"], line["p99_p50"], line["speedup"]) == ("2", "3", "1.5", "1")


def test_batches_and_several_contexts(tmp_path, monkeypatch):
    options = ["--contexts", "60,40", "--rows", "dynamic,static,full,fluxion", "--batch", "2", "--steps", "1"]
    lines, *_ = run(tmp_path, monkeypatch, *options, "--rounds", "1")
    assert [(line["context"], line["row"]) for line in lines] == [
        (context, row) for context in ("40", "60") for row in ("dynamic", "static", "full", "fluxion")
    ]
    assert {line["beyond_bare"] for line in lines} == {"0"}
