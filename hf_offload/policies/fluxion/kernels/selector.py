"""The granularity-budget selector in one launch: how coarse, how many, and which blocks each query head takes.

The query heads of a KV head share a granularity: how many neighbouring blocks make a run. Each head takes its best runs
by its own scores, and the KV head attends their union. Digests are those of single blocks; a run's score is joined from
its blocks' scores.
Source: Fluxion, Eq. 1 (budgets), Eq. 3 and section 5.3 (granularity), section 6.2 (order of tasks).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from hf_offload.cpu.kernels.block_topk import SPARE, clear_marks, copy_scores, list_marked, mark_best
from hf_offload.cpu.kernels.digest_scores import (
    CHUNK_BLOCKS,
    SPARE_BLOCKS,
    Digest,
    check_digest,
    soften_chunk,
    write_scores,
)
from hf_offload.cpu.launch import (
    F32,
    I32,
    U8,
    Array,
    Launch,
    cap_of,
    group_size,
    head_tiles,
    jit,
    jit_for_python,
    kernel,
    require,
)
from hf_offload.cpu.memory import address_of, count_up, get, next_task, put
from hf_offload.cpu.simd.vectors import choose_less, exp, lane_max, load_f32, splat, store, vmax

_LOWEST = np.float32(-3.4e38)  # only -inf is smaller
_FLOOR = np.float32(-80.0)  # masses so far below the best run are alike
_ALMOST = 1.0 - 1e-6  # 0.05 in float32 is slightly more, but of 20 blocks it is one, not two
TALLIES = 8
"""How many numbers `tally` counts before those of each granularity."""


# --- budgets and granularity (Eq. 1, Eq. 3) --------------------------------------------------------------------------


class Budgets(NamedTuple):
    """Predicted properties of every query head, and the terms of V(blk) (Eq. 1 and 3).

    Args:
        budget0, slope: float32 [B, Hq], of Eq. 1: share = budget0 + slope * log2(tokens of a run).
        streaming: uint8 [B, Hq], 1: the head attends no host tokens.
        granularities: int32 [n], blocks of a run to choose from.
        block_size: tokens a block.
        digest_bytes: of a KV head's digest of a block; block_bytes: of its keys and values in one.
    """

    budget0: Array
    slope: Array
    streaming: Array
    granularities: Array
    block_size: int
    digest_bytes: float
    block_bytes: float


class Chosen(NamedTuple):
    """A choice of the host's blocks, those of first..end-1 of each row, cut into runs from the first on.

    Args:
        first: int32 [B].
        end: the same in every row.
        spans: int32 [B, Hkv], blocks of a run, 0 where no head has a budget.
        runs: int32 [B, Hq], runs that each head took (of those with valid tokens, at most).
        blocks: int32 [B, Hkv, C], C at least `end`, ascending, up to the count.
        counts: int32 [B, Hkv].
    """

    first: Array
    end: int
    spans: Array
    runs: Array
    blocks: Array
    counts: Array

    def check(self, batch: int) -> None:
        """Raise unless the arrays fit one another, and rows as many as `batch`."""
        require("first", self.first, I32, (batch,))
        require("spans", self.spans, I32, (batch, self.spans.shape[-1]))
        require("runs", self.runs, I32, (batch, self.runs.shape[-1]))
        require("blocks", self.blocks, I32, (*self.spans.shape, self.blocks.shape[-1]))
        require("counts", self.counts, I32, self.spans.shape)


@jit_for_python
def budget_of(budget0: float, slope: float, streams: int, tokens: float) -> float:
    """bgt(blk), the share of the host's tokens that a query head takes in runs of `tokens` (Eq. 1), within [0, 1].

    NaN becomes 1: the head attends everything, and what made its prediction NaN shows in the output.
    """
    if streams:
        return 0.0
    share = float(budget0) + float(slope) * math.log2(tokens)
    return max(share, 0.0) if share < 1.0 else 1.0


@jit
def sum_budgets(budgets: Any, b: int, h: int, group: int, span: int) -> float:
    """The sum of the budgets of a KV head's query heads in runs of `span` blocks."""
    total, tokens = 0.0, float(span * budgets.block_size)
    for g in range(h * group, (h + 1) * group):
        total += budget_of(budgets.budget0[b, g], budgets.slope[b, g], budgets.streaming[b, g], tokens)
    return total


@jit
def choose_granularity(budgets: Any, b: int, h: int, group: int) -> int:
    """Return the blocks of a run with the least V(blk) (Eq. 3), or 0 if all heads stream or have a budget of 0.

    For each of the host's blocks, V(blk) = digest_bytes / span + block_bytes * (sum of the heads' budgets); of equal
    values the first wins. The first term stands for the work of choosing among more runs: the kernel always reads the
    digests of single blocks.
    """
    best, least = 0, np.inf
    for span in budgets.granularities:
        total = sum_budgets(budgets, b, h, group, span)
        volume = budgets.digest_bytes / float(span) + budgets.block_bytes * total
        if volume < least:
            best, least = int(span) if total > 0.0 else 0, volume
    return best


@jit_for_python
def runs_wanted(budget: float, blocks: int, span: int) -> int:
    """Number of runs that hold a share of the blocks, rounded up."""
    return min(math.ceil(budget * blocks / span * _ALMOST), (blocks + span - 1) // span)


@jit_for_python
def rank_tasks(budgets: Any, first: Array, end: int, spans: Array, volumes: Array, order: Array) -> int:
    """Find the tasks, (row, KV head) pairs with a budget, and order them by V(blk), largest first; return how many.

    Args:
        budgets: of all heads.
        first: int32 [B], the host's blocks of a row are first..end-1.
        spans: int32 [B, Hkv], written: blocks of a run, 0 where no head has a budget.
        volumes: float64 [B * Hkv], written: bytes that a pair reads, the digests of all its blocks and each head's
            budget of keys and values; 0 for a pair without a budget.
        order: int32 [B * Hkv], written up to the number returned: row * Hkv + KV head; of equal ones the first.
    """
    batch, kv_heads = spans.shape
    group, ranked = budgets.budget0.shape[1] // kv_heads, 0
    for line in range(batch * kv_heads):
        b, h = line // kv_heads, line % kv_heads
        span = choose_granularity(budgets, b, h, group)
        blocks = end - min(max(first[b], 0), end)
        spans[b, h], volumes[line] = span, 0.0
        if not span or not blocks:
            continue
        total = sum_budgets(budgets, b, h, group, span)
        volumes[line] = (budgets.digest_bytes + budgets.block_bytes * total) * blocks
        rank = ranked
        while rank > 0 and volumes[order[rank - 1]] < volumes[line]:
            order[rank] = order[rank - 1]
            rank -= 1
        order[rank] = line
        ranked += 1
    return ranked


@jit_for_python
def count_runs(budgets: Any, chosen: Any, b: int, h: int, span: int) -> int:
    """Write the runs of `span` blocks that each query head of KV head h takes; return the host's first block.

    With a span of 0 no head has a budget.
    """
    runs, low = chosen.runs, min(max(chosen.first[b], 0), chosen.end)
    group, blocks, tokens = runs.shape[1] // chosen.counts.shape[1], chosen.end - low, float(span * budgets.block_size)
    for g in range(h * group, (h + 1) * group):
        runs[b, g] = 0
        if span and blocks > 0:
            budget = budget_of(budgets.budget0[b, g], budgets.slope[b, g], budgets.streaming[b, g], tokens)
            runs[b, g] = runs_wanted(budget, blocks, span)
    return int(low)


# --- the choice of blocks --------------------------------------------------------------------------------------------


@jit
def _join_runs(masses: Array, blocks: int, span: int, sums: bool, score: Array) -> int:
    """Write the scores of runs of `span` blocks, -inf for those without a valid token; their number.

    Args:
        masses: of all blocks, as `copy_scores` writes them; used up.
        sums: whether a run's score is the sum of its blocks' masses, or their largest.
    """
    runs = (blocks + span - 1) // span
    if sums:
        first, size = address_of(masses), 4 * ((blocks + 15) & ~15)
        most = splat(np.float32(-np.inf))
        for i in range(first, first + size, 64):
            most = vmax(most, load_f32(i))
        top = lane_max(most)
        if top == -np.inf:
            score[:runs] = -np.inf
            return runs
        for i in range(first, first + size, 64):
            x = load_f32(i)
            weight = exp(vmax(x - splat(top), splat(_FLOOR)))
            store(i, choose_less(x, splat(_LOWEST), splat(np.float32(0.0)), weight))
    for run in range(runs):
        begin, end = run * span, min((run + 1) * span, blocks)
        if sums:
            total = np.float32(0.0)
            for i in range(begin, end):
                total += masses[i]
            score[run] = total if total > 0 else np.float32(-np.inf)
        else:
            best = np.float32(-np.inf)
            for i in range(begin, end):
                best = max(best, masses[i])
            score[run] = best
    return runs


@jit
def _widen_marks(runs: int, span: int, count: int, narrow: int, marks: int) -> None:
    """Mark all blocks of the runs that are marked; addresses."""
    for run in range(runs):
        if get(narrow + 4 * run) > np.float32(0.0):
            for i in range(run * span, min((run + 1) * span, count)):
                put(marks + 4 * i, np.float32(1.0))


class Choice(NamedTuple):
    """A choice as kernels take it: the blocks, what scores them, and what each head takes of them.

    Args:
        digest, query, table, budgets, masses: as in `retrieve_blocks`; the choice is written to `chosen`.
        sums: that of `retrieve_blocks`, as 1 or 0.
        full, rest: of the query heads, see `launch.head_tiles`.
        scale, cap: of the scores.
    """

    digest: Any
    full: Any
    rest: Any
    query: Array
    table: Array
    scale: float
    cap: Any
    sums: int
    budgets: Any
    masses: Array
    chosen: Any


@jit
def make_scratch(choice: Any) -> tuple[Array, Array, Array]:
    """A thread's scratch: the scores of a chunk of blocks, float32 [4, end + `SPARE`], and int32 [1]."""
    end, kv_heads = choice.chosen.end, choice.chosen.counts.shape[1]
    row = (min(CHUNK_BLOCKS, end) + SPARE_BLOCKS) * len(choice.digest.runs)
    scores = np.empty(choice.query.shape[1] // kv_heads * row, np.float32)
    return scores, np.empty((4, end + SPARE), np.float32), np.empty(1, np.int32)


@jit
def score_blocks(choice: Any, b: int, h: int, begin: int, stop: int, reach: int, scores: Array) -> None:
    """Write the masses [B, Hq, N'] of blocks begin..stop-1, at most `CHUNK_BLOCKS`.

    Args:
        reach: as in `write_scores`.
        scores: from `make_scratch`.
    """
    digest, masses, query = choice.digest, choice.masses, choice.query
    group = query.shape[1] // choice.chosen.counts.shape[1]
    row, at = len(scores) // group, address_of(scores)
    write_scores(
        digest, choice.full, choice.rest, query, group, choice.table, b, h, choice.scale, choice.cap, begin, stop,
        reach, at, 4 * row,
    )  # fmt: skip
    for g in range(group):
        weights = address_of(masses[b, h * group + g]) + 4 * begin
        soften_chunk(digest.runs, at + 4 * g * row, stop - begin, True, weights)


@jit
def take_blocks(choice: Any, b: int, h: int, span: int, scratch: Array, word: Array) -> None:
    """Write the host's blocks that the query heads of KV head h take, by their masses; and their runs.

    Args:
        span: blocks of a run; 0: no head has a budget.
        scratch, word: from `make_scratch`.
    """
    budgets, masses, chosen = choice.budgets, choice.masses, choice.chosen
    runs, end = chosen.runs, chosen.end
    group, low = runs.shape[1] // chosen.counts.shape[1], count_runs(budgets, chosen, b, h, span)
    marks, narrow, score = address_of(scratch[0]), address_of(scratch[1]), address_of(scratch[2])
    count = end - low
    clear_marks(marks, count)
    for g in range(h * group, (h + 1) * group):
        if runs[b, g] and span == 1:
            copy_scores(address_of(masses[b, g]) + 4 * low, count, score)
            mark_best(score, count, runs[b, g], marks, word)
        elif runs[b, g]:
            copy_scores(address_of(masses[b, g]) + 4 * low, count, address_of(scratch[3]))
            number = _join_runs(scratch[3], count, span, choice.sums, scratch[2])
            copy_scores(score, number, score)
            clear_marks(narrow, number)
            mark_best(score, number, runs[b, g], narrow, word)
            _widen_marks(number, span, count, narrow, marks)
    chosen.counts[b, h] = list_marked(marks, count, low, chosen.blocks[b, h])


@kernel
def retrieve_kernel(ticket: Array, tasks: int, choice: Any, finished: Array) -> None:
    """One task = one (row, KV head, up to 128 blocks)."""
    spans, first, end, budgets = choice.chosen.spans, choice.chosen.first, choice.chosen.end, choice.budgets
    kv_heads = spans.shape[1]
    group = choice.query.shape[1] // kv_heads
    chunks = max(1, (end + CHUNK_BLOCKS - 1) // CHUNK_BLOCKS)
    scores, scratch, word = make_scratch(choice)
    task = count_up(ticket, 0)
    while task < tasks:
        b, chunk, h = task // (chunks * kv_heads), task // kv_heads % chunks, task % kv_heads
        span = choose_granularity(budgets, b, h, group)
        begin, stop = chunk * CHUNK_BLOCKS, min((chunk + 1) * CHUNK_BLOCKS, end)
        if span and max(begin, min(max(first[b], 0), end)) < stop:
            score_blocks(choice, b, h, begin, stop, min(stop + CHUNK_BLOCKS, end), scores)
        if count_up(finished, b * kv_heads + h) == chunks - 1:
            take_blocks(choice, b, h, span, scratch, word)
            spans[b, h] = span
        task = next_task(ticket)


def retrieve_blocks(
    query: Array, digest: Digest, table: Array, budgets: Budgets, masses: Array, chosen: Chosen, *, sums: bool,
    scale: float, softcap: float | None,
) -> Launch:  # fmt: skip
    """Prepare the choice of the host's blocks for each (row, KV head).

    Of equal runs the first is taken; runs without valid tokens are never taken.

    Args:
        query: float32 [B, Hq, D].
        digest: what scores the blocks.
        table: int32 [B, N], physical block of each logical one.
        budgets: read when the launch runs.
        masses: float32 [B, Hq, N'], N' at least `end` rounded up to a multiple of 16: scratch.
        chosen: its first block and end, at most N, are read; the rest is written.
        sums: a run's mass is the sum of its blocks'; otherwise its score is their largest.
        scale, softcap: of the scores, as in `decode_attention`.

    Raises:
        ValueError: shapes that contradict each other, or granularities that are none.
        TypeError: an array of another dtype.
    """
    batch, query_heads, dim = query.shape
    (_, kv_heads), end = chosen.counts.shape, chosen.end
    full, rest = head_tiles(group_size(query_heads, kv_heads))
    require("query", query, F32, (batch, query_heads, dim))
    require("table", table, I32, (batch, table.shape[-1]))
    for name in ("budget0", "slope"):
        require(name, getattr(budgets, name), F32, (batch, query_heads))
    require("streaming", budgets.streaming, U8, (batch, query_heads))
    require("granularities", budgets.granularities, I32, (len(budgets.granularities),))
    require("masses", masses, F32, (batch, query_heads, masses.shape[-1]))
    chosen.check(batch)
    require("runs", chosen.runs, I32, (batch, query_heads))
    if not len(budgets.granularities) or budgets.granularities.min() < 1:
        raise ValueError(
            f"granularities {budgets.granularities.tolist()} are not blocks a run; use integers of 1 or more"
        )
    if not 0 <= end <= min(table.shape[1], masses.shape[2] // 16 * 16, chosen.blocks.shape[2]):
        raise ValueError(
            f"end {end} exceeds table {table.shape}, masses {masses.shape} in multiples of 16 or blocks "
            f"{chosen.blocks.shape}"
        )
    cost = check_digest(digest, query.shape, kv_heads, end)
    chunks, finished = max(1, -(-end // CHUNK_BLOCKS)), np.zeros(batch * kv_heads, np.int64)
    choice = Choice(digest, full, rest, query, table, float(scale), cap_of(softcap), int(sums), budgets, masses, chosen)
    return Launch(retrieve_kernel, batch * kv_heads * chunks, (choice, finished), cost, counters=finished)


@jit_for_python
def tally(chosen: Any, granularities: Array, totals: Array) -> None:
    """Count a choice.

    Args:
        chosen: the choice; granularities: as in `Budgets`.
        totals: float64 [TALLIES + granularities], added to: groups that have a host, of them those that stream; heads,
            of them those that take nothing; sum of the heads' shares; blocks chosen, blocks there were, of them those
            whose digests were read; then groups by granularity.
    """
    first, end, spans, runs, _, counts = chosen
    for b in range(counts.shape[0]):
        blocks = end - min(max(first[b], 0), end)
        if not blocks:
            continue
        kv_heads = counts.shape[1]
        group = runs.shape[1] // kv_heads
        for h in range(kv_heads):
            totals[0] += 1.0
            totals[1] += 1.0 if spans[b, h] == 0 else 0.0
            totals[5] += float(counts[b, h])
            totals[6] += float(blocks)
            totals[7] += float(blocks) if spans[b, h] else 0.0
            for g in range(h * group, (h + 1) * group):
                totals[2] += 1.0
                totals[3] += 1.0 if runs[b, g] == 0 else 0.0
                totals[4] += min(float(runs[b, g] * spans[b, h]) / float(blocks), 1.0)
            for i in range(len(granularities)):
                totals[TALLIES + i] += 1.0 if granularities[i] == spans[b, h] else 0.0


@kernel
def count_kernel(ticket: Array, tasks: int, chosen: Any, granularities: Array, totals: Array) -> None:
    """One task: all of it."""
    if count_up(ticket, 0) == 0:
        tally(chosen, granularities, totals)
        count_up(ticket, 1)


def count_choice(chosen: Chosen, granularities: Array, totals: Array) -> Launch:
    """Prepare to count a choice; arguments as in `tally`."""
    chosen.check(len(chosen.counts))
    require("granularities", granularities, I32, (len(granularities),))
    require("totals", totals, np.dtype(np.float64), (TALLIES + len(granularities),))
    return Launch(count_kernel, 1, (chosen, granularities, totals), chosen.runs.nbytes)
