"""Scores of sub-mean digests: pairs of keys, stored as their mean in int4 and half their difference in 2 bits.

A block has S pairs for each KV head; codes and levels are packed as in `gpu/seal.py`. The lanes of a register are
the pairs of one or more blocks; two registers are scored at a time.

An array of digests holds one row for each physical block, with the data of all KV heads. Reading one head's data of
many blocks strides by the row size, often a power of two, which is much slower than sequential reads. The KV
heads of a chunk are therefore scored in turn, and each prefetches its share of the next chunk's whole rows (`Sweep`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hf_offload.cpu.launch import F32, I32, U8, Array, by_tiles, jit, require
from hf_offload.cpu.memory import LINE, address_of, hold, prefetch
from hf_offload.cpu.simd.int_dot import (
    add_code_dots,
    add_level_dots,
    load_word_pair,
    prefetch_word_pair,
    start_counters,
    store_scores,
)
from hf_offload.cpu.simd.vectors import lowest_bit, words_with


class Sweep(NamedTuple):
    """State of the row-wise prefetch of one array: the block is table[position], `line` its next cache line."""

    base: int
    row: int
    lines: int
    position: int
    line: int
    each: int


@jit
def sweep_from(base: int, row: int, begin: int, end: int, h: int, kv_heads: int, steps: int) -> Any:
    """The `Sweep` over KV head h's share of the rows of blocks begin..end-1 (`row` bytes each, at `base`)."""
    lines = (row + LINE - 1) // LINE
    total = max(end - begin, 0) * lines
    first, last = total * h // kv_heads, total * (h + 1) // kv_heads
    each = (last - first + steps - 1) // steps
    return Sweep(base, row, lines, begin + first // lines, first % lines, each)


@jit
def sweep_on(sweep: Any, table: Array, end: int) -> Any:
    """Prefetch the lines of one step, none of blocks from `end` on; return the advanced `Sweep`."""
    position, line, left = sweep.position, sweep.line, sweep.each
    while left > 0 and position < end:
        start = sweep.base + table[position] * sweep.row
        upto = min(line + left, sweep.lines)
        for i in range(line, upto):
            prefetch(start + i * LINE, 2)
        left -= upto - line
        line = upto
        if line == sweep.lines:
            position, line = position + 1, 0
    return Sweep(sweep.base, sweep.row, sweep.lines, position, line, sweep.each)


SUBMEANS = (4, 8, 16, 32, 64)
INFINITE = 0x7F80
"""Infinity in bfloat16, as bits."""
_AHEAD = 6  # steps from a prefetch to its use


class SubMeans(NamedTuple):
    """Sub-mean digests of a layer: key pairs j as m_j +- d_j.

    m_j = center + sigma * scale_j * (codes_j - 8), d_j = sigma * size_j * (levels_j - 1.5).

    Args:
        codes: uint8 [P, Hkv, S * D / 2], from `seal.pack_codes`; S is 4, 8, 16, 32 or 64.
        levels: int32 [P, Hkv, D / 16, S], from `seal.pack_levels`.
        sizes: int32 [P, Hkv, S], from `seal.pack_halves`: scale and size as bfloat16. The sign of the size marks an
            outlier.
        bias: float32 [P, S], log of the pair's valid tokens; -inf if none, whatever the other arrays hold.
        center, sigma: float32 [B, Hkv, D].
        pieces: a tuple as long as blocks fit a register (at least one).
        runs: a tuple of S entries.
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
    batch, _, dim = center.shape
    if dim % 16 or not 16 <= dim <= 256 or count not in SUBMEANS:
        raise ValueError(f"D {dim} must be a multiple of 16 in 16..256, and S {count} one of {SUBMEANS}")
    require("codes", codes, U8, (physical, kv_heads, count * dim // 2))
    require("levels", levels, I32, (physical, kv_heads, dim // 16, count))
    require("sizes", sizes, I32, (physical, kv_heads, count))
    require("bias", bias, F32, (physical, count))
    require("center", center, F32, (batch, kv_heads, dim))
    require("sigma", sigma, F32, (batch, kv_heads, dim))
    return SubMeans(codes, levels, sizes, bias, center, sigma, (0,) * max(1, 16 // count), (0,) * count)


@jit
def _prepare_query(
    query: Array, center: Array, sigma: Array, scale: float, octets: Array, start: Array, facts: Array
) -> None:
    """Round sigma * query of one head to int8, in the order of `add_code_dots`.

    start: [0] corrects the codes' offset of 8, [1] is zero. facts: [0] the score of one unit of the integer sums, [1]
    the score of `center`, [2] corrects the levels' offset of 1.5. The rounding error is a twentieth of that of the
    4-bit codes.
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


@by_tiles
@jit
def _score_step(
    heads: Any, done: int, pieces: Any, dim: int, count: int, pieces_at: int, later: int, octets: int, starts: int,
    facts: int, cap: Any, scores: int, stride: int,
) -> None:  # fmt: skip
    """Scores of two registers of pairs for a register tile of heads, from head `done` of the group on.

    pieces_at: addresses of the codes, levels, sizes and biases, 2 * pieces each.
    later: address of as many addresses to prefetch, spread evenly over the step; 0: none.
    """
    right, later = 8 * len(pieces), later if done == 0 else 0
    octets, starts, facts, scores = octets + done * dim, starts + 8 * done, facts + 12 * done, scores + done * stride
    if later != 0:
        prefetch_word_pair(later + 4 * right, later + 5 * right, 0, pieces)
        prefetch_word_pair(later + 6 * right, later + 7 * right, 0, pieces)
    sums = start_counters(starts, 8, heads)
    for d in range(0, dim // 2, 4):
        if later != 0 and d * count % LINE == 0:
            prefetch_word_pair(later, later + right, d * count, pieces)
        words = load_word_pair(pieces_at, pieces_at + right, d * count, pieces)
        sums = add_code_dots(sums, words, octets + 2 * d, dim, heads)
    swings = start_counters(starts + 4, 8, heads)
    for d in range(0, dim, 16):
        if later != 0 and d // 4 * count % LINE == 0:
            prefetch_word_pair(later + 2 * right, later + 3 * right, d // 4 * count, pieces)
        words = load_word_pair(pieces_at + 2 * right, pieces_at + 3 * right, d // 4 * count, pieces)
        swings = add_level_dots(swings, words, octets + d, dim, heads)
    store_scores(sums, swings, pieces_at + 4 * right, pieces, facts, cap, scores, stride, heads)


@jit
def _find_addresses(
    digest: Any, table: Array, h: int, n: int, end: int, part: int, addresses: Array, first: int, registers: int
) -> None:
    """Write the addresses that `_score_step` reads to addresses[first:], for the blocks from n on, up to end - 1.

    A register holds one or more blocks, or a part of one (from `part` bytes on).
    """
    codes, levels, sizes, bias = digest.codes, digest.levels, digest.sizes, digest.bias
    _, kv_heads, count = sizes.shape
    for i in range(registers):
        p = np.int64(table[min(n + i, end - 1)] if count <= 16 else table[min(n, end - 1)])
        offset = 0 if count <= 16 else part + 64 * i
        at, record = first + i, p * kv_heads + h
        addresses[at] = address_of(codes) + record * codes.shape[2] + offset
        addresses[at + registers] = address_of(levels) + record * 4 * levels.shape[2] * count + offset
        addresses[at + 2 * registers] = address_of(sizes) + record * 4 * count + offset
        addresses[at + 3 * registers] = address_of(bias) + p * 4 * count + offset


def score_submeans(
    digest: Any, full: Any, rest: Any, query: Array, group: int, table: Array, b: int, h: int, scale: float, cap: Any,
    begin: int, end: int, reach: int, out: int, stride: int,
) -> None:  # fmt: skip
    """Write the scores of pairs, as `digest_scores.write_scores` says; up to 7 blocks beyond the last are written."""
    pieces, count, dim = digest.pieces, digest.sizes.shape[2], query.shape[2]
    step = 2 * len(pieces) if count <= 16 else 1
    octets, starts = np.empty((group, dim), np.int8), np.empty((group, 2), np.int32)
    facts, addresses = np.empty((group, 3), np.float32), np.empty(16 * len(pieces), np.int64)
    for g in range(group):
        _prepare_query(
            query[b, h * group + g], digest.center[b, h], digest.sigma[b, h], scale, octets[g], starts[g], facts[g]
        )  # fmt: skip
    registers, kv_heads, steps = 2 * len(pieces), digest.sizes.shape[1], (end - begin + step - 1) // step
    code_row, size_row = kv_heads * count * dim // 2, 4 * kv_heads * count
    code_sweep = sweep_from(address_of(digest.codes), code_row, end, reach, h, kv_heads, steps)
    level_sweep = sweep_from(address_of(digest.levels), code_row // 2, end, reach, h, kv_heads, steps)
    size_sweep = sweep_from(address_of(digest.sizes), size_row, end, reach, h, kv_heads, steps)
    for n in range(begin, end, step):
        code_sweep = sweep_on(code_sweep, table[b], reach)
        level_sweep = sweep_on(level_sweep, table[b], reach)
        size_sweep = sweep_on(size_sweep, table[b], reach)
        ahead = n + _AHEAD * step
        for part in range(0, 4 * count, 128):
            _find_addresses(digest, table[b], h, n, end, part, addresses, 0, registers)
            later = 0
            if ahead < end:
                _find_addresses(digest, table[b], h, ahead, end, part, addresses, 4 * registers, registers)
                later = address_of(addresses) + 32 * registers
            _score_step(
                full, rest, group, pieces, dim, count, address_of(addresses), later, address_of(octets),
                address_of(starts), address_of(facts), cap, out + 4 * (n - begin) * count + part, stride,
            )  # fmt: skip
    hold((addresses, octets, starts, facts))


_SIGN = 0x8000  # of the size of a pair


@jit
def find_outliers(
    digest: Any, table: Array, h: int, begin: int, end: int, marks: Any, most: int, masses: Array
) -> None:  # fmt: skip
    """Set the masses of the outliers (`seal.OUTLIER`) of blocks begin..end-1 of one KV head to infinity.

    Args:
        table: int32 [N].
        marks: uint8 [T] or None; a pair of two tokens that it marks is left as it is.
        most: of more outliers the first ones count.
        masses: bfloat16 as bits, of the pairs from block 0 on.
    """
    sizes, count, kv_heads = address_of(digest.sizes), len(digest.runs), digest.sizes.shape[1]
    for n in range(begin, end):
        word = words_with(sizes + 4 * count * (np.int64(table[n]) * kv_heads + h), _SIGN, digest.runs)
        while word != 0 and most > 0:
            pair = n * count + lowest_bit(word)
            word &= word - 1
            if marks is None or marks[2 * pair] == 0 or marks[2 * pair + 1] == 0:
                masses[pair] = INFINITE
                most -= 1
    hold(digest.sizes)
