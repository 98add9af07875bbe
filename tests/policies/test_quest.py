"""Policies that fetch chosen blocks to the device: `quest`, and `full` with `host="fetch"`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HybridCache
from hf_offload.attention.step_split import SplitStep
from hf_offload.blocks.resident_set import ResidentSet

LENGTH, STEPS = 300, 20


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def decode(model: PreTrainedModel, cache: HybridCache, rows: int = 1) -> torch.Tensor:
    ids, mask = prompt(rows, LENGTH)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=STEPS, do_sample=False)
    return out[:, LENGTH:]


@pytest.mark.parametrize(
    ("knobs", "resident"), [({}, 96), ({"sinks": 16, "recent": 32, "join": "max"}, 112), ({"host_dtype": "int8"}, 64)]
)
def test_two_memories_attend_what_one_does(model: PreTrainedModel, knobs: dict[str, Any], resident: int) -> None:
    """Also with more slots than the budget, and where what is chosen has no room: the rest passes by."""
    one = HybridCache(model, "quest", budget=96, tier="one", **knobs)
    two = HybridCache(model, "quest", budget=96, tier="split", resident=resident, prefill_tile=32, **knobs)
    assert torch.equal(decode(model, one, 3), decode(model, two, 3))
    total = two.stats().as_dict()
    assert total["cpu_ratio"] == 0
    assert total["recall_blocks"] > 0


def test_each_step_attends_the_budget(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, attend = [], SplitStep.attend_device

    def count(step: SplitStep, device: Any) -> Any:
        seen.append((device.counts.clone(), device.slots.clone()))
        return attend(step, device)

    monkeypatch.setattr(SplitStep, "attend_device", count)
    decode(model, HybridCache(model, "quest", budget=96, tier="split"), 2)
    assert len(seen) == 4 * (STEPS - 1)
    assert all((counts == 6).all() and (slots >= 0).all() for counts, slots in seen)


def test_what_is_resident_beside_the_choice_saves_fetches(model: PreTrainedModel) -> None:
    moved = {}
    for resident in (96, 256):
        cache = HybridCache(model, "quest", budget=96, tier="split", resident=resident)
        decode(model, cache)
        moved[resident] = cache.stats().as_dict()["recall_blocks"]
    assert 0 < moved[256] < moved[96]


@pytest.mark.parametrize(("by_kernel", "tile"), [(True, 32), (False, 4096)])
def test_full_fetches_every_byte(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, by_kernel: bool, tile: int
) -> None:
    if by_kernel:
        monkeypatch.setattr(ResidentSet, "read_by_kernels", True)
    cache = HybridCache(model, "full", host="fetch", tier="split", block_size=16, resident=64, prefill_tile=tile)
    want = decode(model, HybridCache(model, "full", tier="one", block_size=16), 2)
    assert torch.equal(decode(model, cache, 2), want)
    total = cache.stats().as_dict()
    blocks = sum(-(-length // 16) - 4 for length in range(LENGTH + 1, LENGTH + STEPS))
    assert total["recall_blocks"] == 4 * 2 * 2 * blocks  # layers, rows, KV heads
    assert total["cpu_ratio"] == 0
