"""`cache.fork()`: shared blocks with reference counts, and equal tokens."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import pytest
import torch
from pools import used_bytes
from test_families import build
from test_from_cache import TIERS
from tiny import begin, decode, prefill, prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import ConstantPredictor, HybridCache
from hf_offload.blocks import digests
from hf_offload.cache.layer import HybridLayer
from hf_offload.policies.hgca.token_mass import TokenMass

Models = dict[str, PreTrainedModel]

BLOCK = 16
PROMPT = 205
SMALL: dict[str, Any] = {"budget": 96, "sinks": 16, "recent": 16}
AHEAD: dict[str, Any] = {**SMALL, "lookahead": "attend", "synchronous_layers": (0,), "recall": 2}
HGCA: dict[str, Any] = {"window": 60, "resident": None}
PREDICTOR = ConstantPredictor(budget0=0.2, slope=0.02, sinks=16, local=32)
CASES = {
    "full": ("full", {}),
    "full-int8": ("full", {"host_dtype": "int8"}),
    "window": ("window", {"budget": 96, "sinks": 16}),
    "scout": ("scout", SMALL),
    "scout-quest-int8": ("scout", {**SMALL, "digest": "quest", "host_dtype": "int8"}),
    "scout-attend": ("scout", AHEAD),
    "scout-attend-int8": ("scout", {**AHEAD, "host_dtype": "int8"}),
    "hgca": ("hgca", HGCA),
    "hgca-int8": ("hgca", {**HGCA, "host_dtype": "int8"}),
    "fixed_hybrid": ("fixed_hybrid", {"budget": 0.3, "sinks": 16, "local": 32, "resident": None}),
    "fluxion": ("fluxion", {"predictor": PREDICTOR, "resident": None}),
    "full-fetch-int8": ("full", {"host": "fetch", "host_dtype": "int8", "prefill_tile": 256}),
    "h2o": ("h2o", {"heavy": 0.2, "recent": 0.2, "resident": None}),
    "infinigen-int8": ("infinigen", {"alpha": 1.0, "host_dtype": "int8", "resident": None}),
    "infinigen": ("infinigen", {"alpha": 1.0, "resident": None}),
    "quest": ("quest", {"budget": 96, "sinks": 16}),
}


def make(model: PreTrainedModel, case: str, tier: str) -> HybridCache:
    policy, knobs = CASES[case]
    resident = {"resident": 128} if tier == "split" else {}
    return HybridCache(model, policy, block_size=BLOCK, **{"prefill_tile": 64, **TIERS[tier], **resident, **knobs})


def pool_bytes(*caches: HybridCache) -> int:
    """Bytes of the blocks in use in all pools of some caches, each pool once, when nothing is being decided."""
    for cache in caches:
        cache.drain()
    layers = [layer for cache in caches for layer in cache.layers if isinstance(layer, HybridLayer)]
    contexts = {layer.state.now.retained.pool for layer in layers if isinstance(layer.state, TokenMass)}
    return sum(used_bytes(pool) for pool in {layer.store.pool for layer in layers if layer.store} | contexts)


@pytest.fixture(scope="module")
def models() -> Models:
    return {family: tiny_model(family) for family in ("llama", "gemma3")}


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("case", "tier", "when"),
    [
        ("scout", "split", 5),
        ("window", "split", 3),  # the next token begins a block
        ("scout-quest-int8", "one", 0),
        ("scout-attend-int8", "split", 5),
        ("hgca", "split", 3),
        ("fixed_hybrid", "one", 3),
        ("full-fetch-int8", "split", 5),
        ("quest", "split", 3),
        ("h2o", "one", 3),
        ("infinigen-int8", "split", 3),
        ("fluxion", "split", 5),
        *(
            pytest.param(case, tier, when, marks=pytest.mark.slow)
            for (case, tier), when in zip(product(CASES, TIERS), cycle((0, 5)), strict=False)
        ),
    ],
)
def test_every_cache_goes_on_as_one_alone(models: Models, case: str, tier: str, when: int) -> None:
    model = models["gemma3" if case == "scout" else "llama"]
    alone, cache = make(model, case, tier), make(model, case, tier)
    (token, mask), _ = (begin(model, one, 2, PROMPT, when) for one in (alone, cache))
    fork = cache.fork()
    other = torch.full_like(token, 77)
    strange = decode(model, cache.fork(), other, mask, 17)
    want = decode(model, alone, token, mask, 17)
    for one in (fork, cache):
        got = decode(model, one, token, mask, 17)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
    assert not torch.equal(strange[1], want[1])


@dataclass
class Session:
    cache: HybridCache
    turns: int = 0


HOLDERS: dict[str, tuple[Callable[[HybridCache], Any], Callable[[Any], HybridCache]]] = {
    "itself": (lambda cache: cache, lambda held: held),
    "a list": (lambda cache: [cache, cache], lambda held: held[1]),
    "a dict": (lambda cache: {"past_key_values": cache}, lambda held: held["past_key_values"]),
    "a dataclass": (Session, lambda held: held.cache),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize(("case", "tier"), [("scout", "one"), ("scout-attend", "split")])
def test_a_deep_copy_is_a_fork(models: Models, case: str, tier: str, holder: str) -> None:
    """As Transformers' guide reuses the cache of a prompt."""
    hold, held = HOLDERS[holder]
    model = models["llama"]
    cache = make(model, case, tier)
    token, mask = begin(model, cache, 2, PROMPT)
    before = pool_bytes(cache)
    whole = copy.deepcopy(hold(cache))
    copied = held(whole)
    assert type(copied) is HybridCache
    assert copied is not cache
    if holder == "a list":
        assert whole[0] is copied
    assert pool_bytes(cache, copied) <= 1.1 * before  # shared, but for the newest block
    want = decode(model, cache.fork(), token, mask, 5)
    decode(model, copied, torch.full_like(token, 77), mask, 5)
    for one in (cache, copy.deepcopy(hold(cache))):
        got = decode(model, one if one is cache else held(one), token, mask, 5)
        assert torch.equal(got[1], want[1])


def test_threads_may_copy_one_cache_at_once(models: Models) -> None:
    """As a server does with the cache of its system prompt."""
    model = models["llama"]
    cache = make(model, "scout", "one")
    token, mask = begin(model, cache, 2, PROMPT)
    want, got = decode(model, cache.fork(), token, mask, 4)[1], []
    start = threading.Barrier(4)

    def serve() -> None:
        start.wait()
        got.append(decode(model, copy.deepcopy(cache), token, mask, 4)[1])

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    assert all(torch.equal(logits, want) for logits in got)


def test_a_copy_beside_its_model_is_of_the_copied_model() -> None:
    model = tiny_model("llama")
    empty = make(model, "scout", "one")
    cache = copy.deepcopy(empty)
    token, mask = begin(model, cache, 2, PROMPT)
    assert empty.get_seq_length() == 0
    both = copy.deepcopy({"model": model, "cache": cache})
    want = decode(model, cache, token, mask, 4)[1]
    assert torch.equal(decode(both["model"], both["cache"], token, mask, 4)[1], want)
    with pytest.raises(TypeError, match=r"use fork\(\) of the cache"):
        copy.deepcopy(cache.layers)


@pytest.mark.parametrize(
    ("case", "tier"),
    [("scout", "one"), ("hgca", "split"), pytest.param("scout-attend-int8", "split", marks=pytest.mark.slow)],
)
def test_what_only_a_fork_holds_is_freed_with_it(models: Models, case: str, tier: str) -> None:
    model = models["llama"]
    cache = make(model, case, tier)
    token, mask = begin(model, cache, 1, 2000)
    one, stats = pool_bytes(cache), cache.stats().as_dict()
    assert stats["host_bytes"] + stats["context_bytes"] == one
    forks = [cache.fork() for _ in range(3)]
    assert pool_bytes(cache, *forks) == one
    for i, fork in enumerate(forks):
        decode(model, fork, torch.full_like(token, 20 + i), mask, 20)
    total = pool_bytes(cache, *forks)
    assert one < total < (1.2 if "int8" in case else 1.1) * one  # packed blocks are small beside the newest ones
    stats = forks[0].stats().as_dict()
    assert stats["host_bytes"] - stats["shared_bytes"] <= (total - one) // 3 + 4 * 4 * BLOCK * 1024
    forks.pop()
    del fork
    second = forks.pop()
    assert one < pool_bytes(cache, forks[0], second) < total
    second.reset()
    forks[0].reset()
    assert pool_bytes(cache) == one
    assert cache.stats().as_dict()["shared_bytes"] == 0
    fork = cache.fork()
    want = decode(model, cache, token, mask, 20)
    del cache
    got = decode(model, fork, token, mask, 20)  # the blocks outlive the cache that made them
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("case", ["full-int8", "scout", "hgca"])
def test_a_fork_may_be_cropped_and_reordered(models: Models, case: str) -> None:
    model = models["llama"]
    cache, alone = make(model, case, "one"), make(model, case, "one")
    (token, mask), _ = (begin(model, one, 2, PROMPT) for one in (cache, alone))
    fork = cache.fork()
    fork.reorder_cache(torch.tensor([1, 0]))
    fork.crop(-(PROMPT - 100))
    short = mask.flip(0)[:, :100]
    decode(model, fork, token.flip(0), short, 40)
    got, want = decode(model, cache, token, mask, 20), decode(model, alone, token, mask, 20)
    assert torch.equal(got[1], want[1])
    fork.batch_repeat_interleave(2)
    del fork
    assert pool_bytes(cache) == pool_bytes(alone)


@pytest.mark.parametrize("case", ["scout", "hgca"])
def test_padding_that_one_learns_of_is_not_the_others(models: Models, case: str) -> None:
    model = models["llama"]
    cache, alone = make(model, case, "one"), make(model, case, "one")
    (token, mask), _ = (begin(model, one, 1, PROMPT) for one in (cache, alone))
    fork, hidden = cache.fork(), mask.clone()
    hidden[:, 40:120] = 0
    strange = decode(model, fork, token, hidden, 20)
    got, want = decode(model, cache, token, mask, 20), decode(model, alone, token, mask, 20)
    assert torch.equal(got[1], want[1])
    assert not torch.equal(strange[1], want[1])


@pytest.mark.parametrize("tokens", [5, 40])
def test_a_short_prompt_leaves_each_its_own_statistics(models: Models, tokens: int) -> None:
    """Before there is a digest nothing is fixed: what one fork seals first is not the measure of the other's keys."""
    model = models["llama"]
    ids, mask = prompt(1, tokens)
    mask[:, :32] = tokens == 5  # two blocks of padding alone
    cache, alone = make(model, "scout", "one"), make(model, "scout", "one")
    token = prefill(model, cache, ids, mask)
    prefill(model, alone, ids, mask)
    decode(model, cache.fork(), torch.full_like(token, 99), mask, 60)
    got, want = decode(model, cache, token, mask, 60), decode(model, alone, token, mask, 60)
    assert torch.equal(got[1], want[1])


def test_statistics_of_one_fork_change_no_digest_of_another(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks share full blocks without digests. Each then has statistics, and digests of these blocks, of its own."""
    monkeypatch.setattr(digests, "STATISTICS_TOKENS", 64)
    model, (ids, mask) = models["llama"], prompt(1, 50)
    found = []
    for shared in (True, False):
        cache = make(model, "scout", "one")
        token = prefill(model, cache, ids, mask)
        other = cache.fork() if shared else cache
        strange = torch.full_like(token, 99)
        decode(model, other, strange, mask, 30)
        if shared:
            decode(model, cache, token, mask, 30)  # later, with statistics of other keys
        found.append(decode(model, other, strange, torch.ones(1, 80, dtype=mask.dtype), 20)[1])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("case", "tier"),
    [
        pytest.param("scout", "one", marks=pytest.mark.slow),
        pytest.param("scout-quest-int8", "one", marks=pytest.mark.slow),
        pytest.param("scout-attend-int8", "split", marks=pytest.mark.slow),
        ("hgca", "one"),
    ],
)
def test_forks_run_in_threads_of_their_own(models: Models, case: str, tier: str) -> None:
    model = models["llama"]
    cache = make(model, case, tier)
    token, mask = begin(model, cache, 1, PROMPT)
    starts = [torch.full_like(token, 30 + i) for i in range(3)]
    want = [decode(model, cache.fork(), start, mask, 40) for start in starts]
    got: list[Any] = [None] * 3

    def run(i: int, fork: HybridCache) -> None:
        got[i] = decode(model, fork, starts[i], mask, 40)

    threads = [threading.Thread(target=run, args=(i, cache.fork())) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine[1], theirs[1])


def test_generate_answers_from_a_fork(models: Models) -> None:
    """As in the README: the document is taken in once, every question with the document before it."""
    model = models["llama"]
    document, _ = prompt(1, 100)
    cache = make(model, "full", "one")
    model.generate(document, past_key_values=cache, max_new_tokens=1)
    for seed in (5, 6):
        ids = torch.cat([document, prompt(1, 9, seed)[0]], 1)
        knobs: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
        got = model.generate(ids, past_key_values=cache.fork(), **knobs)
        assert torch.equal(got, model.generate(ids, **knobs))
    assert cache.get_seq_length() == 100


def test_linear_layers_are_copied() -> None:
    model = build("qwen3_next", "hybrid_sparse")
    cache, alone = (HybridCache(model, "full", block_size=BLOCK) for _ in range(2))
    (token, mask), _ = (begin(model, one, 1, 60) for one in (cache, alone))
    with torch.inference_mode():
        fork = cache.fork()
    strange = decode(model, cache.fork(), torch.full_like(token, 99), mask, 10)
    want = decode(model, alone, token, mask, 10)
    assert not torch.equal(strange[1], want[1])
    for one in (cache, fork):
        assert torch.equal(decode(model, one, token, mask, 10)[1], want[1])
