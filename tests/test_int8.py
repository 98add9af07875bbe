"""`HybridCache(host_dtype="int8")` on models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import feed, prompt
from transformers import PreTrainedModel

from hf_offload import HybridCache

KNOBS: dict[str, Any] = {"block_size": 16}


@pytest.mark.parametrize("tier", ["one", "split"])
def test_a_turn_behind_many_tiles_of_packed_tokens(llama: PreTrainedModel, tier: str) -> None:
    """The next tile is gathered into the memory of the one before."""
    ids, mask = prompt(1, 700)
    logits = []
    for host in (None, "int8"):
        cache = HybridCache(llama, "full", tier=tier, prefill_tile=64, host_dtype=host, **KNOBS)
        logits.append(feed(llama, cache, ids, mask, (0, 660, 700))[1])
    difference = (logits[1] - logits[0]).abs().max()
    assert 0 < difference < 0.1 * logits[0].abs().max()


def test_beams_crop_and_less_memory(llama: PreTrainedModel) -> None:
    ids, mask = prompt(2, 400)
    knobs: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "num_beams": 3}
    exact, cache = (HybridCache(llama, "full", host_dtype=kind, **KNOBS) for kind in (None, "int8"))
    want, got = (llama.generate(ids, past_key_values=one, **knobs) for one in (exact, cache))
    assert torch.equal(got[:, :405], want[:, :405])
    assert cache.stats().as_dict()["host_bytes"] < 0.7 * exact.stats().as_dict()["host_bytes"]
    cache.crop(-200)
    assert cache.get_seq_length() == 229


@pytest.mark.parametrize("tier", ["one", "split"])
@pytest.mark.parametrize("left", [20, 130])
def test_a_turn_behind_a_crop_of_most_of_a_prompt(
    llama: PreTrainedModel, stock: PreTrainedModel, left: int, tier: str
) -> None:
    """What is left was packed with the prompt; at that length nothing would be."""
    ids, mask = prompt(1, 300)
    cache = HybridCache(llama, "full", host_dtype="int8", tier=tier, **KNOBS)
    feed(llama, cache, ids, mask, (0, 300))
    cache.crop(left - 300)
    plain, turn = cache.to_dynamic(), (left, left + 40)
    got, want = (feed(model, held, ids, mask, turn)[0] for model, held in ((llama, cache), (stock, plain)))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tier", ["one", "split"])
def test_a_forward_that_fails_packs_nothing_that_was_young(llama: PreTrainedModel, tier: str) -> None:
    ids, _ = prompt(1, 600)
    cache = HybridCache(llama, "full", host_dtype="int8", tier=tier, block_size=16)
    with torch.no_grad():
        llama(ids[:, :100], past_key_values=cache)
        before = cache.to_dynamic().layers
        with llama.model.layers[2].register_forward_pre_hook(lambda *args: 1 / 0), pytest.raises(ZeroDivisionError):
            llama(ids[:, 100:], past_key_values=cache)
    assert cache.get_seq_length() == 100
    for was, now in zip(before, cache.to_dynamic().layers, strict=True):
        assert torch.equal(now.keys, was.keys)
        assert torch.equal(now.values, was.values)
