# mypy: ignore-errors
"""Triton kernel of the hand-over to the CPU; see `handover.py`."""

import triton
import triton.language as tl

from .flags_kernels import announce


@triton.jit(do_not_specialize=["capacity"])
def hand_over_kernel(
    query,  # [B, Hq, D]
    blocks,  # [B, Hkv, C]
    counts,  # [B, Hkv]
    to_query,  # these three in host memory
    to_blocks,
    to_counts,
    arrived,  # [1] or None, like the two that follow
    flag,  # [1] in host memory
    epoch,  # [1]
    capacity,  # C
    NUMBERS: tl.constexpr,  # of the query, for one KV head
    CHUNK: tl.constexpr,
):
    """One program = one row and KV head; the last one to arrive announces all of them."""
    line = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNK)
    count = tl.load(counts + line)
    tl.store(to_counts + line, count)
    for start in range(0, NUMBERS, CHUNK):
        there = start + at < NUMBERS
        place = line * NUMBERS + start + at
        tl.store(to_query + place, tl.load(query + place, mask=there), mask=there)
    at = tl.arange(0, CHUNK // 4)  # one for each thread: where the list ends no thread may write several
    for start in range(0, count, CHUNK // 4):
        there = start + at < count
        place = line * capacity + start + at
        tl.store(to_blocks + place, tl.load(blocks + place, mask=there), mask=there)
    if flag is not None:
        # All threads have written: one orders that before its arrival, and the last one to arrive all before the flag.
        tl.debug_barrier()
        before = tl.atomic_add(arrived, 1, sem="acq_rel", scope="sys")
        if before == tl.num_programs(0) - 1:
            tl.store(arrived, 0)  # for the next hand-over
            announce(flag, tl.load(epoch))
