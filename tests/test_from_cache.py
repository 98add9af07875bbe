"""Conversion from a prefilled `DynamicCache` and back."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from test_exactness import assert_equal
from test_families import build
from tiny import ONE_MEMORY, decode, prefill, prompt, tiny_model
from transformers import DynamicCache

from hf_offload import HybridCache

BLOCK = 16
PROMPT = 75
STEPS = 22
TIERS: dict[str, dict[str, Any]] = {"one": ONE_MEMORY, "split": {"tier": "split", "resident": 4 * BLOCK}}


@pytest.fixture(scope="module")
def oracle() -> dict[Any, Any]:
    return {}


def stock_run(oracle: dict[Any, Any], family: str, batch: int) -> Any:
    """A model, a filled DynamicCache of it, its next token and mask, and what the stock model says after it."""
    if (family, batch) not in oracle:
        ids, mask = prompt(batch, PROMPT)
        stock = tiny_model(family, "sdpa")
        filled = DynamicCache(config=stock.config)
        token = prefill(stock, filled, ids, mask)
        again = DynamicCache(config=stock.config)
        prefill(stock, again, ids, mask)
        oracle[family, batch] = tiny_model(family), filled, token, mask, decode(stock, again, token, mask)
    return oracle[family, batch]


@pytest.mark.parametrize(("family", "tier"), [("llama", "split"), ("gemma3", "one")])
def test_and_back(oracle: dict[Any, Any], family: str, tier: str) -> None:
    model, filled, token, mask, want = stock_run(oracle, family, 3)
    knobs = {"budget": 256, "sinks": 16, "recent": 0, "block_size": BLOCK, "prefill_tile": 32, **TIERS[tier]}
    cache = HybridCache.from_cache(filled, model, attention_mask=mask, **knobs)
    back = cache.to_dynamic()
    for mine, theirs in zip(back.layers, filled.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
        assert mine.get_seq_length() == theirs.get_seq_length()
    half = decode(model, cache, token, mask, STEPS // 2)
    longer = torch.cat([mask, torch.ones_like(half[0])], 1)
    back = cache.to_dynamic()
    stock = tiny_model(family, "sdpa")
    rest = decode(stock, back, half[0][:, -1:], longer, STEPS // 2)
    assert_equal((torch.cat([half[0], rest[0]], 1), torch.cat([half[1], rest[1]], 1)), want)
    more = decode(model, cache, half[0][:, -1:], longer, STEPS // 2)  # the cache itself goes on, too
    assert_equal((torch.cat([half[0], more[0]], 1), torch.cat([half[1], more[1]], 1)), want)


def test_tokens_are_those_of_a_cache_that_took_the_prompt_itself(oracle: dict[Any, Any]) -> None:
    """A budget that covers little, so that the same blocks must be chosen by the same digests."""
    model = stock_run(oracle, "llama", 3)[0]
    ids, mask = prompt(3, 400)
    knobs: dict[str, Any] = {"budget": 96, "sinks": 16, "recent": 16, "block_size": BLOCK, "lookahead": "off"}
    own, filled = HybridCache(model, **knobs), DynamicCache(config=model.config)
    token = prefill(model, own, ids, mask)
    for layer, stored in zip(filled.layers, own.to_dynamic().layers, strict=True):
        layer.update(stored.keys, stored.values)
    taken = HybridCache.from_cache(filled, model, attention_mask=mask, **knobs)
    got, want = decode(model, taken, token, mask), decode(model, own, token, mask)
    assert torch.equal(got[1], want[1])


def test_a_cache_made_without_a_config_and_in_inference_mode(oracle: dict[Any, Any]) -> None:
    """Such a cache keeps all tokens of the sliding layers, too."""
    model, _, token, mask, want = stock_run(oracle, "gemma3", 3)
    filled = DynamicCache()
    with torch.inference_mode():
        prefill(tiny_model("gemma3", "sdpa"), filled, prompt(3, PROMPT)[0], mask)
        cache = HybridCache.from_cache(filled, model, "full", attention_mask=mask, block_size=BLOCK)
    assert_equal(decode(model, cache, token, mask), want)


def test_linear_layers_are_taken_over_and_given_back() -> None:
    stock, ours = build("qwen3_next", "sdpa"), build("qwen3_next", "hybrid_sparse")
    ids, mask = prompt(1, PROMPT)
    filled = DynamicCache(config=stock.config)
    token = prefill(stock, filled, ids, mask)
    cache = HybridCache.from_cache(filled, ours, "full", block_size=BLOCK)
    back = cache.to_dynamic()
    want = decode(stock, filled, token, mask, 9)
    assert_equal(decode(ours, cache, token, mask, 9), want)
    assert_equal(decode(stock, back, token, mask, 9), want)


def test_padding_may_be_told_later(oracle: dict[Any, Any]) -> None:
    model, filled, token, mask, want = stock_run(oracle, "llama", 3)
    cache = HybridCache.from_cache(filled, model, budget=256, sinks=16, recent=0, block_size=BLOCK)
    assert_equal(decode(model, cache, token, mask), want)


@pytest.mark.parametrize(("policy", "tier"), [("scout", "split"), ("infinigen", "one")])
def test_drafts_may_come_first(oracle: dict[Any, Any], policy: str, tier: str) -> None:
    """The first forward behind a take-over is one of drafts: nobody has told the scale of the softmax yet."""
    model, filled, token, mask, (want, _) = stock_run(oracle, "llama", 1)
    knobs: dict[str, Any] = {"alpha": math.inf, "share": 1}
    if policy == "scout":
        knobs = {"budget": 256, "sinks": 16, "recent": 0, "synchronous_layers": (0,)}
        knobs["lookahead"] = "select" if tier == "split" else "off"
    cache = HybridCache.from_cache(filled, model, policy, attention_mask=mask, tier=tier, block_size=BLOCK, **knobs)
    cache.activate_past_recording()
    fed = torch.cat([token, want[:, :3]], 1)
    with torch.no_grad():
        for _ in range(2):
            logits = model(fed, past_key_values=cache, logits_to_keep=4).logits
            assert torch.equal(logits.argmax(-1), want[:, :4])
            cache.crop(-4)


def test_what_does_not_fit_is_refused(oracle: dict[Any, Any]) -> None:
    model, filled, _, mask, _ = stock_run(oracle, "llama", 3)
    gemma = stock_run(oracle, "gemma3", 3)

    def changed(index: int, shape: tuple[int, ...]) -> DynamicCache:
        other = DynamicCache()
        for i in range(max(4, index + 1)):
            size = shape if i == index else (1, 2, 20, 16)
            other.update(torch.zeros(size), torch.zeros(size), i)
        return other

    gap = changed(3, (1, 2, 20, 16))
    gap.layers[2].reset()
    if gap.layers[2].keys is not None:  # older versions of Transformers keep zeros
        gap.layers[2].keys = gap.layers[2].values = None
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (HybridCache(model), model, {}, "not a HybridCache"),
        (filled, model, {"attention_mask": mask[:, 1:]}, r"attention_mask has shape \(3, 74\)"),
        (gemma[1], model, {}, "DynamicSlidingWindowLayer, but plain full attention in this model"),
        (filled, tiny_model("llama").bfloat16(), {}, r"computes in torch\.bfloat16"),
        (changed(4, (1, 2, 20, 16)), model, {}, "has 5 layers, this model has 4"),
        (changed(2, (1, 2, 21, 16)), model, {}, "layer 2 of the cache holds 1 rows of 21 tokens"),
        (changed(1, (1, 3, 20, 16)), model, {}, "layer 1 of the cache has 3 KV heads, the model has 2"),
        (changed(0, (1, 2, 20, 32)), model, {}, "layer 0 of the cache has head_dim 32, the model has 16"),
        (gap, model, {}, "layer 2 of the cache is empty"),
    ]
    for source, target, knobs, told in cases:
        with pytest.raises((TypeError, ValueError), match=told):
            HybridCache.from_cache(source, target, **knobs)
    assert HybridCache.from_cache(DynamicCache(config=model.config), model).get_seq_length() == 0
