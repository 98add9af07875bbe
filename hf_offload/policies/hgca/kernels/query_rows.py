"""Stored tokens scored for the queries of one KV head that lie behind one another: rows, taken four at a time.

The G * Q rows of a KV head are the Q queries of its first query head, those of the second, and so on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_offload.cpu.kernels.block import STEP_TOKENS, soften_scores
from hf_offload.cpu.kernels.int8_blocks import spare_bytes
from hf_offload.cpu.kernels.record import record_of, score_keys
from hf_offload.cpu.launch import Array, jit
from hf_offload.cpu.memory import address_of
from hf_offload.cpu.simd.convert import load_marks
from hf_offload.cpu.simd.vectors import MASKED, choose_less, load_f32, splat, store

_TILE = (0, 0, 0, 0)  # rows in registers, see `launch.head_tiles`; always as many, so that one version is compiled


@jit
def scratch_bytes(dim: int, block_size: int) -> int:
    """The four scaled queries, scores of four rows, which tokens are valid, and what packed records want."""
    return 64 + 16 * dim + 4 * 5 * max(STEP_TOKENS, block_size) + spare_bytes(dim, block_size)


@jit
def find_ends(ends: Array, first_row: int, queries: int, start: int, stop: int, valid: Array) -> None:
    """ends[row] = the token behind the last one that a row (from first_row on) sees; 0 if its query is not valid."""
    i = first_row % queries
    for row in range(ends.shape[0]):
        ends[row] = min(stop, start + i + 1) if valid[start + i] != 0 else 0
        i = i + 1 if i + 1 < queries else 0


@jit
def pick_rows(
    picked: Array, ends: Array, row: int, begin: int, query: int, dim: int, scale: float, tile: int
) -> tuple[int, int]:
    """Write up to four scaled rows, from `row` on, that see tokens behind `begin`, and their numbers; fill up with 0.

    Returns:
        How many, and the row to go on with.
    """
    count = 0
    while row < ends.shape[0] and count < 4:
        if ends[row] > begin:
            picked[count] = row
            for d in range(0, dim, 16):
                x = load_f32(query + 4 * (row * dim + d)) * splat(np.float32(scale))
                store(tile + 4 * (count * dim + d), x)
            count += 1
        row += 1
    if count > 0:
        for place in range(tile + 4 * count * dim, tile + 16 * dim, 64):
            store(place, splat(np.float32(0.0)))
    return count, row


@jit
def score_rows(
    tag: Any, addresses: Array, tile: int, dim: int, block_size: int, scores: int, stride: int, seen: int, cap: float,
    marks: int, masked: bool, packed: Any, spare: int,
) -> None:  # fmt: skip
    """Scores of the four rows of a tile with `seen` tokens, MASKED where `marks` (float32) has a 0."""
    padded = (seen + 15) & ~15
    for i in range((seen + block_size - 1) // block_size):
        place = scores + 4 * i * block_size
        score_keys(tag, _TILE, addresses[i], 0, tile, dim, block_size, place, stride, packed, spare)
    if cap > 0.0:
        soften_scores(4, scores, stride, padded, cap)
    if masked:
        none, zero = splat(MASKED), splat(np.float32(0.0))
        for token in range(0, padded, 16):
            mark = load_f32(marks + 4 * token)
            for i in range(4):
                place = scores + i * stride + 4 * token
                store(place, choose_less(zero, mark, load_f32(place), none))


@jit
def open_step(
    addresses: Array, block_ptr: Array, table: Array, holes: Array, valid: Array, begin: int, end: int, h: int,
    record: int, block_size: int, packed: Any, packed_record: int, marks: int,
) -> tuple[int, bool]:  # fmt: skip
    """Find the records of tokens begin..end-1 and which tokens are valid.

    Returns:
        The token behind the last valid one (`begin` if there is none), and whether any is not valid.
    """
    masked = False
    for i in range((end - begin + block_size - 1) // block_size):
        n = begin // block_size + i
        addresses[i] = record_of(block_ptr[table[n]], h, record, packed, packed_record)
        masked = masked or holes[n] != 0
    if masked:
        for token in range(0, end - begin, 16):
            store(marks + 4 * token, load_marks(address_of(valid) + begin + token, end - begin - token))
        while end > begin and valid[end - 1] == 0:
            end -= 1
    return end, masked
