"""Fluxion's tasks shared by CPU threads and device: the same result for any division."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import forward, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

import hf_offload
from hf_offload import ConstantPredictor, Fluxion
from hf_offload.blocks.resident_set import ResidentSet
from hf_offload.policies.fluxion import scheduler

SINKS, LOCAL = 16, 32
SHARED = ("priority", "uniform", "length")


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


def make_cache(model: PreTrainedModel, budget: float = 0.3, digest: str = "submean", **knobs: Any) -> Any:
    predictor = ConstantPredictor(budget, 0.02 * (budget < 1), digest=digest, sinks=SINKS, local=LOCAL)
    return hf_offload.HybridCache(model, "fluxion", predictor=predictor, **({"tier": "split"} | knobs))


def decode(model: PreTrainedModel, cache: Any, batch: int = 3, length: int = 240, steps: int = 6) -> torch.Tensor:
    """Logits `[B, steps, V]` of tokens that come one by one behind a prompt; rows are left padded."""
    ids, mask = prompt(batch, length + steps)
    mask[1:2, : length - 60] = 0  # a short row beside long ones
    forward(model, cache, ids, mask, 0, length)
    return torch.cat([forward(model, cache, ids, mask, t, t + 1) for t in range(length, length + steps)], 1)


@pytest.mark.parametrize("name", SHARED)
def test_with_a_budget_of_one_every_schedule_is_full_attention(llama: PreTrainedModel, name: str) -> None:
    full = decode(tiny_model("llama", "sdpa"), DynamicCache(config=llama.config))
    got = decode(llama, make_cache(llama, 1.0, schedule=name, threads=2))
    torch.testing.assert_close(got, full, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("digest", "host_dtype", "side"),
    [
        ("submean", None, "cpu"),
        ("submean", None, "device"),
        ("quest", None, "device"),
        ("quest", None, "device, by kernel"),
        ("quest", "int8", "device"),
        ("quest", "int8", "device, by kernel"),
    ],
)
def test_either_side_chooses_and_attends_alike(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, digest: str, host_dtype: str | None, side: str
) -> None:
    side, _, by_kernel = side.partition(", ")
    if by_kernel:
        monkeypatch.setattr(ResidentSet, "read_by_kernels", True)
    knobs = {"host_dtype": host_dtype} if host_dtype else {}
    alone = make_cache(llama, digest=digest, **knobs)
    want = decode(llama, alone)
    monkeypatch.setattr(scheduler, "_device_share", lambda name, tasks, lengths: np.full(len(tasks), side == "device"))
    cache = make_cache(llama, digest=digest, schedule="uniform", **knobs)
    got = decode(llama, cache)
    told, before = (one.stats().as_dict()["retrievals"] for one in (cache, alone))
    assert told["device_tasks"] == (side == "device")
    for key in ("streaming_heads", "head_budget", "retrieved_share"):
        assert told[key] == pytest.approx(before[key], rel=0.02)
    assert told["granularities"] == before["granularities"]
    alike = (got - want).abs().amax(-1) < (2e-3 if host_dtype else 1e-3)
    # Sub-means are rounded otherwise here and there: of two blocks with almost equal masses the other one may be taken.
    assert alike.float().mean() >= (0.5 if digest == "submean" and side == "device" else 1.0)
    assert told["cpu_idle_seconds"] + told["device_idle_seconds"] > 0


@pytest.mark.parametrize("late", ["cpu", "device"])
def test_a_side_that_is_late_changes_nothing(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    want = decode(llama, make_cache(llama, 1.0))
    cache = make_cache(llama, 1.0, schedule="priority", threads=2)
    if late == "cpu":
        cache.settings.worker.delay = 0.01
    else:
        run = scheduler.DeviceTasks.run

        def slow(*args: Any) -> None:
            torch.linalg.svd(torch.randn(200, 200))
            run(*args)

        monkeypatch.setattr(scheduler.DeviceTasks, "run", slow)
    torch.testing.assert_close(decode(llama, cache), want, rtol=1e-3, atol=1e-4)


class Late:
    """Stands for the event behind a copy to the host: before it the query there is one that nobody asked with."""

    def __init__(self, partial: scheduler.ScheduledHostPartial) -> None:
        self.query, self.coming = partial.query, partial.query.clone()
        self.query.fill_(-1.0)

    def synchronize(self) -> None:
        self.query.copy_(self.coming)


@pytest.mark.slow
@pytest.mark.parametrize("digest", ["quest", "submean"])
def test_a_query_that_arrives_late_is_the_one_that_chooses(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, digest: str
) -> None:
    monkeypatch.setattr(scheduler, "_device_share", lambda name, tasks, lengths: np.zeros(len(tasks), bool))
    want = decode(llama, make_cache(llama, digest=digest, schedule="uniform"))
    monkeypatch.setattr(scheduler.ScheduledHostPartial, "_arrived", lambda partial: Late(partial))
    torch.testing.assert_close(decode(llama, make_cache(llama, digest=digest, schedule="uniform")), want)


def test_knobs_for_comparison(llama: PreTrainedModel) -> None:
    cache = make_cache(llama, granularities=(32,))
    decode(llama, cache, steps=2)
    told = cache.stats().as_dict()["retrievals"]
    assert told["granularities"] == {"32": 1.0}
    streams = ConstantPredictor(0.3, streaming=True, sinks=SINKS, local=LOCAL)
    for skips in (True, False):
        cache = hf_offload.HybridCache(llama, "fluxion", predictor=streams, skip_streaming=skips)
        decode(llama, cache, steps=2)
        told = cache.stats().as_dict()["retrievals"]
        assert told["streaming_groups"] == skips
        assert (told["head_budget"] > 0.25) == (not skips)


def test_knobs_that_are_refused(llama: PreTrainedModel) -> None:
    predictor = ConstantPredictor()
    with pytest.raises(ValueError, match=r"granularities=\(48,\) are not some of"):
        Fluxion(predictor=predictor, granularities=(48,))
    with pytest.raises(ValueError, match="schedule='best' is not known; use one of priority"):
        Fluxion(predictor=predictor, schedule="best")
    with pytest.raises(ValueError, match="schedule='priority' shares work with a device"):
        make_cache(llama, tier="one", schedule="priority")


def test_a_saved_cache_knows_its_schedule(llama: PreTrainedModel, tmp_path: Path) -> None:
    cache = make_cache(llama, schedule="length", granularities=(16, 64))
    decode(llama, cache, batch=1, steps=2)
    cache.save(tmp_path / "saved")
    loaded = hf_offload.HybridCache.load(tmp_path / "saved", llama)
    assert (loaded.policy.schedule, loaded.policy.granularities) == ("length", (16, 64))


def test_the_first_task_of_a_device_says_nothing_of_its_pace(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles and loads kernels, for seconds: were it counted, the device would get none for a hundred steps."""
    run, learn, tasks, told = scheduler.DeviceTasks.run, scheduler.Pace.learn, [0], []

    def slow_at_first(self: Any, *args: Any) -> None:
        tasks[0] += 1
        if tasks[0] == 1:
            time.sleep(3)
        run(self, *args)

    def learning(self: Any, side: int, volume: float, seconds: float) -> None:
        told.append((side, volume, seconds))
        learn(self, side, volume, seconds)

    monkeypatch.setattr(scheduler.DeviceTasks, "run", slow_at_first)
    monkeypatch.setattr(scheduler.Pace, "learn", learning)
    decode(llama, make_cache(llama, schedule="uniform", threads=1))
    device = [seconds for side, volume, seconds in told if side == scheduler.DEVICE and volume]
    assert device
    assert max(device) < 3
