"""Splitting a selection by where its blocks lie."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def _split(blocks, counts, slot_of, here, here_slots, here_counts, there, there_counts):  # type: ignore[no-untyped-def]
    for b in range(blocks.shape[0]):
        for h in range(blocks.shape[1]):
            near, far = 0, 0
            for i in range(counts[b, h]):
                block = blocks[b, h, i]
                slot = slot_of[b, h, block]
                if slot >= 0:
                    here[b, h, near] = block
                    here_slots[b, h, near] = slot
                    near += 1
                else:
                    there[b, h, far] = block
                    far += 1
            here_counts[b, h] = near
            there_counts[b, h] = far


def split_blocks(
    blocks: np.ndarray, counts: np.ndarray, slot_of: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Part blocks into those that have a slot and those that have none.

    Args:
        blocks: `[B, Hkv, C]` int32 logical blocks; counts: `[B, Hkv]` int32, how many of them are meant.
        slot_of: `[B, Hkv, N]` int32, the slot of each block, negative = none.

    Returns:
        (blocks, slots, counts) with a slot and (blocks, counts) without, in the same order.
    """
    if slot_of.shape[:2] != blocks.shape[:2] or counts.shape != blocks.shape[:2]:
        raise ValueError(
            f"blocks {blocks.shape}, counts {counts.shape} and slot_of {slot_of.shape} do not fit together"
        )
    here, slots, there = np.empty_like(blocks), np.zeros_like(blocks), np.empty_like(blocks)
    here_counts, there_counts = np.empty_like(counts), np.empty_like(counts)
    _split(blocks, counts, slot_of, here, slots, here_counts, there, there_counts)
    return (here, slots, here_counts), (there, there_counts)


@njit(nogil=True, cache=True)
def _overlap(a, a_counts, b, b_counts):  # type: ignore[no-untyped-def]
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
