"""Splitting a selection by where its blocks lie."""

from __future__ import annotations

import numpy as np

from .launch import I32, Array, Launch, jit, kernel, new_ticket, require
from .memory import count_up


@kernel
def part_kernel(
    ticket: Array, tasks: int, blocks: Array, counts: Array, low: Array, high: Array, newest: int, here: Array,
    here_counts: Array, there: Array, there_counts: Array,
) -> None:  # fmt: skip
    """One task = one row."""
    while True:
        b = count_up(ticket, 0)
        if b >= tasks:
            break
        for h in range(blocks.shape[1]):
            near, far = 0, 0
            for i in range(counts[b, h]):
                block = blocks[b, h, i]
                if block >= newest or low[b] <= block < high[b]:
                    here[b, h, near] = block
                    near += 1
                else:
                    there[b, h, far] = block
                    far += 1
            here_counts[b, h] = near
            there_counts[b, h] = far
        count_up(ticket, 1)


def part_always(
    blocks: Array, counts: Array, low: Array, high: Array, newest: int, here: tuple[Array, Array],
    there: tuple[Array, Array],
) -> Launch:  # fmt: skip
    """Prepare to part blocks into those that are always attended and the others, in the same order.

    Args:
        blocks: `[B, Hkv, C]` int32 logical blocks; counts: `[B, Hkv]` int32, how many of them are meant.
        low, high: `[B]` int32, the sinks of each row: first block and end.
        newest: this block and those behind it are always attended too.
        here: like blocks and counts, written: sinks and newest blocks; there: the same for the others.

    Raises:
        ValueError: shapes that contradict each other.
        TypeError: an array of another dtype.
    """
    for blocks_of, counts_of in ((blocks, counts), here, there):
        require("blocks", blocks_of, I32, blocks.shape)
        require("counts", counts_of, I32, blocks.shape[:2])
    for bound in (low, high):
        require("bound", bound, I32, (len(blocks),))
    args = (blocks, counts, low, high, int(newest), *here, *there)
    return Launch(part_kernel, len(blocks), args, new_ticket(), 3 * blocks.nbytes)


@jit
def _overlap(a: Array, a_counts: Array, b: Array, b_counts: Array) -> int:
    common = 0
    for row in range(a.shape[0]):
        for h in range(a.shape[1]):
            i = j = 0
            while i < a_counts[row, h] and j < b_counts[row, h]:
                x, y = a[row, h, i], b[row, h, j]
                common += x == y
                i += x <= y
                j += y <= x
    return common


def common_blocks(a: np.ndarray, a_counts: np.ndarray, b: np.ndarray, b_counts: np.ndarray) -> int:
    """How many blocks two selections (ascending `[B, Hkv, C]` with counts `[B, Hkv]`) share."""
    return int(_overlap(a, a_counts, b, b_counts))
