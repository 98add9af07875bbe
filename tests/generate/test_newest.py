"""What newer versions of Transformers brought: layers of different sizes, a model's own drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import DEVICE, ONE_MEMORY, SIZES, prompt, spread_weights
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma4TextConfig,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
)

from hf_offload import HybridCache
from hf_offload.tools.plan import shape_of

SCOUT: dict[str, Any] = {"budget": 512, "sinks": 16, "recent": 0, "block_size": 8}
TIERS: dict[str, dict[str, Any]] = {
    "one": ONE_MEMORY,
    "split": {"tier": "split", "resident": 64, "lookahead": "select", "synchronous_layers": (0,)},
}
tiers = pytest.mark.parametrize("tier", TIERS)


# --- layers of different sizes ----------------------------------------------------------------------------------------

KINDS = ["sliding_attention", "full_attention"] * 2
SIZES_BY_LAYER: dict[str, dict[str, Any]] = {
    "head sizes": {"global_head_dim": 32},
    "KV heads": {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
}
"""Head sizes and KV heads of layers with full attention; others have a window, and sizes of their own."""


def by_layer(sizes: str, attn_implementation: str) -> PreTrainedModel:
    config = Gemma4TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=16, sliding_window=8, layer_types=KINDS, num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=SIZES["vocab_size"], **SIZES_BY_LAYER[sizes],
    )  # fmt: skip
    torch.manual_seed(0)
    return spread_weights(
        AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    )


@pytest.mark.parametrize("sizes", SIZES_BY_LAYER)
@tiers
def test_layers_of_different_sizes(sizes: str, tier: str, tmp_path: Path) -> None:
    stock, model = by_layer(sizes, "sdpa"), by_layer(sizes, "hybrid_sparse")
    ids, knobs = prompt(2, 60)[0].clamp(min=3), {"max_new_tokens": 12, "do_sample": False}
    want = stock.generate(ids, past_key_values=DynamicCache(config=stock.config), **knobs)
    cache = HybridCache(model, "scout", **SCOUT, **TIERS[tier])
    assert torch.equal(model.generate(ids, past_key_values=cache, **knobs), want)
    shapes = [tuple(layer.keys.shape) for layer in cache.layers]
    assert shapes == [(2, 2, 7, 16), (2, 1 if sizes == "KV heads" else 2, 71, 32)] * 2
    cache.save(tmp_path / "saved")
    dynamic = cache.to_dynamic()
    others = cache.fork(), HybridCache.load(tmp_path / "saved", model), HybridCache.from_cache(dynamic, model, "full")
    with torch.no_grad():
        expected = model(want[:, -1:], past_key_values=cache).logits
        for other in others:
            got = model(want[:, -1:], past_key_values=other).logits
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_plan_takes_layers_of_one_size() -> None:
    shape = shape_of(by_layer("head sizes", "sdpa").config, torch.bfloat16)
    assert (shape.layers, shape.windows, shape.head_dim) == (2, (8, 8), 32)
    with pytest.raises(ValueError, match="differ in their heads or head size"):
        shape_of(
            LlamaConfig(**SIZES, num_key_value_heads=2, per_layer_config={1: {"num_key_value_heads": 1}}),
            torch.bfloat16,
        )


# --- drafts -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(GenerationConfig(), "use_mtp"), reason="drafts with a model's own layers came in 5.20")
@pytest.mark.parametrize("policy", ["full", "scout"])
@tiers
def test_drafts_by_a_models_own_layers(policy: str, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multi-token prediction: drafts are verified as those of an assistant are, with a small budget, too."""
    from transformers import Glm4MoeConfig
    from transformers.modeling_layers import MtpModel

    config = Glm4MoeConfig(
        **SIZES, num_key_value_heads=2, head_dim=16, num_mtp_layers=2, moe_intermediate_size=32, n_routed_experts=4,
        num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = spread_weights(
        AutoModelForCausalLM.from_config(config, attn_implementation="hybrid_sparse", dtype=torch.float32)
    )

    def drafter(main: PreTrainedModel, **_: Any) -> PreTrainedModel:  # as read from a checkpoint
        return MtpModel(main, main.config.num_mtp_layers).eval().to(DEVICE)

    monkeypatch.setattr(MtpModel, "from_pretrained", staticmethod(drafter))
    ids, knobs = prompt(1, 90)[0].clamp(min=3), {"max_new_tokens": 12, "do_sample": False}
    options: dict[str, Any] = {
        "block_size": 8,
        **({"tier": "split", "resident": 64} if tier == "split" else ONE_MEMORY),
    }
    options |= {**SCOUT, "budget": 48, "lookahead": "off"} if policy == "scout" else {}
    want = model.generate(ids, past_key_values=HybridCache(model, policy, **options), **knobs)
    cache = HybridCache(model, policy, **options)
    assert torch.equal(model.generate(ids, past_key_values=cache, use_mtp=True, **knobs), want)
    assert cache.settings.drafts.recording
