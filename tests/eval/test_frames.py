"""Counts of the package's Python frames in one layer's step."""

from __future__ import annotations

import csv
from pathlib import Path

import tiny
import torch
from torch import nn
from typer.testing import CliRunner

import common
import frames


class Module(nn.Module):
    """Calls a function of another file between two of its own."""

    def forward(self, count: int) -> torch.Tensor:
        self.helper()
        for _ in range(count):
            tiny.spread_weights(nn.Linear(2, 2))
        return self.helper()

    def helper(self) -> torch.Tensor:
        return torch.zeros(1)


def test_frames_changes_and_files_are_counted(monkeypatch):
    monkeypatch.setattr(frames, "PACKAGE", str(Path(tiny.__file__).parent))
    monkeypatch.setattr(tiny, "spread_weights", lambda layer, f=tiny.prompt: f(1, 2))
    module, other = Module(), Module()
    counter = frames.Counter(module)
    module(0)
    assert counter.counts() == (3, 0, 1)
    module(2)  # each time a lambda of this file and a function of the other
    assert counter.counts() == (7, 4, 2)
    other(5)
    tiny.prompt(1, 2)
    assert counter.counts() == (7, 4, 2)


def test_kinds_of_steps():
    kinds = [frames.kind_of(number, 64 + number) for number in range(40)]
    assert kinds[:3] == ["first", "second", "usual"]
    assert {number: kind for number, kind in enumerate(kinds[3:], 3) if kind != "usual"} == {31: "fills", 32: "begins"}


def test_every_kind_of_step_is_counted(tmp_path):
    out = tmp_path / "frames.csv"
    options = ["--row", "window:budget=96", "--context", "200", "--out", str(out)]
    result = CliRunner().invoke(common.command(frames.main), options)
    assert result.exit_code == 0, result.output
    with out.open(newline="") as file:
        found = {(row["tier"], row["step"]): int(row["frames"]) for row in csv.DictReader(file)}
    assert list(found) == [(tier, kind) for tier in ("one", "split") for kind in frames.KINDS]
    assert all(found["split", kind] > 0 < found["one", kind] for kind in frames.KINDS)
    assert found["split", "usual"] > found["one", "usual"]
    assert found["one", "first"] > found["one", "usual"]
