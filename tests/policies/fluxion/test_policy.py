"""Fluxion and FixedHybrid in decode steps: what is attended, rows of mixed lengths, both memories, schedules."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import feed, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import ConstantPredictor, Fluxion, HybridCache
from hf_offload.blocks.resident_set import ResidentSet
from hf_offload.files.fingerprint import likeness
from hf_offload.policies.fluxion import scheduler
from hf_offload.policies.fluxion.features import PROMPT_FEATURES
from hf_offload.policies.fluxion.predictor import HeadPredictor, save_predictors
from hf_offload.tools.training.samples import Samples, Sampling, capture, layer_samples

SINKS, LOCAL, BLOCK = 16, 32, 16
NEAR: dict[str, Any] = {"sinks": SINKS, "local": LOCAL}
LENGTHS = (512, 64, 40, 304)
"""Of rows: much on the host, one block, none, some; the padding of all but the third are whole blocks."""


def constant(budget: float = 0.3, digest: str = "submean", **knobs: Any) -> ConstantPredictor:
    return ConstantPredictor(budget, 0.02 * (budget < 1), digest=digest, **NEAR, **knobs)


def decode_rows(model: PreTrainedModel, cache: Any, lengths: tuple[int, ...] = LENGTHS, steps: int = 4) -> torch.Tensor:
    """Logits `[B, steps, V]` of the last tokens of rows that end together; a row has the same ids in every batch."""
    longest = max(lengths)
    ids, mask = (torch.zeros(len(lengths), longest, dtype=torch.long) for _ in range(2))
    for row, length in enumerate(lengths):
        words = torch.randint(3, 150, (1024,), generator=torch.Generator().manual_seed(length))
        ids[row, longest - length :], mask[row, longest - length :] = words[:length], 1
    return torch.cat(feed(model, cache, ids, mask, (0, *range(longest - steps, longest + 1)))[1:], 1)


def told(cache: HybridCache) -> dict[str, Any]:
    found: dict[str, Any] = cache.stats().as_dict()["retrievals"]
    return found


@pytest.fixture(scope="module")
def full(llama: PreTrainedModel) -> torch.Tensor:
    return decode_rows(tiny_model("llama", "sdpa"), DynamicCache(config=llama.config))


@pytest.fixture(scope="module")
def trained(llama: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a network that says something else for every head and step: its weights are random."""
    sampling, model = Sampling(interval=200, steps=20, **NEAR), tiny_model("llama", "sdpa")
    plan = sampling.positions(512, 0)
    positions = [p for length, steps in plan.items() for p in (length - 1, *steps)]
    seen = capture(model, prompt(1, 512)[0], positions, lambda read: None)
    features = Samples.joined([layer_samples(layer, plan, sampling) for layer in seen]).features
    torch.manual_seed(0)
    made = HeadPredictor(tau=0.1, digest="submean", streaming_at=0.5, **NEAR).requires_grad_(False)
    made.standardise(features)
    made.outputs.bias -= made(features).median(0).values - torch.tensor([0.3, 0.0, 0.0])
    path = tmp_path_factory.mktemp("trained") / "predictor.safetensors"
    save_predictors(path, likeness(llama.config, llama.model), {0.1: made}, {})
    return path


@pytest.mark.parametrize(
    ("policy", "tier"),
    [("streaming", "one"), ("budget 0", "split"), ("fixed_hybrid", "one"), ("fixed_hybrid", "split")],
)
def test_without_a_budget_sinks_and_newest_tokens_are_attended(llama: PreTrainedModel, policy: str, tier: str) -> None:
    if policy == "fixed_hybrid":
        cache = HybridCache(llama, policy, budget=0.0, tier=tier, **NEAR)
    else:
        nothing = {
            "streaming": ConstantPredictor(streaming=True, **NEAR),
            "budget 0": ConstantPredictor(-0.1, 0.01, **NEAR),
        }
        cache = HybridCache(llama, "fluxion", predictor=nothing[policy], tier=tier)
    (ids, mask), start, at = prompt(1, 160), 140, torch.arange(160)
    full_blocks = at[:, None] // BLOCK * BLOCK  # before a step
    seen = (at < SINKS) | (at >= full_blocks - LOCAL) | (at[:, None] < start)
    want = tiny_model("llama", "sdpa")(ids, attention_mask=(seen & (at <= at[:, None]))[None, None]).logits
    got = torch.cat(feed(llama, cache, ids, mask, (0, *range(start, 161))), 1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    found = told(cache)
    assert found["head_budget"] == found["retrieved_share"] == found["retrieved_bytes"] == 0
    assert (found["streaming_groups"], found["scored_bytes"]) == (1, 0)


@pytest.mark.parametrize("schedule", [None, *scheduler.SCHEDULES])
def test_a_budget_of_one_is_full_attention_for_every_row(
    llama: PreTrainedModel, full: torch.Tensor, schedule: str | None
) -> None:
    knobs: dict[str, Any] = {"tier": "split", "schedule": schedule, "threads": 2} if schedule else {"tier": "one"}
    got = decode_rows(llama, HybridCache(llama, "fluxion", predictor=constant(1.0), **knobs))
    torch.testing.assert_close(got, full, rtol=1e-4, atol=1e-4)


def test_a_row_is_what_it_is_alone_in_both_memories(llama: PreTrainedModel, full: torch.Tensor, trained: Path) -> None:
    """Features, budgets and choices of a row are its own."""
    caches = [
        HybridCache(llama, "fluxion", predictor=str(trained), **knobs)
        for knobs in ({"tier": "one"}, {"tier": "split"}, {"tier": "split", "schedule": "priority", "threads": 2})
    ]
    logits = [decode_rows(llama, cache) for cache in caches]
    alone = [decode_rows(llama, HybridCache(llama, "fluxion", predictor=trained), (length,)) for length in LENGTHS]
    # What is rounded otherwise may, rarely, turn a head's choice, and what comes after it in that step.
    for found in (*logits[1:], torch.cat(alone)):
        assert ((found - logits[0]).abs().amax(-1) < 1e-3).float().mean() >= 0.9
    assert ((logits[0] - full).abs().amax(-1) > 1e-3).all(1).tolist() == [True, False, False, True]
    one, *others = map(told, caches)
    for name in ("head_budget", "streaming_heads", "retrieved_share"):
        assert 0 < one[name] < 1
        assert all(one[name] == pytest.approx(two[name], rel=0.02) for two in others)
    assert sum(one["granularities"].values()) == pytest.approx(1 - one["streaming_groups"])


@pytest.mark.parametrize("tier", ["one", "split"])
def test_a_prompt_has_the_features_that_the_training_has_seen(llama: PreTrainedModel, tier: str) -> None:
    cache = HybridCache(llama, "fluxion", predictor=constant(digest="quest"), tier=tier, prefill_tile=48)
    given, sampling = prompt(1, 203), Sampling(interval=202, steps=1, digest="quest", **NEAR)
    feed(llama, cache, *given, (0, 202, 203))
    for seen in capture(tiny_model("llama", "sdpa"), given[0], [201, 202], lambda read: None):
        want = layer_samples(seen, {202: [202]}, sampling).features[:, : len(PROMPT_FEATURES)]
        got = cache.layers[seen.layer].state.tensors()["fixed"][0]
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


def test_statistics_are_made_anew_when_the_host_has_twice_as_much(llama: PreTrainedModel) -> None:
    cache, made = HybridCache(llama, "fluxion", predictor=constant(), tier="one"), []
    given = prompt(1, 160)
    for first, stop in ((0, 80), *itertools.pairwise(range(80, 161))):
        feed(llama, cache, *given, (first, stop))
        made.append(cache.layers[0].state.blocks)
    assert sorted(set(made)) == [0, 3, 6]  # none yet, after the prompt


def test_knobs(llama: PreTrainedModel) -> None:
    cache = HybridCache(llama, "fluxion", predictor=constant(), granularities=(32,))
    decode_rows(llama, cache, (240,), 2)
    assert told(cache)["granularities"] == {"32": 1.0}
    for skips in (True, False):
        cache = HybridCache(llama, "fluxion", predictor=constant(streaming=True), skip_streaming=skips)
        decode_rows(llama, cache, (240,), 2)
        assert told(cache)["streaming_groups"] == skips
        assert (told(cache)["head_budget"] > 0.25) == (not skips)
    with pytest.raises(ValueError, match=r"granularities=\(48,\) are not some of"):
        Fluxion(predictor=constant(), granularities=(48,))
    with pytest.raises(ValueError, match="schedule='best' is not known; use one of priority"):
        Fluxion(predictor=constant(), schedule="best")
    with pytest.raises(ValueError, match="schedule='priority' shares work with a device"):
        HybridCache(llama, "fluxion", predictor=constant(), tier="one", schedule="priority")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("digest", "host_dtype", "side", "by_kernel"),
    [
        ("submean", None, "device", False), ("quest", None, "cpu", False), ("quest", None, "device", True),
        ("quest", "int8", "device", False), ("quest", "int8", "device", True),
    ],
)  # fmt: skip
def test_either_side_chooses_and_attends_alike(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, digest: str, host_dtype: str | None, side: str,
    by_kernel: bool,
) -> None:  # fmt: skip
    if by_kernel:
        monkeypatch.setattr(ResidentSet, "read_by_kernels", True)
    knobs = {"predictor": constant(digest=digest), "host_dtype": host_dtype, "tier": "split"}
    alone = HybridCache(llama, "fluxion", **knobs)
    want = decode_rows(llama, alone, (240, 60, 200), 6)
    monkeypatch.setattr(scheduler, "_device_share", lambda name, tasks, lengths: np.full(len(tasks), side == "device"))
    cache = HybridCache(llama, "fluxion", schedule="uniform", **knobs)
    got = decode_rows(llama, cache, (240, 60, 200), 6)
    found, before = told(cache), told(alone)
    assert found["device_tasks"] == (side == "device")
    for key in ("streaming_heads", "head_budget", "retrieved_share"):
        assert found[key] == pytest.approx(before[key], rel=0.02)
    assert found["granularities"] == before["granularities"]
    alike = (got - want).abs().amax(-1) < (2e-3 if host_dtype else 1e-3)
    # Sub-means are rounded otherwise here and there: of two blocks with almost equal masses the other one may be taken.
    assert alike.float().mean() >= (0.5 if digest == "submean" else 1.0)
    assert found["cpu_idle_seconds"] + found["device_idle_seconds"] > 0


class Late:
    """Stands for the event behind the copies to the host: before it the buffers hold what nobody sent."""

    def __init__(self, partial: Any) -> None:
        self.sent = [(buffer, buffer.clone()) for buffer in (partial.query, *partial._local)]
        for buffer, _ in self.sent:
            buffer.fill_(-1.0)

    def synchronize(self) -> None:
        for buffer, coming in self.sent:
            buffer.copy_(coming)


@pytest.mark.parametrize("schedule", ["none", "uniform"])
def test_what_arrives_late_is_what_properties_and_choice_are_of(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, trained: Path, schedule: str
) -> None:
    monkeypatch.setattr(scheduler, "_device_share", lambda name, tasks, lengths: np.zeros(len(tasks), bool))
    knobs = {"predictor": trained, "tier": "split", "schedule": schedule}
    want = decode_rows(llama, HybridCache(llama, "fluxion", **knobs))
    monkeypatch.setattr(scheduler.SelectedHostPartial, "_arrived", lambda partial: Late(partial))
    assert torch.equal(decode_rows(llama, HybridCache(llama, "fluxion", **knobs)), want)


def test_the_first_task_of_a_device_says_nothing_of_its_pace(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles and loads kernels, for seconds: were it counted, the device would get none for a hundred steps."""
    run, pause = scheduler.DeviceTasks.run, [0.6]
    monkeypatch.setattr(
        scheduler.DeviceTasks, "run", lambda *args: (time.sleep(pause.pop() if pause else 0), run(*args))
    )
    cache = HybridCache(llama, "fluxion", predictor=constant(), tier="split", schedule="uniform")
    decode_rows(llama, cache, (240,), 2)
    partial = cache.layers[0].host_partial
    assert 0 < partial.queue.pace.seconds[scheduler.DEVICE] * partial.selector.volumes.sum() < 0.3
