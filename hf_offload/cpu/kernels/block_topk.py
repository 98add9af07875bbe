"""Top-k blocks of each row and KV head: the always kept blocks plus the best others, by bisection of a threshold.

Shapes: score [B, Hkv, N], chosen blocks [B, Hkv, C] with a count for each (row, KV head). `choose_blocks` scores every
sealed block, joins the heads of a group and selects in one launch. Its tasks are chunks of blocks; the thread that
finishes the last chunk of a (row, KV head) joins the scores and selects, so that no thread waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from hf_offload.cpu.kernels.digest_scores import (
    CHUNK_BLOCKS,
    JOINS,
    SPARE_BLOCKS,
    Digest,
    check_digest,
    join_chunks,
    soften_chunk,
    tail_of_head,
    write_scores,
)
from hf_offload.cpu.kernels.record import HostBlocks
from hf_offload.cpu.launch import (
    F32,
    I32,
    TAGS,
    Array,
    Launch,
    cap_of,
    group_size,
    head_tiles,
    jit,
    kernel,
    require,
    tag_of,
)
from hf_offload.cpu.memory import address_of, count_up, get, hold, next_task, put
from hf_offload.cpu.simd.vectors import choose_less, lane_max, lane_sum, load_f32, splat, store, vmax

SPARE = 64
"""Rows of scores and marks are padded to a multiple of this many float32."""
_NEVER = np.float32(-np.inf)
_LOWEST = np.float32(-3.4e38)  # only -inf is smaller
_FLIP = 0x7FFFFFFF


@jit
def copy_scores(source: int, count: int, row: int) -> None:
    """Copy `count` float32 to `row`, with -inf for NaN, and fill up with -inf to a multiple of `SPARE`."""
    low, lowest = splat(_NEVER), splat(_LOWEST)
    whole = count & ~15
    for i in range(0, 4 * whole, 64):
        x = load_f32(source + i)
        store(row + i, choose_less(lowest, x, x, low))
    for i in range(4 * whole, 4 * ((count + SPARE - 1) // SPARE * SPARE), 4):
        x = get(source + i) if i < 4 * count else _NEVER
        put(row + i, x if x > _LOWEST else _NEVER)


@jit
def _below(row: int, size: int, bound: float) -> int:
    """The number of scores in `size` bytes that are below a bound."""
    zero, one, limit = splat(np.float32(0.0)), splat(np.float32(1.0)), splat(np.float32(bound))
    a, b, c, d = zero, zero, zero, zero
    for i in range(row, row + size, 256):
        a = a + choose_less(load_f32(i), limit, one, zero)
        b = b + choose_less(load_f32(i + 64), limit, one, zero)
        c = c + choose_less(load_f32(i + 128), limit, one, zero)
        d = d + choose_less(load_f32(i + 192), limit, one, zero)
    return int(lane_sum((a + b) + (c + d)))


@jit
def _key(x: float, word: Array) -> int:
    """An integer key with the order of the floats."""
    word.view(np.float32)[0] = np.float32(x) + np.float32(0.0)  # -0 and +0 tie
    bits = np.int64(word[0])
    return int(bits if bits >= 0 else bits ^ _FLIP)


@jit
def _value(key: int, word: Array) -> float:
    word[0] = np.int32(key if key >= 0 else key ^ _FLIP)
    return float(word.view(np.float32)[0])


@jit
def bound_of(row: int, count: int, want: int, word: Array) -> tuple[float, int]:
    """The threshold that the best `want` scores reach, and how many of the scores equal to it are among them.

    Args:
        row: address of scores, as `copy_scores` writes them; want: at least 1.
        word: scratch int32 [1].
    """
    size = 4 * ((count + SPARE - 1) // SPARE * SPARE)
    total = size // 4
    usable = total - _below(row, size, float(_LOWEST))
    if usable <= want:
        return float(_LOWEST), count
    low, lowest, zero = splat(_NEVER), splat(_LOWEST), splat(np.float32(0.0))
    most, least = low, low
    for i in range(row, row + size, 64):
        x = load_f32(i)
        most, least = vmax(most, x), vmax(least, choose_less(x, lowest, low, zero - x))
    below, above = _key(-lane_max(least), word), _key(lane_max(most), word)
    while below < above:
        middle = (below + above + 1) >> 1
        at_least = total - _below(row, size, _value(middle, word))
        if at_least == want:
            return _value(middle, word), count
        if at_least > want:
            below = middle
        else:
            above = middle - 1
    bound = _value(below, word)
    above = 0 if bound == np.inf else total - _below(row, size, _value(below + 1, word))
    return bound, want - above


@jit
def mark_best(row: int, count: int, want: int, marks: int, word: Array) -> None:
    """Write 1 at the marks of the best `want` scores and leave the others unchanged; ties go to the lower index.

    Args:
        row: address of scores, as `copy_scores` writes them; want: at least 1.
        marks: address of float32 [count, rounded up to a multiple of `SPARE`].
        word: scratch int32 [1].
    """
    bound, ties = bound_of(row, count, want, word)
    one, limit, end = splat(np.float32(1.0)), splat(np.float32(bound)), 4 * count
    left = ties
    for i in range(0, end if ties < count else 0, 4):  # the end of the ties that are taken
        if get(row + i) == np.float32(bound):
            if left == 0:
                end = i
                break
            left -= 1
    for i in range(0, end & ~63, 64):
        store(marks + i, choose_less(load_f32(row + i), limit, load_f32(marks + i), one))
    for i in range(end & ~63, 4 * count, 4):
        x = get(row + i)
        if x > np.float32(bound) or (i < end and x == np.float32(bound)):
            put(marks + i, np.float32(1.0))


@jit
def list_marked(marks: int, count: int, first: int, blocks: Array) -> int:
    """Write first + i, ascending, for every mark i that is set, and return their number; marks: address."""
    listed = 0
    for i in range(count):
        if get(marks + 4 * i) > np.float32(0.0):
            blocks[listed] = first + i
            listed += 1
    return listed


@jit
def clear_marks(marks: int, count: int) -> None:
    """Set all marks to 0, up to a multiple of `SPARE`."""
    zero = splat(np.float32(0.0))
    for i in range(0, 4 * ((count + SPARE - 1) // SPARE * SPARE), 64):
        store(marks + i, zero)


class Choice(NamedTuple):
    """What is chosen for each (row, KV head), and where that goes; see `select_blocks`. A negative k: nothing."""

    sink_lo: Array
    sink_hi: Array
    recent: int
    k: int
    blocks: Array
    counts: Array


@jit
def select_head(score: Array, n_sealed: int, n_blocks: int, choice: Any, b: int, h: int, word: Array) -> None:
    """Write the chosen blocks of one (row, KV head), score [N], and their number; word: scratch int32 [1]."""
    # Always kept: the sinks [low, high) and [late, n_blocks). Candidates lie between: [high, late).
    low = min(max(choice.sink_lo[b], 0), n_blocks)
    high = min(max(choice.sink_hi[b], low), n_blocks)
    late = min(n_sealed, max(low, n_sealed - choice.recent))
    chosen, count = choice.blocks[b, h], 0
    for n in range(low, min(high, late)):
        chosen[count] = n
        count += 1
    want = choice.k - count - (n_blocks - late)
    candidates = late - high
    if want > 0 and candidates > 0:
        row = np.empty(candidates + SPARE, np.float32)
        copy_scores(address_of(score) + 4 * high, candidates, address_of(row))
        bound, ties = bound_of(address_of(row), candidates, want, word)
        for i in range(candidates):
            if row[i] > bound or (row[i] == bound and ties > 0):
                ties -= int(row[i] == bound)
                chosen[count] = high + i
                count += 1
    for n in range(late, n_blocks):
        chosen[count] = n
        count += 1
    choice.counts[b, h] = count
    hold(score)


@kernel
def select_kernel(
    ticket: Array,
    tasks: int,
    score: Array,
    n_sealed: int,
    n_blocks: int,
    choice: Any,
) -> None:
    """One task = one (row, KV head)."""
    kv_heads, word = score.shape[1], np.empty(1, np.int32)
    task = count_up(ticket, 0)
    while task < tasks:
        b, h = task // kv_heads, task % kv_heads
        select_head(score[b, h], n_sealed, n_blocks, choice, b, h, word)
        task = next_task(ticket)


def make_choice(
    batch: int, kv_heads: int, n_sealed: int, sink_lo: Array, sink_hi: Array, recent: int, n_blocks: int, k: int,
    blocks: Array, counts: Array,
) -> Choice:  # fmt: skip
    """Bundle the arguments of a selection; raise unless they fit together. See `select_blocks`."""
    require("sink_lo", sink_lo, I32, (batch,))
    require("sink_hi", sink_hi, I32, (batch,))
    require("blocks", blocks, I32, (batch, kv_heads, blocks.shape[2]))
    require("counts", counts, I32, (batch, kv_heads))
    if not 0 <= n_sealed <= n_blocks:
        raise ValueError(f"n_sealed {n_sealed} is not within 0..n_blocks ({n_blocks})")
    if recent < 0 or k < 0:
        raise ValueError(f"recent {recent} and k {k} must not be negative")
    sinks = max([0, *(sink_hi - sink_lo).tolist()])  # faster than NumPy for a few rows
    always = min(n_blocks, sinks + min(recent, n_sealed) + n_blocks - n_sealed)
    if blocks.shape[2] < max(always, min(k, n_blocks)):
        raise ValueError(f"blocks holds {blocks.shape[2]} entries; up to {max(always, min(k, n_blocks))} may be chosen")
    return Choice(sink_lo, sink_hi, int(recent), int(k), blocks, counts)


def select_blocks(
    score: Array,
    n_sealed: int,
    n_blocks: int,
    sink_lo: Array,
    sink_hi: Array,
    recent: int,
    k: int,
    blocks: Array,
    counts: Array,
) -> Launch:
    """Prepare the selection of at most k logical blocks for each (row, KV head), in ascending order.

    Always chosen, even beyond k: the sinks, the last `recent` sealed blocks from sink_lo on, and the unsealed blocks.
    The rest of k goes to the best-scoring sealed blocks from sink_lo on whose score is above -inf; ties go to the lower
    block; NaN counts as -inf.

    Args:
        score: float32 [B, Hkv, N].
        n_sealed: blocks 0..n_sealed-1 have a score.
        n_blocks: all blocks, n_sealed <= n_blocks.
        sink_lo: int32 [B], first block with real tokens: the first sink.
        sink_hi: int32 [B], end of the sinks (exclusive), clipped to n_blocks.
        recent: number of newest sealed blocks to keep.
        k: blocks to choose.
        blocks: int32 [B, Hkv, C], written up to the count.
        counts: int32 [B, Hkv], written.

    Raises:
        ValueError: shapes that contradict each other, or C too small for what may be chosen.
        TypeError: an array of another dtype.
    """
    batch, kv_heads, width = score.shape
    require("score", score, F32, (batch, kv_heads, width))
    choice = make_choice(batch, kv_heads, n_sealed, sink_lo, sink_hi, recent, n_blocks, k, blocks, counts)
    if n_sealed > width:
        raise ValueError(f"n_sealed {n_sealed} exceeds the {width} scores of a row")
    args = (score, int(n_sealed), int(n_blocks), choice)
    return Launch(select_kernel, batch * kv_heads, args, 4 * batch * kv_heads * n_sealed)


@kernel
def choose_kernel(
    ticket: Array,
    tasks: int,
    digest: Any,
    full: Any,
    rest: Any,
    query: Array,
    table: Array,
    unsealed: Any,
    n_sealed: int,
    length: int,
    scale: float,
    cap: Any,
    mode: int,
    masses: Array,
    peaks: Array,
    finished: Array,
    tail: Array,
    reads_tail: bool,
    score: Array,
    n_blocks: int,
    choice: Any,
) -> None:
    """One task = one (row, KV head, up to 128 blocks)."""
    kv_heads = score.shape[1]
    group = query.shape[1] // kv_heads
    chunks = max(1, (n_sealed + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS)
    runs = digest.runs
    row = (min(CHUNK_BLOCKS, n_sealed) + SPARE_BLOCKS) * len(runs)
    scores, word = np.empty(group * row, np.float32), np.empty(1, np.int32)
    task = count_up(ticket, 0)
    while task < tasks:
        b, chunk, h = task // (chunks * kv_heads), task // kv_heads % chunks, task % kv_heads
        begin = chunk * CHUNK_BLOCKS
        end = min(begin + CHUNK_BLOCKS, n_sealed)
        reach, at = min(end + CHUNK_BLOCKS, n_sealed), address_of(scores)
        if begin < end:
            write_scores(digest, full, rest, query, group, table, b, h, scale, cap, begin, end, reach, at, 4 * row)
        for g in range(group):
            peaks[b, h * group + g, chunk] = soften_chunk(
                runs, address_of(scores) + 4 * g * row, end - begin, mode == 2,
                address_of(masses[b, h * group + g]) + 4 * begin,
            )  # fmt: skip
        if count_up(finished, b * kv_heads + h) == chunks - 1:
            heads = slice(h * group, (h + 1) * group)
            if reads_tail:
                tail_of_head(
                    unsealed, full, rest, query[b, heads], b, h, kv_heads, n_sealed, length, scale, cap, tail[b, heads]
                )  # fmt: skip
            join_chunks(masses[b, heads], peaks[b, heads], tail[b, heads], n_sealed, mode, score[b, h])
            if choice.k >= 0:
                select_head(score[b, h], n_sealed, n_blocks, choice, b, h, word)
        task = next_task(ticket)
    hold(scores)


_NO_BLOCKS, _NO_COUNTS, _NO_SINKS = (np.empty((0,) * n, np.int32) for n in (3, 2, 1))
_NO_CHOICE = Choice(_NO_SINKS, _NO_SINKS, 0, -1, _NO_BLOCKS, _NO_COUNTS)
_NO_MARKS = np.empty((0, 0), np.uint8)
_NOWHERE = HostBlocks(TAGS[torch.float32], np.empty(0, np.int64), np.empty((0, 0), np.int32), _NO_MARKS, _NO_MARKS, 1)


def choose_blocks(
    query: Array,
    digest: Digest,
    table: Array,
    n_sealed: int,
    masses: Array,
    tail: Array,
    score: Array,
    *,
    join: str,
    scale: float,
    softcap: float | None,
    kv_dtype: torch.dtype,
    unsealed: HostBlocks | None = None,
    length: int = 0,
    select: tuple[Array, Array, int, int, int, Array, Array] | None = None,
) -> Launch:
    """Prepare the scores of all sealed blocks for each (row, KV head), and the selection of blocks by them.

    "max" and "mean": each query head's softmax over its blocks and the tail, then the largest or the mean of the group.
    "raw": the mean of the log masses. A block without valid tokens has score -inf, every other block a larger one.
    Negligible scores are inexact: sub-means are cut off 40 below the best of their 128 blocks, and softmax shares below
    1e-17 are ordered only among themselves.

    Args:
        query: float32 [B, Hq, D], D a multiple of 16 up to 256.
        digest: the digests that score the blocks.
        table: int32 [B, N], physical block of each logical one.
        n_sealed: blocks 0..n_sealed-1 are scored.
        masses: float32 [B, Hq, N], N at least n_sealed rounded up to a multiple of 16: scratch.
        tail: float32 [B, Hq], log of the mass of the tokens without a digest; may be -inf. Written with `unsealed`.
        score: float32 [B, Hkv, N], written up to n_sealed rounded up to a multiple of 16.
        join: "max", "mean" or "raw".
        scale, softcap: as in `decode_attention`.
        kv_dtype: dtype of the pool, also where the pool is not read (it selects the compiled kernel).
        unsealed: the rows' blocks, of which those without digest give the tail; length: tokens in every row.
        select: sink_lo, sink_hi, recent, n_blocks, k, blocks and counts, as in `select_blocks`; None: scores alone.

    Raises:
        ValueError: an unknown join, shapes that contradict each other, or sizes that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    if join not in JOINS:
        raise ValueError(f"join {join!r} is not one of {tuple(JOINS)}")
    batch, query_heads, dim = query.shape
    kv_heads = score.shape[1]
    group = group_size(query_heads, kv_heads)
    full, rest = head_tiles(group)
    require("query", query, F32, (batch, query_heads, dim))
    require("table", table, I32, (batch, table.shape[-1]))
    require("masses", masses, F32, (batch, query_heads, masses.shape[-1]))
    require("tail", tail, F32, (batch, query_heads))
    require("score", score, F32, (batch, kv_heads, score.shape[-1]))
    cost = check_digest(digest, query.shape, kv_heads, n_sealed)
    if not 0 <= n_sealed <= min(table.shape[1], masses.shape[2] // 16 * 16, score.shape[2] // 16 * 16):
        raise ValueError(
            f"n_sealed {n_sealed} exceeds table {table.shape}, or masses {masses.shape} or score {score.shape} in "
            "multiples of 16"
        )
    if unsealed is not None:
        unsealed.check(batch, dim, length)
    held = _NOWHERE._replace(tag=tag_of(kv_dtype)) if unsealed is None else unsealed._replace(packed=None)
    choice = _NO_CHOICE if select is None else make_choice(batch, kv_heads, n_sealed, *select)
    n_blocks = n_sealed if select is None else select[3]
    chunks = max(1, -(-n_sealed // CHUNK_BLOCKS))
    peaks, finished = np.empty((batch, query_heads, chunks), np.float32), np.zeros(batch * kv_heads, np.int64)
    args = (
        digest, full, rest, query, table, held, int(n_sealed), int(length), float(scale), cap_of(softcap),
        JOINS[join], masses, peaks, finished, tail, unsealed is not None, score, int(n_blocks), choice,
    )  # fmt: skip
    return Launch(choose_kernel, batch * kv_heads * chunks, args, cost, counters=finished)
