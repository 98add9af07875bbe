"""Model families with softcaps, attention sinks, sliding windows or shared keys; layers on different devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiny import DEVICE, ONE_MEMORY, SIZES, prompt, tiny_model
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma3nTextConfig,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

from hf_offload import HybridCache

HEADS: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}


def config(family: str) -> PreTrainedConfig:
    if family == "gemma2":
        return Gemma2Config(**HEADS, sliding_window=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)
    if family == "gpt_oss":
        kinds = ["sliding_attention", "full_attention"] * 2
        return GptOssConfig(**HEADS, **EXPERTS, sliding_window=8, num_local_experts=4, layer_types=kinds)
    return Qwen3NextConfig(
        **HEADS, **EXPERTS, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
        layer_types=["linear_attention"] * 2 + ["full_attention"] * 2,
    )  # fmt: skip


def build(family: str, attn_implementation: str) -> PreTrainedModel:
    return tiny_model(config(family), attn_implementation)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_tokens_are_those_of_eager_attention(family: str) -> None:
    ids, mask = prompt(2, 60)
    knobs: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    eager, ours = build(family, "eager"), build(family, "hybrid_sparse")
    want = eager.generate(ids, past_key_values=DynamicCache(config=eager.config), **knobs)
    scout = {"budget": 512, "sinks": 16, "recent": 0, "synchronous_layers": (0,)}
    for policy, options in (
        ("scout", {**scout, "lookahead": "off", **ONE_MEMORY}),
        ("scout", {**scout, "lookahead": "select", "tier": "split", "resident": 64}),
        ("hgca", {"window": 24, "beta": 0.0, **ONE_MEMORY}),
        ("hgca", {"window": 24, "beta": 0.0, "tier": "split"}),
    ):
        cache = HybridCache(ours, policy, block_size=16, **options)
        assert torch.equal(ours.generate(ids, past_key_values=cache, **knobs), want)


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


@pytest.mark.skipif(DEVICE != "cpu", reason="layers that lie on the CPU stand for a second device")
@pytest.mark.one_in(3)
@pytest.mark.parametrize("lookahead", ["select", "attend"])
@pytest.mark.parametrize("kind", ["one memory", "another mirror"])
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
    ours, theirs = tiny_model(config), tiny_model(config, "eager")
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
