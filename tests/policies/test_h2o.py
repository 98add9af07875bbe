"""H2O: summed weights, evicted tokens, and no return of evicted tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HybridCache
from hf_offload.policies.h2o import EMPTY, Kept

LENGTH = 120


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def start(model: PreTrainedModel, rows: int, chunk: int = LENGTH, **options: Any) -> tuple[HybridCache, Any, Any]:
    """A cache that has read a prompt, with padding, in chunks; the prompt and its mask."""
    ids, mask = prompt(rows, LENGTH)
    cache = HybridCache(model, "h2o", block_size=16, **options)
    with torch.no_grad():
        for first in range(0, LENGTH, chunk):
            stop = min(first + chunk, LENGTH)
            positions = (mask[:, :stop].cumsum(-1) - 1).clamp(min=0)[:, first:]
            model(ids[:, first:stop], attention_mask=mask[:, :stop], position_ids=positions, past_key_values=cache)
    return cache, ids, mask


def feed(model: PreTrainedModel, cache: Any, mask: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Feed tokens one by one; the last logits, and the mask as it is then."""
    with torch.no_grad():
        for step in range(steps):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            token = torch.full((len(mask), 1), 3 + step)
            positions = mask.sum(-1, keepdim=True) - 1
            out = model(token, attention_mask=mask, position_ids=positions, past_key_values=cache)
    return out.logits[:, -1], mask


@pytest.mark.parametrize("chunk", [LENGTH, 37])
@pytest.mark.parametrize("tier", ["one", "split"])
def test_scores_are_sums_of_attention_weights(model: PreTrainedModel, tier: str, chunk: int) -> None:
    cache, ids, mask = start(model, 3, chunk, heavy=1, recent=1, tier=tier, prefill_tile=48)
    _, mask = feed(model, cache, mask, 2)
    eager = tiny_model("llama", "eager")
    ids = torch.cat([ids, torch.tensor([[3, 4]]).expand(3, 2)], 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        weights = eager(ids, attention_mask=mask, position_ids=positions, output_attentions=True).attentions
    for layer, attention in zip(cache.layers, weights, strict=True):
        want = (attention * mask[:, None, :, None]).sum(2)  # of queries that are no padding
        want = want.view(3, 2, -1, LENGTH + 2).sum(2)
        kept = layer.state.kept
        there = kept.position != EMPTY
        assert torch.equal(there.sum(-1), mask.sum(-1, keepdim=True).expand(3, 2))
        got = torch.zeros(3, 2, LENGTH + 3)
        got.scatter_(2, kept.position.masked_fill(~there, LENGTH + 2), kept.score)
        torch.testing.assert_close(got[..., :-1] * mask[:, None], want * mask[:, None], atol=1e-4, rtol=1e-4)


def test_what_is_evicted_does_not_come_back(model: PreTrainedModel) -> None:
    cache, _, mask = start(model, 2, heavy=0.1, recent=0.2)
    seen: list[list[set[int]]] = []
    for step in range(30):
        _, mask = feed(model, cache, mask, 1)
        seen.append([set(line.tolist()) - {EMPTY} for line in cache.layers[2].state.kept.position.flatten(0, 1)])
        for line, now in enumerate(seen[-1]):
            newest = LENGTH + step
            assert set(range(newest - 23, newest + 1)) <= now  # 24 of 120
            assert len(now) <= 12 + 24 + 1
            if step:
                assert now <= seen[-2][line] | {newest}
    assert all(len(line) == 37 for line in seen[-1])


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
    logits = []
    for tier in ("one", "split"):
        cache, _, mask = start(model, 3, tier=tier)
        logits.append(feed(model, cache, mask, 20)[0])
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


def test_a_cache_taken_over_begins_with_its_step(model: PreTrainedModel) -> None:
    """Nobody has kept queries: the newest tokens and what the first step attends most."""
    ids, mask = prompt(1, LENGTH)
    stock = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=stock)
    cache = HybridCache.from_cache(stock, model, "h2o", heavy=1, recent=1, block_size=16)
    got, want = (feed(model, each, mask, 1)[0] for each in (cache, stock))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
