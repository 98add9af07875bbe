"""Families of models and of layers: softcaps, sinks, windows, shared keys, other devices, and what fits no block."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import DEVICE, ONE_MEMORY, SIZES, forward, prompt, tiny_model
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_offload import HybridCache

HEADS: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
HALVES = ["sliding_attention", "full_attention"] * 2
COVERING: dict[str, Any] = {"budget": 512, "sinks": 16, "recent": 0, "block_size": 16}
SPLIT: dict[str, Any] = {**COVERING, "tier": "split", "resident": 64, "lookahead": "select"}


def config(family: str) -> PreTrainedConfig:
    if family == "gemma2":
        return transformers.Gemma2Config(
            **HEADS, sliding_window=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=16
        )
    if family == "gpt_oss":
        return transformers.GptOssConfig(**HEADS, **EXPERTS, sliding_window=8, num_local_experts=4, layer_types=HALVES)
    if family == "deepseek_v3":  # keys and values of different shapes
        return transformers.DeepseekV3Config(
            **SIZES, **EXPERTS, num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=4, n_group=1, topk_group=1, moe_intermediate_size=32,
        )  # fmt: skip
    if family == "diffllama":  # values are changed after the cache
        return transformers.DiffLlamaConfig(**HEADS)
    if family == "odd_heads":  # no multiple of 16
        return transformers.LlamaConfig(**HEADS | {"head_dim": 24})
    return transformers.Qwen3NextConfig(
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
    hgca = {"window": 24, "beta": 0.0, "block_size": 16, "rescue": 0}  # all is kept: nothing is left to draw
    for policy, options in (
        ("scout", {**COVERING, "lookahead": "off", **ONE_MEMORY}),
        ("scout", {**SPLIT, "synchronous_layers": (0,)}),
        ("hgca", {**hgca, **ONE_MEMORY}),
        ("hgca", {**hgca, "tier": "split"}),
    ):
        cache = HybridCache(ours, policy, **options)
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
    config = transformers.Gemma3nTextConfig(
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


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v3", "keys of 1 head with 16 channels and values of 1 head with 8"),
        ("diffllama", "the model changes keys or values after the cache"),
        ("odd_heads", "head_dim 24 is not a multiple of 16 up to 256"),
    ],
)
def test_stock_layers_are_exact_and_told_of(family: str, reason: str) -> None:
    eager, ours = build(family, "eager"), build(family, "hybrid_sparse")
    ids, mask = prompt(2, 40)
    mask = torch.cat([mask, torch.ones_like(mask[:, 20:])], 1)
    stock, cache = DynamicCache(config=eager.config), HybridCache(ours, "scout", **SPLIT)
    knobs: dict[str, Any] = {"do_sample": False, "max_new_tokens": 5}

    def same(ids: torch.Tensor, stock: DynamicCache, **more: Any) -> None:
        given = {"attention_mask": mask[:, : ids.shape[1]], **knobs, **more}
        want = eager.generate(ids, past_key_values=stock, **given)
        assert torch.equal(ours.generate(ids, past_key_values=cache, **given), want)

    with pytest.warns(UserWarning, match=reason):
        same(ids, stock)
    cache.crop(-4)
    stock.crop(-4)
    same(torch.cat([ids, ids[:, 20:]], 1), stock)
    assert cache.stats().as_dict()["stock_layers"] == [0, 1, 2, 3]
    cache.reset()
    same(ids, DynamicCache(config=eager.config), num_beams=3)


def fail(*_: Any) -> None:
    raise ArithmeticError


def test_a_failed_first_forward_leaves_nothing_in_stock_layers() -> None:
    model, (ids, mask) = build("deepseek_v3", "hybrid_sparse"), prompt(2, 40)
    cache, stock = HybridCache(model, "scout", **COVERING), DynamicCache(config=model.config)
    with model.model.layers[2].register_forward_hook(fail), pytest.raises(ArithmeticError):
        forward(model, cache, ids, mask, 0, 40)
    assert cache.get_seq_length() == 0
    with pytest.warns(UserWarning, match="keeps Transformers' own cache"):
        got = forward(model, cache, ids, mask, 0, 40)
    assert torch.equal(got, forward(model, stock, ids, mask, 0, 40))


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3"])
def test_layers_that_cannot_undo_a_failed_forward_do_not_repeat_it(family: str) -> None:
    """Their state has taken the tokens in; a second time would count them twice."""
    model = tiny_model(family if family == "gemma3" else config(family))
    cache = HybridCache(model, "full", block_size=16)
    ids = prompt(1, 40)[0]
    with torch.no_grad():
        want = model(ids, past_key_values=cache).logits
        with model.model.layers[3].register_forward_hook(fail), pytest.raises(ArithmeticError):
            model(ids[:, :1], past_key_values=cache)
        with pytest.raises(
            RuntimeError, match=r"sliding windows or linear attention cannot undo a forward that failed; call reset\(\)"
        ):
            model(ids[:, :1], past_key_values=cache)
        cache.reset()
        assert torch.equal(model(ids, past_key_values=cache).logits, want)


def test_a_mask_for_fewer_keys_than_are_cached_is_refused() -> None:
    model = tiny_model("llama")
    ids = prompt(1, 40)[0]
    cache = HybridCache(model, "full", block_size=16)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="has a mask for 1 of 41 keys"):
            model(ids[:, :1], attention_mask=torch.zeros(1, 1, 1, 1, device=DEVICE), past_key_values=cache)


def test_a_model_that_slices_masks_for_shared_keys_gets_dense_ones() -> None:
    """Gemma 4 computes the last layers for the last token alone, and cuts their masks."""
    kinds = ["sliding_attention", "full_attention"] * 2
    heads: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "hidden_size_per_layer_input": 8}
    config = transformers.Gemma4TextConfig(
        **heads, sliding_window=8, layer_types=kinds, num_kv_shared_layers=2, vocab_size_per_layer_input=160
    )
    eager, ours = tiny_model(config, "eager"), tiny_model(config)
    ids, mask = prompt(2, 40)
    knobs: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 5, "eos_token_id": None}
    want = eager.generate(ids, past_key_values=DynamicCache(config=eager.config), **knobs)
    cache = HybridCache(ours, "full", block_size=16)
    with pytest.warns(UserWarning, match="head_dim 512"):
        assert torch.equal(ours.generate(ids, past_key_values=cache, **knobs), want)


@pytest.mark.filterwarnings("ignore:HybridCache keeps Transformers' own cache")
@pytest.mark.parametrize("way", ["fork", "save", "from_cache"])
@pytest.mark.parametrize("family", ["deepseek_v3", "mixed"])
def test_stock_layers_go_along(family: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if family == "mixed":
        from hf_offload.cache import arrivals as fits
        from hf_offload.cache import conversion as takeover
        from hf_offload.model import fallback

        def odd(key: torch.Tensor, value: torch.Tensor) -> str | None:
            return "odd" if key.shape[1] == 4 else fits.unsuitable(key, value)

        for module in (fallback, takeover):
            monkeypatch.setattr(module, "unsuitable", odd)
        model = tiny_model("llama")
        wide_layer(model, 1)
    else:
        model = build(family, "hybrid_sparse")
    ids, mask = prompt(2, 40)
    cache, stock = HybridCache(model, "scout", **COVERING), DynamicCache(config=model.config)
    with torch.no_grad():
        for each in (cache, stock):
            model(ids, attention_mask=mask, past_key_values=each)
        if way == "fork":
            made = cache.fork()
        elif way == "save":
            cache.save(tmp_path / "saved")
            made = HybridCache.load(tmp_path / "saved", model)
        else:
            made = HybridCache.from_cache(stock, model, "scout", attention_mask=mask, **COVERING)
        assert made.stats().as_dict()["stock_layers"] == cache.stats().as_dict()["stock_layers"] != []
        for length in (7, 1, 1):
            mask = torch.cat([mask, mask.new_ones(2, length)], 1)
            more = torch.full((2, length), 9, device=DEVICE)
            got = model(more, attention_mask=mask, past_key_values=made).logits
            want = model(more, attention_mask=mask, past_key_values=stock).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def wide_layer(model: PreTrainedModel, index: int) -> None:
    """Give one layer of a model twice the KV heads of the others."""
    attention = model.model.layers[index].self_attn
    for name in ("k_proj", "v_proj"):
        old = getattr(attention, name)
        new = torch.nn.Linear(old.in_features, 2 * old.out_features, bias=False)
        new.weight.data = torch.cat([old.weight.data, old.weight.data.flip(0)])
        setattr(attention, name, new)
    attention.num_key_value_groups //= 2
