"""`samples`: keys drawn by their estimated attention, in whole decode steps."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_exactness import assert_equal, decode_logits
from tiny import prompt, spread_weights, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache

import hf_offload
from hf_offload.cache.checks import Checks
from hf_offload.cpu.kernels.draw_pairs import most_pairs
from hf_offload.policies.choices import DrawnPairs
from hf_offload.tools import measuring
from walk import configs

BLOCK, PROMPT, STEPS = 16, 150, 24
FEW = {"samples": 40, "sinks": 16, "recent": 16}
SPLIT = {"tier": "split", "resident": 96, "block_size": BLOCK}


@pytest.fixture
def always_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw in short contexts, too."""
    monkeypatch.setattr(DrawnPairs, "blocks", lambda choice, size: 0)


def decode(model: Any, cache: Any, batch: int = 1, steps: int = STEPS, **options: Any) -> torch.Tensor:
    ids, mask = prompt(batch, PROMPT)
    given = {"past_key_values": cache, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=steps, **given, **options)
    return torch.stack(out.logits, 1)


def model_of_type(model_type: str, attn_implementation: str) -> Any:
    """Half of its layers have sliding windows."""
    config = configs.tiny_config(model_type)
    kinds = ["sliding_attention", "full_attention"] * config.num_hidden_layers
    config.layer_types = kinds[: config.num_hidden_layers]
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    return spread_weights(made).eval()


@pytest.mark.parametrize(
    ("family", "batch"), [("llama", 3), ("llama", 1), pytest.param("gemma3", 3, marks=pytest.mark.slow)]
)
def test_with_all_pairs_it_is_full_attention(family: str, batch: int, always_drawn: None) -> None:
    stock, model = tiny_model(family, "sdpa"), tiny_model(family)
    want = decode(stock, DynamicCache(config=stock.config), batch)
    for join in ("max", "mean"):
        cache = hf_offload.HybridCache(model, "scout", samples=10**7, join=join, block_size=BLOCK, sinks=16)
        found = decode(model, cache, batch)
        assert torch.equal(found.argmax(-1), want.argmax(-1))
        assert (found - want).abs().max() <= 1e-5 * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_softcap_and_the_models_sinks(model_type: str, always_drawn: None) -> None:
    """Gemma 2's softcap and GPT-OSS's sinks, in both memories, with all pairs drawn."""
    ids, mask = prompt(2, PROMPT)[0].clamp(min=3), torch.ones(2, PROMPT, dtype=torch.long)
    stock, model = model_of_type(model_type, "eager"), model_of_type(model_type, "hybrid_sparse")
    want = decode_logits(stock, DynamicCache(config=stock.config), ids, mask, None, STEPS)
    for memory in ({}, {**SPLIT, "lookahead": "select", "synchronous_layers": (0,)}):
        knobs = {"block_size": BLOCK, "sinks": 16, "recent": 0, **memory}
        cache = hf_offload.HybridCache(model, "scout", samples=2 * 10**9, **knobs)
        assert_equal(decode_logits(model, cache, ids, mask, None, STEPS), want)


def test_a_real_model_loses_little(smollm2: Any) -> None:
    model, tokenizer = smollm2
    ids = tokenizer(hf_offload.demo_text("prose"), return_tensors="pt").input_ids[:, :1056]
    known = DynamicCache(config=model.config)

    def follow(cache: Any) -> torch.Tensor:
        steps = [model(ids[:, i : i + 1], past_key_values=cache).logits[0, 0] for i in range(1040, 1056)]
        return torch.stack(steps).log_softmax(-1)

    with torch.inference_mode():
        model(ids[:, :1040], past_key_values=known, logits_to_keep=1)
        full = follow(known)
        known.crop(-16)
        with hf_offload.enabled(model):
            cache = hf_offload.HybridCache.from_cache(known, model, "scout", samples=128)
            assert float((full.exp() * (full - follow(cache))).sum(-1).mean()) < 0.005


def test_sinks_are_attended_where_keys_are_drawn() -> None:
    """A digest says little of a first token that attracts every query. Quest's own form has no sinks."""
    assert hf_offload.Scout(samples=64).sinks == 4
    assert hf_offload.Quest(budget=64).sinks == 0


@pytest.mark.parametrize(("length", "recent"), [(100, 31), (100, 0), (21, 32), (20, 5)])
def test_what_is_always_attended(length: int, recent: int, always_drawn: None) -> None:
    """Sinks and newest tokens by pairs, also behind odd padding, and where both overlap."""
    ids, mask = prompt(3, length)
    mask[1, :7], mask[2, : length - 2] = 0, 0
    model = tiny_model("llama")
    cache = hf_offload.HybridCache(model, "scout", samples=1, sinks=5, recent=recent, block_size=BLOCK)
    model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, do_sample=False)
    length = cache.get_seq_length()
    sealed = (length - 1) // BLOCK * BLOCK
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    for layer in cache.layers:
        selection = layer.steps[True]._estimate.selection
        pairs, weights, counts = selection.items, selection.weights.weights, selection.counts
        for b in range(3):
            first = int(mask[b].argmax())
            late = max(sealed - recent, min(first, sealed))
            always = {i // 2 for i in (*range(first, min(first + 5, length)), *range(late, length))}
            for h in range(model.config.num_key_value_heads):
                listed = pairs[b, h, : counts[b, h]].tolist()
                assert listed == sorted(set(listed)), "each pair once, in order"
                assert always <= set(listed)
                assert len(listed) <= len(always) + most_pairs(1, group, max(late - first, 0) // 2)
                assert all(w == 0 for i, w in zip(listed, weights[b, h], strict=False) if i in always)


@pytest.mark.parametrize("options", [{}, {"host_dtype": "int8"}], ids=["plain", "int8"])
def test_more_samples_are_nearer_to_full_attention(options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    full = decode(model, hf_offload.HybridCache(model, "full", block_size=BLOCK), 3, steps=2)[:, 1].log_softmax(-1)
    far, attended = [], []
    for samples in (20, 120):
        cache = hf_offload.HybridCache(
            model, "scout", block_size=BLOCK, samples=samples, sinks=16, recent=16, **options
        )
        found = decode(model, cache, 3, steps=2)[:, 1].log_softmax(-1)
        far.append(float((full.exp() * (full - found)).sum(-1).mean()))
        attended.append(cache.stats().as_dict()["attended_tokens"])
        assert "tokens" in str(cache.stats())
    assert 48 < attended[0] < attended[1] < PROMPT
    assert 0 < far[1] < far[0] / 2


def test_up_to_so_many_tokens_all_are_attended() -> None:
    model = tiny_model("llama")
    want = decode(model, hf_offload.HybridCache(model, "full", block_size=BLOCK))
    cache = hf_offload.HybridCache(model, "scout", block_size=BLOCK, samples=PROMPT + STEPS + BLOCK)
    assert torch.equal(decode(model, cache), want)
    assert cache.stats().as_dict()["attended_tokens"] is None


@pytest.mark.parametrize("lookahead", ["off", "select", "attend"])
@pytest.mark.parametrize("options", [{}, {"host_dtype": "int8"}], ids=["plain", "int8"])
def test_two_memories_draw_from_what_is_not_resident(lookahead: str, options: dict[str, Any]) -> None:
    """More samples are nearer to full attention, and the device attends all that is resident."""
    model = tiny_model("llama")
    knobs = {**SPLIT, "sinks": 16, "recent": 16, "lookahead": lookahead, "synchronous_layers": (0,), **options}
    full = decode(model, hf_offload.HybridCache(model, "full", block_size=BLOCK), 3, steps=4)[:, 1:3].log_softmax(-1)
    far, ratios = [], []
    for samples in (20, 400):
        cache = hf_offload.HybridCache(model, "scout", samples=samples, **knobs)
        found = decode(model, cache, 3, steps=4)[:, 1:3].log_softmax(-1)
        far.append(float((full.exp() * (full - found)).sum(-1).mean()))
        stats = cache.stats().as_dict()
        ratios.append(stats["cpu_ratio"])
        assert stats["attended_tokens"] > 96
        assert stats["estimated_error"] > 0
    assert 0 < ratios[0] < ratios[1] < 0.6
    assert 0 < far[1] < far[0]


def test_two_memories_recall_by_the_shares_of_a_draw() -> None:
    model = tiny_model("llama")
    cache = hf_offload.HybridCache(model, "scout", samples=200, recall=2, sinks=16, recent=16, **SPLIT)
    decode(model, cache)
    assert cache.stats().as_dict()["recalls"] > 4
    resident = cache.layers[1].resident
    blocks = cache.layers[1].store.sealed
    assert (resident.worth[:, :, :blocks] > 0).all()
    assert resident.worth[:, :, :blocks].sum(-1).max() <= 2


def test_what_stats_say_of_a_draw() -> None:
    model = tiny_model("llama")
    cache = hf_offload.HybridCache(model, "scout", block_size=BLOCK, check_every=1, **FEW)
    decode(model, cache, 3)
    stats = cache.stats().as_dict()
    assert stats["attended_share"] == pytest.approx(stats["attended_tokens"] / (PROMPT + STEPS / 2), rel=0.1)
    assert 0 < stats["estimated_error"] < stats["estimated_error_p99"] < 1
    assert 0 < stats["missed_mass"] < 1 - 0.5 * stats["attended_share"]
    assert 0 < stats["output_error"] < 1
    errors = [pair for layer in stats["layers"] for pair in layer["checked_errors"]]
    assert len(errors) == 3 * 4 * (STEPS - 1)  # rows and heads, of one layer in each step
    estimated, true = torch.tensor(errors).T
    assert (true <= 3 * estimated + 1e-3).float().mean() > 0.9
    assert "missed" in str(cache.stats())
    fork = cache.fork()
    assert fork.settings.checks is not None


MEMORIES = pytest.mark.parametrize("memory", [{}, SPLIT], ids=["one", "two"])


@MEMORIES
def test_a_check_tells_what_a_budget_misses(memory: dict[str, Any]) -> None:
    model = tiny_model("gemma3")
    missed = []
    for budget in (64, 128):
        knobs = {"budget": budget, "sinks": 16, "recent": 16, "block_size": BLOCK, **memory}
        cache = hf_offload.HybridCache(model, "scout", check_every=1, **knobs)
        decode(model, cache, 3)
        missed.append(cache.stats().as_dict()["missed_mass"])
    assert 0 < missed[1] < missed[0] < 1


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_checks_of_two_memories_find_what_those_of_one_find(model_type: str) -> None:
    """The same blocks are attended; with a softcap, and with the model's sinks."""
    ids, mask = prompt(2, PROMPT)[0].clamp(min=3), torch.ones(2, PROMPT, dtype=torch.long)
    model, found = model_of_type(model_type, "hybrid_sparse"), []
    for memory in ({}, {**SPLIT, "resident": 80}):
        knobs = {"budget": 64, "sinks": 16, "recent": 16, "block_size": BLOCK, "check_every": 1, **memory}
        cache = hf_offload.HybridCache(model, "scout", **knobs, attend_resident="selected")
        decode_logits(model, cache, ids, mask, None, STEPS)
        told = cache.stats().as_dict()
        true = [pair[1] for layer in told["layers"] for pair in layer["checked_errors"]]
        assert len(true) > 2 * STEPS
        found.append(([told["missed_mass"], told["output_error"]], torch.tensor(true)))
    assert found[1][0] == pytest.approx(found[0][0], rel=0.02)
    # Where two blocks score alike, rounding decides, for this head and step.
    assert torch.isclose(found[1][1], found[0][1], rtol=1e-3, atol=1e-5).float().mean() > 0.8


@pytest.mark.parametrize("lookahead", ["off", "select", "attend"])
def test_checks_of_draws_with_two_memories(lookahead: str) -> None:
    """With a query that was predicted, too: what was drawn for it is weighed by the real one."""
    model, missed = tiny_model("llama"), []
    for samples in (20, 10**8):
        knobs = {**SPLIT, "sinks": 16, "recent": 16, "lookahead": lookahead, "synchronous_layers": (0,)}
        cache = hf_offload.HybridCache(model, "scout", samples=samples, check_every=1, **knobs)
        decode(model, cache, 3)
        told = cache.stats().as_dict()
        estimated, true = torch.tensor([pair for layer in told["layers"] for pair in layer["checked_errors"]]).T
        missed.append(told["missed_mass"])
        if samples == 20:
            predicted = lookahead == "attend"  # a random model's predicted queries err more than the draw
            assert (true <= 3 * estimated + 1e-3).float().mean() > (0.5 if predicted else 0.9)
            assert told["missed_mass"] > (0 if predicted else 1.5) * true.mean()
    assert missed[0] > 0.01
    assert missed[1] == pytest.approx(0, abs=1e-5)


def test_bytes_read_on_the_host_are_those_of_the_drawn_tokens_and_the_digests() -> None:
    model, knobs = tiny_model("llama"), {**SPLIT, "sinks": 16, "recent": 16, "recall": 10**6}
    cache = hf_offload.HybridCache(model, "scout", samples=20, **knobs)
    decode(model, cache)
    want = 0.0
    for layer, told in zip(cache.layers, cache.stats().as_dict()["layers"], strict=True):
        store = layer.store
        tokens = told["attended_tokens"] - SPLIT["resident"]  # a head, beside its resident tokens
        want += tokens * store.host_bytes / (store.reserved * BLOCK) + store.sealed * store.digests.block_bytes
    assert measuring.host_bytes(cache) == pytest.approx(want, rel=0.1)


@pytest.mark.parametrize("correction", [True, False])
def test_blocks_that_met_a_predicted_query_were_attended(correction: bool) -> None:
    """What a check misses are keys, not the error of the prediction."""
    model, missed, errors = tiny_model("llama"), [], []
    for budget in (96, 10**4):
        knobs = {**SPLIT, "budget": budget, "lookahead": "attend", "synchronous_layers": (0,), "correction": correction}
        cache = hf_offload.HybridCache(model, "scout", sinks=16, recent=16, check_every=1, **knobs)
        decode(model, cache, 3)
        told = cache.stats().as_dict()
        missed.append(told["missed_mass"])
        errors.append(told["output_error"])
    assert missed[0] > 0.01
    assert missed[1] == pytest.approx(0, abs=1e-5)
    assert errors[1] > 0.01


@MEMORIES
def test_checks_of_a_rescue_where_marks_end_with_the_prompt(memory: dict[str, Any]) -> None:
    model, (ids, _) = tiny_model("llama"), prompt(1, 1026)
    knobs = {"window": 48, "rescue": 64, "block_size": BLOCK, **({"tier": "split"} if memory else {})}
    found = []
    for check_every in (None, 1):
        cache = hf_offload.HybridCache(model, "hgca", check_every=check_every, **knobs)
        with torch.no_grad():
            model(ids[:, :1024], past_key_values=cache)
            found.append(torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in (1024, 1025)]))
    assert torch.equal(*found)
    assert 0 < cache.stats().as_dict()["missed_mass"] < 1


@MEMORIES
def test_a_check_of_full_attention_finds_nothing(memory: dict[str, Any]) -> None:
    model = tiny_model("llama")
    every = hf_offload.HybridCache(model, "full", check_every=3, **({"block_size": BLOCK} | memory))
    decode(model, every)
    told = every.stats().as_dict()
    assert told["missed_mass"] == pytest.approx(0, abs=1e-6)
    assert told["output_error"] < 1e-5
    assert told["estimated_error"] is None


@MEMORIES
def test_a_check_tells_what_a_rescue_misses(memory: dict[str, Any]) -> None:
    """The mass of keys that were not attended, whatever those that were stand for."""
    model = tiny_model("llama")
    missed, tokens = [], []
    for rescue in (0, 12, 10**6):
        knobs = {"window": 48, "rescue": rescue, "check_every": 1, "block_size": BLOCK}
        knobs |= {"tier": "split"} if memory else {}
        cache = hf_offload.HybridCache(model, "hgca", **knobs)
        decode(model, cache, 1)
        told = cache.stats().as_dict()
        missed.append(told["missed_mass"])
        tokens.append(told["attended_share"])
        estimated, true = torch.tensor([pair for layer in told["layers"] for pair in layer["checked_errors"]]).T
        assert bool(estimated.isnan().all()) == (rescue == 0)
        if rescue == 12:
            assert (true <= 3 * estimated + 1e-3).float().mean() > 0.9
            assert told["missed_mass"] > true.mean()
    assert missed[0] > missed[1] > 0.2 * missed[0]
    assert missed[2] == pytest.approx(0, abs=1e-5)
    assert 0 < tokens[1] < tokens[2] == pytest.approx(1.0, abs=1e-6)


def test_as_many_samples_as_tokens_attend_every_token() -> None:
    """Also if they end within a block."""
    model = tiny_model("llama")
    want = decode(model, hf_offload.HybridCache(model, "full", block_size=BLOCK))
    found = decode(model, hf_offload.HybridCache(model, "scout", samples=PROMPT + STEPS, block_size=BLOCK))
    assert (found - want).abs().max() <= 1e-5 * max(1.0, want.abs().max().item())


def test_digests_that_do_not_fit_are_told() -> None:
    checks = Checks(1, (0, 1))
    checks.compare(np.full(200, 0.1), np.full(200, 0.9))
    with pytest.warns(RuntimeWarning, match=r"is off by 90\.0%, estimated were 10\.0%"):
        checks.compare(np.full(200, 0.1), np.full(200, 0.9))
    with warnings.catch_warnings(action="error"):
        checks.compare(np.full(200, 0.1), np.full(200, 0.9))  # once
        Checks(1, (0, 1)).compare(np.zeros(400), np.full(400, 1e-5))  # all pairs are attended; sums are of float32
    assert [checks.due(layer, step) for step in range(2) for layer in range(2)] == [True, False, False, True]


@pytest.mark.parametrize("tier", ["one", "split"])
@pytest.mark.parametrize("batch", [1, 3])
def test_hgca_finds_again_what_it_did_not_keep(batch: int, tier: str) -> None:
    """With all pairs drawn nothing is missed; tokens that are kept are not attended twice."""
    model = tiny_model("llama")
    want = decode(model, hf_offload.HybridCache(model, "full", block_size=BLOCK), batch)
    knobs = {"block_size": BLOCK, "window": 40, "tier": tier}
    paper = decode(model, hf_offload.HybridCache(model, "hgca", rescue=0, **knobs), batch)
    assert (paper - want).abs().max() > 1e-3
    for beta in (1.0, 50.0, 1e6):  # some, few or no tokens are kept
        cache = hf_offload.HybridCache(model, "hgca", rescue=2 * 10**9, beta=beta, **knobs)
        found = decode(model, cache, batch)
        assert cache.stats().as_dict()["kept_share"] < 1
        assert torch.equal(found.argmax(-1), want.argmax(-1))
        assert (found - want).abs().max() <= 1e-5 * max(1.0, want.abs().max().item())
    some = hf_offload.HybridCache(model, "hgca", rescue=40, **knobs)
    near = decode(model, some, batch, steps=2)[:, 1]
    assert (near - want[:, 1]).abs().max() < (paper[:, 1] - want[:, 1]).abs().max()
    assert 40 < some.stats().as_dict()["attended_tokens"] < PROMPT + 20
    policy = hf_offload.HybridCache(model, "hgca", **knobs).policy
    assert policy.rescue == (128 if tier == "one" else 0)


def test_threads_do_not_change_a_token() -> None:
    model, found = tiny_model("llama"), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(decode(model, hf_offload.HybridCache(model, "scout", block_size=BLOCK, **FEW), 3))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0].argmax(-1), found[1].argmax(-1))


def test_forks_files_and_crops_go_on_with_the_same_tokens(tmp_path: Path) -> None:
    model = tiny_model("llama")
    whole = decode(model, hf_offload.HybridCache(model, "scout", block_size=BLOCK, **FEW))
    tokens = whole.argmax(-1)
    cache = hf_offload.HybridCache(model, "scout", block_size=BLOCK, **FEW)
    begun = decode(model, cache, steps=6)
    assert torch.equal(begun, whole[:, :6])
    fork = cache.fork()
    cache.save(tmp_path / "saved")
    caches = {"fork": fork, "file": hf_offload.HybridCache.load(tmp_path / "saved", model), "itself": cache}
    for name, each in caches.items():
        for i in range(5, STEPS - 1):
            with torch.no_grad():
                logits = model(tokens[:, i : i + 1], past_key_values=each).logits[:, -1]
            assert torch.equal(logits, whole[:, i + 1]), (name, i)
    cache.crop(5 - (STEPS - 1))
    with torch.no_grad():
        again = model(tokens[:, 5:6], past_key_values=cache).logits[:, -1]
    assert torch.equal(again, whole[:, 6])


def test_a_row_that_is_mostly_padding_beside_a_long_one() -> None:
    """What hgca draws from is cut into gaps, of which some lie in the padding."""
    model = tiny_model("llama")
    ids, mask = prompt(2, 1301)
    mask[1, :1201] = 0
    both, alone = (hf_offload.HybridCache(model, "hgca", window=256, rescue=128, block_size=BLOCK) for _ in range(2))
    given = {"max_new_tokens": 20, "do_sample": False}
    got = model.generate(ids, attention_mask=mask, past_key_values=both, **given)
    want = model.generate(ids[:1], past_key_values=alone, **given)
    assert torch.equal(got[0], want[0])


def test_drafts_are_steps_of_their_own() -> None:
    model = tiny_model("llama")
    cache = hf_offload.HybridCache(model, "scout", block_size=BLOCK, **FEW)
    want = decode(model, cache).argmax(-1)
    drafted = hf_offload.HybridCache(model, "scout", block_size=BLOCK, **FEW)
    assert torch.equal(decode(model, drafted, prompt_lookup_num_tokens=3).argmax(-1), want)


@pytest.mark.parametrize(
    ("name", "knobs", "why"),
    [
        ("scout", {"samples": 64, "budget": 1024}, "give one of them"),
        ("scout", {"samples": 0}, "samples=0"),
        ("scout", {"samples": 64, "digest": "quest"}, 'needs digest="submean"'),
        ("scout", {"samples": 64, "join": "raw"}, "no share"),
        ("quest", {"samples": 64}, "use 'scout' with samples=64, recent=0, block_size=16"),
        ("hgca", {"rescue": -1}, "rescue=-1"),
        ("scout", {"check_every": 0}, "check_every=0"),
    ],
)
def test_what_does_not_go_together(name: str, knobs: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        hf_offload.HybridCache(tiny_model("llama"), name, **knobs)
