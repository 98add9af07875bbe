"""Policies that attend single tokens of their states, after later turns, crops and masks; and what H2O keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import feed, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HybridCache
from hf_offload.policies.h2o import EMPTY, Kept

LENGTH = 120  # half of the last block
COVERING: dict[str, dict[str, Any]] = {
    "h2o": {"heavy": 1, "recent": 1},
    "infinigen": {"alpha": float("inf"), "share": 1},
}


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


# --- H2O -------------------------------------------------------------------------------------------------------------


def begin(
    model: PreTrainedModel, rows: int, steps: int, chunk: int = LENGTH, **options: Any
) -> tuple[HybridCache, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache that has read a prompt, with padding, in chunks, and some steps; tokens, mask, last logits."""
    ids, mask = prompt(rows, LENGTH + steps)
    cache = HybridCache(model, "h2o", block_size=16, **options)
    logits = feed(model, cache, ids, mask, [*range(0, LENGTH, chunk), *range(LENGTH, LENGTH + steps + 1)])
    return cache, ids, mask, logits[-1]


@pytest.mark.parametrize(("tier", "chunk"), [("one", LENGTH), ("split", 38)])
def test_scores_are_sums_of_attention_weights(model: PreTrainedModel, tier: str, chunk: int) -> None:
    cache, ids, mask, _ = begin(model, 3, 2, chunk, heavy=1, recent=1, tier=tier, prefill_tile=48)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions, "output_attentions": True}
    with torch.no_grad():
        weights = tiny_model("llama", "eager")(ids, **given).attentions
    for got, attention in zip(learnt(cache, "h2o"), weights, strict=True):
        want = (attention * mask[:, None, :, None]).sum(2)  # of queries that are no padding
        want = want.view(3, 2, -1, LENGTH + 2).sum(2) * mask[:, None]
        torch.testing.assert_close(got[..., : LENGTH + 2] * mask[:, None], want, atol=1e-4, rtol=1e-4)


def test_what_is_evicted_does_not_come_back(model: PreTrainedModel) -> None:
    cache, (ids, mask), seen = (
        HybridCache(model, "h2o", block_size=16, heavy=0.1, recent=0.2),
        prompt(2, LENGTH + 30),
        [],
    )
    feed(model, cache, ids, mask, (0, LENGTH))
    for newest in range(LENGTH, LENGTH + 30):
        feed(model, cache, ids, mask, (newest, newest + 1))
        seen.append([set(line.tolist()) - {EMPTY} for line in cache.layers[2].state.kept.position.flatten(0, 1)])
        for now, before in zip(seen[-1], seen[-2] if seen[1:] else seen[-1], strict=True):
            assert {*range(newest - 23, newest + 1)} <= now <= before | {newest}  # 24 of 120
    assert [len(line) for line in seen[-1]] == [12 + 24 + 1] * 4


def test_the_lightest_old_token_goes() -> None:
    kept = Kept(
        torch.zeros(1, 1, 4, 16), torch.zeros(1, 1, 4, 16), torch.tensor([[[0.5, 0.1, 0.3, 0.0]]]),
        torch.tensor([[[0, 1, 2, 3]]]), recent=2,
    )  # fmt: skip
    kept.take_in(torch.ones(1, 1, 16), torch.ones(1, 1, 16), 4, None)
    assert kept.position.tolist() == [[[0, 4, 2, 3]]]  # 3 is lighter, but recent
    assert kept.keys[0, 0, :, 0].tolist() == [0, 1, 0, 0]
    kept.take_in(torch.ones(1, 1, 16), torch.ones(1, 1, 16), 5, torch.tensor([False]))
    assert kept.position.tolist() == [[[0, 4, 2, EMPTY]]]
    kept.take_in(torch.ones(1, 1, 16), torch.ones(1, 1, 16), 6, None)
    assert kept.position.tolist() == [[[0, 4, 2, 6]]]


def test_two_memories_attend_what_one_does(model: PreTrainedModel) -> None:
    one, two = (begin(model, 3, 20, tier=tier)[-1] for tier in ("one", "split"))
    torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_a_cache_taken_over_begins_with_its_step(model: PreTrainedModel) -> None:
    """Nobody has kept queries: the newest tokens and what the first step attends most."""
    given, stock = prompt(1, LENGTH + 1), DynamicCache(config=model.config)
    feed(model, stock, *given, (0, LENGTH))
    cache = HybridCache.from_cache(stock, model, "h2o", heavy=1, recent=1, block_size=16)
    got, want = (feed(model, each, *given, (LENGTH, LENGTH + 1))[0] for each in (cache, stock))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
