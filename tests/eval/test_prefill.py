"""The script over prompts, on a small shape without a model."""

import csv

import pytest
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
