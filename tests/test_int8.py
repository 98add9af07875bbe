"""`HybridCache(host_dtype="int8")` on models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_exactness import decode_logits
from tiny import prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import ConstantPredictor, HybridCache

KNOBS: dict[str, Any] = {"block_size": 16}
SCOUT: dict[str, Any] = {**KNOBS, "budget": 640, "sinks": 16, "recent": 16}
CASES = [
    ("full", {}),
    ("full", {"tier": "split", "resident": 64}),
    ("hgca", {"window": 60, "beta": 0.0}),
    ("hgca", {"window": 60, "beta": 0.0, "tier": "split"}),
    ("fixed_hybrid", {"budget": 1.0, "sinks": 16, "local": 32}),
    ("full", {"host": "fetch", "tier": "split", "resident": 64}),
    ("quest", {"budget": 640, "tier": "split", "resident": 96}),
    ("fluxion", {"predictor": ConstantPredictor(sinks=16, local=32), "tier": "split"}),
    ("scout", {}),
    ("scout", {"tier": "split", "resident": 96, "recall": 1}),
    ("scout", {"tier": "split", "resident": 96, "recall": 2, "lookahead": "select", "synchronous_layers": (0,)}),
    ("scout", {"tier": "split", "resident": 96, "lookahead": "attend", "synchronous_layers": (0,)}),
]


LIKE = (1, 8, 9)
"""Of these the rest holds what differs: in the slow set alone."""


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("policy", "knobs", "chunk"),
    [
        pytest.param(*case, chunk, marks=() if place == number % 2 and number not in LIKE else pytest.mark.slow)
        for number, case in enumerate(CASES)
        for place, chunk in enumerate((None, 100))
    ],
)
def test_logits_are_near_those_of_exact_blocks(
    llama: PreTrainedModel, policy: str, knobs: dict[str, Any], chunk: int | None
) -> None:
    ids, mask = prompt(2, 400)
    base = {**(SCOUT if policy == "scout" else KNOBS), **knobs}
    exact = decode_logits(llama, HybridCache(llama, policy, **base), ids, mask, chunk, steps=40)
    cache = HybridCache(llama, policy, host_dtype="int8", **base)
    got = decode_logits(llama, cache, ids, mask, chunk, steps=40)
    same = (got[0] == exact[0]).long().cumprod(1).bool()  # as long as the tokens are the same, so are the inputs
    if knobs.get("lookahead") == "attend":  # in a random model predicted queries amplify every difference
        same[:, 3:] = False
    assert same[:, :2].all()
    difference = (got[1] - exact[1]).abs().amax(-1)[same]
    assert 0 < difference.max() < 0.1 * exact[1].abs().max()


@pytest.mark.parametrize("tier", ["one", "split"])
def test_a_turn_behind_many_tiles_of_packed_tokens(llama: PreTrainedModel, tier: str) -> None:
    """The next tile is gathered into the memory of the one before."""
    ids, _ = prompt(1, 700)
    logits = []
    for host in (None, "int8"):
        cache = HybridCache(llama, "full", tier=tier, prefill_tile=64, host_dtype=host, **KNOBS)
        with torch.no_grad():
            llama(ids[:, :660], past_key_values=cache)
            logits.append(llama(ids[:, 660:], past_key_values=cache).logits)
    difference = (logits[1] - logits[0]).abs().max()
    assert 0 < difference < 0.1 * logits[0].abs().max()


def test_memory_is_reported_as_it_is(llama: PreTrainedModel) -> None:
    ids, mask = prompt(2, 900)
    used = []
    for host_dtype in (None, "int8"):
        cache = HybridCache(llama, "full", host_dtype=host_dtype, block_size=32)
        decode_logits(llama, cache, ids, mask, None, steps=3)
        used.append(cache.stats().as_dict()["host_bytes"])
    assert used[1] < 0.45 * used[0]  # from float32


def test_beams_and_crop(llama: PreTrainedModel) -> None:
    ids, mask = prompt(2, 400)
    knobs: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "num_beams": 3}
    cache = HybridCache(llama, "full", host_dtype="int8", **KNOBS)
    tokens = llama.generate(ids, past_key_values=cache, **knobs)
    exact = llama.generate(ids, past_key_values=HybridCache(llama, "full", **KNOBS), **knobs)
    assert torch.equal(tokens[:, :405], exact[:, :405])
    cache.crop(-200)
    assert cache.get_seq_length() == 229


@pytest.mark.parametrize("tier", ["one", "split"])
def test_a_forward_that_fails_packs_nothing_that_was_young(llama: PreTrainedModel, tier: str) -> None:
    ids, _ = prompt(1, 600)
    cache = HybridCache(llama, "full", host_dtype="int8", tier=tier, block_size=16)
    with torch.no_grad():
        llama(ids[:, :100], past_key_values=cache)
        before = [layer.store.gather(0, 100) for layer in cache.layers]
        handle = llama.model.layers[2].register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llama(ids[:, 100:], past_key_values=cache)
        handle.remove()
    assert cache.get_seq_length() == 100
    for layer, (k, v) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.store.gather(0, 100)[0], k)
        assert torch.equal(layer.store.gather(0, 100)[1], v)
