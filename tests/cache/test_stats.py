"""Counters of steps on the device, read only when statistics are requested."""

from __future__ import annotations

import pytest
import torch
from tiny import prompt, tiny_model

from hf_offload import HybridCache
from hf_offload.cache.stats import KEEP_STEPS, LayerStats, Ledger, Tally, joined


def test_replayed_steps_count_in_their_order() -> None:
    first, second = (Tally(LayerStats(i)) for i in range(2))
    first.record_bytes = 10
    second.add("cpu_ratio", torch.tensor(0.1))
    ledger = Ledger([(first, "moves"), (second, "cpu_ratio"), (first, "cpu_ratio")])
    second.add("cpu_ratio", torch.tensor(0.2))
    for row in ([3.0, 0.3, 0.7], [0.0, 0.4, 0.8], [2.0, 0.5, 0.9]):
        ledger.add(torch.tensor(row))
    assert first.stats.recalls == 0  # nothing has been read
    second.add("cpu_ratio", torch.tensor(0.6))  # a step in Python between replays
    ledger.add(torch.tensor([0.0, 0.7, 1.0]))
    second.count()
    first.count()
    assert list(second.stats.cpu_ratio_by_step) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert list(first.stats.cpu_ratio_by_step) == pytest.approx([0.7, 0.8, 0.9, 1.0])
    assert first.stats.as_dict()["cpu_ratio"] == pytest.approx(0.85)
    assert (first.stats.recalls, first.stats.recall_blocks, first.stats.recall_bytes) == (2, 5, 50)


def test_only_the_newest_steps_are_kept_and_the_mean_is_of_all() -> None:
    tally = Tally(LayerStats(0))
    for step in range(2 * KEEP_STEPS):
        tally.add("cpu_ratio", float(step % 2))
    tally.add("cpu_ratio", 1.0)
    row = tally.stats.as_dict()
    assert row["cpu_ratio"] == pytest.approx((KEEP_STEPS + 1) / (2 * KEEP_STEPS + 1))
    assert row["cpu_ratio_by_step"] == [1.0, 0.0] * (KEEP_STEPS // 2 - 1) + [1.0, 1.0]


def test_layers_of_which_some_share_their_tasks() -> None:
    """A model may lie on a device in part; the other layers' tasks are all the CPU's."""
    on_host = {"head_budget": 0.2, "retrieved_bytes": 10, "granularities": {"16": 1.0, "32": 0.0}}
    shared = {"head_budget": 0.4, "retrieved_bytes": 30, "granularities": {"16": 0.5, "32": 0.5}}
    shared |= {"device_tasks": 0.5, "cpu_busy_seconds": 2.0}
    for layers in ([on_host, shared, {}], [shared, on_host]):
        found = joined(layers)
        assert found.pop("head_budget") == pytest.approx(0.3)
        assert found.pop("granularities") == {"16": 0.75, "32": 0.25}
        assert found == {"retrieved_bytes": 40, "device_tasks": 0.5, "cpu_busy_seconds": 2.0}


def test_a_report_is_a_copy() -> None:
    model = tiny_model("llama")
    cache = HybridCache(model, "full", tier="split", resident=128)
    with torch.no_grad():
        model(prompt(1, 200)[0], past_key_values=cache)
        model(prompt(1, 1)[0], past_key_values=cache)
        report = cache.stats()
        model(prompt(1, 1)[0], past_key_values=cache)
    assert [len(row["cpu_ratio_by_step"]) for row in report.as_dict()["layers"]] == [1] * 4
    assert len(cache.stats().as_dict()["layers"][0]["cpu_ratio_by_step"]) == 2
