"""Every policy against full attention with a covering budget, also with few resident blocks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tiny import FAMILIES, decode, feed, in_memory, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

import hf_offload
from hf_offload import ConstantPredictor
from hf_offload.attention import interface
from hf_offload.cache.layer import HybridLayer

STEPS = 25
PROMPT = 91
BLOCK = 16
FOUR_BLOCKS = {"resident": 4 * BLOCK}


def decode_logits(
    model: PreTrainedModel, cache: Any, ids: torch.Tensor, mask: torch.Tensor, chunk: int | None, steps: int = STEPS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens `[B, steps]` and their logits, of a prompt that is taken in at once or in chunks."""
    length = ids.shape[1]
    cuts = [*range(0, length, chunk or length), length]
    first = feed(model, cache, ids, mask, cuts)[-1][:, -1:]
    token = first[:, 0].argmax(-1, keepdim=True)
    tokens, logits = decode(model, cache, token, mask, steps)
    return torch.cat([token, tokens[:, :-1]], 1), torch.cat([first, logits[:, :-1]], 1)


def assert_equal(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert torch.equal(got[0], want[0])
    error = (got[1] - want[1]).abs().max().item()
    assert error <= 1e-5 * max(1.0, want[1].abs().max().item()), error


AHEAD: dict[str, Any] = {"lookahead": "select", "synchronous_layers": (0,)}
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "window": ("window", {"budget": 256, "sinks": 16}),
    "scout-off": ("scout", {"lookahead": "off"}),
    "scout-select": ("scout", AHEAD),
    "scout-quest": ("scout", {"lookahead": "off", "digest": "quest", "join": "raw"}),
    "scout-mean": ("scout", {**AHEAD, "digest": "mean", "recall": 3}),
    "full-fetch": ("full", {"host": "fetch"}),
    "quest": ("quest", {"budget": 256, "sinks": 16}),
    "h2o": ("h2o", {"heavy": 1, "recent": 1, "resident": None}),
    "infinigen": ("infinigen", {"alpha": float("inf"), "share": 1, "resident": None}),
    "fixed-hybrid": ("fixed_hybrid", {"budget": 1, "sinks": 16, "local": 16, "resident": None, "dense": False}),
    "fluxion": ("fluxion", {"predictor": ConstantPredictor(sinks=16, local=16), "resident": None}),
    "hgca": ("hgca", {"window": 40, "beta": 0.0, "resident": None}),
    "scout-drawn": ("scout", {"lookahead": "off", "samples": 2 * 10**9}),
    "scout-drawn-select": ("scout", {**AHEAD, "samples": 2 * 10**9, "recall": 3}),
    "scout-all": ("scout", {**AHEAD, "attend_resident": "all"}),
}


def knobs_of(name: str) -> tuple[str, dict[str, Any]]:
    policy, knobs = POLICIES[name]
    if policy == "scout":
        knobs = {"sinks": 16, "recent": 0, **knobs}
        knobs |= {} if "samples" in knobs else {"budget": 256}
    return policy, knobs


@pytest.fixture(scope="module")
def oracle() -> dict[Any, Any]:
    return {}


def reference(
    oracle: dict[Any, Any], family: str, batch: int
) -> tuple[PreTrainedModel, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    if (family, batch) not in oracle:
        ids, mask = prompt(batch, PROMPT)
        stock = tiny_model(family, "sdpa")
        want = decode_logits(stock, DynamicCache(config=stock.config), ids, mask, None)
        oracle[family, batch] = (tiny_model(family), ids, mask, want)
    return oracle[family, batch]


def combinations() -> list[Any]:
    """All of them; in the quick set padded rows in chunks, of llama with every policy, of others with some."""
    rows = []
    for row in itertools.product(FAMILIES, POLICIES, (1, 3), (None, 17), ("one", "split")):
        family, policy, batch, chunk, tier = row
        if policy in ("scout-select", "scout-drawn-select", "scout-all") and tier == "one":
            continue  # scout-off, scout-drawn
        elsewhere = policy in ("full-fetch", "quest", "h2o", "infinigen", "hgca", "fixed-hybrid", "fluxion")
        turn = FAMILIES.index(family) + list(POLICIES).index(policy)
        if family == "llama":
            quick = (batch, chunk) == (3, 17)
        else:
            quick = (batch, chunk, tier) == (3, 17, ("one", "split")[turn % 2]) and (
                family == "gemma3" or (not elsewhere and turn % 3 == 0)
            )
        rows.append(pytest.param(*row, marks=() if quick else pytest.mark.slow))
    return rows


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("family", "policy", "batch", "chunk", "tier"), combinations())
def test_covering_budget_is_full_attention(
    oracle: dict[Any, Any], family: str, policy: str, batch: int, chunk: int | None, tier: str
) -> None:
    model, ids, mask, want = reference(oracle, family, batch)
    name, knobs = knobs_of(policy)
    extra = FOUR_BLOCKS if tier == "split" else {}
    cache = hf_offload.HybridCache(
        model, name, tier=tier, block_size=BLOCK, prefill_tile=32, **(extra | in_memory(tier, knobs))
    )
    assert_equal(decode_logits(model, cache, ids, mask, chunk), want)
    if tier == "split":
        total = cache.stats().as_dict()
        if policy in ("full-fetch", "quest"):
            assert total["cpu_ratio"] == 0
            assert total["recall_bytes"] > 0
        elif policy not in ("h2o", "infinigen"):  # which attend tokens themselves
            assert total["cpu_ratio"] > 0.2  # most of the work is the CPU's: four blocks are resident
        assert name != "scout" or total["recalls"] > 0


QUICK_ORDER = ("gpt_neox", "llama", "opt", "qwen3", "gemma3")
"""An order in which it is groups of heads that draw pairs in the quick cases."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("family", "batch"),
    [
        pytest.param(family, batch, marks=() if batch == 3 else pytest.mark.slow)
        for family in sorted(FAMILIES, key=QUICK_ORDER.index)  # a new family has to be put in
        for batch in (1, 3)
    ],
)
@pytest.mark.parametrize("attended", [{"budget": 256}, {"samples": 2 * 10**9}], ids=["budget", "samples"])
def test_attending_ahead_with_the_real_query_is_full_attention(
    oracle: dict[Any, Any], monkeypatch: pytest.MonkeyPatch, family: str, batch: int, attended: dict[str, int]
) -> None:
    """The host partial starts a layer early; fed the query that will really come, it changes nothing."""
    model, ids, mask, want = reference(oracle, family, batch)
    seen: list[dict[int, torch.Tensor]] = [{}]
    real = interface.decode

    def record(layer: HybridLayer, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if layer.index in seen[-1]:
            seen.append({})
        seen[-1][layer.index] = query
        return real(layer, query, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(interface, "decode", record)
        decode_logits(model, hf_offload.HybridCache(model, "full", block_size=BLOCK), ids, mask, None)
    knobs: dict[str, Any] = {"sinks": 16, "recent": 0, "lookahead": "attend", "synchronous_layers": (0,), **attended}
    cache = hf_offload.HybridCache(model, "scout", tier="split", block_size=BLOCK, **FOUR_BLOCKS, **knobs)

    def real_query(target: int, *_: Any) -> torch.Tensor:
        return seen[cache.layers[target].stats.steps][target]

    monkeypatch.setattr(cache, "predict_query", real_query)
    assert_equal(decode_logits(model, cache, ids, mask, 17), want)
    ahead = [row for row in cache.stats().as_dict()["layers"] if row["query_cosine"] is not None]
    assert ahead, "no layer attended ahead"
    assert all(row["query_cosine"] > 0.9999 for row in ahead)
