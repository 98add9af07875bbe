"""The choice of blocks in one launch: score every sealed block, join the heads of a group, keep the best.

The tasks are chunks of blocks. Whoever finishes the last chunk of a (row, KV head) joins its scores and selects: nobody
waits, and any number of threads may take part.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .launch import F32, I32, Array, Launch, cap_of, group_size, head_tiles, kernel, require, tag_of
from .memory import address_of, count_up, hold
from .scoring import (
    CHUNK_BLOCKS,
    JOINS,
    SPARE_BLOCKS,
    Digest,
    check_digest,
    join_chunks,
    soften_chunk,
    write_scores,
)
from .select import check_selection, select_head
from .tail import check_tail, tail_of_head


@kernel
def choose_kernel(
    ticket: Array,
    tasks: int,
    digest: Any,
    tag: Any,
    full: Any,
    rest: Any,
    query: Array,
    block_ptr: Array,
    table: Array,
    holes: Array,
    valid: Array,
    n_sealed: int,
    length: int,
    block_size: int,
    scale: float,
    cap: Any,
    mode: int,
    masses: Array,
    peaks: Array,
    finished: Array,
    tail: Array,
    reads_tail: bool,
    score: Array,
    sink_lo: Array,
    sink_hi: Array,
    recent: int,
    n_blocks: int,
    k: int,
    blocks: Array,
    counts: Array,
) -> None:
    """One task = one (row, KV head, up to 128 blocks)."""
    kv_heads = score.shape[1]
    group = query.shape[1] // kv_heads
    chunks = max(1, (n_sealed + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS)
    runs = digest.runs
    row = (min(CHUNK_BLOCKS, n_sealed) + SPARE_BLOCKS) * len(runs)
    scores = np.empty(group * row, np.float32)
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
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
                    tag, full, rest, query[b, heads], block_ptr, table[b], h, kv_heads, n_sealed, length, holes[b],
                    valid[b], block_size, scale, cap, tail[b, heads],
                )  # fmt: skip
            join_chunks(masses[b, heads], peaks[b, heads], tail[b, heads], n_sealed, mode, score[b, h])
            if k >= 0:
                counts[b, h] = select_head(
                    score[b, h], n_sealed, n_blocks, sink_lo[b], sink_hi[b], recent, k, blocks[b, h]
                )  # fmt: skip
        count_up(ticket, 1)
    hold(scores)


_NO_BLOCKS, _NO_COUNTS, _NO_SINKS = (np.empty((0,) * n, np.int32) for n in (3, 2, 1))
_NOWHERE = (np.empty(0, np.int64), np.empty((0, 0), np.uint8), np.empty((0, 0), np.uint8), 0, 1)


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
    unsealed: tuple[Array, Array, Array, int, int] | None = None,
    select: tuple[Array, Array, int, int, int, Array, Array] | None = None,
) -> Launch:
    """Prepare one score a (row, KV head, sealed block), and the choice of blocks by it.

    "max" and "mean": each query head's softmax over its blocks and the tail, then the largest or the mean of the group.
    "raw": the mean of the log masses. A block without valid tokens has score -inf, every other one more. What is of no
    consequence is not exact: sub-means are cut off 40 below the best of their 128 blocks, and shares of a softmax below
    1e-17 have an order only among these.

    Args:
        query: float32 [B, Hq, D], D a multiple of 16 up to 256.
        digest: what scores the blocks.
        table: int32 [B, N], physical block of each logical one.
        n_sealed: blocks 0..n_sealed-1 are scored.
        masses: float32 [B, Hq, N], N at least n_sealed rounded up to a multiple of 16: scratch.
        tail: float32 [B, Hq], log of the mass of the tokens without a digest; may be -inf. Written with `unsealed`.
        score: float32 [B, Hkv, N], written up to n_sealed rounded up to a multiple of 16.
        join: "max", "mean" or "raw".
        scale, softcap: of the scores, as in `decode.sparse_decode`.
        kv_dtype: dtype of the pool, whether it is read or not (there is one compiled kernel for each).
        unsealed: where the tokens without a digest are read, to fill `tail`: block_ptr, holes and valid (as in
            `decode.sparse_decode`), length in tokens, block size.
        select: sink_lo, sink_hi, recent, n_blocks, k, blocks and counts, as in `select.select_blocks`.

    Raises:
        ValueError: an unknown join, shapes that contradict each other, or what the kernel does not cover.
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
    block_ptr, holes, valid, length, block_size = unsealed or _NOWHERE
    n_blocks = n_sealed
    if unsealed is not None:
        check_tail(block_ptr, holes, valid, table, dim, n_sealed, length, block_size)
    sink_lo = sink_hi = _NO_SINKS
    recent, k, blocks, counts = 0, -1, _NO_BLOCKS, _NO_COUNTS
    if select is not None:
        sink_lo, sink_hi, recent, n_blocks, k, blocks, counts = select
        check_selection(batch, kv_heads, n_sealed, *select)
    chunks = max(1, -(-n_sealed // CHUNK_BLOCKS))
    peaks, finished = np.empty((batch, query_heads, chunks), np.float32), np.zeros(batch * kv_heads, np.int64)
    args = (
        digest, tag_of(kv_dtype), full, rest, query, block_ptr, table, holes, valid, int(n_sealed), int(length),
        int(block_size), float(scale), cap_of(softcap), JOINS[join], masses, peaks, finished, tail,
        unsealed is not None, score, sink_lo, sink_hi, int(recent), int(n_blocks), int(k), blocks, counts,
    )  # fmt: skip
    return Launch(choose_kernel, batch * kv_heads * chunks, args, cost, counters=finished)
