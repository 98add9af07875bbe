"""The script for saving, loading and forking, with a tiny model."""

from __future__ import annotations

import csv

from letters import letters
from tiny import prompt, tiny_model
from typer.testing import CliRunner

import common
import save_load


def test_it_runs_and_continuations_are_identical(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama"), letters()))
    monkeypatch.setattr(common, "window", lambda text, tokenizer, start, tokens: prompt(1, tokens)[0])
    out = tmp_path / "save_load.csv"
    options = ["--tokens", "1300,1100", "--steps", "3", "--repeats", "1", "--rows", "scout-1024,scout-1024-int8"]
    options += ["--out", str(out)]
    result = CliRunner().invoke(common.command(save_load.main), options)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(out.open()))
    assert [(row["row"], row["tokens"]) for row in rows] == [
        (name, tokens) for tokens in ("1300", "1100") for name in ("scout-1024", "scout-1024-int8")
    ]
    for row in rows:
        assert row["identical"] == "True"
        assert float(row["unverified_load_s"]) > 0
        assert 1 < float(row["fork_bytes"]) < 2
        assert all(float(row[f"turn_{kind}_s"]) > 0 for kind in ("none", "ram", "disk", "cold_disk"))
