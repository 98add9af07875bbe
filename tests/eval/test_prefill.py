"""The script over prompts, on a small shape without a model."""

import csv

import pytest
import torch
from tiny import tiny_model
from typer.testing import CliRunner

import common
import prefill


def test_each_way_has_its_rate(tmp_path):
    options = ["--lengths", "64", "--shapes", "4x2x32", "--dtypes", "float32", "--rounds", "2", "--contexts", ""]
    result = CliRunner().invoke(common.command(prefill.main), [*options, "--out", str(tmp_path / "prefill.csv")])
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader((tmp_path / "prefill.csv").open(newline="")))
    assert [row["way"] for row in rows] == ["hf_offload", "torch", "matmul"]
    work = 2 * 4 * 32 * 64**2
    assert [float(row["gflops"]) * float(row["p50"]) * 1e9 for row in rows] == pytest.approx([work] * 3, rel=1e-3)
    assert float(rows[1]["of_torch"]) == 1


def test_prompts_tell_time_and_memory(tmp_path, monkeypatch):
    tiny = tiny_model("llama")
    monkeypatch.setattr(common.Setting, "load", lambda self: (tiny, None))
    monkeypatch.setattr(common.TextSetting, "window", lambda self, tokenizer, kind, start, n: torch.ones(1, n).long())
    options = ["--lengths", "64", "--shapes", "4x2x32", "--dtypes", "float32", "--rounds", "2", "--contexts", "96"]
    options += ["--chunks", "0,64", "--out", str(tmp_path / "prefill.csv")]
    result = CliRunner().invoke(common.command(prefill.main), options)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader((tmp_path / "prefill_prompts.csv").open(newline="")))
    assert [(row["way"], row["chunk"]) for row in rows] == [
        (way, chunk) for chunk in ("0", "64") for way in ("hf_offload", "DynamicCache")
    ]
    assert all(float(row["p50"]) > 0 and float(row["peak_mib"]) >= 0 for row in rows)
    assert (tmp_path / "prefill.png").exists()
