"""Estimated against true errors: a run over a tiny model, and its summary."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tiny import prompt, tiny_model
from typer.testing import CliRunner

import common
import error_estimate


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(1, 1100)[0]
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama"), None))
    monkeypatch.setattr(common, "text_of", lambda kind, prose: kind)
    monkeypatch.setattr(common, "window", lambda text, tokenizer, start, tokens: ids[:, :tokens])
    out = tmp_path / "errors.csv"
    options = ["--contexts", "1000", "--samples", "64", "--steps", "8", "--kinds", "code", "--out", str(out)]
    result = CliRunner().invoke(common.command(error_estimate.main), options)
    assert result.exit_code == 0, result.output
    with out.open(encoding="utf-8") as file:
        lines = {line["layer"]: line for line in csv.DictReader(file)}
    assert sorted(lines) == ["0", "1", "2", "3", "all"]
    assert int(lines["all"]["points"]) == 8 * 4  # a layer a step, all its heads
    assert float(lines["all"]["within"]) > 0.8
    assert out.with_suffix(".png").stat().st_size > 0


def test_a_summary() -> None:
    points = [{"layer": 0, "estimated": 0.1, "true": true} for true in (0.0, 0.3, 0.4, 0.0)]
    assert error_estimate.summary(points) == pytest.approx(
        {"points": 4, "within": 0.75, "estimated": 0.1, "true": 0.25}
    )
