"""The log-sum-exp of stored tokens' scores for several queries, streamed: no matrix of queries by tokens is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_offload.cpu.kernels.block import STEP_TOKENS, clear_scores, softmax_step
from hf_offload.cpu.kernels.int8_blocks import packed_bytes
from hf_offload.cpu.kernels.parts import PART_TOKENS, PARTS, merge_masses
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
    kernel,
    require,
    tag_of,
)
from hf_offload.cpu.memory import address_of, count_up, get, hold, put
from hf_offload.cpu.simd.vectors import NOTHING

from .query_rows import find_ends, open_step, pick_rows, score_rows, scratch_bytes

_ROWS = 128  # rows of a task


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
    packed_record: int,
) -> None:
    """One task = up to 128 rows of one (row, KV head) and `share` tokens; the last one of the rows merges the parts."""
    batch, query_heads, queries, dim = query.shape
    rows = query_heads // kv_heads * queries
    record = 2 * block_size * dim * tag.itemsize
    width, stride = max(STEP_TOKENS, block_size), 4 * max(STEP_TOKENS, block_size)
    runs = (rows + _ROWS - 1) // _ROWS
    scratch = np.empty(scratch_bytes(dim, block_size) // 4 + 16, np.float32)
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
        find_ends(ends, first_row, queries, start, stop, valid[b])
        source = address_of(query) + 4 * (head * rows + first_row) * dim
        state = address_of(partial) + task * partial_step
        for i in range(count):
            put(state + 4 * i, NOTHING)
            put(state + 4 * (_ROWS + i), np.float32(0.0))
        low = first + part * share
        for begin in range(low, min(low + share, stop), width):
            end, masked = open_step(
                addresses, block_ptr, table[b], holes[b], valid[b], begin, min(begin + width, low + share, stop), h,
                record, block_size, packed, packed_record, marks,
            )  # fmt: skip
            row = 0 if end > begin else count
            while row < count:
                filled, row = pick_rows(picked, ends, row, begin, source, dim, scale, tile)
                if filled == 0:
                    break
                seen = 0
                for i in range(filled):
                    seen = max(seen, min(ends[picked[i]], end) - begin)
                score_rows(
                    tag, addresses, tile, dim, block_size, scores, stride, seen, cap, marks, masked, packed, spare
                )
                padded = (seen + 15) & ~15
                for i in range(filled):
                    clear_scores(1, scores + i * stride, stride, min(ends[picked[i]] - begin, seen), padded)
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


def check_queries(
    query: Array, block_ptr: Array, table: Array, holes: Array, valid: Array, first: int, stop: int, start: int,
    lse: Array, kv_heads: int, block_size: int, softcap: float | None,
) -> None:  # fmt: skip
    """Raise unless the arrays fit the queries of `query_lse` and cover their tokens."""
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


def step_share(tokens: int, parts: int, block_size: int) -> int:
    """Tokens of a part, whole steps of them."""
    step = max(STEP_TOKENS, block_size)
    return max(1, -(-tokens // (parts * step))) * step


def key_bytes(query: Array, tokens: int, kv_dtype: torch.dtype) -> int:
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
    packed: bool = False,
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
    check_queries(query, block_ptr, table, holes, valid, first, stop, start, lse, kv_heads, block_size, softcap)
    batch, query_heads, queries, dim = query.shape
    runs = batch * kv_heads * -(-(query_heads // kv_heads * queries) // _ROWS)
    # The cut depends on shapes alone: results are the same on any number of threads.
    share = step_share(stop - first, max(1, min(-(-(stop - first) // PART_TOKENS), PARTS // runs)), block_size)
    parts = max(1, -(-(stop - first) // share))
    partial, finished = np.empty((runs * parts, 3 * _ROWS), np.float32), np.zeros(runs, np.int64)
    args = (
        tag_of(kv_dtype), query, block_ptr, table, holes, valid, int(first), int(stop), int(start), lse, int(kv_heads),
        int(block_size), float(scale), float(softcap or 0.0), share, parts, partial, finished, 0 if packed else None,
        packed_bytes(dim, block_size),
    )  # fmt: skip
    cost = key_bytes(query, stop - first, kv_dtype)
    return Launch(lse_kernel, runs * parts, args, cost, counters=finished)
