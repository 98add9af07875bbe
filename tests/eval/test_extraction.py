"""Records to be copied out: prompts and answers, and a run over a tiny model."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tiny import prompt, tiny_model
from typer.testing import CliRunner

import common
import extraction


def test_the_answer_is_in_the_list() -> None:
    question, answer = extraction.prompt_and_answer(3, 200, 20)
    held = dict(line[2:].split(": ") for line in question.splitlines() if line.startswith("- "))
    told = json.loads(answer)
    assert len(held) == 200
    assert len(told) == 20
    assert told.items() <= held.items()
    assert question.endswith(", ".join(told) + ".")  # in the order in which they are asked for
    assert extraction.prompt_and_answer(3, 200, 20) == (question, answer)
    assert extraction.prompt_and_answer(4, 200, 20)[1] != answer


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama"), None))
    monkeypatch.setattr(extraction, "tokens_of", lambda *_: (prompt(1, 240)[0], 12))
    out = tmp_path / "extraction.csv"
    options = ["--row", "full", "--row", "scout:samples=40,sinks=16,recent=16,block_size=16", "--lists", "2"]
    result = CliRunner().invoke(common.command(extraction.main), [*options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    with out.open(encoding="utf-8") as file:
        found: list[dict[str, Any]] = list(csv.DictReader(file))
    full, drawn = found[::2], found[1::2]
    assert [line["row"] for line in full] == ["full", "full"]
    assert all(float(line["kept"]) == 1 and float(line["kl"]) < 1e-5 for line in full)
    assert all(float(line["kl"]) > 1e-5 and 40 < float(line["attended"]) < 240 for line in drawn)
    assert all(line["right"] == line["right_full"] for line in full)
