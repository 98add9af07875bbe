"""HGCA's queries of an append by row: each row of a batch learns as if alone, and padding adds nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tiny import prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HGCA, HybridCache
from hf_offload.model.hooks import hybrid_layers
from hf_offload.policies.hgca.append import AppendProgress, newest_queries

BLOCK = 16
Piece = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def converse(model: PreTrainedModel, pieces: list[Piece], tier: str, **knobs: Any) -> HybridCache:
    """A cache that has taken in pieces of tokens and masks, `[B, n]` each."""
    cache = HybridCache(model, "hgca", window=80, block_size=BLOCK, tier=tier, rescue=0, **knobs)
    mask = pieces[0][1][:, :0]
    for ids, real in pieces:
        mask = torch.cat([mask, real], 1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            model(input_ids=ids * real, attention_mask=mask, position_ids=positions, past_key_values=cache)
    cache.drain()
    return cache


def row(pieces: list[Piece]) -> list[Piece]:
    """The second row alone, without what is padding in it."""
    return [(ids[1:, real[1] != 0], real[1:, real[1] != 0]) for ids, real in pieces if real[1].any()]


def outside(cache: HybridCache, line: int) -> list[np.ndarray]:
    """Which tokens are kept of those that have left the window and are no padding, `[Hkv, n]` for each layer."""
    found = []
    for layer in hybrid_layers(cache):
        mass, stop = layer.state, layer.state.evicted * BLOCK
        real = cache.settings.padding.valid[line, :stop] != 0
        found.append(mass.kept[line, :, :stop][:, real] != 0)
    return found


def test_queries_are_the_last_of_each_row_that_are_no_padding() -> None:
    marks = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1], [0] * 6], np.uint8)
    want = [[0, 0, 0, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 1], [0] * 5]
    assert newest_queries(marks, 2).tolist() == [[bool(mark) for mark in line] for line in want]
    assert newest_queries(marks[:1], 2).tolist() == [[True, True]]
    assert newest_queries(marks[3:], 2).tolist() == [[False]]


@pytest.mark.parametrize("tier", ["one", "split"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_padding_behind_a_prompt_says_nothing(model: PreTrainedModel, tier: str, chunks: int) -> None:
    ids, mask = prompt(2, 320)[0], torch.ones(2, 320, dtype=torch.long)
    mask[1, 160:] = 0
    ids[1] = ids[0].flip(0)
    pieces = list(zip(ids.chunk(chunks, 1), mask.chunk(chunks, 1), strict=True))
    got, want = (converse(model, made, tier, beta=3.0) for made in (pieces, row(pieces)))
    for found, alone in zip(outside(got, 1), outside(want, 0), strict=True):
        assert np.array_equal(found[:, : alone.shape[1]], alone)
        assert 0.02 < alone.mean() < 0.9


@pytest.mark.parametrize("append", ["max", "mean"])
@pytest.mark.parametrize("said", [0, 16])
def test_padding_in_a_turn_says_nothing(model: PreTrainedModel, append: str, said: int) -> None:
    ids = torch.cat([prompt(1, 260)[0], prompt(1, 260, seed=5)[0]])
    mask = torch.ones_like(ids)
    mask[1, 212 : 260 - said] = 0
    cuts = [0, 200, *range(201, 213), 260]
    pieces = [(ids[:, a:b], mask[:, a:b]) for a, b in pairwise(cuts)]
    got, want = (converse(model, made, "one", append=append, beta=3.0) for made in (pieces, row(pieces)))
    shared = (212 - 3) // BLOCK * BLOCK - 4 * BLOCK  # on the host when the turn began, in every layer
    for layer, alone in zip(hybrid_layers(got), hybrid_layers(want), strict=True):
        averages = layer.state.average[1, :, :shared], alone.state.average[0, :, :shared]
        assert np.allclose(*averages, atol=1e-6)
        assert averages[0].max() > 1e-3
    for found, alone in zip(outside(got, 1), outside(want, 0), strict=True):
        if said:
            assert np.array_equal(found[:, :shared], alone[:, :shared])
        assert 0.02 < found[:, :shared].mean() < 1.0


@pytest.mark.parametrize("tier", ["one", "split"])
def test_a_crop_below_a_turn_forgets_what_was_before_it(model: PreTrainedModel, tier: str) -> None:
    ids, mask = prompt(1, 300)
    pieces = [(ids[:, a:b], mask[:, a:b]) for a, b in ((0, 150), (150, 200))]
    cache = converse(model, pieces, tier)
    cache.crop(-60)
    for t in range(140, 160):
        with torch.no_grad():
            model(ids[:, t : t + 1], past_key_values=cache)
    cache.crop(-10)
    assert all(layer.state.progress.end == -1 for layer in hybrid_layers(cache))


@pytest.mark.parametrize("tier", ["one", "split"])
def test_a_row_that_says_nothing_in_a_turn_keeps_what_it_kept(model: PreTrainedModel, tier: str) -> None:
    ids, mask = prompt(2, 300)[0], torch.ones(2, 300, dtype=torch.long)
    mask[1, 212:260] = 0
    before = [(ids[:, a:b], mask[:, a:b]) for a, b in pairwise([0, 200, *range(201, 213)])]
    turn = ids[:, 212:260], mask[:, 212:260]
    first, second = (converse(model, pieces, tier, beta=3.0) for pieces in (before, [*before, turn]))
    for had, has in zip(hybrid_layers(first), hybrid_layers(second), strict=True):
        stop = had.state.evicted * BLOCK
        marks = had.state.kept[:, :, :stop], has.state.kept[:, :, :stop]
        assert np.array_equal(marks[0][1], marks[1][1])
        assert not np.array_equal(marks[0][0], marks[1][0])
        assert 0.02 < marks[0].mean() < 0.9


@pytest.mark.parametrize("tier", ["one", "split"])
def test_a_step_that_is_padding_in_a_row_says_nothing_of_it(model: PreTrainedModel, tier: str) -> None:
    ids, mask = prompt(2, 220)[0], torch.ones(2, 220, dtype=torch.long)
    mask[1, 207:] = 0
    cuts, found = [0, 120, *range(121, 221)], []
    for end in (207, 220):
        pieces = [(ids[:, a:b], mask[:, a:b]) for a, b in pairwise(cut for cut in cuts if cut <= end)]
        cache = converse(model, pieces, tier, beta=3.0)
        for layer in hybrid_layers(cache):
            layer.unplace()
        found.append([layer.state.average[:, :, 160:207] for layer in hybrid_layers(cache)])
    for before, after in zip(*found, strict=True):
        assert np.array_equal(before[1], after[1])
        assert not np.array_equal(before[0], after[0])
        assert before[1].max() > 0


@pytest.mark.parametrize("tier", ["one", "split"])
def test_a_row_of_which_nothing_is_known_keeps_all_until_it_asks(model: PreTrainedModel, tier: str) -> None:
    ids, mask = prompt(2, 340)[0], torch.ones(2, 340, dtype=torch.long)
    whole = DynamicCache(config=model.config)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        model(ids[:, :200], past_key_values=whole)
    model.set_attn_implementation("hybrid_sparse")
    cache = HybridCache.from_cache(whole, model, "hgca", window=80, block_size=BLOCK, tier=tier, beta=3.0)
    mask[1, 200:230] = 0

    def feed(*pieces: tuple[int, int]) -> list[list[float]]:
        """The share that each row keeps in each layer."""
        for a, b in pieces:
            positions = (mask[:, :b].cumsum(-1) - 1)[:, a:]
            with torch.no_grad():
                model(ids[:, a:b], attention_mask=mask[:, :b], position_ids=positions, past_key_values=cache)
        cache.drain()
        return [[float(marks.mean()) for marks in outside(cache, line)] for line in (0, 1)]

    asking, silent = feed((200, 230))
    assert max(asking) < 1.0
    assert silent == [1.0] * 4
    asking, silent = feed(*((t, t + 1) for t in range(230, 300)))  # what leaves the window of both
    assert silent == [1.0] * 4
    assert max(max(row) for row in feed((300, 340))) < 1.0


def told(chunks: list[list[int]], among: int | None, append: str) -> np.ndarray:
    """What an append says of one token on the host, `[B]`, in chunks of so many queries of each row.

    The first query of a row gives it a weight of 1/2, the next one 1/3, and so on.
    """
    rows, length = len(chunks[0]), 50
    rule = HGCA(append_queries=among, append=append, append_run=0).rule
    weighing, average, asked = AppendProgress(rule, np.zeros(rows, np.int64), end=-1), np.full((rows, 1, 1), 7.0), 0
    weighing.begin(length, length, 1)
    for counts in map(np.array, chunks):
        length += counts.max()
        valid = (np.arange(counts.max()) >= counts.max() - counts[:, None]).astype(np.uint8)
        given = valid / (np.reshape(asked, (-1, 1)) + valid.cumsum(1) + 1.0)
        asked = asked + counts
        span = weighing.spans(valid, length, 0.1, 10, anew=True)[1]
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
