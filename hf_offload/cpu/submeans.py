"""Scores of sub-means in int4, one float32 per sub-mean: what a block's log mass is made of.

Shapes: a block has S sub-means a KV head; codes are packed as in `packing.py`. Lanes of a register are the sub-means of
one or more blocks, so that two registers hold 32 / S blocks: a step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .codes import add_code_dots, load_word_pair, start_counters, store_scores
from .launch import F32, U8, Array, jit, require
from .memory import LINE, address_of, hold, prefetch

SUBMEANS = (2, 4, 8, 16, 32)
_AHEAD = 3  # steps from a prefetch to its use


class SubMeans(NamedTuple):
    """The digests of a layer as sub-means: m_j = center + sigma * scales_j * (codes_j - 8).

    Args:
        codes: uint8 [P, Hkv, S * D / 2], from `packing.pack_codes`; S is 2, 4, 8, 16 or 32.
        scales: float32 [P, Hkv, S].
        bias: float32 [P, S], log of the valid tokens of the sub-mean; -inf if none, whatever codes and scales hold.
        center: float32 [Hkv, D].
        sigma: float32 [Hkv, D].
        pieces: as many entries as blocks fit a register (at least one).
        runs: S entries.
    """

    codes: Array
    scales: Array
    bias: Array
    center: Array
    sigma: Array
    pieces: tuple[int, ...]
    runs: tuple[int, ...]


def submeans(codes: Array, scales: Array, bias: Array, center: Array, sigma: Array) -> SubMeans:
    """Check and bundle the arrays of a `SubMeans`.

    Raises:
        ValueError: shapes that contradict each other, a memory layout or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    physical, kv_heads, count = scales.shape
    dim = center.shape[1]
    if dim % 16 or not 16 <= dim <= 256 or count not in SUBMEANS:
        raise ValueError(f"D {dim} must be a multiple of 16 in 16..256, and S {count} one of {SUBMEANS}")
    require("codes", codes, U8, (physical, kv_heads, count * dim // 2))
    require("scales", scales, F32, (physical, kv_heads, count))
    require("bias", bias, F32, (physical, count))
    require("center", center, F32, (kv_heads, dim))
    require("sigma", sigma, F32, (kv_heads, dim))
    return SubMeans(codes, scales, bias, center, sigma, (0,) * max(1, 16 // count), (0,) * count)


@jit
def _prepare_query(
    query: Array, center: Array, sigma: Array, scale: float, octets: Array, start: Array, facts: Array
) -> None:
    """Round sigma * query of one head to int8, in the order of `add_code_dots`.

    start: [0] what undoes that codes are stored 8 too large. facts: [0] what a unit of the integers is worth in scores,
    [1] the score of `center`. The rounding is a twentieth of what the codes, in 4 bits, lose.
    """
    dim = query.shape[0]
    top, middle = np.float32(0.0), np.float32(0.0)
    for d in range(dim):
        top = max(top, abs(query[d] * sigma[d]))
        middle += query[d] * center[d]
    inverse = np.float32(127.0) / top if top > np.float32(0.0) else np.float32(0.0)
    total = np.int32(0)
    for d in range(dim):
        value = np.int32(np.rint(query[d] * sigma[d] * inverse))
        octets[(d & ~7) + 4 * (d & 1) + (d & 7) // 2] = value
        total += value
    start[0] = np.int32(-8) * total
    facts[0] = np.float32(scale) * top / np.float32(127.0)
    facts[1] = np.float32(scale) * middle


@jit
def _score_step(
    heads: Any, pieces: Any, dim: int, count: int, places: int, octets: int, starts: int, facts: int, scores: int,
    stride: int,
) -> None:  # fmt: skip
    """Scores of one step's sub-means for one register tile of heads, `stride` bytes apart.

    places: addresses of the step's codes, scales and biases, 2 * pieces each.
    """
    right = 8 * len(pieces)
    sums = start_counters(starts, 4, heads)
    for d in range(0, dim // 2, 4):
        words = load_word_pair(places, places + right, d * count, pieces)
        sums = add_code_dots(sums, words, octets + 2 * d, dim, heads)
    store_scores(sums, places + 2 * right, pieces, facts, scores, stride, heads)


@jit
def score_chunk(
    digest: Any, full: Any, rest: Any, query: Array, table: Array, h: int, scale: float, begin: int, end: int, out: int,
    stride: int,
) -> None:  # fmt: skip
    """Write the scores of the sub-means of blocks begin..end-1 of one KV head, query heads `stride` bytes apart.

    Args:
        query: float32 [G, D].
        table: int32 [N].
        out: address of the scores; a step may write beyond the last block, but not beyond 32 blocks more.
    """
    codes, scales, bias, pieces = digest.codes, digest.scales, digest.bias, digest.pieces
    _, kv_heads, count = scales.shape
    group, dim = query.shape
    size = count * dim // 2
    step = 2 * len(pieces) if count <= 16 else 1
    octets, starts = np.empty((group, dim), np.int8), np.empty((group, 1), np.int32)
    facts, places = np.empty((group, 2), np.float32), np.empty(6 * len(pieces), np.int64)
    for g in range(group):
        _prepare_query(query[g], digest.center[h], digest.sigma[h], scale, octets[g], starts[g], facts[g])
    code_base, scale_base = address_of(codes) + h * size, address_of(scales) + 4 * h * count
    for n in range(begin, end, step):
        for later in range(n + _AHEAD * step, min(n + (_AHEAD + 1) * step, end)):
            p = np.int64(table[later])
            prefetch(scale_base + 4 * p * kv_heads * count, 1)
            for line in range(0, size, LINE):
                prefetch(code_base + p * kv_heads * size + line, 1)
        for i in range(2 * len(pieces)):
            p = np.int64(table[min(n + i, end - 1)])
            places[i] = code_base + p * kv_heads * size
            places[2 * len(pieces) + i] = scale_base + 4 * p * kv_heads * count
            places[4 * len(pieces) + i] = address_of(bias) + 4 * p * count
        if count > 16:  # the second register holds the other half of the same block
            places[1], places[3], places[5] = places[0] + 64, places[2] + 64, places[4] + 64
        done, at = 0, out + 4 * (n - begin) * count
        while done < group:
            begin_query, begin_start = address_of(octets) + done * dim, address_of(starts) + 4 * done
            if done + len(full) <= group:
                _score_step(
                    full, pieces, dim, count, address_of(places), begin_query, begin_start,
                    address_of(facts) + 8 * done, at + done * stride, stride,
                )  # fmt: skip
                done += len(full)
            else:
                _score_step(
                    rest, pieces, dim, count, address_of(places), begin_query, begin_start,
                    address_of(facts) + 8 * done, at + done * stride, stride,
                )  # fmt: skip
                done += len(rest)
    hold(places)
    hold(octets)
    hold(starts)
    hold(facts)
