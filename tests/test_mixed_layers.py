"""Layers of one cache on different devices: one and two memories, and separate device mirrors."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from tiny import DEVICE, SIZES, prompt, spread_weights, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3nTextConfig, PreTrainedModel

from hf_offload import HybridCache

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="layers that lie on the CPU stand for a second device")

KINDS = ("one memory", "another mirror")
SCOUT: dict[str, Any] = {
    "tier": "split", "block_size": 8, "resident": 64, "sinks": 8, "recent": 16, "synchronous_layers": (0,),
    "attend_resident": "selected",
}  # fmt: skip


def mixed_cache(model: PreTrainedModel, kind: str, **knobs: Any) -> HybridCache:
    """A cache whose first two layers have two memories, as on a device, and whose others are of another kind."""
    cache = HybridCache(model, "scout", **SCOUT, **knobs)
    settings = dataclasses.replace(cache.settings, tier="one" if kind == "one memory" else "split", mirrors={})
    for layer in cache.layers[2:]:
        layer.settings = settings
    return cache


@pytest.mark.one_in(3)
@pytest.mark.parametrize("lookahead", ["select", "attend"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_decodes_where_it_lies(kind: str, lookahead: str) -> None:
    model, (ids, mask) = tiny_model("llama"), prompt(2, 75)
    budget = 64 if lookahead == "attend" else 512
    cache = mixed_cache(model, kind, lookahead=lookahead, budget=budget)
    knobs: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **knobs)
    assert [layer.resident is not None for layer in cache.layers] == [True, True, *[kind != "one memory"] * 2]
    if budget == 512:
        full = model.generate(ids, attention_mask=mask, past_key_values=DynamicCache(config=model.config), **knobs)
        assert torch.equal(out, full)
    elif kind == "another mirror":  # what is attended early is what is not resident, the same with one mirror
        one = HybridCache(model, "scout", **SCOUT, lookahead=lookahead, budget=budget)
        assert torch.equal(out, model.generate(ids, attention_mask=mask, past_key_values=one, **knobs))
    assert cache.stats().as_dict()["selection_overlap"] > 0


@pytest.mark.parametrize(("policy", "tier"), [("full", "one"), ("scout", "split"), ("fixed_hybrid", "split")])
def test_layers_that_share_keys_see_the_block_that_the_other_began(policy: str, tier: str) -> None:
    """Of two layers over the same tokens, one plans when a block is full and sealed, and goes on in the next."""
    config = Gemma3nTextConfig(
        **(SIZES | {"intermediate_size": [96] * 4}), num_key_value_heads=2, head_dim=16, num_kv_shared_layers=2,
        layer_types=["full_attention"] * 4, vocab_size_per_layer_input=SIZES["vocab_size"],
        hidden_size_per_layer_input=8, laurel_rank=4, altup_num_inputs=2, activation_sparsity_pattern=[0.0] * 4,
    )  # fmt: skip
    torch.manual_seed(0)
    ours = spread_weights(AutoModelForCausalLM.from_config(config, attn_implementation="hybrid_sparse"))
    theirs = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    theirs.load_state_dict(ours.state_dict())
    knobs: dict[str, Any] = (
        {"budget": 1.0, "local": 32, "sinks": 16, "dense": False} if policy == "fixed_hybrid" else {"block_size": 8}
    )
    cache = HybridCache(ours, policy, tier=tier, **knobs)
    known, ids = DynamicCache(config=config), prompt(1, 100)[0]
    with torch.no_grad():
        for first, stop in [(0, 60), *((t, t + 1) for t in range(60, 100))]:
            got = ours(ids[:, first:stop], past_key_values=cache).logits
            want = theirs(ids[:, first:stop], past_key_values=known).logits
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
