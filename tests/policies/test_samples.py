"""`samples`: keys drawn by their estimated attention, in whole decode steps; and checks of what is not attended."""

from __future__ import annotations

import functools
import heapq
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_exactness import assert_equal, decode_logits
from tiny import feed, prompt, spread_weights, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache

import hf_offload
from hf_offload import HybridCache
from hf_offload.blocks import digests
from hf_offload.cache.checks import Checks
from hf_offload.policies.choices import DrawnPairs
from hf_offload.tools import measuring
from tiny_configs import tiny_config

BLOCK, PROMPT, STEPS = 16, 150, 24
NEAR: dict[str, Any] = {"sinks": 16, "recent": 16}
FEW = {"samples": 40, **NEAR}
SPLIT: dict[str, Any] = {"tier": "split", "resident": 96}

model_of = functools.cache(tiny_model)


@pytest.fixture
def always_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw in short contexts, too."""
    monkeypatch.setattr(DrawnPairs, "blocks", lambda choice, size: 0)


def decode(model: Any, cache: Any, batch: int = 1, steps: int = STEPS, **options: Any) -> torch.Tensor:
    """Logits `[B, steps, V]` of generated tokens."""
    ids, mask = prompt(batch, PROMPT)
    given = {"past_key_values": cache, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=steps, **given, **options)
    return torch.stack(out.logits, 1)


def decoded(
    policy: str, batch: int = 1, steps: int = STEPS, family: str = "llama", **knobs: Any
) -> tuple[torch.Tensor, HybridCache]:
    """Logits of a tiny model, and the cache that has generated them."""
    cache = HybridCache(model_of(family), policy, block_size=BLOCK, **knobs)
    return decode(model_of(family), cache, batch, steps), cache


def distance(full: torch.Tensor, found: torch.Tensor) -> float:
    """Mean KL divergence of one's logits from the other's."""
    full, found = full.log_softmax(-1), found.log_softmax(-1)
    return float((full.exp() * (full - found)).sum(-1).mean())


def assert_alike(*logits: torch.Tensor) -> None:
    assert_equal(*((each.argmax(-1), each) for each in logits))


def checked_errors(told: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimated and true errors of all checks."""
    estimated, true = torch.tensor([pair for layer in told["layers"] for pair in layer["checked_errors"]]).T
    return estimated, true


def ahead(lookahead: str) -> dict[str, Any]:
    """Options of two memories of which the layers behind the first may look ahead."""
    return {**SPLIT, "lookahead": lookahead, "synchronous_layers": (0,)}


def model_of_type(model_type: str, attn_implementation: str) -> Any:
    """Half of its layers have sliding windows."""
    config = tiny_config(model_type)
    kinds = ["sliding_attention", "full_attention"] * config.num_hidden_layers
    config.layer_types = kinds[: config.num_hidden_layers]
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    return spread_weights(made).eval()


# --- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_with_all_pairs_it_is_full_attention(family: str, always_drawn: None) -> None:
    stock = tiny_model(family, "sdpa")
    want = decode(stock, DynamicCache(config=stock.config), 3)
    for join in ("max", "mean"):
        assert_alike(decoded("scout", 3, family=family, samples=10**7, join=join, sinks=16)[0], want)


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_softcap_and_the_models_sinks(model_type: str, always_drawn: None) -> None:
    """Gemma 2's softcap and GPT-OSS's sinks, in both memories, with all pairs drawn."""
    ids, mask = prompt(2, PROMPT)[0].clamp(min=3), torch.ones(2, PROMPT, dtype=torch.long)
    stock, model = model_of_type(model_type, "eager"), model_of_type(model_type, "hybrid_sparse")
    want = decode_logits(stock, DynamicCache(config=stock.config), ids, mask, None, STEPS)
    for memory in ({}, {**SPLIT, "lookahead": "select", "synchronous_layers": (0,)}):
        cache = HybridCache(model, "scout", samples=2 * 10**9, block_size=BLOCK, sinks=16, recent=0, **memory)
        assert_equal(decode_logits(model, cache, ids, mask, None, STEPS), want)


def test_a_real_model_loses_little(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "STATISTICS_TOKENS", 128)
    model, tokenizer = smollm2
    ids = tokenizer(heapq.__about__, return_tensors="pt").input_ids[:, :328]
    known = DynamicCache(config=model.config)

    def follow(cache: Any) -> torch.Tensor:
        return torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits[0] for i in range(320, 328)])

    with torch.inference_mode():
        model(ids[:, :320], past_key_values=known, logits_to_keep=1)
        full = follow(known)
        known.crop(-8)
        with hf_offload.enabled(model):
            cache = HybridCache.from_cache(known, model, "scout", samples=64, sinks=4, recent=16)
            assert distance(full, follow(cache)) < 0.005
        assert cache.stats().as_dict()["attended_share"] < 0.3


@pytest.mark.parametrize(
    ("lookahead", "host_dtype"), [(None, None), (None, "int8"), ("off", "int8"), ("select", None), ("attend", "int8")]
)
def test_more_samples_are_nearer_to_full_attention(lookahead: str | None, host_dtype: str | None) -> None:
    """With two memories the device attends all that is resident, and keys are drawn from the others."""
    knobs = {**(ahead(lookahead) if lookahead else {}), **NEAR, "host_dtype": host_dtype}
    full, far, attended, ratios = decoded("full", 3, steps=4)[0][:, 1:3], [], [], []
    for samples in (20, 400 if lookahead else 120):
        found, cache = decoded("scout", 3, steps=4, samples=samples, **knobs)
        far.append(distance(full, found[:, 1:3]))
        stats = cache.stats().as_dict()
        attended.append(stats["attended_tokens"])
        ratios.append(stats["cpu_ratio"])
    assert (SPLIT["resident"] if lookahead else 48) < attended[0] < attended[1] < PROMPT
    assert 0 < far[1] < far[0] / (1 if lookahead else 2)
    assert not lookahead or 0 < ratios[0] < ratios[1] < 0.6


def test_up_to_so_many_tokens_all_are_attended() -> None:
    """Also if they end within a block."""
    found, cache = decoded("scout", samples=PROMPT + STEPS)
    assert_alike(found, decoded("full")[0])
    assert cache.stats().as_dict()["attended_tokens"] is None


def test_two_memories_recall_by_the_shares_of_a_draw() -> None:
    _, cache = decoded("scout", samples=200, recall=2, **NEAR, **SPLIT)
    assert cache.stats().as_dict()["recalls"] > 4
    layer = cache.layers[1]
    worth = layer.resident.worth[:, :, : layer.store.sealed]
    assert (worth > 0).all()
    assert worth.sum(-1).max() <= 2


def test_what_stats_say_of_a_draw() -> None:
    _, cache = decoded("scout", 3, check_every=1, **FEW)
    stats = cache.stats().as_dict()
    assert stats["attended_share"] == pytest.approx(stats["attended_tokens"] / (PROMPT + STEPS / 2), rel=0.1)
    assert 0 < stats["estimated_error"] < stats["estimated_error_p99"] < 1
    assert 0 < stats["missed_mass"] < 1 - 0.5 * stats["attended_share"]
    assert 0 < stats["output_error"] < 1
    estimated, true = checked_errors(stats)
    assert len(true) == 3 * 4 * (STEPS - 1)  # rows and heads, of one layer in each step
    assert (true <= 3 * estimated + 1e-3).float().mean() > 0.9
    assert cache.fork().settings.checks is not None


def test_bytes_read_on_the_host_are_those_of_the_drawn_tokens_and_the_digests() -> None:
    _, cache = decoded("scout", samples=20, recall=10**6, **NEAR, **SPLIT)
    want = 0.0
    for layer, told in zip(cache.layers, cache.stats().as_dict()["layers"], strict=True):
        store = layer.store
        tokens = told["attended_tokens"] - SPLIT["resident"]  # a head, beside its resident tokens
        want += tokens * store.host_bytes / (store.reserved * BLOCK) + store.sealed * store.digests.block_bytes
    assert measuring.host_bytes(cache) == pytest.approx(want, rel=0.1)


@pytest.mark.parametrize(("batch", "tier"), [(1, "split"), (3, "one")])
def test_hgca_finds_again_what_it_did_not_keep(batch: int, tier: str) -> None:
    """With all pairs drawn nothing is missed; tokens that are kept are not attended twice."""
    knobs = {"window": 40, "tier": tier}
    want, paper = decoded("full", batch, 20)[0], decoded("hgca", batch, 20, rescue=0, **knobs)[0]
    assert (paper - want).abs().max() > 1e-3
    for beta in (1.0, 1e6):  # some, or no tokens are kept
        found, cache = decoded("hgca", batch, 20, rescue=2 * 10**9, beta=beta, **knobs)
        assert cache.stats().as_dict()["kept_share"] < 1
        assert_alike(found, want)
    near, some = decoded("hgca", batch, steps=2, rescue=40, **knobs)
    assert (near - want[:, :2])[:, 1].abs().max() < (paper[:, 1] - want[:, 1]).abs().max()
    assert 40 < some.stats().as_dict()["attended_tokens"] < PROMPT + 20
    rescue = HybridCache(model_of("llama"), "hgca", block_size=BLOCK, **knobs).policy.rescue
    assert rescue == {"one": 128, "split": 0}[tier]


def test_forks_files_and_crops_go_on_with_the_same_tokens(tmp_path: Path) -> None:
    model, whole = model_of("llama"), decoded("scout", **FEW)[0]
    begun, cache = decoded("scout", steps=6, **FEW)
    assert torch.equal(begun, whole[:, :6])
    tokens, mask = torch.cat([prompt(1, PROMPT)[0], whole.argmax(-1)], 1), torch.ones(1, PROMPT + STEPS)
    fork = cache.fork()
    cache.save(tmp_path / "saved")
    for each in (fork, HybridCache.load(tmp_path / "saved", model), cache):
        got = feed(model, each, tokens, mask.long(), range(PROMPT + 5, PROMPT + STEPS))
        assert torch.equal(torch.cat(got, 1), whole[:, 6:])
    cache.crop(5 - (STEPS - 1))
    assert torch.equal(feed(model, cache, tokens, mask.long(), (PROMPT + 5, PROMPT + 6))[0], whole[:, 6:7])


def test_a_row_that_is_mostly_padding_beside_a_long_one() -> None:
    """What hgca draws from is cut into gaps, of which some lie in the padding."""
    model, (ids, mask) = model_of("llama"), prompt(2, 1301)
    mask[1, :1201] = 0
    both, alone = (HybridCache(model, "hgca", window=256, rescue=128, block_size=BLOCK) for _ in range(2))
    given = {"max_new_tokens": 20, "do_sample": False}
    got = model.generate(ids, attention_mask=mask, past_key_values=both, **given)
    want = model.generate(ids[:1], past_key_values=alone, **given)
    assert torch.equal(got[0], want[0])


def test_drafts_are_steps_of_their_own() -> None:
    drafted = HybridCache(model_of("llama"), "scout", block_size=BLOCK, **FEW)
    found = decode(model_of("llama"), drafted, prompt_lookup_num_tokens=3)
    assert torch.equal(found.argmax(-1), decoded("scout", **FEW)[0].argmax(-1))


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [{}, SPLIT], ids=["one", "two"])
def test_a_check_tells_what_a_budget_misses(memory: dict[str, Any]) -> None:
    missed = []
    for budget in (64, 128):
        _, cache = decoded("scout", 3, 8, "gemma3", check_every=1, budget=budget, **NEAR, **memory)
        missed.append(cache.stats().as_dict()["missed_mass"])
    assert 0 < missed[1] < missed[0] < 1
    told = decoded("full", steps=8, check_every=3, **memory)[1].stats().as_dict()
    assert told["missed_mass"] == pytest.approx(0, abs=1e-6)
    assert told["output_error"] < 1e-5
    assert told["estimated_error"] is None


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_checks_of_two_memories_find_what_those_of_one_find(model_type: str) -> None:
    """The same blocks are attended; with a softcap, and with the model's sinks."""
    ids, mask = prompt(2, PROMPT)[0].clamp(min=3), torch.ones(2, PROMPT, dtype=torch.long)
    model, found = model_of_type(model_type, "hybrid_sparse"), []
    for memory in ({}, SPLIT | {"resident": 80}):
        knobs = {"budget": 64, **NEAR, "block_size": BLOCK, "check_every": 1, **memory}
        cache = HybridCache(model, "scout", **knobs, attend_resident="selected")
        decode_logits(model, cache, ids, mask, None, STEPS)
        told = cache.stats().as_dict()
        true = checked_errors(told)[1]
        assert len(true) > 2 * STEPS
        found.append(([told["missed_mass"], told["output_error"]], true))
    assert found[1][0] == pytest.approx(found[0][0], rel=0.02)
    # Where two blocks score alike, rounding decides, for this head and step.
    assert torch.isclose(found[1][1], found[0][1], rtol=1e-3, atol=1e-5).float().mean() > 0.8


@pytest.mark.parametrize("lookahead", ["off", "attend"])
def test_checks_of_draws_with_two_memories(lookahead: str) -> None:
    """With a query that was predicted, too: what was drawn for it is weighed by the real one."""
    knobs = {**ahead(lookahead), **NEAR, "check_every": 1}
    few, every = (decoded("scout", 3, 12, samples=n, **knobs)[1].stats().as_dict() for n in (20, 10**8))
    estimated, true = checked_errors(few)
    predicted = lookahead == "attend"  # a random model's predicted queries err more than the draw
    assert (true <= 3 * estimated + 1e-3).float().mean() > (0.5 if predicted else 0.9)
    assert few["missed_mass"] > max(0.01, (0 if predicted else 1.5) * true.mean())
    assert every["missed_mass"] == pytest.approx(0, abs=1e-5)


def test_blocks_that_met_a_predicted_query_were_attended() -> None:
    """What a check misses are keys, not the error of the prediction."""
    knobs = {**ahead("attend"), **NEAR, "check_every": 1}
    few, every = (decoded("scout", 3, 12, budget=n, **knobs)[1].stats().as_dict() for n in (96, 10**4))
    assert few["missed_mass"] > 0.01
    assert every["missed_mass"] == pytest.approx(0, abs=1e-5)
    assert every["output_error"] > 0.01


def test_checks_of_a_rescue_where_marks_end_with_the_prompt() -> None:
    knobs: dict[str, Any] = {"window": 48, "rescue": 64, "block_size": BLOCK}
    given, found = prompt(1, 1026), []
    for check_every in (None, 1):
        cache = HybridCache(model_of("llama"), "hgca", check_every=check_every, **knobs)
        found.append(torch.cat(feed(model_of("llama"), cache, *given, (0, 1024, 1025, 1026))[1:], 1))
    assert torch.equal(*found)
    assert 0 < cache.stats().as_dict()["missed_mass"] < 1


@pytest.mark.parametrize("tier", ["one", "split"])
def test_a_check_tells_what_a_rescue_misses(tier: str) -> None:
    """The mass of keys that were not attended, whatever those that were stand for."""
    missed, tokens = [], []
    for rescue in (0, 12, 10**6):
        _, cache = decoded("hgca", steps=12, window=48, rescue=rescue, check_every=1, tier=tier)
        told = cache.stats().as_dict()
        missed.append(told["missed_mass"])
        tokens.append(told["attended_share"])
        estimated, true = checked_errors(told)
        assert bool(estimated.isnan().all()) == (rescue == 0)
        if rescue == 12:
            assert (true <= 3 * estimated + 1e-3).float().mean() > 0.9
            assert told["missed_mass"] > true.mean()
    assert missed[0] > missed[1] > 0.2 * missed[0]
    assert missed[2] == pytest.approx(0, abs=1e-5)
    assert 0 < tokens[1] < tokens[2] == pytest.approx(1.0, abs=1e-6)


def test_digests_that_do_not_fit_are_told() -> None:
    checks = Checks(1, (0, 1))
    checks.compare(np.full(200, 0.1), np.full(200, 0.9))
    with pytest.warns(RuntimeWarning, match=r"is off by 90\.0%, estimated were 10\.0%"):
        checks.compare(np.full(200, 0.1), np.full(200, 0.9))
    with warnings.catch_warnings(action="error"):
        checks.compare(np.full(200, 0.1), np.full(200, 0.9))  # once
        Checks(1, (0, 1)).compare(np.zeros(400), np.full(400, 1e-5))  # all pairs are attended; sums are of float32
    assert [checks.due(layer, step) for step in range(2) for layer in range(2)] == [True, False, False, True]


def test_what_does_not_go_together() -> None:
    for name, knobs, why in (
        ("scout", {"samples": 64, "budget": 1024}, "give one of them"),
        ("scout", {"samples": 64, "digest": "quest"}, 'needs digest="submean"'),
        ("scout", {"samples": 64, "join": "raw"}, "no share"),
        ("quest", {"samples": 64}, "use 'scout' with samples=64, recent=0, block_size=16"),
    ):
        with pytest.raises(ValueError, match=why):
            HybridCache(model_of("llama"), name, **knobs)
