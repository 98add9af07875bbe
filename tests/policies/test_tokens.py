"""Policies that attend single tokens of their states, after later turns, crops and masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HybridCache
from hf_offload.policies.h2o import EMPTY

LENGTH = 120  # half of the last block
COVERING: dict[str, dict[str, Any]] = {
    "h2o": {"heavy": 1, "recent": 1},
    "infinigen": {"alpha": float("inf"), "share": 1},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def take_in(model: PreTrainedModel, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Let a cache take in tokens `[B, n]`; their logits."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids, attention_mask=mask, past_key_values=cache).logits
    return logits


def learnt(cache: HybridCache, policy: str) -> list[torch.Tensor]:
    """What each layer's state says of its tokens, where nothing depends on order or signs."""
    states = [layer.state for layer in cache.layers]
    if policy == "infinigen":
        return [state.basis @ state.basis.transpose(2, 3) for state in states]
    scores = []
    for state in states:
        there = state.kept.position != EMPTY
        score = torch.zeros(*there.shape[:2], there.shape[2] + 1)
        scores.append(score.scatter_add_(2, state.kept.position + 1, state.kept.score * there)[:, :, 1:])
    return scores


@pytest.mark.parametrize("tier", ["one", "split"])
@pytest.mark.parametrize("policy", COVERING)
def test_a_prompt_that_was_cropped_is_a_shorter_prompt(model: PreTrainedModel, policy: str, tier: str) -> None:
    ids, _ = prompt(1, LENGTH)
    found = []
    for tokens in (LENGTH, LENGTH - 30):
        cache = HybridCache(model, policy, tier=tier, block_size=16, **COVERING[policy])
        take_in(model, cache, ids[:, :tokens])
        cache.crop(LENGTH - 30 - tokens)
        take_in(model, cache, ids[:, :1])
        found.append(learnt(cache, policy))
    for cropped, shorter in zip(*found, strict=True):
        torch.testing.assert_close(cropped, shorter, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", COVERING)
def test_a_row_learns_from_its_own_last_queries(model: PreTrainedModel, policy: str) -> None:
    """As many as the policy asks for, in chunks as in one prompt, wherever the row has moved to."""
    ids = prompt(1, 2 * LENGTH)[0].view(2, LENGTH)
    found = []
    for rows, cuts in ((ids, [100, 20]), (ids[1:], [LENGTH])):
        cache = HybridCache(model, policy, block_size=16, prompt_queries=30, **COVERING[policy])
        for part in rows.split(cuts, 1):
            take_in(model, cache, part)
        cache.batch_select_indices(torch.tensor([len(rows) - 1]))
        take_in(model, cache, ids[1:, :1])
        found.append(learnt(cache, policy))
    for moved, alone in zip(*found, strict=True):
        torch.testing.assert_close(moved, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", COVERING)
def test_a_turn_after_decoding_brings_queries_of_its_own(model: PreTrainedModel, policy: str) -> None:
    """They are not joined with those from before the tokens that were decoded."""
    ids, _ = prompt(1, LENGTH)
    cache = HybridCache(model, policy, block_size=16, **COVERING[policy])
    take_in(model, cache, ids[:, :80])
    for token in range(80, 90):
        take_in(model, cache, ids[:, token : token + 1])
    take_in(model, cache, ids[:, 90:])
    for layer in cache.layers:
        assert (layer.last_queries.start, layer.last_queries.end) == (90, LENGTH)
    take_in(model, cache, ids[:, :1])
    if policy == "infinigen":
        return
    eager = tiny_model("llama", "eager")
    with torch.no_grad():
        weights = eager(torch.cat([ids, ids[:, :1]], 1), output_attentions=True).attentions
    for got, attention in zip(learnt(cache, policy), weights, strict=True):
        want = attention[:, :, 90:].sum(2).view(1, 2, -1, LENGTH + 1).sum(2)
        torch.testing.assert_close(got[..., : LENGTH + 1], want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tier", ["one", "split"])
@pytest.mark.parametrize("policy", COVERING)
def test_a_token_that_becomes_padding_is_attended_no_more(model: PreTrainedModel, policy: str, tier: str) -> None:
    """One of the block that is filling up, and one of a full block; and they come back with their mask."""
    ids, mask = prompt(1, LENGTH)
    caches = [HybridCache(model, policy, tier=tier, block_size=16, **COVERING[policy]), DynamicCache()]
    for cache in caches:
        take_in(model, cache, ids)
    for number, hidden in enumerate(([], [117], [117, 120], [120], [20], [])):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        now = mask.clone()
        now[:, hidden] = 0
        got, want = (take_in(model, cache, ids[:, number : number + 1], now) for cache in caches)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
