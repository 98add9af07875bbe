"""What one packed block (`packed.py`) contributes to the query heads of its group, in integers.

A row of floats that meets codes takes their scales in and is rounded to int16, with one unit a head and block: of a
query, which meets 127 steps a channel, or of a softmax's weights. No error is larger than half a unit: that of a score
is at most D / 65534 of the largest product of a single channel, that of a weight 1 / 65534 of the block's largest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .launch import jit
from .memory import LINE, prefetch
from .rounding import choose_units, first_half, round_rows, scale_rows
from .shorts import (
    add_key_octets,
    add_sums,
    add_token_dots,
    add_value_pairs,
    join_key_sums,
    no_sums,
    repeat_octet,
    token_scores,
)
from .tile import store_quads, zeros
from .vector import fma, load, load_f32, splat, store

SCALES = np.empty(0, np.uint16)  # a tag, see `launch.TAGS`
_UNITS = 64  # bytes for the units of a tile of heads


@jit
def spare_bytes(dim: int, block_size: int) -> int:
    """Scratch that the functions below want for one register tile of heads."""
    return _UNITS + 24 * max(dim, block_size, 16) + 64 * (block_size + 4)


@jit
def _fold(heads: Any, rows: int, row_step: int, width: int, scales: int, spare: int, first: int, second: int) -> None:
    """Write float32 rows (one a head) times scales (bfloat16; 0: all 1) as int16 rows and their units.

    Args:
        width: entries of a row, a multiple of 16.
        first, second: where to prefetch 4 * width bytes meanwhile (0: nowhere), so that memory is not idle.
        spare: units float32 [4], 4 more, then int16 [heads, width], then float32 [heads, width].
    """
    shorts = spare + _UNITS
    scaled = shorts + 2 * len(heads) * width
    peaks = zeros(heads, 1)
    for i in range(0, width, 16):
        if first != 0:
            prefetch(first + 4 * i, 2)
        factors = splat(np.float32(1.0)) if scales == 0 else load(SCALES, scales + 2 * i)
        peaks = scale_rows(peaks, rows + 4 * i, row_step, factors, scaled + 4 * i, 4 * width, heads)
    choose_units(peaks, spare)
    for i in range(0, width, 16):
        if second != 0:
            prefetch(second + 4 * i, 2)
        round_rows(scaled + 4 * i, 4 * width, spare, shorts + 2 * i, 2 * width, heads)


@jit
def _fold_weights(heads: Any, weights: int, stride: int, block_size: int, scales: int, spare: int) -> None:
    """`_fold` for weights; those of a block of 8 are filled up with zeros."""
    if block_size >= 16:
        _fold(heads, weights, stride, block_size, scales, spare, 0, 0)
        return
    padded = spare + _UNITS + 96 * len(heads)
    for head in range(len(heads)):
        store(padded + 64 * head, first_half(load_f32(weights + head * stride)))
    _fold(heads, padded, 64, 16, scales, spare, 0, 0)


@jit
def score_packed(
    heads: Any, record: int, ahead: int, query: int, dim: int, block_size: int, scores: int, stride: int, spare: int
) -> None:
    """`block.score_block` for a packed record."""
    facts = 2 * block_size * dim
    if ahead != 0:
        for line in range(facts, facts + 2 * (dim + block_size), LINE):
            prefetch(ahead + line, 2)
    shorts, step = spare + _UNITS, 2 * dim
    values = ahead + block_size * dim if ahead != 0 else 0
    _fold(heads, query, 4 * dim, dim, record + facts, spare, ahead, values)
    for token in range(0, block_size, 8):
        sums = no_sums(heads, 4)
        for d in range(0, dim, 16):
            if ahead != 0 and token > 0:  # the lines of the first 8 tokens: `_fold`
                line = token * dim // 2 + 4 * d
                prefetch(ahead + line, 2)
                prefetch(values + line, 2)
            sums = add_token_dots(sums, record + token * dim + 4 * d, 4 * dim, shorts + 2 * d, step, heads)
        first, second = token_scores(sums, spare)
        store_quads(scores + 4 * token, stride, heads, first)
        store_quads(scores + 4 * (token + 4), stride, heads, second)


@jit
def add_packed_values(
    heads: Any, record: int, ahead: int, dim: int, block_size: int, weights: int, stride: int, sums: int, spare: int
) -> None:
    """`block.add_weighted` for all values of a packed record: codes are finite, so a weight of 0 leaves a token out."""
    shorts, step = spare + _UNITS, 2 * max(block_size, 16)
    _fold_weights(heads, weights, stride, block_size, record + 2 * (block_size + 1) * dim, spare)
    values = record + block_size * dim
    wide = dim - dim % 64
    half = block_size * dim // 2
    for d in range(0, wide, 64):
        tile = no_sums(heads, 4)
        for token in range(0, block_size, 2):
            if ahead != 0:
                share = ahead + half + (d * block_size + 64 * token) // 2
                prefetch(share, 2)
                prefetch(share + 2 * half, 2)
            tile = add_value_pairs(tile, values + token * dim + 2 * d, shorts + 2 * token, step, heads)
        add_sums(sums + 4 * d, 4 * dim, spare, heads, tile)
    for d in range(wide, dim, 16):
        tile = no_sums(heads, 1)
        for token in range(0, block_size, 2):
            if ahead != 0:
                share = ahead + half + (d * block_size + 16 * token) // 2
                prefetch(share, 2)
                prefetch(share + 2 * half, 2)
            tile = add_value_pairs(tile, values + token * dim + 2 * d, shorts + 2 * token, step, heads)
        add_sums(sums + 4 * d, 4 * dim, spare, heads, tile)


@jit
def add_packed_keys(
    heads: Any, record: int, dim: int, block_size: int, weights: int, stride: int, sums: int, spare: int
) -> None:
    """`block.add_weighted` for all keys of a packed record."""
    shorts, step = spare + _UNITS, 2 * max(block_size, 16)
    _fold_weights(heads, weights, stride, block_size, 0, spare)
    octets = shorts + len(heads) * step
    totals = octets + 16 * len(heads) * block_size
    for head in range(len(heads)):
        for token in range(0, block_size, 8):
            repeat_octet(shorts + head * step + 2 * token, octets + 16 * (head * block_size + token))
    for d in range(0, dim, 16):
        tile = no_sums(heads, 2)
        for token in range(0, block_size, 8):
            keys = record + token * dim + 4 * d
            tile = add_key_octets(tile, keys, 4 * dim, octets + 16 * token, 16 * block_size, heads)
        for head in range(len(heads)):
            store(totals + 64 * head, splat(np.float32(0.0)))
        add_sums(totals, 64, spare, heads, join_key_sums(tile))
        scales = load(SCALES, record + 2 * (block_size * dim + d))
        for head in range(len(heads)):
            place = sums + 4 * (head * dim + d)
            store(place, fma(load_f32(totals + 64 * head), scales, load_f32(place)))
