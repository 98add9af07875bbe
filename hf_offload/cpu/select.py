"""Choice of the blocks to attend: the always-kept ones and the best-scoring others.

Shapes: score [B, Hkv, N], chosen blocks [B, Hkv, C] with a count for each (row, KV head).
"""

from __future__ import annotations

import numpy as np

from .launch import F32, I32, Array, Launch, jit, kernel, require
from .memory import count_up

_NEVER = np.int32(-(2**31))  # the key of -inf and NaN: below the key of every other float


@jit
def sort_keys(row: Array, keys: Array) -> int:
    """Write integers in the order of the floats of a row [n], and return how many are neither -inf nor NaN."""
    bits, usable = row.view(np.int32), np.int32(0)
    for i in range(len(row)):
        x = np.int32(0) if bits[i] == _NEVER else bits[i]  # -0 and +0 tie
        x = x ^ ((x >> np.int32(31)) & np.int32(0x7FFFFFFF))
        fits = row[i] > -np.inf
        keys[i] = x if fits else _NEVER
        usable += np.int32(fits)
    return int(usable)


@jit
def threshold_of(keys: Array, count: int, want: int, usable: int) -> tuple[int, int]:
    """What the best `want` of the first `count` keys exceed, and how many keys that equal it are among them.

    Args:
        keys: int32, from `sort_keys`, which returned `usable`.
    """
    if usable <= want:
        return int(_NEVER) + 1, count
    bound, ties = _threshold(keys, count, want), want
    for i in range(count):
        ties -= int(keys[i] > bound)
    return bound, ties


@jit
def _threshold(keys: Array, count: int, want: int) -> int:
    """The largest key t with at least `want` of the first `count` keys >= t, where that many exceed _NEVER.

    May return a smaller t when exactly `want` keys are >= it.
    """
    high, low = keys[0], keys[0]
    for i in range(count):
        high, low = max(high, keys[i]), min(low, keys[i])
    below, above = max(np.int64(low), np.int64(_NEVER) + 1), np.int64(high)
    while below < above:
        middle = (below + above + 1) >> 1
        bound, found = np.int32(middle), np.int32(0)
        for i in range(count):
            found += np.int32(keys[i] >= bound)
        if found == want:
            return int(middle)
        if found > want:
            below = middle
        else:
            above = middle - 1
    return int(below)


@jit
def select_head(
    score: Array, n_sealed: int, n_blocks: int, sink_lo: int, sink_hi: int, recent: int, k: int, chosen: Array
) -> int:
    """Write the chosen blocks of one (row, KV head), score [N], and return their number; see `select_blocks`."""
    # Always kept: the sinks [low, high) and [late, n_blocks). Candidates lie between: [high, late).
    low = min(max(sink_lo, 0), n_blocks)
    high = min(max(sink_hi, low), n_blocks)
    late = min(n_sealed, max(low, n_sealed - recent))
    count = 0
    for n in range(low, min(high, late)):
        chosen[count] = n
        count += 1
    want = k - count - (n_blocks - late)
    candidates = late - high
    if want > 0 and candidates > 0:
        keys = np.empty(candidates, np.int32)
        usable = sort_keys(score[high:late], keys)
        bound, ties = threshold_of(keys, candidates, want, usable)
        for i in range(candidates):
            if keys[i] > bound:
                chosen[count] = high + i
                count += 1
            elif keys[i] == bound and ties > 0:
                chosen[count] = high + i
                count += 1
                ties -= 1
    for n in range(late, n_blocks):
        chosen[count] = n
        count += 1
    return count


@kernel
def select_kernel(
    ticket: Array,
    tasks: int,
    score: Array,
    n_sealed: int,
    n_blocks: int,
    sink_lo: Array,
    sink_hi: Array,
    recent: int,
    k: int,
    blocks: Array,
    counts: Array,
) -> None:
    """One task = one (row, KV head)."""
    kv_heads = score.shape[1]
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        b, h = task // kv_heads, task % kv_heads
        counts[b, h] = select_head(score[b, h], n_sealed, n_blocks, sink_lo[b], sink_hi[b], recent, k, blocks[b, h])
        count_up(ticket, 1)


def check_selection(
    batch: int, kv_heads: int, n_sealed: int, sink_lo: Array, sink_hi: Array, recent: int, n_blocks: int, k: int,
    blocks: Array, counts: Array,
) -> None:  # fmt: skip
    """Raise unless the arguments of a choice fit together; see `select_blocks`."""
    require("sink_lo", sink_lo, I32, (batch,))
    require("sink_hi", sink_hi, I32, (batch,))
    require("blocks", blocks, I32, (batch, kv_heads, blocks.shape[2]))
    require("counts", counts, I32, (batch, kv_heads))
    if not 0 <= n_sealed <= n_blocks:
        raise ValueError(f"n_sealed {n_sealed} is not within 0..n_blocks ({n_blocks})")
    if recent < 0 or k < 0:
        raise ValueError(f"recent {recent} and k {k} must not be negative")
    sinks = max([0, *(sink_hi - sink_lo).tolist()])  # for a few rows quicker than NumPy
    always = min(n_blocks, sinks + min(recent, n_sealed) + n_blocks - n_sealed)
    if blocks.shape[2] < max(always, min(k, n_blocks)):
        raise ValueError(f"blocks holds {blocks.shape[2]} entries; up to {max(always, min(k, n_blocks))} may be chosen")


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
    """Prepare the choice of at most k logical blocks for each (row, KV head), in ascending order.

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
    check_selection(batch, kv_heads, n_sealed, sink_lo, sink_hi, recent, n_blocks, k, blocks, counts)
    if n_sealed > width:
        raise ValueError(f"n_sealed {n_sealed} exceeds the {width} scores of a row")
    args = (score, int(n_sealed), int(n_blocks), sink_lo, sink_hi, int(recent), int(k), blocks, counts)
    return Launch(select_kernel, batch * kv_heads, args, 4 * batch * kv_heads * n_sealed)
