"""The script that measures what is added outside kernels runs, and its metered steps compute what others do."""

import contextlib
import csv

import pytest
import torch
from tiny import prompt, tiny_model
from typer.testing import CliRunner

import common
import overhead


def test_every_row_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(overhead, "load", lambda name, dtype, threads: (tiny_model("llama"), None))
    out = tmp_path / "overhead.csv"
    options = ["--context", "224", "--budget", "192", "--rounds", "3", "--out", str(out)]
    result = CliRunner().invoke(common.command(overhead.main), options)
    assert result.exit_code == 0, result.output
    with out.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == [row.name for row in overhead.make_rows(192)]
    for row in rows:
        assert float(row["bare"]) > 0
        assert float(row["kernels"]) > 0


@pytest.mark.parametrize("row", overhead.make_rows(192), ids=lambda row: row.name)
def test_metered_steps_compute_the_same(row):
    model, ids = tiny_model("llama"), prompt(1, 260)[0]
    seen = []
    for metered in (False, True):
        meter = overhead.Meter()
        with torch.inference_mode(), meter.metering() if metered else contextlib.nullcontext():
            cache = row.make_cache(model)
            logits = [common.prefill(model, cache, ids[:, :250])]
            logits += [model(token, past_key_values=cache).logits[:, -1] for token in ids[:, 250:].split(1, 1)]
        seen.append(torch.cat(logits))
        assert (meter.wall > 0) == metered
    assert torch.equal(*seen)
