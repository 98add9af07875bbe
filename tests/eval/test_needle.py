"""Hidden numbers as benchmark samples, and the report of those that are lost."""

from __future__ import annotations

import csv

from letters import letters
from tiny import tiny_model
from typer.testing import CliRunner

import common
import needle
from hf_offload.tools import assets

TEXT = "A sentence that says little. Another one! " * 300


def test_samples_are_the_needles_of_their_seeds():
    tokenizer = letters()
    samples = needle.samples_of(TEXT, "prose", (1, 4), tokenizer, 400)
    for seed, sample in zip((1, 4), samples, strict=True):
        hidden = assets.random_needle(TEXT, tokenizer, seed, tokens=400)
        assert (sample.task, sample.name, sample.question) == ("prose", str(seed), assets.QUESTION)
        assert hidden.number in sample.prompt
        assert sample.prompt.endswith(assets.QUESTION)
        assert sample.score(f"It is {hidden.number}.") == 100
        assert sample.score("It is 1000000.") == 0
    assert samples[0].prompt != samples[1].prompt


def test_only_what_full_attention_finds_can_be_lost():
    def record(row, task, sample, score):
        return {"setup": "dense", "row": row, "task": task, "sample": sample, "score": score}

    records = [
        *(record("full", "code", str(n), 100 * (n > 0)) for n in range(4)),
        *(record("window", "code", str(n), 100 * (n in (0, 1))) for n in range(4)),
        record("full", "prose", "4", 100), record("window", "prose", "4", 100),
    ]  # fmt: skip
    want = {"setup": "dense", "row": "window", "lost, code": "2 of 3", "lost, prose": "0 of 1", "lost": "2 of 4"}
    assert needle.lost(records, ["code", "prose"]) == [want]


def test_a_run(tmp_path, monkeypatch):
    out = tmp_path / "needle.csv"
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama"), letters()))
    monkeypatch.setattr(common, "text_of", lambda *_: TEXT)
    monkeypatch.setattr(assets.Needle, "found_in", lambda *_: True)
    rows = ["--row", "full", "--row", "window:budget=64,sinks=8,block_size=8"]
    options = ["--tokens", "300", "--kinds", "code,prose", "--limit", "2", "--new-tokens", "3", "--out", str(out)]
    result = CliRunner().invoke(common.command(needle.main), [*rows, *options])
    assert result.exit_code == 0, result.output
    with out.open(encoding="utf-8") as file:
        lines = [(line["row"], line["task"], line["samples"]) for line in csv.DictReader(file)]
    assert {("full", "code", "2"), (rows[3], "prose", "2")} <= set(lines)
    assert "0 of 4" in result.output
    names = [
        line.split('"sample": ')[1].split(",")[0] for line in out.with_suffix(".jsonl").read_text().split("\n")[1:-1]
    ]
    assert sorted(names) == ['"0"', '"0"', '"1"', '"1"', '"2"', '"2"', '"3"', '"3"']
    again = CliRunner().invoke(common.command(needle.main), [*rows, *options])
    assert again.exit_code == 0, again.output


def test_a_text_that_is_too_short_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama"), letters()))
    monkeypatch.setattr(common, "text_of", lambda *_: TEXT)
    options = ["--tokens", "300000", "--kinds", "code", "--out", str(tmp_path / "needle.csv")]
    result = CliRunner().invoke(common.command(needle.main), options)
    assert result.exit_code == 2
    assert "code: tokens=300000 is more than the " in " ".join(result.output.replace("│", " ").split())
