"""Model families with softcaps, attention sinks and sliding windows, against eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import ONE_MEMORY, SIZES, prompt, spread_weights
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
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
    torch.manual_seed(0)
    return spread_weights(AutoModelForCausalLM.from_config(config(family), attn_implementation=attn_implementation))


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
