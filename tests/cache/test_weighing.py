"""Whose queries say what about which tokens: rows of a batch learn what each would learn alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tiny import prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HybridCache
from hf_offload.attention.hooks import hybrid_layers
from hf_offload.cache.weighing import newest

BLOCK = 16
Piece = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def converse(model: PreTrainedModel, pieces: list[Piece], tier: str, **knobs: Any) -> HybridCache:
    """A cache that has taken in pieces of tokens and masks, `[B, n]` each."""
    cache = HybridCache(model, "hgca", window=80, block_size=BLOCK, tier=tier, **knobs)
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
        salience, stop = layer.salience, layer.salience.evicted * BLOCK
        real = cache.settings.padding.valid[line, :stop] != 0
        found.append(salience.kept[line, :, :stop][:, real] != 0)
    return found


def test_queries_are_the_last_of_each_row_that_are_no_padding() -> None:
    marks = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1], [0] * 6], np.uint8)
    want = [[0, 0, 0, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 1], [0] * 5]
    assert newest(marks, 2).tolist() == [[bool(mark) for mark in line] for line in want]
    assert newest(marks[:1], 2).tolist() == [[True, True]]
    assert newest(marks[3:], 2).tolist() == [[False]]


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
        averages = layer.salience.average[1, :, :shared], alone.salience.average[0, :, :shared]
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
    assert all(layer.salience.weighing.decoded for layer in hybrid_layers(cache))
