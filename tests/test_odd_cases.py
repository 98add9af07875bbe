"""Difficult cases of a drop-in: masks, one KV head, copies, threads, towers beside the decoder."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from test_exactness import assert_equal, decode_logits
from test_hybrid_cache import COVERING, TIERS
from tiny import DEVICE, SIZES, feed, forward, prompt, tiny_model
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    DynamicCache,
    LlamaConfig,
    LlavaConfig,
    PreTrainedModel,
)

from hf_offload import HybridCache
from hf_offload.gpu.block_topk import MOST_BLOCKS


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return tiny_model("llama", "sdpa")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("policy", ["full", "scout"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(5, 1, 16), (6, 2, 80), pytest.param(7, 1, 32, marks=pytest.mark.slow)]
)
def test_group_sizes(heads: int, kv_heads: int, dim: int, policy: str, tier: str) -> None:
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    config = LlamaConfig(**(SIZES | heads_of | {"hidden_size": 16 * heads}))
    theirs, ours = tiny_model(config, "sdpa"), tiny_model(config)
    ids, mask = prompt(1, 61)
    want = decode_logits(theirs, DynamicCache(config=theirs.config), ids, mask, None, steps=20)
    knobs = COVERING if policy == "scout" else {"block_size": 16}
    cache = HybridCache(ours, policy, **knobs, **TIERS[tier])
    assert_equal(decode_logits(ours, cache, ids, mask, 20, steps=20), want)


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min])
def test_additive_masks_over_tiles(llama: PreTrainedModel, stock: PreTrainedModel, hidden: float) -> None:
    ids, cache = prompt(2, 80)[0], HybridCache(llama, "full", block_size=16, prefill_tile=32)
    mask = torch.full((80, 80), hidden, device=DEVICE).triu(1).expand(2, 1, 80, 80).clone()
    mask[1, :, 20:, 5:15] = hidden
    with torch.no_grad():
        want = stock(ids, attention_mask=mask).logits
        for a, b in ((0, 50), (50, 80)):
            got = llama(ids[:, a:b], attention_mask=mask[:, :, a:b, :b], past_key_values=cache).logits
            assert torch.allclose(got, want[:, a:b], atol=5e-5)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dense", [False, True])
def test_tokens_that_become_visible_are_seen(llama: PreTrainedModel, tier: str, dense: bool) -> None:
    """A prompt that hides a stretch, then decode steps that do not: digests must not remember the stretch as empty."""
    ids, mask = prompt(1, 90)
    mask[:, 10:60] = 0
    first: torch.Tensor = mask[:, :80]
    if dense:
        number = torch.arange(80, device=DEVICE)
        first = (number <= number[:, None])[None, None] & (first[:, None, None] != 0)
    logits = []
    hgca = {"window": 20, "beta": 0.0, "block_size": 16, "resident": None}
    for policy, knobs in (("full", {"block_size": 16}), ("scout", COVERING), ("hgca", hgca)):
        cache = HybridCache(llama, policy, **(TIERS[tier] | knobs))
        with torch.no_grad():
            llama(ids[:, :80], attention_mask=first, past_key_values=cache)
            rows = []
            for i in range(80, 90):
                later = None if dense else torch.ones(1, i + 1, dtype=torch.long, device=DEVICE)
                rows.append(llama(ids[:, i : i + 1], attention_mask=later, past_key_values=cache).logits)
        logits.append(torch.cat(rows, 1))
    assert torch.allclose(logits[0], logits[1], atol=5e-5)
    assert torch.allclose(logits[0], logits[2], atol=5e-5)


def llava(attn_implementation: Any) -> PreTrainedModel:
    """A model whose vision tower has as many layers as its decoder."""
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=32, patch_size=16
    )
    text = LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=16)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=159)
    return tiny_model(config, attn_implementation, kind=AutoModelForImageTextToText)


def test_the_decoder_is_hooked_and_not_a_tower_of_the_same_depth() -> None:
    model = llava("hybrid_sparse")
    knobs = COVERING | TIERS["split"] | {"lookahead": "attend", "synchronous_layers": (0,), "sinks": 0, "resident": 48}
    cache = HybridCache(model, "scout", **knobs)
    model.generate(prompt(1, 50)[0], past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert cache.stats().as_dict()["query_cosine"] is not None


def test_copies_by_other_ways_and_compiled_models_are_refused(llama: PreTrainedModel) -> None:
    cache = HybridCache(llama, **COVERING)
    for attempt in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"use fork\(\)"):
            attempt(cache)
    with pytest.raises(ValueError, match=r"torch\.compile"):
        HybridCache(torch.compile(llama), **COVERING)


@pytest.mark.parametrize("tier", ["one", "split"])
def test_blocks_that_are_copied_have_room_for_a_digest(llama: PreTrainedModel, tier: str) -> None:
    """Copies of shared blocks, and packed blocks that are opened again, may be the ones for which the pool grows."""
    ids, mask = prompt(1, 530)
    knobs: dict[str, Any] = {"budget": 1024, "sinks": 8, "recent": 8, "block_size": 8, "tier": tier}
    cache = HybridCache(llama, "scout", **knobs)
    feed(llama, cache, ids, mask, (0, 508, 509))
    cache.batch_repeat_interleave(2)
    got = feed(llama, cache, ids.expand(2, -1), mask.expand(2, -1), range(509, 521))[-1]
    assert torch.allclose(got, forward(llama, None, ids, mask, 0, 520)[:, -1:].expand_as(got), atol=5e-5)
    cache = HybridCache(llama, "scout", **knobs, host_dtype="int8")
    forward(llama, cache, ids, mask, 0, 512)
    cache.crop(-412)
    got = feed(llama, cache, ids, mask, range(100, 113))[-1]
    assert torch.allclose(got, forward(llama, None, ids, mask, 0, 112)[:, -1:], atol=0.5)


@pytest.mark.slow
def test_contexts_of_nearly_as_many_blocks_as_can_be_ranked() -> None:
    """The table grows ahead of the tokens, but not beyond what a device ranks."""
    model, length = tiny_model("llama"), 13_375 * 8
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    source = DynamicCache(config=model.config)
    for layer in range(model.config.num_hidden_layers):
        source.update(*torch.randn(2, 1, heads, length, dim).unbind(), layer)
    knobs: dict[str, Any] = {"block_size": 8, "tier": "split", "budget": 512, "sinks": 8, "recent": 8}
    cache = HybridCache.from_cache(source, model, "scout", **knobs)
    with torch.no_grad():
        for _ in range(10):
            model(torch.ones(1, 1, dtype=torch.long, device=DEVICE), past_key_values=cache)
        assert cache.get_seq_length() == length + 10
        assert cache.layers[0].store.table.shape[1] == MOST_BLOCKS
        too_many = (MOST_BLOCKS - 2) * 8 - length - 9
        with pytest.raises(ValueError, match=r"131057 tokens a row are more than the 16382 blocks of 8.*block_size"):
            model(torch.ones(1, too_many, dtype=torch.long, device=DEVICE), past_key_values=cache)
        assert cache.get_seq_length() == length + 10
        model(torch.ones(1, 1, dtype=torch.long, device=DEVICE), past_key_values=cache)


@pytest.mark.parametrize(
    ("policy", "padding", "knobs"),
    [
        ("full", 120, {"resident": 24}),
        ("scout", 100, {"budget": 400, "sinks": 16, "recent": 16, "resident": 56, "lookahead": "select"}),
        ("fixed_hybrid", 120, {"budget": 1.0, "sinks": 32, "local": 16, "resident": 112, "block_size": 16}),
    ],
)
def test_padding_gives_its_slots_to_a_short_rows_tokens(
    llama: PreTrainedModel, stock: PreTrainedModel, policy: str, knobs: dict[str, Any], padding: int
) -> None:
    """A row whose first tokens come late: what is resident of its padding makes room for its sinks as they fill."""
    cache = HybridCache(llama, policy, tier="split", **({"block_size": 8, "prefill_tile": 32} | knobs))
    ids, mask = prompt(2, 160)[0], torch.ones(2, 160, dtype=torch.long, device=DEVICE)
    mask[1, :padding] = 0
    theirs = DynamicCache()
    for first, stop in [(0, 118), *((t, t + 1) for t in range(118, 160))]:
        ours = forward(llama, cache, ids, mask, first, stop)[:, -1]
        want = forward(stock, theirs, ids, mask, first, stop)[:, -1]
        real = mask[:, stop - 1] != 0
        torch.testing.assert_close(ours[real], want[real], atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("policy", ["fixed_hybrid", "scout"])
def test_a_cache_whose_newest_full_block_is_padding_in_a_row_loads(
    llama: PreTrainedModel, policy: str, tmp_path: Path
) -> None:
    """That block may have given up its slot: nothing in it is attended."""
    knobs: dict[str, Any] = {"tier": "split", "block_size": 16, "prefill_tile": 32}
    if policy == "scout":
        knobs |= {"budget": 256, "resident": 256}
    else:
        knobs |= {"budget": 0.0, "digest": "submean", "sinks": 0, "local": 16, "resident": 64}
    ids, mask = prompt(3, 60)[0], torch.ones(3, 60, dtype=torch.long, device=DEVICE)
    mask[2, :48] = 0
    cache = HybridCache(llama, policy, **knobs)
    forward(llama, cache, ids, mask, 0, 49)
    for at in range(49, 60):
        cache.save(tmp_path / "saved")
        loaded = HybridCache.load(tmp_path / "saved", llama)
        assert torch.equal(*(forward(llama, one, ids, mask, at, at + 1) for one in (cache, loaded)))
