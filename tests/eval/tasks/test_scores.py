"""Scores, paired differences, their intervals, and the report."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from common import Setting
from tasks.scores import AVERAGE, WORTH, difference, report, spoken, summarize


def record(task, sample, row, score, setup="dense", **more):
    return {
        "task": task, "sample": sample, "row": row, "setup": setup, "score": score, "tokens": 90, "whole": 100,
        "asked": 6, "new_tokens": 4, "answer_seconds": 0.02, "answer": str(score), "cpu_ratio": None,
        "kept_share": None, "retrieved_share": 0.5, **more,
    }  # fmt: skip


@pytest.fixture
def few(monkeypatch):
    """Intervals of two samples, which are easy to reckon."""
    monkeypatch.setattr("tasks.scores.FEWEST", 2)


def test_tasks_weigh_alike(few, monkeypatch):
    found = difference([np.ones(30), np.array([4.0, 6.0])])
    assert (found["more"], found["pairs"]) == (pytest.approx(3), 32)
    assert (found["low"], found["high"]) == (pytest.approx(2.5), pytest.approx(3.5))  # of the two, one is drawn twice
    assert difference([np.arange(5.0)])["low"] > 0
    assert difference([np.arange(5.0), np.ones(1)]) == {"more": 1.5, "low": None, "high": None, "pairs": 6}
    assert difference([np.ones(0)]) == {"more": None, "low": None, "high": None, "pairs": 0}


def test_differences_are_paired_by_sample(few):
    """Samples of one row alone count in its score only."""
    answers = {"scout": {"a": 5, "b": 7, "c": 100}, "full": {"b": 6, "a": 5}}
    found = summarize([record("qa", name, row, score) for row, of in answers.items() for name, score in of.items()])
    assert next((x["more"], x["pairs"], x["samples"]) for x in found if x["row"] == "scout") == (0.5, 2, 3)


RECORDS = [
    record("hard", "1", "full", 10), record("hard", "2", "full", 0),
    record("easy", "1", "full", 50), record("easy", "2", "full", 30),
    record("hard", "1", "scout", 0), record("hard", "2", "scout", 0),
    record("easy", "1", "scout", 50), record("easy", "2", "scout", 26),
    record("easy", "1", "scout", 44, "sparse", whole=90),
]  # fmt: skip


def test_a_line_a_task_and_the_averages(few):
    lines = {(x["setup"], x["row"], x["task"]): x for x in summarize(RECORDS)}
    assert len(lines) == 10
    scout = lines["dense", "scout", AVERAGE]
    assert (scout["score"], scout["full"], scout["more"], scout["samples"]) == (19.0, 22.5, -3.5, 4)
    assert (scout["ms_per_token"], scout["cut"], scout["retrieved_share"]) == (pytest.approx(5), 4, 0.5)
    worth = lines["dense", "scout", WORTH]
    assert (worth["percent"], worth["same"]) == (-5, 0.5)
    assert (worth["more"], worth["tasks"], worth["pairs"]) == (-2, 1, 2)
    alone = lines["sparse", "scout", AVERAGE]
    assert (alone["score"], alone["more"], alone["full"], alone["cut"]) == (44, None, None, 0)
    assert alone["ms_per_token"] == pytest.approx(2)  # six tokens of the question were fed, too
    assert spoken(lines["dense", "full", "easy"]) == "40.0"
    assert spoken(worth) == "38.0 (-2.0, -4.0 to +0.0)"
    assert spoken(alone) == "44.0"


def test_the_report(tmp_path, capsys, few):
    out = tmp_path / "out.csv"
    report("Bench", Setting(out=out), RECORDS, ["samsum"])
    with out.open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 10
    text = out.with_suffix(".md").read_text(encoding="utf-8")
    assert "| easy | 2 (2) | 40.0 | 38.0 (-2.0, -4.0 to +0.0) |" in text
    assert "## Question sparse" in text
    assert "No samples of samsum were at hand" in text
    assert "No samples of samsum" in capsys.readouterr().out
