"""`HybridCache` as a drop-in: registration, refusals, hooks, `generate()`, its own methods."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pools import used_blocks
from tiny import DEVICE, feed, forward, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import ConstantPredictor, HybridCache, Scout

BLOCK = 16
COVERING: dict[str, Any] = {"budget": 512, "sinks": 16, "recent": 0, "block_size": BLOCK, "lookahead": "off"}
TIERS = {"one": {"tier": "one"}, "split": {"tier": "split", "resident": 4 * BLOCK}}


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return tiny_model("llama", "sdpa")


def hooks_on(model: PreTrainedModel) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


# --- registration and fall back ---------------------------------------------------------------------------------------


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


# --- refusals ---------------------------------------------------------------------------------------------------------


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


def test_another_batch_is_refused_until_reset(llama: PreTrainedModel) -> None:
    cache = HybridCache(llama, **COVERING)
    forward(llama, cache, *prompt(1, 20), 0, 20)
    with pytest.raises(ValueError, match="reset"):
        forward(llama, cache, *prompt(2, 40), 20, 40)
    cache.reset()
    assert cache.get_seq_length() == 0
    forward(llama, cache, *prompt(2, 20), 0, 20)
    assert cache.get_seq_length() == 20


# --- the cache's own methods ------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("tier", TIERS)
def test_rows_share_host_blocks_until_they_part(llama: PreTrainedModel, tier: str) -> None:
    ids, _ = prompt(1, 70)
    with torch.no_grad():
        cache = HybridCache(llama, **COVERING, **TIERS[tier])
        llama(ids, past_key_values=cache)
        token = torch.tensor([[7]], device=DEVICE)
        llama(token, past_key_values=cache)
        store = cache.layers[0].store
        before = used_blocks(store.pool)
        cache.batch_repeat_interleave(3)
        assert used_blocks(store.pool) == before
        tokens = torch.tensor([[5], [6], [7]], device=DEVICE)
        got = llama(tokens, past_key_values=cache).logits
        assert used_blocks(store.pool) <= before + 2  # two rows got a tail of their own
        cache.batch_select_indices(torch.tensor([2, 0]))
        got = torch.cat([got[[2, 0]], llama(tokens[:2], past_key_values=cache).logits], 1)
        for row, path in enumerate(([7, 5], [5, 6])):
            whole = torch.cat([ids, token, torch.tensor([path], device=DEVICE)], 1)
            want = llama(whole).logits[0, -2:]
            assert torch.allclose(got[row], want, atol=5e-5)


def test_sliding_layers_that_cannot_undo_a_failure_say_so() -> None:
    model = tiny_model("gemma3")
    cache = HybridCache(model, **COVERING)
    ids, _ = prompt(1, 31)

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
        with model.model.layers[0].mlp.register_forward_pre_hook(fail), pytest.raises(MemoryError):
            model(ids[:, 30:], past_key_values=cache)
        with pytest.raises(RuntimeError, match="reset"):
            model(ids[:, 30:], past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)


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
