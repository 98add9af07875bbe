"""H2O: summed weights, evicted tokens, and no return of evicted tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import feed, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HybridCache
from hf_offload.policies.h2o import EMPTY, Kept

LENGTH = 120


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def begin(
    model: PreTrainedModel, rows: int, steps: int, chunk: int = LENGTH, **options: Any
) -> tuple[HybridCache, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache that has read a prompt, with padding, in chunks, and some steps; tokens, mask, last logits."""
    ids, mask = prompt(rows, LENGTH + steps)
    cache = HybridCache(model, "h2o", block_size=16, **options)
    logits = feed(model, cache, ids, mask, [*range(0, LENGTH, chunk), *range(LENGTH, LENGTH + steps + 1)])
    return cache, ids, mask, logits[-1]


@pytest.mark.parametrize("chunk", [LENGTH, 38])
@pytest.mark.parametrize("tier", ["one", "split"])
def test_scores_are_sums_of_attention_weights(model: PreTrainedModel, tier: str, chunk: int) -> None:
    cache, ids, mask, _ = begin(model, 3, 2, chunk, heavy=1, recent=1, tier=tier, prefill_tile=48)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": positions, "output_attentions": True}
    with torch.no_grad():
        weights = tiny_model("llama", "eager")(ids, **given).attentions
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
