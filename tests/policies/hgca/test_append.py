"""HGCA's queries of an append by row: each row of a batch learns as if alone, and padding adds nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import feed, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HGCA, HybridCache
from hf_offload.model.hooks import hybrid_layers
from hf_offload.policies.hgca.append import AppendProgress

BLOCK = 16
TIERS = pytest.mark.parametrize("tier", ["one", "split"])


def converse(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cuts: Iterable[int], tier: str, **knobs: Any
) -> HybridCache:
    """A cache that has taken in the tokens between cuts, piece by piece."""
    cache = HybridCache(model, "hgca", window=80, block_size=BLOCK, tier=tier, rescue=0, **knobs)
    feed(model, cache, ids, mask, cuts)
    cache.drain()
    return cache


def alone(ids: torch.Tensor, mask: torch.Tensor, cuts: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The second row, without what is padding in it."""
    real = mask[1] != 0
    return ids[1:, real], mask[1:, real], sorted({int(real[:cut].sum()) for cut in cuts})


def outside(cache: HybridCache, line: int) -> list[np.ndarray]:
    """Which tokens are kept of those that have left the window and are no padding, `[Hkv, n]` for each layer."""
    found = []
    for layer in hybrid_layers(cache):
        mass, stop = layer.state, layer.state.now.evicted * BLOCK
        real = cache.settings.padding.valid[line, :stop] != 0
        found.append(mass.now.kept[line, :, :stop][:, real] != 0)
    return found


@TIERS
@pytest.mark.parametrize("chunks", [1, 2])
def test_padding_behind_a_prompt_says_nothing(model: PreTrainedModel, tier: str, chunks: int) -> None:
    ids, mask = prompt(2, 320)[0], torch.ones(2, 320, dtype=torch.long)
    mask[1, 160:] = 0
    ids[1] = ids[0].flip(0)
    given = ids, mask, range(0, 321, 320 // chunks)
    got, want = (converse(model, *each, tier, beta=3.0) for each in (given, alone(*given)))
    for found, one in zip(outside(got, 1), outside(want, 0), strict=True):
        assert np.array_equal(found[:, : one.shape[1]], one)
        assert 0.02 < one.mean() < 0.9


@pytest.mark.parametrize("append", ["max", "mean"])
@pytest.mark.parametrize("said", [0, 16])
def test_padding_in_a_turn_says_nothing(model: PreTrainedModel, append: str, said: int) -> None:
    ids = torch.cat([prompt(1, 260)[0], prompt(1, 260, seed=5)[0]])
    mask = torch.ones_like(ids)
    mask[1, 212 : 260 - said] = 0
    given = ids, mask, [0, 200, *range(201, 213), 260]
    got, want = (converse(model, *each, "one", append=append, beta=3.0) for each in (given, alone(*given)))
    shared = (212 - 3) // BLOCK * BLOCK - 4 * BLOCK  # on the host when the turn began, in every layer
    for layer, one in zip(hybrid_layers(got), hybrid_layers(want), strict=True):
        averages = layer.state.now.average[1, :, :shared], one.state.now.average[0, :, :shared]
        assert np.allclose(*averages, atol=1e-6)
        assert averages[0].max() > 1e-3
    for found, marks in zip(outside(got, 1), outside(want, 0), strict=True):
        if said:
            assert np.array_equal(found[:, :shared], marks[:, :shared])
        assert 0.02 < found[:, :shared].mean() < 1.0


@TIERS
@pytest.mark.parametrize(
    ("length", "cuts", "more", "what"),
    [
        (260, [0, 200, *range(201, 213)], [260], "kept"),  # a turn
        (220, [0, 120, *range(121, 208)], range(208, 221), "average"),  # steps
    ],
)
def test_a_row_that_is_padding_keeps_what_it_kept(
    model: PreTrainedModel, tier: str, length: int, cuts: list[int], more: Iterable[int], what: str
) -> None:
    ids, mask = prompt(2, length)[0], torch.ones(2, length, dtype=torch.long)
    mask[1, cuts[-1] :] = 0
    first, second = (converse(model, ids, mask, each, tier, beta=3.0) for each in (cuts, [*cuts, *more]))
    for had, has in zip(hybrid_layers(first), hybrid_layers(second), strict=True):
        span = slice(0, had.state.now.evicted * BLOCK) if what == "kept" else slice(160, 207)
        for layer in (had, has):
            layer.unplace()
        before, after = (getattr(layer.state.now, what)[:, :, span] for layer in (had, has))
        assert np.array_equal(before[1], after[1])
        assert not np.array_equal(before[0], after[0])
        assert 0 < before.mean() < 0.9


@TIERS
def test_a_row_of_which_nothing_is_known_keeps_all_until_it_asks(model: PreTrainedModel, tier: str) -> None:
    ids, mask = prompt(2, 340)[0], torch.ones(2, 340, dtype=torch.long)
    whole = DynamicCache(config=model.config)
    feed(tiny_model("llama", "sdpa"), whole, ids, mask, (0, 200))
    cache = HybridCache.from_cache(whole, model, "hgca", window=80, block_size=BLOCK, tier=tier, beta=3.0)
    mask[1, 200:230] = 0

    def shares(cuts: Iterable[int]) -> list[list[float]]:
        """The share that each row keeps in each layer, after more tokens."""
        feed(model, cache, ids, mask, cuts)
        cache.drain()
        return [[float(marks.mean()) for marks in outside(cache, line)] for line in (0, 1)]

    asking, silent = shares((200, 230))
    assert max(asking) < 1.0
    assert silent == [1.0] * 4
    assert shares(range(230, 301))[1] == [1.0] * 4  # what leaves the window of both
    assert max(map(max, shares((300, 340)))) < 1.0


def told(chunks: list[list[int]], among: int | None, append: str) -> np.ndarray:
    """What an append says of one token on the host, `[B]`, in chunks of so many queries of each row.

    The first query of a row gives it a weight of 1/2, the next one 1/3, and so on.
    """
    rows, length = len(chunks[0]), 50
    rule = HGCA(append_queries=among, append=append, append_run=0).rule
    progress, average, asked = AppendProgress(rule, np.zeros(rows, np.int64), end=-1), np.full((rows, 1, 1), 7.0), 0
    progress = progress.chunk(length, length, 1)
    for counts in map(np.array, chunks):
        length += counts.max()
        valid = (np.arange(counts.max()) >= counts.max() - counts[:, None]).astype(np.uint8)
        given = valid / (np.reshape(asked, (-1, 1)) + valid.cumsum(1) + 1.0)
        asked = asked + counts
        (_, span), progress = progress.spans(valid, length, 10, anew=True)
        given = np.where(span.counted, given[:, -span.queries :], 0.0)
        joined = given.max(1) if span.coefficient is None else given @ span.coefficient
        span.update(average, joined[:, None, None])
    return average[:, 0, 0]


@pytest.mark.parametrize("append", ["max", "mean"])
def test_an_appends_queries_are_counted_over_its_chunks(append: str) -> None:
    """In rows of which one says nothing at first."""
    chunks, weights = [[5, 0], [3, 9], [12, 2]], 1 / np.arange(2.0, 22.0)
    join = np.max if append == "max" else np.mean
    assert told(chunks, None, append) == pytest.approx([join(weights), join(weights[:11])], rel=1e-5)
    assert told(chunks, 30, append) == pytest.approx([join(weights), join(weights[:11])], rel=1e-5)
    late = 0.75 * join(weights[1:9])  # six of them are among the last eight
    late = max(late, weights[9]) if append == "max" else late + 0.25 * weights[9:11].mean()
    assert told(chunks, 8, append) == pytest.approx([join(weights[12:]), late], rel=1e-5)
