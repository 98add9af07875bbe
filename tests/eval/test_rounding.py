"""Ways to decode the same tokens: a run over a tiny model."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from tiny import prompt, tiny_model
from typer.testing import CliRunner

import common
import rounding


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(1, 316)[0]
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama"), None))
    monkeypatch.setattr(common, "text_of", lambda kind, prose: kind)
    monkeypatch.setattr(common, "window", lambda text, tokenizer, start, tokens: ids[:, :tokens])
    out = tmp_path / "rounding.csv"
    row = "scout:samples=24,recent=16,block_size=16"
    options = ["--contexts", "300", "--row", row, "--steps", "16", "--kinds", "code", "--out", str(out)]
    result = CliRunner().invoke(common.command(rounding.main), options)
    assert result.exit_code == 0, result.output
    with out.open(encoding="utf-8") as file:
        within = {line["way"]: float(line["within"]) for line in csv.DictReader(file)}
    assert list(within) == list(rounding.WAYS)
    assert within.pop("other") < 0.1
    assert min(within.values()) > 0.9


def test_steps_are_compared_by_their_largest_difference() -> None:
    want = torch.zeros(4, 3)
    found = torch.tensor([[0, 0, 0], [0, 5e-4, 0], [0, 0, -2e-3], [1, 0, 0.5]])
    assert rounding.compared(found, want) == pytest.approx({"within": 0.5, "median": 5e-4, "largest": 1.0})
