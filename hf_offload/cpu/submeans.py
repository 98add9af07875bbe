"""Scores of key pairs from their mean in int4 and half their difference in 2 bits: what a log mass is made of.

Shapes: a block has S pairs a KV head; codes and levels are packed as in `packing.py`. Lanes of a register are the pairs
of one or more blocks; two registers are scored at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .codes import add_code_dots, add_level_dots, load_word_pair, start_counters, store_scores
from .launch import F32, I32, U8, Array, jit, require
from .memory import LINE, address_of, hold, prefetch

SUBMEANS = (4, 8, 16, 32, 64)
_AHEAD = 3  # steps from a prefetch to its use


class SubMeans(NamedTuple):
    """The digests of a layer: key pairs j as m_j +- d_j.

    m_j = center + sigma * scale_j * (codes_j - 8), d_j = sigma * size_j * (levels_j - 1.5).

    Args:
        codes: uint8 [P, Hkv, S * D / 2], from `packing.pack_codes`; S is 4, 8, 16, 32 or 64.
        levels: int32 [P, Hkv, D / 16, S], from `packing.pack_levels`.
        sizes: int32 [P, Hkv, S], from `packing.pack_halves`: scale and size as bfloat16.
        bias: float32 [P, S], log of the pair's valid tokens; -inf if none, whatever the other arrays hold.
        center: float32 [Hkv, D].
        sigma: float32 [Hkv, D].
        pieces: as many entries as blocks fit a register (at least one).
        runs: S entries.
    """

    codes: Array
    levels: Array
    sizes: Array
    bias: Array
    center: Array
    sigma: Array
    pieces: tuple[int, ...]
    runs: tuple[int, ...]


def submeans(codes: Array, levels: Array, sizes: Array, bias: Array, center: Array, sigma: Array) -> SubMeans:
    """Check and bundle the arrays of a `SubMeans`.

    Raises:
        ValueError: shapes that contradict each other, a memory layout or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    physical, kv_heads, count = sizes.shape
    dim = center.shape[1]
    if dim % 16 or not 16 <= dim <= 256 or count not in SUBMEANS:
        raise ValueError(f"D {dim} must be a multiple of 16 in 16..256, and S {count} one of {SUBMEANS}")
    require("codes", codes, U8, (physical, kv_heads, count * dim // 2))
    require("levels", levels, I32, (physical, kv_heads, dim // 16, count))
    require("sizes", sizes, I32, (physical, kv_heads, count))
    require("bias", bias, F32, (physical, count))
    require("center", center, F32, (kv_heads, dim))
    require("sigma", sigma, F32, (kv_heads, dim))
    return SubMeans(codes, levels, sizes, bias, center, sigma, (0,) * max(1, 16 // count), (0,) * count)


@jit
def _prepare_query(
    query: Array, center: Array, sigma: Array, scale: float, octets: Array, start: Array, facts: Array
) -> None:
    """Round sigma * query of one head to int8, in the order of `add_code_dots`.

    start: [0] what undoes that codes are stored 8 too large, [1] zero. facts: [0] what a unit of the integers is worth
    in scores, [1] the score of `center`, [2] what undoes that levels are stored 1.5 too large. The rounding is a
    twentieth of what the codes, in 4 bits, lose.
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
    start[0], start[1] = np.int32(-8) * total, 0
    facts[0] = np.float32(scale) * top / np.float32(127.0)
    facts[1] = np.float32(scale) * middle
    facts[2] = np.float32(1.5) * total


@jit
def _score_step(
    heads: Any, pieces: Any, dim: int, count: int, places: int, octets: int, starts: int, facts: int, scores: int,
    stride: int,
) -> None:  # fmt: skip
    """Scores of two registers of pairs for one register tile of heads, `stride` bytes apart.

    places: addresses of the codes, levels, sizes and biases, 2 * pieces each.
    """
    right = 8 * len(pieces)
    sums = start_counters(starts, 8, heads)
    for d in range(0, dim // 2, 4):
        words = load_word_pair(places, places + right, d * count, pieces)
        sums = add_code_dots(sums, words, octets + 2 * d, dim, heads)
    swings = start_counters(starts + 4, 8, heads)
    for d in range(0, dim, 16):
        words = load_word_pair(places + 2 * right, places + 3 * right, d // 4 * count, pieces)
        swings = add_level_dots(swings, words, octets + d, dim, heads)
    store_scores(sums, swings, places + 4 * right, pieces, facts, scores, stride, heads)


@jit
def score_chunk(
    digest: Any, full: Any, rest: Any, query: Array, table: Array, h: int, scale: float, begin: int, end: int, out: int,
    stride: int,
) -> None:  # fmt: skip
    """Write the scores of the pairs of blocks begin..end-1 of one KV head, query heads `stride` bytes apart.

    Args:
        query: float32 [G, D].
        table: int32 [N].
        out: address of the scores; up to 7 blocks beyond the last may be written.
    """
    codes, levels, sizes, bias, pieces = digest.codes, digest.levels, digest.sizes, digest.bias, digest.pieces
    _, kv_heads, count = sizes.shape
    group, dim = query.shape
    code_bytes, level_bytes = count * dim // 2, count * dim // 4
    step = 2 * len(pieces) if count <= 16 else 1
    octets, starts = np.empty((group, dim), np.int8), np.empty((group, 2), np.int32)
    facts, places = np.empty((group, 3), np.float32), np.empty(8 * len(pieces), np.int64)
    for g in range(group):
        _prepare_query(query[g], digest.center[h], digest.sigma[h], scale, octets[g], starts[g], facts[g])
    code_base, level_base = address_of(codes) + h * code_bytes, address_of(levels) + h * level_bytes
    size_base, registers = address_of(sizes) + 4 * h * count, 2 * len(pieces)
    for n in range(begin, end, step):
        for later in range(n + _AHEAD * step, min(n + (_AHEAD + 1) * step, end)):
            p = np.int64(table[later]) * kv_heads
            for line in range(0, code_bytes, LINE):
                prefetch(code_base + p * code_bytes + line, 1)
            for line in range(0, level_bytes, LINE):
                prefetch(level_base + p * level_bytes + line, 1)
            for line in range(0, 4 * count, LINE):
                prefetch(size_base + 4 * p * count + line, 1)
        for part in range(0, 4 * count, 128):
            for i in range(registers):
                p = np.int64(table[min(n + i, end - 1)] if count <= 16 else table[n])
                offset = 0 if count <= 16 else part + 64 * i
                places[i] = code_base + p * kv_heads * code_bytes + offset
                places[registers + i] = level_base + p * kv_heads * level_bytes + offset
                places[2 * registers + i] = size_base + 4 * p * kv_heads * count + offset
                places[3 * registers + i] = address_of(bias) + 4 * p * count + offset
            done, at = 0, out + 4 * (n - begin) * count + part
            while done < group:
                queries, begins = address_of(octets) + done * dim, address_of(starts) + 8 * done
                if done + len(full) <= group:
                    _score_step(
                        full, pieces, dim, count, address_of(places), queries, begins, address_of(facts) + 12 * done,
                        at + done * stride, stride,
                    )  # fmt: skip
                    done += len(full)
                else:
                    _score_step(
                        rest, pieces, dim, count, address_of(places), queries, begins, address_of(facts) + 12 * done,
                        at + done * stride, stride,
                    )  # fmt: skip
                    done += len(rest)
    hold(places)
    hold(octets)
    hold(starts)
    hold(facts)
