"""Times between tokens: counted steps, medians over runs, bytes computed from sizes."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from tiny import prompt, tiny_model
from typer.testing import CliRunner

import common
import steady


def test_steps_after_a_switch_do_not_count():
    times = np.full((2, 100, 2), [10.0, 20.0])
    times[:, ::50] = times[:, 1::50] = 1e6
    line = steady.summary(list(times), turn=50)
    assert (line["p50"], line["max"], line["cpu_p99"], line["p99_p50"]) == (10, 10, 20, 1)
    turns = steady.by_turn("a", list(times), prompt=7, turn=50)
    assert [(t["context"], t["max"], t["tokens_per_second"]) for t in turns] == [(57, 10, 100), (107, 10, 100)]


def test_numbers_are_medians_over_runs():
    generator = np.random.default_rng(0)
    runs = [generator.uniform(1, 100, (400, 2)) for _ in range(3)]
    use = np.arange(400) % 20 >= 2
    got = steady.summary(runs, turn=20)
    assert got["p95"] == pytest.approx(np.median([np.percentile(r[use, 0], 95) for r in runs]))
    assert got["cpu_max"] == pytest.approx(np.median([r[use, 1].max() for r in runs]))
    ratios = [np.percentile(r[use, 0], 99) / np.percentile(r[use, 0], 50) for r in runs]
    assert got["p99_p50"] == pytest.approx(np.median(ratios))


def test_what_a_growing_context_takes_is_not_unsteady_within_a_turn():
    times = np.repeat(np.linspace(100.0, 200.0, 20), 50)[:, None].repeat(2, 1)
    line = steady.summary([times], turn=50)
    assert line["p99_p50"] > 1.3
    assert line["p99_turn"] == line["cpu_p99_turn"] == 1
    times[10::50] *= 3  # one of 48 steps that count
    line = steady.summary([times[:-49]], turn=50)  # the last turn has none that counts
    assert line["p99_turn"] == pytest.approx(3)
    assert steady.within_turns(times[:53, 0], 50).tolist() == [*[1.0] * 8, 3.0, *[1.0] * 39, 1.0]


@torch.inference_mode()
@pytest.mark.parametrize(("tier", "device_blocks"), [("one", 0), ("split", 4)])
def test_bytes_are_those_of_the_sizes(tier, device_blocks):
    model, ids = tiny_model("llama"), prompt(1, 163)[0]
    memory = {"tier": tier, "block_size": 32}
    token = 2 * 4 * 2 * 16 * 4  # K and V, layers, heads, channels, bytes
    full = common.FULL.make_cache(model)
    common.prefill(model, full, ids)
    assert steady.memory(model, common.FULL, full) == {"device_bytes": 163 * token, "device_due": 163 * token}
    row = common.Row("window", "window", {"budget": 64 + 32} | memory)
    cache = row.make_cache(model)
    common.prefill(model, cache, ids[:, :-2])
    for one in ids[:, -2:].split(1, 1):
        model(one, past_key_values=cache)
    held = steady.memory(model, row, cache)
    assert held["host_due"] == 6 * 32 * token
    assert held["host_bytes"] == held["host_due"]
    assert held["device_bytes"] == device_blocks * 32 * token
    assert held["device_due"] == held["device_bytes"]


@torch.inference_mode()
def test_what_the_cpu_keeps_is_a_share_of_what_has_left_the_window(monkeypatch):
    model, ids = tiny_model("llama"), prompt(1, 163)[0]
    row = common.Row("window", "window", {"budget": 96, "tier": "one", "block_size": 32})
    cache = row.make_cache(model)
    common.prefill(model, cache, ids)
    stats = cache.stats().as_dict() | {"kept_share": 0.5, "context_bytes": 7}
    monkeypatch.setattr(type(cache.stats()), "as_dict", lambda self: stats)
    held = steady.memory(model, row, cache)
    token = 2 * 4 * 2 * 16 * 4
    assert (held["kept_share"], held["context_bytes"]) == (0.5, 7)
    assert held["context_due"] == round(0.5 * (163 - 96) * token)


@torch.inference_mode()
def test_rows_take_turns_over_the_same_tokens(tmp_path, monkeypatch):
    ids, seen = prompt(1, 100)[0], []

    def time_turn(model, row, cache, tokens, real=steady.time_turn):
        seen.append((row.name, tokens[0].tolist()))
        return real(model, row, cache, tokens)

    monkeypatch.setattr(steady, "time_turn", time_turn)
    monkeypatch.setattr(steady, "load", lambda *_: (tiny_model("llama"), None))
    monkeypatch.setattr(steady, "text_of", lambda kind, prose: kind)
    monkeypatch.setattr(steady, "window", lambda text, tokenizer, start, n: ids[:, start : start + n])
    out = tmp_path / "steady.csv"
    options = ["--rows", "full,window-512", "--prompt", "70", "--steps", "30", "--turn", "12", "--runs", "2"]
    result = CliRunner().invoke(common.command(steady.main), [*options, "--out", str(out)])
    assert result.exit_code == 0, result.output
    parts = [part.tolist() for part in ids[0, 70:].split(12)]
    assert seen == 2 * [
        ("full", parts[0]), ("window-512", parts[0]), ("window-512", parts[1]), ("full", parts[1]),
        ("full", parts[2]), ("window-512", parts[2]),
    ]  # fmt: skip
    with out.open(encoding="utf-8") as file:
        full, other = csv.DictReader(file)
    assert (full["row"], full["slower"], full["unsteady"], full["runs"]) == ("full", "1", "1", "2")
    assert float(other["slower"]) == pytest.approx(float(other["p50"]) / float(full["p50"]), rel=1e-3)
    assert out.with_suffix(".png").stat().st_size > 0
    assert len(out.with_name("steady_turns.csv").read_text().splitlines()) == 1 + 2 * 3
