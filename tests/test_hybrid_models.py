"""Models whose layers are linear attention or convolutions but for a few: what grows is held, the others are stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_exactness import assert_equal, decode_logits
from tiny import ONE_MEMORY, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HybridCache
from hf_offload.cache.layer import HybridLayer
from tiny_configs import tiny_config

Models = dict[str, PreTrainedModel]

TYPES = ("qwen3_next", "qwen3_5_text", "nemotron_h", "lfm2", "olmo_hybrid")
KINDS: dict[str, dict[str, Any]] = {"lfm2": {"layer_types": ["conv", "full_attention"] * 2}}
TIERS: dict[str, dict[str, Any]] = {
    "one": ONE_MEMORY,
    "split": {"tier": "split", "resident": 64, "lookahead": "select", "synchronous_layers": (0,)},
}
SCOUT: dict[str, Any] = {"budget": 512, "sinks": 16, "recent": 0, "block_size": 16, "prefill_tile": 32}
LENGTH, STEPS = 75, 8

every_type = pytest.mark.parametrize("model_type", TYPES)
tiers = pytest.mark.parametrize("tier", TIERS)


def build(model_type: str, attn_implementation: str) -> PreTrainedModel:
    config = tiny_config(model_type)
    for name, value in KINDS.get(model_type, {}).items():
        setattr(config, name, value)
    return tiny_model(config, attn_implementation)


@pytest.fixture(scope="module")
def models() -> Models:
    return {model_type: build(model_type, "hybrid_sparse") for model_type in TYPES}


@every_type
def test_tokens_are_those_of_the_stock_cache(models: Models, model_type: str) -> None:
    """A covering budget: the tokens of sdpa and `DynamicCache`, and logits within rounding."""
    model, stock = models[model_type], build(model_type, "sdpa")
    ids, mask = prompt(2, LENGTH)[0].clamp(min=3), torch.ones(2, LENGTH, dtype=torch.long)
    want = decode_logits(stock, DynamicCache(config=stock.config), ids, mask, None, STEPS)
    for knobs in TIERS.values():
        cache = HybridCache(model, "scout", **SCOUT, **knobs)
        assert_equal(decode_logits(model, cache, ids, mask, None, STEPS), want)
        held = [isinstance(layer, HybridLayer) for layer in cache.layers]
        theirs = DynamicCache(config=stock.config).layers
        assert 0 < sum(held) < len(held)
        assert all(ours or type(a) is type(b) for ours, a, b in zip(held, cache.layers, theirs, strict=True))
        assert cache.stats().as_dict()["stock_layers"] == [i for i, ours in enumerate(held) if not ours]
        length = cache.get_seq_length()
        with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
            cache.crop(-5)  # no state can be
        assert cache.get_seq_length() == length


@tiers
def test_drafts_where_the_layers_can(models: Models, tier: str) -> None:
    """Convolutions record what they forget while drafts are verified; other states Transformers itself refuses."""
    ids, knobs = prompt(1, 60)[0].clamp(min=3), {"max_new_tokens": 30, "do_sample": False}
    for model_type in TYPES:
        model, given = models[model_type], {**knobs, "prompt_lookup_num_tokens": 3}
        cache = HybridCache(model, "scout", **SCOUT, **TIERS[tier])
        if model_type == "lfm2":
            want = model.generate(ids, past_key_values=DynamicCache(config=model.config), **knobs)
            assert torch.equal(model.generate(ids, past_key_values=cache, **given), want)
        else:
            with pytest.raises(ValueError, match="not supported with stateful models"):
                model.generate(ids, past_key_values=cache, **given)


def test_attention_and_a_state_in_one_layer_are_refused_by_name() -> None:
    model = build("falcon_h1", "hybrid_sparse")
    with pytest.raises(ValueError, match="keys, values and a recurrent state in one layer"):
        HybridCache(model)
