"""Steps with one memory: reuse of a plan with new arguments, and a new plan after any other change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pairwise import covering
from tiny import feed, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HybridCache, Policy
from hf_offload.attention.step_cpu import CpuStep
from hf_offload.policies.base import Plan

BLOCK = 16
KNOBS: dict[str, dict[str, Any]] = {
    "full": {"block_size": BLOCK},
    "window": {"budget": 2048, "block_size": BLOCK},
    "scout": {"budget": 96, "sinks": 16, "recent": 16, "block_size": BLOCK},
    "quest": {"budget": 1024},
    "hgca": {"window": 64, "beta": 0.0, "block_size": BLOCK},
    "fixed_hybrid": {"budget": 1.0, "sinks": 16, "local": 32},
}
EXACT = {name for name in KNOBS if name != "scout"}


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


def decode(model: PreTrainedModel, cache: Any, ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Logits of single tokens `start … stop - 1`."""
    return torch.cat(feed(model, cache, ids, torch.ones_like(ids), range(start, stop + 1)), 1)


def prefill(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> None:
    with torch.no_grad():
        model(ids, past_key_values=cache)


@pytest.mark.parametrize("name", sorted(KNOBS))
def test_steps_that_are_planned_one_by_one_give_the_same_bits(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """What depends on the length is written into every launch, whatever lay in the buffers before."""
    ids, _ = prompt(2, 276)
    found, empty = [], np.empty
    compiled = HybridCache(model, name, **KNOBS[name])  # Numba knows NumPy's own np.empty alone
    prefill(model, compiled, ids[:, :244])
    decode(model, compiled, ids, 244, 246)

    def poisoned(shape: Any, dtype: Any = float, **kwargs: Any) -> np.ndarray:
        array = empty(shape, dtype, **kwargs)
        array.fill(np.nan if array.dtype.kind == "f" else 113)
        return array

    for once in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", poisoned)
            if once:
                patch.setattr(CpuStep, "_serves", lambda step: False)
            cache = HybridCache(model, name, **KNOBS[name])
            prefill(model, cache, ids[:, :244])
            found.append(decode(model, cache, ids, 244, 276))
    assert not found[0].isnan().any()
    assert torch.equal(*found)


def grow_a_fork(cache: HybridCache, model: PreTrainedModel, ids: torch.Tensor) -> None:
    """The other one grows the pool that both share."""
    prefill(model, cache.fork(), ids.flip(1)[:, :90])


CHANGES: dict[str, tuple[Callable[..., Any], int]] = {  # what is done behind 242 tokens, and how many there are then
    "crop": (lambda cache, model, ids: cache.crop(-56), 186),
    "fork": (grow_a_fork, 242),
    "rows": (lambda cache, model, ids: cache.reorder_cache(torch.tensor([1, 0])), 242),
    "fork and go on": (lambda cache, model, ids: cache.fork(), 242),  # the one that was forked from is gone
    "append": (lambda cache, model, ids: prefill(model, cache, ids[:, 242:300]), 300),
}


@pytest.mark.parametrize(("name", "change"), covering(sorted(EXACT), CHANGES))
@pytest.mark.one_in(2)
def test_what_has_changed_is_seen(model: PreTrainedModel, name: str, change: str) -> None:
    ids, _ = prompt(2, 400)
    cache = HybridCache(model, name, **KNOBS[name])
    prefill(model, cache, ids[:, :230])
    decode(model, cache, ids, 230, 242)
    changed, past = CHANGES[change]
    cache = changed(cache, model, ids) or cache
    rows = ids.flip(0) if change == "rows" else ids
    assert cache.get_seq_length() == past
    stock = DynamicCache()
    prefill(model, stock, rows[:, :past])
    want = decode(model, stock, rows, past, past + 24)
    assert torch.allclose(decode(model, cache, rows, past, past + 24), want, atol=5e-5)


class Newest(Policy):
    """Attends the newest block, looks at its query, and says that its plan serves for ever."""

    name = "newest_that_looks"

    def __init__(self) -> None:
        self.planned = list[int]()

    def plan(self, step: Any) -> Plan:
        assert not np.isnan(step.query).any()
        self.planned.append(step.length)
        return Plan(step.attend(step.recent(1)), until=1 << 20)


def test_a_plan_that_looks_at_results_serves_one_step(model: PreTrainedModel) -> None:
    ids, _ = prompt(1, 60)
    policy = Newest()
    cache = HybridCache(model, policy)
    prefill(model, cache, ids[:, :40])
    decode(model, cache, ids, 40, 44)
    assert sorted(policy.planned) == sorted([41, 42, 43, 44] * 4)  # by each layer


def test_other_numbers_of_threads_are_followed(model: PreTrainedModel) -> None:
    ids, _ = prompt(2, 260)
    caches = [HybridCache(model, "scout", **KNOBS["scout"]) for _ in range(2)]
    before = torch.get_num_threads()
    for cache in caches:
        prefill(model, cache, ids[:, :200])
    want, found = decode(model, caches[0], ids, 200, 260), []
    try:
        for i in range(200, 260):
            torch.set_num_threads(1 + i % 3)
            found.append(decode(model, caches[1], ids, i, i + 1))
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(torch.cat(found, 1), want, atol=1e-5)
