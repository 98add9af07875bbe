"""The script for time outside kernels: it runs, and disabled parts of a step compute nothing."""

import contextlib
import csv
import random

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


@pytest.mark.parametrize("row", overhead.make_rows(192)[:2], ids=lambda row: row.name)
def test_nothing_is_computed_in_steps_that_are_off(row):
    model, ids = tiny_model("llama"), prompt(1, 226)[0]
    with torch.inference_mode():
        series = overhead.Series(model, overhead.bare_copy(model), row, ids[:, :224])
        cache, layer = series.cache, series.cache.layers[1]
        before = layer.kernels[1, model.config.num_attention_heads, 1, layer.store.head_dim].out.copy()
        told = []
        for off in (True, False):
            with series.switch.off() if off else contextlib.nullcontext():
                model(ids[:, 225:], past_key_values=cache)
            answer = layer.kernels[1, model.config.num_attention_heads, 1, layer.store.head_dim].out
            told.append((answer == before).all())
    assert told == [True, False]
    assert cache.get_seq_length() == 224 + 2 + 2


def test_what_begins_a_block_or_fills_one_is_never_off():
    model, ids = tiny_model("llama"), prompt(1, 300)[0]
    row = overhead.make_rows(192)[1]
    with torch.inference_mode():
        series = overhead.Series(model, overhead.bare_copy(model), row, ids[:, :225])
        off, at = series.switch.off, []

        @contextlib.contextmanager
        def watched():
            at.append(series.cache.get_seq_length() % series.block_size)
            with off():
                yield

        series.switch.off = watched
        for token in ids[:, 225:].split(1, 1):
            series.round(token, random.Random(0))
    assert len(at) == 75
    assert not {0, series.block_size - 1} & set(at)
    assert len(series.found["full"]) == 4
