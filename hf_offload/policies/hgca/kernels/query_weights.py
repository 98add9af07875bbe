"""Attention weights that several queries of an append give to stored tokens (HGCA, section 3.2.2, "Re-evaluation").

`query_lse` computes the log-sum-exp of each query's scores, `weigh_tokens` then joins each token's weights over the
queries. Both stream the tokens, 128 for four queries at a time: no matrix of queries by tokens exists.

A row of these kernels is one query of one query head. The G * Q rows of a KV head are the Q queries of its first query
head, those of its second, and so on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_offload.cpu.kernels.block import STEP_TOKENS, clear_scores, soften_scores, softmax_step
from hf_offload.cpu.kernels.packed import spare_bytes
from hf_offload.cpu.kernels.parts import PART_TOKENS, PARTS, merge_masses
from hf_offload.cpu.kernels.record import record_of, score_keys
from hf_offload.cpu.launch import (
    F32,
    I32,
    I64,
    U8,
    Array,
    Launch,
    cap_of,
    check_geometry,
    group_size,
    jit,
    kernel,
    require,
    tag_of,
)
from hf_offload.cpu.memory import address_of, count_up, get, hold, put
from hf_offload.cpu.simd.convert import load_marks, store_first
from hf_offload.cpu.simd.vectors import MASKED, NOTHING, choose_less, exp, fma, load_f32, splat, store, vmax

_ROWS = 128  # rows of a task of `query_lse`
_TILE = (0, 0, 0, 0)  # rows in registers, see `launch.head_tiles`; always as many, so that one version is compiled
_NO_COEFFICIENT = np.empty(0, np.float32)


# --- scores of the rows of a KV head ---------------------------------------------------------------------------------


@jit
def _scratch_bytes(packed: Any, dim: int, block_size: int) -> int:
    """Bytes for four scaled queries, the scores of four rows, the marks of valid tokens, and an unpacked record."""
    return 64 + 16 * dim + 4 * 5 * max(STEP_TOKENS, block_size) + spare_bytes(packed, dim, block_size)


@jit
def _find_ends(ends: Array, first_row: int, queries: int, start: int, stop: int, valid: Array) -> None:
    """ends[row] = the token behind the last one that a row (from first_row on) sees; 0 if its query is not valid."""
    i = first_row % queries
    for row in range(ends.shape[0]):
        ends[row] = min(stop, start + i + 1) if valid[start + i] != 0 else 0
        i = i + 1 if i + 1 < queries else 0


@jit
def _open_step(
    addresses: Array, block_ptr: Array, table: Array, holes: Array, valid: Array, begin: int, end: int, h: int,
    record: int, block_size: int, packed: Any, marks: int,
) -> tuple[int, bool]:  # fmt: skip
    """Find the records of tokens begin..end-1 and which tokens are valid.

    Returns:
        The token behind the last valid one (`begin` if there is none), and whether any is not valid.
    """
    masked = False
    for i in range((end - begin + block_size - 1) // block_size):
        n = begin // block_size + i
        addresses[i] = record_of(block_ptr[table[n]], h, record, packed)
        masked = masked or holes[n] != 0
    if masked:
        for token in range(0, end - begin, 16):
            store(marks + 4 * token, load_marks(address_of(valid) + begin + token, end - begin - token))
        while end > begin and valid[end - 1] == 0:
            end -= 1
    return end, masked


@jit
def _pick_rows(
    picked: Array, ends: Array, row: int, begin: int, query: int, dim: int, scale: float, tile: int
) -> tuple[int, int]:
    """Write up to four scaled rows, from `row` on, that see tokens behind `begin`, and their numbers; fill up with 0.

    Returns:
        How many, and the row to go on with.
    """
    count = 0
    while row < ends.shape[0] and count < 4:
        if ends[row] > begin:
            picked[count] = row
            for d in range(0, dim, 16):
                x = load_f32(query + 4 * (row * dim + d)) * splat(np.float32(scale))
                store(tile + 4 * (count * dim + d), x)
            count += 1
        row += 1
    if count > 0:
        for place in range(tile + 4 * count * dim, tile + 16 * dim, 64):
            store(place, splat(np.float32(0.0)))
    return count, row


@jit
def _score_tile(
    tag: Any, addresses: Array, tile: int, dim: int, block_size: int, scores: int, stride: int, seen: int, cap: float,
    marks: int, masked: bool, packed: Any, spare: int,
) -> None:  # fmt: skip
    """Scores of the four rows of a tile with `seen` tokens, MASKED where `marks` (float32) has a 0."""
    padded = (seen + 15) & ~15
    for i in range((seen + block_size - 1) // block_size):
        place = scores + 4 * i * block_size
        score_keys(_TILE, 0, tag, addresses[i], 0, tile, dim, block_size, place, stride, packed, spare)
    if cap > 0.0:
        soften_scores(4, scores, stride, padded, cap)
    if masked:
        none, zero = splat(MASKED), splat(np.float32(0.0))
        for token in range(0, padded, 16):
            mark = load_f32(marks + 4 * token)
            for i in range(4):
                place = scores + i * stride + 4 * token
                store(place, choose_less(zero, mark, load_f32(place), none))


@jit
def _score_rows(
    tag: Any, addresses: Array, picked: Array, ends: Array, row: int, begin: int, end: int, query: int, dim: int,
    scale: float, tile: int, block_size: int, scores: int, stride: int, cap: float, marks: int, masked: bool,
    packed: Any, spare: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Score the next four rows, from `row` on, with those of the tokens begin..end-1 that each of them sees.

    Returns:
        How many rows there were, whose numbers are in `picked`; the tokens scored, rounded up to 16; and the row to go
        on with.
    """
    filled, row = _pick_rows(picked, ends, row, begin, query, dim, scale, tile)
    seen = 0
    for i in range(filled):
        seen = max(seen, min(ends[picked[i]], end) - begin)
    padded = (seen + 15) & ~15
    if filled > 0:
        _score_tile(tag, addresses, tile, dim, block_size, scores, stride, seen, cap, marks, masked, packed, spare)
        for i in range(filled):
            clear_scores(1, scores + i * stride, stride, min(ends[picked[i]] - begin, seen), padded)
    return filled, padded, row


# --- the kernels -----------------------------------------------------------------------------------------------------


@kernel
def lse_kernel(
    ticket: Array,
    tasks: int,
    tag: Any,
    query: Array,
    block_ptr: Array,
    table: Array,
    holes: Array,
    valid: Array,
    first: int,
    stop: int,
    start: int,
    lse: Array,
    kv_heads: int,
    block_size: int,
    scale: float,
    cap: float,
    share: int,
    parts: int,
    partial: Array,
    finished: Array,
    packed: Any,
) -> None:
    """One task = up to 128 rows of one (row, KV head) and `share` tokens; the last one of the rows merges the parts."""
    batch, query_heads, queries, dim = query.shape
    rows = query_heads // kv_heads * queries
    record = 2 * block_size * dim * tag.itemsize
    width, stride = max(STEP_TOKENS, block_size), 4 * max(STEP_TOKENS, block_size)
    runs = (rows + _ROWS - 1) // _ROWS
    scratch = np.empty(_scratch_bytes(packed, dim, block_size) // 4 + 16, np.float32)
    tile = (address_of(scratch) + 63) & ~63
    scores = tile + 16 * dim
    marks = scores + 4 * stride
    spare = marks + stride
    addresses, picked = np.empty(width // block_size, np.int64), np.empty(4, np.int64)
    limits, states = np.empty(_ROWS, np.int64), np.empty(12, np.float32)
    totals = lse.reshape(batch * kv_heads, rows)
    peaks = address_of(states)
    partial_step = 4 * partial.shape[1]
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        run, part = task // parts, task % parts
        head, first_row = run // runs, run % runs * _ROWS
        b, h = head // kv_heads, head % kv_heads
        count = min(_ROWS, rows - first_row)
        ends = limits[:count]
        _find_ends(ends, first_row, queries, start, stop, valid[b])
        source = address_of(query) + 4 * (head * rows + first_row) * dim
        state = address_of(partial) + task * partial_step
        for i in range(count):
            put(state + 4 * i, NOTHING)
            put(state + 4 * (_ROWS + i), np.float32(0.0))
        low = first + part * share
        for begin in range(low, min(low + share, stop), width):
            end, masked = _open_step(
                addresses, block_ptr, table[b], holes[b], valid[b], begin, min(begin + width, low + share, stop), h,
                record, block_size, packed, marks,
            )  # fmt: skip
            row = 0 if end > begin else count
            while row < count:
                filled, padded, row = _score_rows(
                    tag, addresses, picked, ends, row, begin, end, source, dim, scale, tile, block_size, scores,
                    stride, cap, marks, masked, packed, spare,
                )  # fmt: skip
                if filled == 0:
                    break
                for i in range(filled):
                    put(peaks + 4 * i, get(state + 4 * picked[i]))
                    put(peaks + 16 + 4 * i, get(state + 4 * (_ROWS + picked[i])))
                softmax_step(filled, scores, stride, padded, peaks, peaks + 16, peaks + 32)
                for i in range(filled):
                    put(state + 4 * picked[i], get(peaks + 4 * i))
                    put(state + 4 * (_ROWS + picked[i]), get(peaks + 16 + 4 * i))
        if count_up(finished, run) == parts - 1:
            origin = address_of(partial) + run * parts * partial_step
            merge_masses(origin, parts, partial_step, count, 0, 4 * _ROWS, totals[head, first_row : first_row + count])
        count_up(ticket, 1)
    hold(scratch)
    hold(states)
    hold(partial)
    hold(query)


@jit
def _join_weights(scores: int, tokens: int, lse: float, coefficient: float, largest: bool, joined: int) -> None:
    """joined += coefficient * exp(scores - lse), or the larger of both."""
    shift, factor = splat(np.float32(lse)), splat(np.float32(coefficient))
    for place in range(0, 4 * tokens, 64):
        weight, old = exp(load_f32(scores + place) - shift), load_f32(joined + place)
        store(joined + place, vmax(weight, old) if largest else fma(weight, factor, old))


@kernel
def weigh_kernel(
    ticket: Array,
    tasks: int,
    tag: Any,
    query: Array,
    block_ptr: Array,
    table: Array,
    holes: Array,
    valid: Array,
    first: int,
    stop: int,
    start: int,
    lse: Array,
    coefficient: Array,
    skipped: int,
    joined: Array,
    kv_heads: int,
    block_size: int,
    scale: float,
    cap: float,
    share: int,
    parts: int,
    packed: Any,
) -> None:
    """One task = up to `share` tokens of one (row, KV head)."""
    batch, query_heads, queries, dim = query.shape
    group = query_heads // kv_heads
    rows, largest = group * queries, coefficient.shape[0] == 0
    record = 2 * block_size * dim * tag.itemsize
    width, stride = max(STEP_TOKENS, block_size), 4 * max(STEP_TOKENS, block_size)
    scratch = np.empty(_scratch_bytes(packed, dim, block_size) // 4 + 16 + group * width, np.float32)
    tile = (address_of(scratch) + 63) & ~63
    scores = tile + 16 * dim
    marks = scores + 4 * stride
    sums = marks + stride
    spare = sums + group * stride
    addresses, picked, ends = np.empty(width // block_size, np.int64), np.empty(4, np.int64), np.empty(rows, np.int64)
    totals = lse.reshape(batch * kv_heads, rows)
    factors, targets = np.ones(rows, np.float32), np.empty(rows, np.int64)
    for g in range(group):
        for i in range(queries):
            targets[g * queries + i] = sums + g * stride
            if not largest:
                factors[g * queries + i] = coefficient[i]
    zero = splat(np.float32(0.0))
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        head, part = task // parts, task % parts
        b, h = head // kv_heads, head % kv_heads
        _find_ends(ends, 0, queries, start, stop, valid[b])
        for row in range(rows):
            behind = start + row % queries + 1 - skipped
            ends[row] = 0 if totals[head, row] == -np.inf else min(ends[row], behind)
        source = address_of(query) + 4 * head * rows * dim
        low = first + part * share
        for begin in range(low, min(low + share, stop), width):
            whole = min(begin + width, low + share, stop) - begin
            end, masked = _open_step(
                addresses, block_ptr, table[b], holes[b], valid[b], begin, begin + whole, h, record, block_size,
                packed, marks,
            )  # fmt: skip
            place = address_of(joined) + 4 * (head * group * joined.shape[2] + begin)
            for g in range(group):
                for token in range(0, whole, 16):
                    store(sums + g * stride + 4 * token, zero)
            row = 0 if end > begin else rows
            while row < rows:
                filled, padded, row = _score_rows(
                    tag, addresses, picked, ends, row, begin, end, source, dim, scale, tile, block_size, scores,
                    stride, cap, marks, masked, packed, spare,
                )  # fmt: skip
                for i in range(filled):
                    at = picked[i]
                    _join_weights(scores + i * stride, padded, totals[head, at], factors[at], largest, targets[at])
            for g in range(group):
                for token in range(0, whole, 16):
                    x = load_f32(sums + g * stride + 4 * token)
                    if masked:
                        x = choose_less(zero, load_f32(marks + 4 * token), x, zero)
                    store_first(place + 4 * (g * joined.shape[2] + token), whole - token, x)
        count_up(ticket, 1)
    hold(scratch)
    hold(query)
    hold(joined)


# --- their launches --------------------------------------------------------------------------------------------------


def _check(
    query: Array, block_ptr: Array, table: Array, holes: Array, valid: Array, first: int, stop: int, start: int,
    lse: Array, kv_heads: int, block_size: int, softcap: float | None,
) -> None:  # fmt: skip
    """Raise unless the arrays fit the queries and cover their tokens."""
    batch, query_heads, queries, dim = query.shape
    check_geometry(dim, block_size)
    group_size(query_heads, kv_heads)
    require("query", query, F32, query.shape)
    require("block_ptr", block_ptr, I64, block_ptr.shape[:1])
    require("table", table, I32, (batch, table.shape[-1]))
    require("holes", holes, U8, (batch, holes.shape[-1]))
    require("valid", valid, U8, (batch, valid.shape[-1]))
    require("lse", lse, F32, (batch, query_heads, queries))
    covered = min(valid.shape[1], min(holes.shape[1], table.shape[1]) * block_size)
    if first % block_size or not 0 <= first <= stop <= covered:
        raise ValueError(
            f"tokens {first}..{stop} must begin with a block of {block_size}; table, holes and valid cover {covered}"
        )
    if queries < 1 or not 0 <= start <= valid.shape[1] - queries:
        raise ValueError(f"{queries} queries from position {start} on: valid covers {valid.shape[1]} tokens")
    cap_of(softcap)


def _part_tokens(tokens: int, parts: int, block_size: int) -> int:
    """Tokens of a part, whole steps of them."""
    step = max(STEP_TOKENS, block_size)
    return max(1, -(-tokens // (parts * step))) * step


def _key_bytes(query: Array, tokens: int, kv_dtype: torch.dtype) -> int:
    """Bytes of keys that are read, most of them from the caches."""
    batch, query_heads, queries, dim = query.shape
    cost: int = batch * -(-query_heads * queries // 4) * tokens * dim * kv_dtype.itemsize
    return cost


def query_lse(
    query: Array,
    block_ptr: Array,
    table: Array,
    holes: Array,
    valid: Array,
    first: int,
    stop: int,
    start: int,
    lse: Array,
    *,
    kv_heads: int,
    kv_dtype: torch.dtype,
    block_size: int,
    scale: float,
    softcap: float | None,
    packed: Any = None,
) -> Launch:
    """Prepare the log-sum-exp of the scores of tokens first..stop-1 for several queries a row.

    A query sees the valid tokens up to its own position; one that is not a valid token itself sees none.

    Args:
        query: float32 [B, Hq, Q, D], D a multiple of 16 up to 256; query i stands at position start + i.
        block_ptr, table, holes: as in `sparse_decode`.
        valid: uint8 [B, T], 1 where the token may be attended; covers `stop` tokens and the queries.
        first: a multiple of the block size.
        stop: the token after the last.
        start: position of the first query, the same in every row.
        lse: float32 [B, Hq, Q], written: natural log; -inf where nothing is seen.
        kv_heads: how many.
        kv_dtype, block_size, scale, softcap, packed: as in `sparse_decode`.

    Raises:
        ValueError: shapes that contradict each other, a memory layout or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    _check(query, block_ptr, table, holes, valid, first, stop, start, lse, kv_heads, block_size, softcap)
    batch, query_heads, queries, _ = query.shape
    runs = batch * kv_heads * -(-(query_heads // kv_heads * queries) // _ROWS)
    # The cut depends on shapes alone: results are the same on any number of threads.
    share = _part_tokens(stop - first, max(1, min(-(-(stop - first) // PART_TOKENS), PARTS // runs)), block_size)
    parts = max(1, -(-(stop - first) // share))
    partial, finished = np.empty((runs * parts, 3 * _ROWS), np.float32), np.zeros(runs, np.int64)
    args = (
        tag_of(kv_dtype), query, block_ptr, table, holes, valid, int(first), int(stop), int(start), lse, int(kv_heads),
        int(block_size), float(scale), float(softcap or 0.0), share, parts, partial, finished, packed,
    )  # fmt: skip
    cost = _key_bytes(query, stop - first, kv_dtype)
    return Launch(lse_kernel, runs * parts, args, cost, counters=finished)


def weigh_tokens(
    query: Array,
    block_ptr: Array,
    table: Array,
    holes: Array,
    valid: Array,
    first: int,
    stop: int,
    start: int,
    lse: Array,
    coefficient: Array | None,
    joined: Array,
    *,
    kv_heads: int,
    kv_dtype: torch.dtype,
    block_size: int,
    scale: float,
    softcap: float | None,
    skipped: int = 0,
    packed: Any = None,
) -> Launch:
    """Prepare joining the attention weights of tokens first..stop-1 of every row under several queries.

    The weight of a token is w_i = exp(score - lse) under query i, 0 where the query does not see it or skips it.
    With coefficients they are joined to sum_i coefficient_i * w_i, without to max_i w_i.

    Args:
        query, block_ptr, table, holes, valid, first, stop, start: as in `query_lse`.
        lse: float32 [B, Hq, Q], natural log of each query's sum of exp(score), no smaller than any score of its; a
            query with -inf is left out.
        coefficient: float32 [Q] or None.
        joined: float32 [B, Hq, T'], T' at least `stop`, written: 0 where a token is not valid.
        kv_heads, kv_dtype, block_size, scale, softcap, packed: as in `query_lse`.
        skipped: how many of the newest tokens that a query sees, itself among them, get no weight from it.

    Raises:
        ValueError: shapes that contradict each other, a memory layout or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    _check(query, block_ptr, table, holes, valid, first, stop, start, lse, kv_heads, block_size, softcap)
    batch, query_heads, queries, _ = query.shape
    require("joined", joined, F32, (batch, query_heads, joined.shape[-1]))
    if coefficient is None:
        coefficient = _NO_COEFFICIENT
    else:
        require("coefficient", coefficient, F32, (queries,))
    if joined.shape[2] < stop:
        raise ValueError(f"joined holds {joined.shape[2]} tokens, fewer than stop {stop}")
    if skipped < 0:
        raise ValueError(f"skipped must not be negative, got {skipped}")
    heads = batch * kv_heads
    share = _part_tokens(stop - first, max(1, PARTS // heads), block_size)
    parts = -(-(stop - first) // share)
    args = (
        tag_of(kv_dtype), query, block_ptr, table, holes, valid, int(first), int(stop), int(start), lse, coefficient,
        int(skipped), joined, int(kv_heads), int(block_size), float(scale), float(softcap or 0.0), share, parts,
        packed,
    )  # fmt: skip
    return Launch(weigh_kernel, heads * parts, args, _key_bytes(query, stop - first, kv_dtype))
