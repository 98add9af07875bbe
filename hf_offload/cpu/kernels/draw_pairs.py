"""Pairs of keys drawn by their estimated share of the attention: Poisson sampling with fixed thresholds.

p is a pair's share of a query head's attention, by its digest; of the heads of a group the largest (`join="max"`) or
the mean. With x = p · samples and a threshold u between 0 and 1 for each pair (`Thresholds`):

    x >= 1: the pair is attended.
    u < x < 1: it is attended, and log(1 / x) is added to its two scores, so that it stands for 1 / samples.

An outlier, a pair that its digest misses by far (`seal.OUTLIER`), is attended like one of x >= 1; in each chunk at most
one pair in 64.

If thresholds were random, every pair would be attended with probability min(x, 1), and the weighted sums would have no
bias, whatever the digest's errors. They are fixed, and lie evenly between 0 and 1 for 256 consecutive pairs, and for
every second, third, … one of them: about as many are drawn as x promises, even of a text that repeats itself. Each pair
is decided by itself: rounding moves the decision of pairs near their threshold alone. The others are listed whatever
their shares (`Always`), or attended elsewhere (`Resident`).

Tasks are chunks of blocks, as in `block_topk.choose_blocks`; the thread that finishes the last one of a (row, KV head)
draws. Between the two a pair's mass is kept in 16 bits for each query head.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_offload.cpu.kernels.digest_scores import (
    CHUNK_BLOCKS,
    JOINS,
    SPARE_BLOCKS,
    Digest,
    check_digest,
    chunk_shares,
    join_chunks,
    soften_chunk,
    tail_of_head,
    write_scores,
)
from hf_offload.cpu.kernels.record import HostBlocks
from hf_offload.cpu.kernels.submean_scores import find_outliers
from hf_offload.cpu.launch import (
    F32,
    I32,
    I64,
    TAGS,
    U8,
    U32,
    Array,
    Launch,
    cap_of,
    group_size,
    head_tiles,
    jit,
    kernel,
    require,
)
from hf_offload.cpu.memory import add_to, address_of, count_up, hold, next_task
from hf_offload.cpu.simd.vectors import (
    exceeds,
    get_upper,
    load,
    load_f32,
    log,
    lowest_bit,
    splat,
    store,
    store_upper,
    vmax,
)

MASSES = np.dtype(np.uint16)
"""Of kept masses: bfloat16, as bits."""
_SHORT = TAGS[torch.bfloat16]
OUTLIERS = 64
"""At most one pair in this number is attended as an outlier, rounded up; a full chunk has a multiple of it."""
_GOLDEN = 0x9E3779B9
_order = np.empty(0, np.uint32)


def most_pairs(samples: int, group: int, pairs: int) -> int:
    """The largest number of pairs that a KV head can draw of `pairs`.

    Of 256 consecutive pairs the thresholds are 1 / 256 apart, so that the k-th smallest of N is at least
    (k - N / 64 - 16) / N; those of drawn pairs add up to less than `group * samples`, within rounding.
    """
    even = math.isqrt(2 * 65 * group * samples * pairs // 64)
    return min(pairs, even + pairs // 64 + 16 + -(-pairs // OUTLIERS))


def order_of(pairs: int) -> Array:
    """The part of thresholds that a pair's number alone decides, uint32 [`pairs` or more].

    256 consecutive pairs are a lattice: 97 is a multiplier of which every stride up to 28 is spread out, too. Each 256
    have a hash of their own, so that strides do not add up over a long text.
    """
    global _order
    order = _order  # another thread may replace it
    if len(order) < pairs:
        i = np.arange(max(2 * pairs, 1 << 12), dtype=np.uint32)
        _order = order = i * np.uint32(97 << 24) + _mix(i >> 8)
    return order


def _mix(x: Any) -> Any:
    """A hash of uint32, with the primes of xxHash32."""
    x = x * np.uint32(0x9E3779B1)
    x = (x ^ (x >> 15)) * np.uint32(0x85EBCA77)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE3D)
    return x ^ (x >> 16)


def kept_masses(n_sealed: int, size: int) -> int:
    """Entries of a row of kept masses: of all pairs, and what the last vector reads beyond."""
    return (-(-n_sealed // 16) * 16) * size + 16


class PairLists(NamedTuple):
    """Lists of pairs, as a draw writes them and attention reads them.

    Args:
        pairs: int32 [B, Hkv, C]; pair j is the tokens 2 · j and 2 · j + 1.
        weights: float32 [B, Hkv, C]: log(1 / x) of a drawn pair, else 0.
        counts: int32 [B, Hkv].
    """

    pairs: Array
    weights: Array
    counts: Array

    @classmethod
    def of(cls, batch: int, kv_heads: int, capacity: int) -> PairLists:
        """Empty lists with a capacity of `capacity` pairs."""
        shape = batch, kv_heads, capacity
        return cls(np.empty(shape, np.int32), np.empty(shape, np.float32), np.zeros(shape[:2], np.int32))

    @classmethod
    def all_of(cls, batch: int, kv_heads: int, pairs: int) -> PairLists:
        """Lists of the first `pairs` pairs, of which none is drawn."""
        lists = cls.of(batch, kv_heads, pairs)
        lists.pairs[:], lists.weights[:], lists.counts[:] = np.arange(pairs), 0, pairs
        return lists


class Thresholds(NamedTuple):
    """What the thresholds of a step's pairs depend on: u = ((v >> 9) + 1/2) / 2 ** 23, in uint32

        v = order[j - f // 2] + 0x9E3779B9 · (length - 1 - f) + layer

    for pair j of a row whose first valid token is f. Neither padding nor what is resident plays a part.

    Args:
        order: uint32 [N], `order_of`, for all pairs and 16 more.
        first: int32 [B], f.
        layer: a hash of the layer's index.
        limits: int32 [2], of which the first is the number of tokens in a row with the query's when the launch runs; or
            [0]: the launch's `length` is that number.
    """

    order: Array
    first: Array
    layer: int
    limits: Array

    @classmethod
    def of(cls, layer: int, first: Array, pairs: int, limits: Array | None = None) -> Thresholds:
        """The thresholds of the layer of an index, for at most `pairs` pairs; `limits` None: `length` is known."""
        mixed = int(_mix(np.array([layer + 1], np.uint32))[0])
        return cls(order_of(pairs + 16), first, mixed, _NO_LIMITS if limits is None else limits)


_NO_LIMITS = np.empty(0, np.int32)


class Always(NamedTuple):
    """Pairs that are listed whatever their shares, besides those without digest.

    Args:
        sink_lo, sink_hi: int32 [B], the first such pair of each row's sinks, and their end.
        recent: the newest pairs with digests.
    """

    sink_lo: Array
    sink_hi: Array
    recent: int


class Resident(NamedTuple):
    """Blocks that are attended elsewhere.

    Args:
        blocks: int32 [B, Hkv, R], ascending. The last block of a list has no digest, all blocks before that one have.
        counts: int32 [B, Hkv], at least 1.
        score: float32 [B, Hkv, N], written: the share of each block, as `choose_blocks` writes it.
        portion: float32 [B, Hq], written: the share of each head's attention that is not attended elsewhere.
    """

    blocks: Array
    counts: Array
    score: Array
    portion: Array


class Kept(NamedTuple):
    """Single tokens that are attended elsewhere.

    Args:
        marks: uint8 [B, Hkv, T], 1 for such a token. A pair of two of them is not drawn.
        counts: int64 [B · Hkv], how many there are.
    """

    marks: Array
    counts: Array


class Rule(NamedTuple):
    """Which pairs are drawn.

    Args:
        mode: a value of `JOINS`: of a group's heads the largest share counts, or their mean.
        samples: x of a share of 1.
        thresholds: of the step.
    """

    mode: int
    samples: float
    thresholds: Thresholds


class Estimates(NamedTuple):
    """Scratch of a draw.

    Args:
        masses: uint16 [B, Hq, M], of pairs, relative to their chunk's peak.
        totals: float32 [B, Hq, N], of blocks.
        peaks, factors: float32 [B, Hq, chunks]; factors turn a chunk's masses into shares.
        tail: float32 [B, Hq], log mass of the tokens without digest.
    """

    masses: Array
    totals: Array
    peaks: Array
    factors: Array
    tail: Array


@jit
def _list_all(first: int, last: int, pairs: Array, weights: Array, count: int) -> int:
    """List pairs first..last-1, whose x is more than 1; return the list's new length."""
    for i in range(first, last):
        pairs[count], weights[count] = i, np.float32(2.0)
        count += 1
    return count


@jit
def _leave_out(
    marks: Array, masses: Array, factors: Array, each: int, first: int, last: int, portion: Array
) -> None:  # fmt: skip
    """Set the masses [G, N] of the pairs first..last-1 of which both tokens are marked to 0; take them off `portion`.

    Args:
        factors, each: as in `draw_head`; portion: [G].
    """
    for i in range(first, last):
        if marks[2 * i] != 0 and marks[2 * i + 1] != 0:
            for g in range(len(portion)):
                portion[g] -= get_upper(address_of(masses[g]) + 2 * i) * factors[g, i // each]
                masses[g, i] = 0
    hold(masses)


@jit
def draw_head(
    masses: Array, factors: Array, mode: int, samples: float, each: int, first: int, last: int, order: Array,
    begins: int, shift: int, pairs: Array, weights: Array, count: int, limit: int,
) -> int:  # fmt: skip
    """List the drawn ones of the pairs first..last-1 of one (row, KV head), with x in place of their weights.

    Args:
        masses: uint16 [G, M]; read up to 15 pairs beyond `last`. factors: float32 [G, chunks]. Both as in `Estimates`.
        mode, samples: as in `Rule`.
        each: pairs of a chunk.
        order: uint32, `Thresholds.order`; begins: the pair that its first entry belongs to; shift: what is added.
        pairs: int32 [C], weights: float32 [C]: the list, written from `count` on.
        limit: the list is no longer.

    Returns:
        The list's new length; more than `limit` if there was no room for all.
    """
    first = max(first, begins)
    if first >= last:  # padding alone
        return count
    shares = np.empty(min(each, last - first) + 16, np.float32)
    for chunk in range(first // each, (last + each - 1) // each):
        begin, end = max(first, chunk * each), min(last, (chunk + 1) * each)
        size, ordered = 4 * (end - begin), address_of(order) + 4 * (begin - begins)
        for g in range(len(factors)):
            factor, head = splat(factors[g, chunk] * np.float32(samples)), address_of(masses[g]) + 2 * begin
            for i in range(0, size, 64):
                shared = load(_SHORT, head + i // 2) * factor
                if g > 0:
                    others = load_f32(address_of(shares) + i)
                    shared = vmax(others, shared) if mode == 0 else others + shared
                store(address_of(shares) + i, shared)
        for i in range(end - begin, (end - begin + 15) & ~15):
            shares[i] = np.float32(0.0)
        for i in range(0, size, 64):
            hits = exceeds(load_f32(address_of(shares) + i), ordered + i, shift)
            while hits != 0:
                at = i // 4 + lowest_bit(hits)
                hits &= hits - 1
                if count < limit:
                    pairs[count], weights[count] = begin + at, shares[at]
                count += 1
    hold(shares)
    hold(order)
    hold(masses)
    return count


@jit
def finish_weights(weights: Array, count: int) -> None:
    """Turn x into log weights: log(1 / x), 0 where x is at least 1."""
    zero, address = splat(np.float32(0.0)), address_of(weights)
    whole = count & ~15
    for i in range(0, 4 * whole, 64):
        store(address + i, vmax(zero - log(load_f32(address + i)), zero))
    for i in range(whole, count):
        weights[i] = max(np.float32(-math.log(weights[i])), np.float32(0.0))
    hold(weights)


@jit
def _draw_lists(
    rule: Any, estimates: Any, always: Any, resident: Any, kept: Any, b: int, h: int, sealed: int, size: int,
    length: int, lists: Any, tally: Array,
) -> None:  # fmt: skip
    """Draw for one (row, KV head), whose chunks all have masses and factors; arguments as in `draw_kernel`.

    Args:
        sealed: blocks with digests; size: pairs of a block.
    """
    kv_heads, thresholds, mode = lists.counts.shape[1], rule.thresholds, rule.mode
    group, each = estimates.masses.shape[1] // kv_heads, CHUNK_BLOCKS * size
    heads = slice(h * group, (h + 1) * group)
    masses, factors = estimates.masses[b, heads], estimates.factors[b, heads]
    totals, portion = estimates.totals[b, heads], np.zeros(group, np.float32)
    listed, weights = lists.pairs[b, h], lists.weights[b, h]
    tokens: Any = length if len(thresholds.limits) == 0 else np.int64(thresholds.limits[0])
    begins: Any = np.int64(thresholds.first[b]) // 2
    shift: Any = _GOLDEN * (tokens - 1 - thresholds.first[b]) + thresholds.layer
    count, limit, gaps = 0, len(listed), 1
    start, stop, last = 0, 0, (length + 1) // 2
    if always is not None:  # listed: the pairs of the sinks [low, start) and [stop, last); drawn: those between
        low = min(max(always.sink_lo[b], 0), last)
        start = min(max(always.sink_hi[b], low), last)
        stop = min(sealed * size, max(low, sealed * size - always.recent))
        count = _list_all(low, min(start, stop), listed, weights, count)
        limit -= last - stop
    if resident is not None:
        gaps = resident.counts[b, h]
    for i in range(gaps):
        if resident is not None:
            block: Any = np.int64(resident.blocks[b, h, i])
            stop = min(block, sealed) * size
            for n in range(start // size, stop // size):
                for g in range(group):
                    portion[g] += totals[g, n] * factors[g, n // CHUNK_BLOCKS]
        if kept is not None:
            _leave_out(kept.marks[b, h], masses, factors, each, start, stop, portion)
        if start < stop:
            count = draw_head(
                masses, factors, mode, rule.samples, each, start, stop, thresholds.order, begins, shift, listed,
                weights, count, limit,
            )  # fmt: skip
        if resident is not None:
            start = stop + size
    add_to(tally, 1, 1)
    add_to(tally, 3, max(count - limit, 0))
    count = min(count, limit)
    if always is not None:
        count = _list_all(stop, last, listed, weights, count)
        add_to(tally, 0, min(2 * count, length))
        add_to(tally, 2, length)
    if resident is not None:
        fits: Any = (sealed + 1) * 2 * size
        missing: Any = fits - length if length > 0 else 0  # of the unsealed block, if that is known
        elsewhere: Any = np.int64(resident.counts[b, h]) * 2 * size - missing
        if kept is not None:
            elsewhere += kept.counts[b * kv_heads + h]
            for i in range(count):  # of these pairs one token at most
                elsewhere -= kept.marks[b, h, 2 * listed[i]] | kept.marks[b, h, 2 * listed[i] + 1]
        resident.portion[b, heads] = portion * np.float32(group if mode == 1 else 1)
        peaks, tail = estimates.peaks[b, heads], estimates.tail[b, heads]
        join_chunks(totals, peaks, tail, sealed, mode, resident.score[b, h])
        add_to(tally, 0, 2 * count + elsewhere)
        add_to(tally, 2, fits - missing)
    finish_weights(weights, count)
    lists.counts[b, h] = count


@kernel
def draw_kernel(
    ticket: Array,
    tasks: int,
    digest: Any,
    full: Any,
    rest: Any,
    query: Array,
    table: Array,
    n_sealed: int,
    length: int,
    scale: float,
    cap: Any,
    rule: Any,
    estimates: Any,
    finished: Array,
    unsealed: Any,
    always: Any,
    resident: Any,
    kept: Any,
    lists: Any,
    tally: Array,
) -> None:
    """One task = one (row, KV head, up to 128 blocks). Exactly one of `always` and `resident` is there."""
    batch, kv_heads = lists.counts.shape
    group = query.shape[1] // kv_heads
    chunks = tasks // (batch * kv_heads)
    runs, masses, totals, peaks = digest.runs, estimates.masses, estimates.totals, estimates.peaks
    size = len(runs)
    row = (min(CHUNK_BLOCKS, n_sealed) + SPARE_BLOCKS) * size
    scores = np.empty(group * row, np.float32)
    task = count_up(ticket, 0)
    while task < tasks:
        b, chunk, h = task // (chunks * kv_heads), task // kv_heads % chunks, task % kv_heads
        sealed: Any = n_sealed
        if resident is not None:  # the host does not know how far the device is
            sealed = min(n_sealed, np.int64(resident.blocks[b, h, resident.counts[b, h] - 1]))
        begin = chunk * CHUNK_BLOCKS
        end = max(min(begin + CHUNK_BLOCKS, sealed), begin)
        reach, at = min(end + CHUNK_BLOCKS, sealed), address_of(scores)
        if begin < end:
            write_scores(digest, full, rest, query, group, table, b, h, scale, cap, begin, end, reach, at, 4 * row)
        for head in range(h * group, (h + 1) * group):
            masses_of_head = at + 4 * (head - h * group) * row
            peaks[b, head, chunk] = soften_chunk(
                runs, masses_of_head, end - begin, False, address_of(totals[b, head]) + 4 * begin
            )
            to = address_of(masses[b, head]) + 2 * begin * size
            for i in range(0, (end - begin) * size, 16):
                store_upper(to + 2 * i, load_f32(masses_of_head + 4 * i))
        marks = None if kept is None else kept.marks[b, h]
        most = ((end - begin) * size + OUTLIERS - 1) // OUTLIERS
        find_outliers(digest, table[b], h, begin, end, marks, most, masses[b, h * group])
        if count_up(finished, b * kv_heads + h) == chunks - 1:
            heads, tail = slice(h * group, (h + 1) * group), estimates.tail
            if unsealed is not None:
                tail_of_head(
                    unsealed, full, rest, query[b, heads], b, h, kv_heads, sealed, length, scale, cap, tail[b, heads]
                )  # fmt: skip
            for head in range(h * group, (h + 1) * group):
                parts, factors = group if rule.mode == 1 else 1, estimates.factors[b, head]
                chunk_shares(totals[b, head], peaks[b, head], chunks, tail[b, head], sealed, parts, factors)
            _draw_lists(rule, estimates, always, resident, kept, b, h, sealed, size, length, lists, tally)
        task = next_task(ticket)
    hold(scores)


def draw_pairs(
    query: Array,
    digest: Digest,
    table: Array,
    listed: Always | Resident,
    thresholds: Thresholds,
    masses: Array,
    lists: PairLists,
    *,
    n_sealed: int,
    length: int,
    samples: int,
    join: str,
    scale: float,
    softcap: float | None,
    unsealed: HostBlocks | None = None,
    tail: Array | None = None,
    kept: Kept | None = None,
    tally: Array | None = None,
) -> Launch:
    """Prepare the draw of pairs of consecutive tokens for each (row, KV head), in ascending order.

    Args:
        query: float32 [B, Hq, D], D a multiple of 16 up to 256.
        digest: digests with a score for each pair (`SubMeans`).
        table: int32 [B, N], physical block of each logical one.
        listed: the pairs that are listed whatever their shares, or the blocks that are attended elsewhere.
        thresholds: of the step. With `Always` their `limits` are empty.
        masses: uint16 [B, Hq, M], M at least `kept_masses(n_sealed, S)`, S the pairs of a block: scratch.
        lists: written.
        n_sealed: blocks 0..n_sealed-1 have digests. With `Resident` the most that have any: how many there are is read
            from the lists of resident blocks when the launch runs.
        length: tokens in every row, with the query's; 0 where `tail` and the thresholds' limits are given.
        samples: a pair with a share of 1 / samples is always listed.
        join: "max" or "mean".
        scale, softcap: as in `decode_attention`.
        unsealed: the rows' blocks, of which those without digest give the tail; None: `tail` is given.
        tail: float32 [B, Hq], log mass of the tokens without digest.
        kept: single tokens that are attended elsewhere; with `Resident`.
        tally: int64 [4] or None: added to it are the numbers of listed tokens, of lists, of tokens in their rows, and
            of pairs for which a list had no room, which is always 0. What is attended elsewhere counts as listed.

    Raises:
        ValueError: an unknown join, a digest without pairs, or shapes that contradict each other or have no room.
        TypeError: an array of another dtype.
    """
    (batch, query_heads, dim), (kv_heads, capacity), size = query.shape, lists.pairs.shape[1:], len(digest.runs)
    group, heads, per_head = group_size(query_heads, kv_heads), (batch, query_heads), (batch, kv_heads)
    if join not in ("max", "mean"):
        raise ValueError(f"join {join!r} is not 'max' or 'mean'")
    if size < 2:
        raise ValueError("the digest has one score for a block; pairs need a digest with a score for each")
    if samples < 1:
        raise ValueError(f"samples {samples} is not a positive number")
    if (unsealed is None) == (tail is None):
        raise ValueError("one of unsealed and tail gives the mass of the tokens without digest; pass one of them")
    always, resident = (listed, None) if isinstance(listed, Always) else (None, listed)
    most = n_sealed * size
    if always is not None:
        assert unsealed is not None, "with one memory"
        require("sink_lo", always.sink_lo, I32, (batch,))
        require("sink_hi", always.sink_hi, I32, (batch,))
        if always.recent < 0:
            raise ValueError(f"recent {always.recent} is negative")
        most = -(-length // unsealed.block_size) * size
        sure = max([0, *(always.sink_hi - always.sink_lo).tolist()]) + always.recent + most - n_sealed * size
    if resident is not None:
        require("resident.blocks", resident.blocks, I32, (*per_head, resident.blocks.shape[-1]))
        require("resident.counts", resident.counts, I32, per_head)
        require("resident.score", resident.score, F32, (*per_head, resident.score.shape[-1]))
        require("resident.portion", resident.portion, F32, heads)
        if resident.score.shape[2] < -(-n_sealed // 16) * 16:
            raise ValueError(f"resident.score {resident.score.shape} has no room for {n_sealed} blocks, in sixteens")
        sure = 0
    least = min(sure + most_pairs(samples, group, n_sealed * size), most)
    if capacity < least:
        raise ValueError(f"pairs holds {capacity} entries; up to {least} may be drawn")
    require("query", query, F32, (batch, query_heads, dim))
    require("table", table, I32, (batch, table.shape[-1]))
    require("masses", masses, MASSES, (*heads, masses.shape[-1]))
    require("pairs", lists.pairs, I32, (*per_head, capacity))
    require("weights", lists.weights, F32, (*per_head, capacity))
    require("counts", lists.counts, I32, per_head)
    require("thresholds.order", thresholds.order, U32, (max(n_sealed * size + 16, len(thresholds.order)),))
    require("thresholds.first", thresholds.first, I32, (batch,))
    require("thresholds.limits", thresholds.limits, I32, (2 if len(thresholds.limits) else 0,))
    tail = np.empty(heads, np.float32) if tail is None else tail
    require("tail", tail, F32, heads)
    tally = np.zeros(4, np.int64) if tally is None else tally
    require("tally", tally, I64, (4,))
    if kept is not None:
        require("kept.marks", kept.marks, U8, (*per_head, kept.marks.shape[-1]))
        require("kept.counts", kept.counts, I64, (batch * kv_heads,))
    cost = check_digest(digest, query.shape, kv_heads, n_sealed)
    if unsealed is not None:
        unsealed.check(batch, dim, length)
        unsealed = unsealed._replace(packed=None)  # blocks without digest are not packed: one kernel serves all pools
        if size != unsealed.block_size // 2:
            raise ValueError(f"the digest has {size} scores for blocks of {unsealed.block_size // 2} pairs")
    if not 0 <= n_sealed <= table.shape[1] or kept_masses(n_sealed, size) > masses.shape[2]:
        raise ValueError(f"n_sealed {n_sealed} exceeds table {table.shape} or masses {masses.shape}")
    chunks, padded = max(1, -(-n_sealed // CHUNK_BLOCKS)), -(-n_sealed // 16) * 16
    totals, (peaks, factors) = np.empty((*heads, padded), np.float32), np.empty((2, *heads, chunks), np.float32)
    finished = np.zeros(batch * kv_heads, np.int64)
    args = (
        digest, *head_tiles(group), query, table, int(n_sealed), int(length), float(scale), cap_of(softcap),
        Rule(JOINS[join], float(samples), thresholds), Estimates(masses, totals, peaks, factors, tail), finished,
        unsealed, always, resident, kept, lists, tally,
    )  # fmt: skip
    return Launch(draw_kernel, batch * kv_heads * chunks, args, cost, counters=finished)
