"""Attention weights that several queries of an append give to stored tokens (HGCA, section 3.2.2, "Re-evaluation").

`query_lse` computes the log-sum-exp of each query's scores, `weigh_tokens` then joins each token's weights over the
queries. Both stream the tokens, 128 for four queries at a time: no matrix of queries by tokens exists.

A row of these kernels is one query of one query head. The G * Q rows of a KV head are the Q queries of its first query
head, those of its second, and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hf_offload.cpu.kernels.block import STEP_TOKENS, clear_scores, soften_scores, softmax_step
from hf_offload.cpu.kernels.packed import spare_bytes
from hf_offload.cpu.kernels.parts import PART_TOKENS, PARTS, merge_masses
from hf_offload.cpu.kernels.record import HostBlocks, record_of, score_keys
from hf_offload.cpu.launch import F32, Array, Launch, borrowing, cap_of, group_size, jit, kernel, require
from hf_offload.cpu.memory import address_of, count_up, get, get_word, hold, next_task, put, put_word
from hf_offload.cpu.simd.convert import load_marks
from hf_offload.cpu.simd.vectors import MASKED, NOTHING, choose_less, exp, fma, load_f32, splat, store, vmax

_ROWS = 128  # rows of a task of `query_lse`
_TILE = (0, 0, 0, 0)  # rows in registers, see `launch.head_tiles`; always as many, so that one version is compiled
_NO_COEFFICIENT = np.empty(0, np.float32)


class Queries(NamedTuple):
    """Several queries a row, and the tokens that they score.

    A query sees the valid tokens up to its own position; one that is not a valid token itself sees none.

    Args:
        query: float32 [B, Hq, Q, D], D a multiple of 16 up to 256; query i stands at position start + i.
        kv_heads: heads of the stored tokens.
        start: position of the first query, the same in every row.
        first: the first token scored, a multiple of the block size; stop: the token after the last.
        scale, softcap: of the scores, as in `decode_attention`.
    """

    query: Array
    kv_heads: int
    start: int
    first: int
    stop: int
    scale: float
    softcap: Any


# --- scores of the rows of a KV head ---------------------------------------------------------------------------------


class _Tile(NamedTuple):
    """A thread's scratch for the scores of four rows with a step of tokens: addresses in one array.

    Args:
        rows: float32, the scaled rows; scores: of these, `stride` bytes apart; marks: of valid tokens, float32.
        records: int64, addresses of the step's records; picked: int64 [4], numbers of the rows; spare: of an unpacked
            record.
        width: tokens of a step.
    """

    rows: int
    scores: int
    marks: int
    records: int
    picked: int
    spare: int
    stride: int
    width: int


@jit
def _make_tile(pool: Any, dim: int) -> tuple[Array, Any]:
    """Scratch, and the array that holds it."""
    width = max(STEP_TOKENS, pool.block_size)
    scores, marks = 16 * dim, 16 * (dim + width)
    records = marks + 4 * width
    picked = records + 64 * -(-width // pool.block_size // 8)
    spare = picked + 64
    memory = np.empty((spare + spare_bytes(pool.packed, dim, pool.block_size)) // 4 + 16, np.float32)
    at = (address_of(memory) + 63) & ~63
    return memory, _Tile(at, at + scores, at + marks, at + records, at + picked, at + spare, 4 * width, width)


@jit
def _find_ends(ends: Array, first_row: int, queries: Any, valid: Array, skipped: int) -> None:
    """ends[row] = the token behind the last one that a row (from first_row on) weighs; 0 if its query is not valid."""
    for row in range(ends.shape[0]):
        position = queries.start + (first_row + row) % queries.query.shape[2]
        ends[row] = min(queries.stop, position + 1 - skipped) if valid[position] != 0 else 0


@jit
def _open_step(tile: Any, pool: Any, b: int, h: int, dim: int, begin: int, end: int) -> tuple[int, bool]:
    """Find the records of tokens begin..end-1 and which tokens are valid.

    Returns:
        The token behind the last valid one (`begin` if there is none), and whether any is not valid.
    """
    block_ptr, table, holes, valid, size = pool.block_ptr, pool.table[b], pool.holes[b], pool.valid[b], pool.block_size
    masked, record = False, 2 * size * dim * pool.tag.itemsize
    for i in range((end - begin + size - 1) // size):
        n = begin // size + i
        put_word(tile.records + 8 * i, record_of(block_ptr[table[n]], h, record, pool.packed))
        masked = masked or holes[n] != 0
    if masked:
        for token in range(0, end - begin, 16):
            store(tile.marks + 4 * token, load_marks(address_of(valid) + begin + token, end - begin - token))
        while end > begin and valid[end - 1] == 0:
            end -= 1
    return end, masked


@jit
def _pick_rows(tile: Any, ends: Array, row: int, begin: int, source: int, dim: int, scale: float) -> tuple[int, int]:
    """Write up to four scaled rows, from `row` on, that see tokens behind `begin`, and their numbers; fill up with 0.

    Returns:
        How many, and the row to go on with.
    """
    count = 0
    while row < ends.shape[0] and count < 4:
        if ends[row] > begin:
            put_word(tile.picked + 8 * count, row)
            for d in range(0, dim, 16):
                x = load_f32(source + 4 * (row * dim + d)) * splat(np.float32(scale))
                store(tile.rows + 4 * (count * dim + d), x)
            count += 1
        row += 1
    if count > 0:
        for address in range(tile.rows + 4 * count * dim, tile.rows + 16 * dim, 64):
            store(address, splat(np.float32(0.0)))
    return count, row


@jit
def _picked(tile: Any, i: int) -> int:
    return np.int64(get_word(tile.picked + 8 * i))  # type: ignore[return-value]


def _by_score_tiles(take: Callable[..., None]) -> Callable[..., None]:
    """Compile `over(tile, pool, queries, head, first_row, ends, low, high, *args)`, which scores rows of a KV head.

    It scores four rows at a time with the tokens low..high-1 that each of them sees, a step at a time, and calls
    `take(tile, begin, filled, padded, *args)`: with the step's first token; how many rows there are, whose numbers are
    in `tile.picked`; and the tokens scored, rounded up to 16. `head` is of all KV heads of all rows of the batch;
    `first_row` is the row of the first of `ends`, which are from `_find_ends`.
    """

    def over(
        tile: Any, pool: Any, queries: Any, head: int, first_row: int, ends: Array, low: int, high: int, *args: Any
    ) -> None:
        _, query_heads, count, dim = queries.query.shape
        size, scores, stride = pool.block_size, tile.scores, tile.stride
        b, h = head // queries.kv_heads, head % queries.kv_heads
        source = address_of(queries.query) + 4 * (head * (query_heads // queries.kv_heads * count) + first_row) * dim
        none, zero = splat(MASKED), splat(np.float32(0.0))
        for begin in range(low, high, tile.width):
            end, masked = _open_step(tile, pool, b, h, dim, begin, min(begin + tile.width, high))
            row = 0 if end > begin else len(ends)
            while row < len(ends):
                filled, row = _pick_rows(tile, ends, row, begin, source, dim, queries.scale)
                seen = 0
                for i in range(filled):
                    seen = max(seen, min(ends[_picked(tile, i)], end) - begin)
                padded = (seen + 15) & ~15
                for i in range((seen + size - 1) // size):
                    record: Any = np.int64(get_word(tile.records + 8 * i))
                    address = scores + 4 * i * size
                    score_keys(
                        _TILE, 0, pool.tag, record, 0, tile.rows, dim, size, address, stride, pool.packed, tile.spare
                    )
                if queries.softcap > 0.0:
                    soften_scores(4, scores, stride, padded, queries.softcap)
                if masked:
                    for token in range(0, padded, 16):
                        mark = load_f32(tile.marks + 4 * token)
                        for i in range(4):
                            address = scores + i * stride + 4 * token
                            store(address, choose_less(zero, mark, load_f32(address), none))
                for i in range(filled):
                    clear_scores(1, scores + i * stride, stride, min(ends[_picked(tile, i)] - begin, seen), padded)
                take(tile, begin, filled, padded, *args)

    return borrowing(over, inline=True)


# --- the kernels -----------------------------------------------------------------------------------------------------


@jit
def _add_masses(tile: Any, begin: int, filled: int, padded: int, state: int, peaks: int) -> None:
    """Take scores into the peaks and masses of a task's rows, at `state`; peaks: scratch for 12 float32."""
    for i in range(filled):
        put(peaks + 4 * i, get(state + 4 * _picked(tile, i)))
        put(peaks + 16 + 4 * i, get(state + 4 * (_ROWS + _picked(tile, i))))
    softmax_step(filled, tile.scores, tile.stride, padded, peaks, peaks + 16, peaks + 32)
    for i in range(filled):
        put(state + 4 * _picked(tile, i), get(peaks + 4 * i))
        put(state + 4 * (_ROWS + _picked(tile, i)), get(peaks + 16 + 4 * i))


_sum_masses = _by_score_tiles(_add_masses)


@kernel
def lse_kernel(
    ticket: Array, tasks: int, pool: Any, queries: Any, lse: Array, share: int, parts: int, partial: Array,
    finished: Array,
) -> None:  # fmt: skip
    """One task = up to 128 rows of one (row, KV head) and `share` tokens; the last one of the rows merges the parts."""
    batch, query_heads, count, dim = queries.query.shape
    rows = query_heads // queries.kv_heads * count
    runs = (rows + _ROWS - 1) // _ROWS
    memory, tile = _make_tile(pool, dim)
    limits, states = np.empty(_ROWS, np.int64), np.empty(12, np.float32)
    totals = lse.reshape(batch * queries.kv_heads, rows)
    peaks = address_of(states)
    partial_step = 4 * partial.shape[1]
    task = count_up(ticket, 0)
    while task < tasks:
        run, part = task // parts, task % parts
        head, first_row = run // runs, run % runs * _ROWS
        ends = limits[: min(_ROWS, rows - first_row)]
        _find_ends(ends, first_row, queries, pool.valid[head // queries.kv_heads], 0)
        state = address_of(partial) + task * partial_step
        for i in range(len(ends)):
            put(state + 4 * i, NOTHING)
            put(state + 4 * (_ROWS + i), np.float32(0.0))
        low = queries.first + part * share
        high = min(low + share, queries.stop)
        _sum_masses(tile, pool, queries, head, first_row, ends, low, high, state, peaks)
        if count_up(finished, run) == parts - 1:
            origin, merged = address_of(partial) + run * parts * partial_step, totals[head, first_row:][: len(ends)]
            merge_masses(origin, parts, partial_step, len(ends), 0, 4 * _ROWS, merged)
        task = next_task(ticket)
    hold(memory)
    hold(states)


@jit
def _add_weights(
    tile: Any, begin: int, filled: int, padded: int, count: int, lse: Array, coefficient: Array, joined: int,
    stride: int,
) -> None:  # fmt: skip
    """joined += coefficient * exp(scores - lse), or the larger of both.

    Args:
        count: queries of a head.
        lse: of the rows.
        joined: address of token 0 of the first query head; those of the next ones are `stride` bytes apart each.
    """
    largest = coefficient.shape[0] == 0
    for i in range(filled):
        row, scores = _picked(tile, i), tile.scores + i * tile.stride
        shift, factor = splat(lse[row]), splat(np.float32(1.0) if largest else coefficient[row % count])
        target = joined + row // count * stride + 4 * begin
        for token in range(0, padded, 16):
            weight, old = exp(load_f32(scores + 4 * token) - shift), load_f32(target + 4 * token)
            store(target + 4 * token, vmax(weight, old) if largest else fma(weight, factor, old))


_join_weights = _by_score_tiles(_add_weights)


@kernel
def weigh_kernel(
    ticket: Array, tasks: int, pool: Any, queries: Any, lse: Array, coefficient: Array, skipped: int, joined: Array,
    share: int, parts: int,
) -> None:  # fmt: skip
    """One task = up to `share` tokens of one (row, KV head)."""
    batch, query_heads, count, dim = queries.query.shape
    group = query_heads // queries.kv_heads
    rows, heads, tokens = group * count, batch * queries.kv_heads, joined.shape[2]
    memory, tile = _make_tile(pool, dim)
    ends, totals, sums = np.empty(rows, np.int64), lse.reshape(heads, rows), joined.reshape(heads, group, tokens)
    task = count_up(ticket, 0)
    while task < tasks:
        head, part = task // parts, task % parts
        _find_ends(ends, 0, queries, pool.valid[head // queries.kv_heads], skipped)
        for row in range(rows):
            if totals[head, row] == -np.inf:
                ends[row] = 0
        low = queries.first + part * share
        high = min(low + share, queries.stop)
        sums[head, :, low : low + (high - low + 15 & ~15)] = 0.0
        target, stride = address_of(joined) + 4 * head * group * tokens, 4 * tokens
        _join_weights(tile, pool, queries, head, 0, ends, low, high, count, totals[head], coefficient, target, stride)
        task = next_task(ticket)
    hold(memory)


# --- their launches --------------------------------------------------------------------------------------------------


def _check(pool: HostBlocks, queries: Queries, lse: Array) -> Queries:
    """Raise unless the pool covers the queries and their tokens; return the queries in the types of the kernels."""
    query, kv_heads, start, first, stop, scale, softcap = queries
    batch, query_heads, count, dim = query.shape
    valid, size = pool.valid, pool.block_size
    pool.check(batch, dim, 0)
    group_size(query_heads, kv_heads)
    require("query", query, F32, query.shape)
    require("lse", lse, F32, (batch, query_heads, count))
    covered = min(valid.shape[1], min(pool.holes.shape[1], pool.table.shape[1]) * size)
    if first % size or not 0 <= first <= stop <= covered:
        raise ValueError(
            f"tokens {first}..{stop} must begin with a block of {size}; table, holes and valid cover {covered}"
        )
    if count < 1 or not 0 <= start <= valid.shape[1] - count:
        raise ValueError(f"{count} queries from position {start} on: valid covers {valid.shape[1]} tokens")
    return Queries(query, int(kv_heads), int(start), int(first), int(stop), float(scale), cap_of(softcap) or 0.0)


def _cut(pool: HostBlocks, queries: Queries, parts: int) -> tuple[int, int, int]:
    """Cut the tokens into parts of whole steps, of which there are `parts` at most.

    The cut depends on shapes alone: results are the same on any number of threads.

    Returns:
        Tokens of a part; how many parts; and the bytes of keys that are read, most of them from the caches.
    """
    (batch, query_heads, count, dim), tokens = queries.query.shape, queries.stop - queries.first
    step = max(STEP_TOKENS, pool.block_size)
    share = max(1, -(-tokens // (parts * step))) * step
    return share, -(-tokens // share), batch * -(-query_heads * count // 4) * tokens * dim * pool.tag.itemsize


def query_lse(pool: HostBlocks, queries: Queries, lse: Array) -> Launch:
    """Prepare the log-sum-exp of each query's scores.

    Args:
        pool: the stored tokens.
        queries: the queries, and the tokens that they score.
        lse: float32 [B, Hq, Q], written: natural log; -inf where nothing is seen.

    Raises:
        ValueError: shapes that contradict each other, a memory layout or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    queries = _check(pool, queries, lse)
    batch, query_heads, count, _ = queries.query.shape
    runs = batch * queries.kv_heads * -(-(query_heads // queries.kv_heads * count) // _ROWS)
    most = max(1, min(-(-(queries.stop - queries.first) // PART_TOKENS), PARTS // runs))
    share, parts, cost = _cut(pool, queries, most)
    parts = max(1, parts)
    partial, finished = np.empty((runs * parts, 3 * _ROWS), np.float32), np.zeros(runs, np.int64)
    args = (pool, queries, lse, share, parts, partial, finished)
    return Launch(lse_kernel, runs * parts, args, cost, counters=finished)


def weigh_tokens(
    pool: HostBlocks, queries: Queries, lse: Array, coefficient: Array | None, joined: Array, *, skipped: int = 0
) -> Launch:
    """Prepare joining the attention weights of each token under several queries.

    The weight of a token is w_i = exp(score - lse) under query i, 0 where the query does not see it or skips it.
    With coefficients they are joined to sum_i coefficient_i * w_i, without to max_i w_i.

    Args:
        pool, queries: as in `query_lse`.
        lse: float32 [B, Hq, Q], natural log of each query's sum of exp(score), no smaller than any score of its; a
            query with -inf is left out.
        coefficient: float32 [Q] or None.
        joined: float32 [B, Hq, T'], T' at least `stop` + 15, written: 0 where a token is not valid. Up to 15 tokens
            from `stop` on are overwritten.
        skipped: how many of the newest tokens that a query sees, itself among them, get no weight from it.

    Raises:
        ValueError: shapes that contradict each other, a memory layout or a size that the kernel does not cover.
        TypeError: an array of another dtype.
    """
    queries = _check(pool, queries, lse)
    batch, query_heads, count, _ = queries.query.shape
    require("joined", joined, F32, (batch, query_heads, joined.shape[-1]))
    if coefficient is None:
        coefficient = _NO_COEFFICIENT
    else:
        require("coefficient", coefficient, F32, (count,))
    if joined.shape[2] < queries.stop + 15:
        raise ValueError(f"joined holds {joined.shape[2]} tokens, fewer than 15 behind stop {queries.stop}")
    if skipped < 0:
        raise ValueError(f"skipped must not be negative, got {skipped}")
    heads = batch * queries.kv_heads
    share, parts, cost = _cut(pool, queries, max(1, PARTS // heads))
    args = (pool, queries, lse, coefficient, int(skipped), joined, share, parts)
    return Launch(weigh_kernel, heads * parts, args, cost)
