"""`HybridCache` as a drop-in: registration, refusals, crops, masks, and cases that are difficult."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from test_exactness import assert_equal, decode_logits
from tiny import DEVICE, SIZES, feed, forward, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import ConstantPredictor, HybridCache, Scout
from hf_offload.gpu.block_topk import MOST_BLOCKS

BLOCK = 16
COVERING: dict[str, Any] = {"budget": 512, "sinks": 16, "recent": 0, "block_size": BLOCK, "lookahead": "off"}
TIERS = {"one": {"tier": "one"}, "split": {"tier": "split", "resident": 4 * BLOCK}}


def hooks_on(model: PreTrainedModel) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
def test_without_a_hybrid_cache_it_is_sdpa_bit_for_bit(family: str) -> None:
    ours, theirs = tiny_model(family), tiny_model(family, "sdpa")
    ids, mask = prompt(3, 40)
    for padding in (None, mask):
        with torch.no_grad():
            assert torch.equal(ours(ids, attention_mask=padding).logits, theirs(ids, attention_mask=padding).logits)
    knobs: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "attention_mask": mask}
    static = {"cache_implementation": "static", "disable_compile": True}  # on a GPU it would be, whole and in pieces
    for cache in ({}, static, {"num_beams": 2}):
        assert torch.equal(ours.generate(ids, **knobs, **cache), theirs.generate(ids, **knobs, **cache))
    losses = []
    for model in (ours, theirs):
        model.train()
        loss = model(ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        losses.append((loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]))
    assert torch.equal(losses[0][0], losses[1][0])
    assert all(torch.equal(a, b) for a, b in zip(losses[0][1], losses[1][1], strict=True))


def test_knobs_that_do_not_go_together_are_named(llama: PreTrainedModel) -> None:
    constant = ConstantPredictor()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("scuot", {}, "policy='scuot' is unknown; use one of fixed_hybrid, .* quest, scout, window"),
        ("scout", {"bugdet": 5}, "bugdet: not a knob.*budget"),
        (Scout(), {"budget": 10}, "budget: knobs belong into Scout"),
        ("scout", {"budget": 64}, "budget=64 is less than"),
        ("scout", {"recall": "nowhere.json"}, "nowhere.json.*hf-offload profile"),
        ("scout", {"resident": 65536}, "resident=65536 .* use an integer of at most 32768 .* or a larger block_size"),
        *(
            (policy, {"cuda_graph": True}, f"in a step of policy '{policy}' the host decides")
            for policy in ("h2o", "fixed_hybrid", "hgca")
        ),
        ("fluxion", {}, "fluxion needs a predictor: predictor=PATH"),
        ("fluxion", {"predictor": constant, "tau": 0.2}, "tau=0.2: the predictor is for tau=0.1; use that"),
        ("fluxion", {"predictor": constant, "digest": "quest"}, "budgets are for 'submean'; use that"),
        ("fluxion", {"predictor": constant, "block_size": 32}, "block_size=32: fluxion chooses runs"),
        ("hgca", {"window": 64, "gpu_ratio": 0.5}, "window=64 and gpu_ratio=0.5 say the same"),
        ("hgca", {"window": 64, "resident": 128}, "resident=128: what is resident is the window .* leave it out"),
        ("hgca", {"window": 99999}, "the window of 99999 tokens takes 3126 blocks of 32 .* more than 1024"),
    ]
    for policy, knobs, named in cases:
        with pytest.raises(ValueError, match=named):
            HybridCache(llama, policy, **knobs)


def test_another_attention_and_what_is_no_model_are_refused(stock: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="set_attn_implementation"):
        HybridCache(stock)
    with pytest.raises(TypeError, match="Transformers model"):
        HybridCache("gpt2")  # type: ignore[arg-type]
    model = tiny_model("llama")
    cache = HybridCache(model, **COVERING)
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), pytest.raises(RuntimeError, match="did not reach the 'hybrid_sparse'"):
        model(prompt(1, 20)[0], past_key_values=cache)


def test_another_model_under_a_cache_is_noticed_and_nothing_is_lost(llama: PreTrainedModel) -> None:
    cache, again = (HybridCache(llama, **COVERING) for _ in range(2))
    ids, mask = prompt(1, 41)
    for one in (cache, again):
        forward(llama, one, ids, mask, 0, 40)
    with pytest.raises(ValueError, match="a model other than the one"):
        forward(tiny_model("llama", seed=5), cache, ids, mask, 40, 41)
    assert cache.get_seq_length() == 40
    assert torch.equal(*(forward(llama, one, ids, mask, 40, 41) for one in (cache, again)))


@pytest.mark.parametrize(("tier", "drop"), [("one", 5), ("one", 40), ("split", 1), ("split", 16)])
def test_crop_forgets_exactly_the_last_tokens(llama: PreTrainedModel, tier: str, drop: int) -> None:
    ids, mask = prompt(2, 91)
    cache, fresh = HybridCache(llama, **COVERING, **TIERS[tier]), HybridCache(llama, "full", block_size=BLOCK)
    feed(llama, cache, ids, mask, (0, *range(80, 91)))
    cache.crop(-drop)
    assert cache.get_seq_length() == 90 - drop
    forward(llama, fresh, ids, mask, 0, 90 - drop)
    got, want = (forward(llama, one, ids, mask, 90 - drop, 91 - drop) for one in (cache, fresh))
    assert torch.allclose(got, want, atol=5e-5)


def test_dense_masks_of_single_tokens(llama: PreTrainedModel, stock: PreTrainedModel) -> None:
    ids, _ = prompt(2, 33)
    step = torch.ones(2, 1, 1, 31, dtype=torch.bool, device=DEVICE)
    step[0, ..., 4:9] = False
    step[1, ..., 20] = False
    hidden = torch.rand(2, 1, 1, 32) > 0.7
    additive = torch.zeros(2, 1, 1, 32).masked_fill_(hidden, torch.finfo(torch.float32).min).to(DEVICE)
    logits = []
    for model, cache in ((stock, DynamicCache()), (llama, HybridCache(llama, **COVERING))):
        with torch.no_grad():
            model(ids[:, :30], past_key_values=cache)
            for i, mask in zip((30, 31, 32), (step, additive, None), strict=True):
                logits.append(model(ids[:, i : i + 1], attention_mask=mask, past_key_values=cache).logits)
    wrong = torch.full((2, 1, 1, 34), -1.0, device=DEVICE)
    with torch.no_grad(), pytest.raises(ValueError, match="bool mask"):
        llama(ids[:, :1], attention_mask=wrong, past_key_values=cache)
    assert cache.get_seq_length() == 33
    assert torch.allclose(torch.cat(logits[:3], 1), torch.cat(logits[3:], 1), atol=5e-5)


@pytest.mark.parametrize("tier", TIERS)
def test_a_mask_that_says_nothing_of_some_keys(llama: PreTrainedModel, stock: PreTrainedModel, tier: str) -> None:
    """Transformers masks what a short mask does not cover; so does the cache."""
    ids, _ = prompt(2, 40)
    short = torch.ones(2, 35, dtype=torch.long, device=DEVICE)
    logits = []
    for model, cache in ((stock, DynamicCache()), (llama, HybridCache(llama, **COVERING, **TIERS[tier]))):
        with torch.no_grad():
            parts = [model(part, attention_mask=short, past_key_values=cache).logits for part in (ids, ids[:, :1])]
        logits.append(torch.cat([parts[0][:, :35], parts[1]], 1))
    assert torch.allclose(*logits, atol=5e-5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("policy", ["full", "scout"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(10, 1, 80), pytest.param(6, 2, 32, marks=pytest.mark.slow)])
def test_group_sizes(heads: int, kv_heads: int, dim: int, policy: str, tier: str) -> None:
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    config = transformers.LlamaConfig(**(SIZES | heads_of | {"hidden_size": 16 * heads}))
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
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=32, patch_size=16
    )
    text = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=16)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=159)
    return tiny_model(config, attn_implementation, kind=transformers.AutoModelForImageTextToText)


def test_the_decoder_is_hooked_and_not_a_tower_of_the_same_depth() -> None:
    model = llava("hybrid_sparse")
    knobs = COVERING | TIERS["split"] | {"lookahead": "attend", "synchronous_layers": (0,), "sinks": 0, "resident": 48}
    cache = HybridCache(model, "scout", **knobs)
    model.generate(prompt(1, 50)[0], past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert cache.stats().as_dict()["query_cosine"] is not None


def test_other_ways_to_copy_a_cache_are_refused(llama: PreTrainedModel) -> None:
    cache = HybridCache(llama, **COVERING)
    for attempt in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"use fork\(\)"):
            attempt(cache)


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
