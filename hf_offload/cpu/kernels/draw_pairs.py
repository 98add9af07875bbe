"""Pairs of keys drawn by their estimated share of the attention: systematic sampling, probability proportional to size.

p is a pair's share of a query head's attention, by its digest; of the heads of a group the largest (`join="max"`) or
the mean. With τ = 1 / samples, in the order of the positions:

    p >= τ: the pair is attended.
    p < τ: it is attended where the running sum of such p passes the next point, (k + 1/2) · τ; log(τ / p) is then added
        to its two scores, so that it stands for the τ of attention between two points.

If the first point were random, every pair would be attended with probability min(p / τ, 1), and the weighted sums would
have no bias, whatever the digest's errors. The first point is fixed at τ / 2: nothing is random. At most
group · samples + 1 pairs are drawn; sinks, the newest blocks and the blocks without digest are attended whole.

Tasks are chunks of blocks, as in `block_topk.choose_blocks`; the thread that finishes the last one of a (row, KV head)
draws. Between the two a pair's mass is kept in 16 bits for each query head.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from hf_offload.cpu.kernels.digest_scores import (
    CHUNK_BLOCKS,
    JOINS,
    SPARE_BLOCKS,
    Digest,
    check_digest,
    check_tail,
    chunk_shares,
    soften_chunk,
    tail_of_head,
    write_scores,
)
from hf_offload.cpu.launch import (
    F32,
    I32,
    I64,
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
from hf_offload.cpu.memory import add_to, address_of, count_up, hold
from hf_offload.cpu.simd.vectors import lane_max, lane_sum, load, load_f32, splat, store, store_upper, vmax

MASSES = np.dtype(np.uint16)
"""Of kept masses: bfloat16, as bits."""
_SHORT = TAGS[torch.bfloat16]


def most_pairs(samples: int, group: int) -> int:
    """The largest number of pairs that a KV head can draw: shares add up to `group`, within rounding."""
    return group * samples + group * samples // 64 + 2


@jit
def _whole(first: int, last: int, pairs: Array, weights: Array, count: int) -> int:
    """List pairs first..last-1 with weight 1; return the list's new length."""
    for i in range(first, last):
        pairs[count], weights[count] = i, np.float32(0.0)
        count += 1
    return count


@jit
def draw_head(
    masses: int, step: int, group: int, factors: Array, mode: int, each: int, first: int, last: int, tau: float,
    pairs: Array, weights: Array, count: int, limit: int,
) -> int:  # fmt: skip
    """List the drawn ones of the pairs first..last-1 of one (row, KV head); return the list's new length.

    Args:
        masses: address of a bfloat16 for each pair, query heads `step` bytes apart.
        factors: float32 [G, chunks], what turns a chunk's masses into shares.
        mode: a value of `JOINS`: the largest or the mean of the heads' shares.
        each: pairs of a chunk.
        tau: share of the attention between two points.
        pairs: int32 [C], weights: float32 [C], logarithms: the list, written from `count` on.
        limit: the list is no longer; shares that are NaN would list all pairs.
    """
    left = 0.5 * tau
    lanes, zero = np.empty(16, np.float32), splat(np.float32(0.0))
    for chunk in range(first // each, (last + each - 1) // each):
        begin, end = max(first, chunk * each), min(last, (chunk + 1) * each)
        for i in range(begin, end, 16):
            share = zero
            for g in range(group):
                mine = load(_SHORT, masses + g * step + 2 * i) * splat(factors[g, chunk])
                share = vmax(share, mine) if mode == 0 else share + mine
            most = lane_max(share)
            total = np.float64(lane_sum(share))
            if most < np.float32(tau) and total < left and i + 16 <= end:
                left -= total
                continue
            store(address_of(lanes), share)
            for lane in range(min(16, end - i)):
                p = np.float64(lanes[lane])
                sure = p >= tau
                if not sure:
                    left -= p
                    if left > 0.0:
                        continue
                    left += tau
                if count < limit:
                    pairs[count] = i + lane
                    weights[count] = np.float32(0.0) if sure else np.float32(math.log(tau / p))
                    count += 1
    hold(lanes)
    return count


@kernel
def draw_kernel(
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
    n_blocks: int,
    length: int,
    block_size: int,
    scale: float,
    cap: Any,
    mode: int,
    tau: float,
    masses: Array,
    totals: Array,
    peaks: Array,
    tail: Array,
    factors: Array,
    finished: Array,
    sink_lo: Array,
    sink_hi: Array,
    recent: int,
    pairs: Array,
    weights: Array,
    counts: Array,
    tally: Array,
) -> None:
    """One task = one (row, KV head, up to 128 blocks)."""
    kv_heads = counts.shape[1]
    group = query.shape[1] // kv_heads
    chunks = max(1, (n_sealed + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS)
    runs = digest.runs
    size = len(runs)
    row = (min(CHUNK_BLOCKS, n_sealed) + SPARE_BLOCKS) * size
    step = 2 * masses.shape[2]
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
            mine, head = at + 4 * g * row, h * group + g
            peaks[b, head, chunk] = soften_chunk(
                runs, mine, end - begin, False, address_of(totals[b, head]) + 4 * begin
            )
            to = address_of(masses[b, head]) + 2 * begin * size
            for i in range(0, (end - begin) * size, 16):
                store_upper(to + 2 * i, load_f32(mine + 4 * i))
        if count_up(finished, b * kv_heads + h) == chunks - 1:
            heads = slice(h * group, (h + 1) * group)
            tail_of_head(
                tag, full, rest, query[b, heads], block_ptr, table[b], h, kv_heads, n_sealed, length, holes[b],
                valid[b], block_size, scale, cap, tail[b, heads],
            )  # fmt: skip
            for g in range(group):
                head = h * group + g
                parts = group if mode == 1 else 1
                chunk_shares(totals[b, head], peaks[b, head], chunks, tail[b, head], n_sealed, parts, factors[b, head])
            # Whole: the sinks [low, high) and [late, n_blocks); drawn: those between.
            low = min(max(sink_lo[b], 0), n_blocks)
            high = min(max(sink_hi[b], low), n_blocks)
            late = min(n_sealed, max(low, n_sealed - recent))
            listed, weight, end_pair = pairs[b, h], weights[b, h], (length + 1) // 2
            count = _whole(low * size, min(high, late) * size, listed, weight, 0)
            if high < late:
                count = draw_head(
                    address_of(masses[b, h * group]), step, group, factors[b, heads], mode, CHUNK_BLOCKS * size,
                    high * size, late * size, tau, listed, weight, count, len(listed) - (end_pair - late * size),
                )  # fmt: skip
            count = _whole(late * size, end_pair, listed, weight, count)
            counts[b, h] = count
            add_to(tally, 0, count)
            add_to(tally, 1, 1)
        count_up(ticket, 1)
    hold(scores)


def draw_pairs(
    query: Array,
    digest: Digest,
    block_ptr: Array,
    table: Array,
    holes: Array,
    valid: Array,
    n_sealed: int,
    length: int,
    masses: Array,
    sink_lo: Array,
    sink_hi: Array,
    recent: int,
    pairs: Array,
    weights: Array,
    counts: Array,
    *,
    samples: int,
    join: str,
    block_size: int,
    scale: float,
    softcap: float | None,
    kv_dtype: torch.dtype,
    tally: Array | None = None,
) -> Launch:
    """Prepare the draw of pairs of consecutive tokens for each (row, KV head), in ascending order.

    Args:
        query: float32 [B, Hq, D], D a multiple of 16 up to 256.
        digest: digests with a score for each pair (`SubMeans`).
        block_ptr, table, holes, valid: as in `sparse_decode`.
        n_sealed: blocks 0..n_sealed-1 have digests.
        length: tokens in every row.
        masses: uint16 [B, Hq, N], N at least the sealed blocks' pairs rounded up to a multiple of 16: scratch.
        sink_lo, sink_hi, recent: as in `select_blocks`.
        pairs: int32 [B, Hkv, C], written up to the count: pair j is the tokens 2 · j and 2 · j + 1.
        weights: float32 [B, Hkv, C], written: log(τ / p) of a drawn pair, else 0.
        counts: int32 [B, Hkv], written.
        samples: 1 / τ.
        join: "max" or "mean".
        block_size, scale, softcap, kv_dtype: as in `sparse_decode`.
        tally: int64 [2] or None: the numbers of listed pairs and of lists are added to it.

    Raises:
        ValueError: an unknown join, a digest without pairs, or shapes that contradict each other or have no room.
        TypeError: an array of another dtype.
    """
    batch, query_heads, dim = query.shape
    kv_heads, room = pairs.shape[1:]
    group = group_size(query_heads, kv_heads)
    size = block_size // 2
    if join not in ("max", "mean"):
        raise ValueError(f"join {join!r} is not 'max' or 'mean'")
    if len(digest.runs) != size:
        raise ValueError(f"the digest has {len(digest.runs)} scores for blocks of {size} pairs")
    if samples < 1:
        raise ValueError(f"samples {samples} is not a positive number")
    require("query", query, F32, (batch, query_heads, dim))
    require("table", table, I32, (batch, table.shape[-1]))
    require("masses", masses, MASSES, (batch, query_heads, masses.shape[-1]))
    require("pairs", pairs, I32, (batch, kv_heads, room))
    require("weights", weights, F32, (batch, kv_heads, room))
    require("counts", counts, I32, (batch, kv_heads))
    require("sink_lo", sink_lo, I32, (batch,))
    require("sink_hi", sink_hi, I32, (batch,))
    tally = np.zeros(2, np.int64) if tally is None else tally
    require("tally", tally, I64, (2,))
    cost = check_digest(digest, query.shape, kv_heads, n_sealed)
    check_tail(block_ptr, holes, valid, table, dim, n_sealed, length, block_size)
    padded = -(-n_sealed // 16) * 16
    if not 0 <= n_sealed <= table.shape[1] or padded * size > masses.shape[2]:
        raise ValueError(f"n_sealed {n_sealed} exceeds table {table.shape} or masses {masses.shape}")
    n_blocks = -(-length // block_size)
    always = max([0, *(sink_hi - sink_lo).tolist()]) + recent + n_blocks - n_sealed
    least = min(always * size + most_pairs(samples, group), n_blocks * size)
    if recent < 0 or room < least:
        raise ValueError(f"pairs holds {room} entries; up to {least} may be drawn (recent {recent})")
    full, rest = head_tiles(group)
    chunks = max(1, -(-n_sealed // CHUNK_BLOCKS))
    peaks = np.empty((batch, query_heads, chunks), np.float32)
    totals, factors = np.empty((batch, query_heads, padded), np.float32), np.empty_like(peaks)
    finished, tail = np.zeros(batch * kv_heads, np.int64), np.empty((batch, query_heads), np.float32)
    args = (
        digest, tag_of(kv_dtype), full, rest, query, block_ptr, table, holes, valid, int(n_sealed), n_blocks,
        int(length), int(block_size), float(scale), cap_of(softcap), JOINS[join], 1.0 / samples, masses, totals, peaks,
        tail, factors, finished, sink_lo, sink_hi, int(recent), pairs, weights, counts,
        tally,
    )  # fmt: skip
    return Launch(draw_kernel, batch * kv_heads * chunks, args, cost, counters=finished)
