"""Split of a KV head's decode attention into parts for several threads, and their merge.

A partial result is float32: the weighted sum of V [G, D], that of K [G, D] if kbar is wanted, then peak, mass and fade
[G] each (as in `block.softmax_step`).
"""

from __future__ import annotations

import math

import numpy as np

from hf_offload.cpu.launch import Array, jit
from hf_offload.cpu.memory import get, put
from hf_offload.cpu.simd.vectors import NOTHING, fma, load_f32, splat, store

PART_TOKENS, PARTS = 512, 64
"""The least number of tokens of a part, and the largest number of tasks that parts are made for."""
NO_KBAR = np.empty((0, 0, 0), np.float32)


def partial_results(count: int, group: int, dim: int, wants_kbar: bool, more: int = 0) -> Array:
    """An uninitialised array for `count` partial results, one for each row, with `more` numbers for each head."""
    width = group * (dim * (2 if wants_kbar else 1) + 3 + more)
    return np.empty((count, -(-width // 16) * 16), np.float32)


@jit
def part_blocks(count: int, parts: int, block_size: int, step: int) -> int:
    """Blocks in each part of a head that attends `count` blocks; a head with few blocks has fewer than `parts` parts.

    Args:
        step: blocks of one softmax step; a part is a whole number of steps.
    """
    parts = min(parts, max((count * block_size + PART_TOKENS - 1) // PART_TOKENS, 1))
    share = (count + parts - 1) // parts
    return max((share + step - 1) // step * step, step)


@jit
def part_of(task: int, parts: int, block_size: int, step: int, counts: Array) -> tuple[int, int]:
    """The first of a task's blocks in its head's list, and their number; counts: [B, Hkv]."""
    head = task // parts
    count = counts[head // counts.shape[1], head % counts.shape[1]]
    share = part_blocks(count, parts, block_size, step)
    begin = min(task % parts * share, count)
    return begin, min(count - begin, share)


@jit
def most_part_blocks(capacity: int, parts: int, block_size: int, step: int) -> int:
    """An upper bound of `part_blocks` for all counts up to `capacity` (it is not monotonic in the count)."""
    share = max((capacity + parts - 1) // parts, PART_TOKENS // block_size)
    return max((share + step - 1) // step * step, step)


@jit
def partial_state(group: int, dim: int, wants_kbar: bool) -> int:
    """Bytes of the sums in a partial result: the offset of its peaks, masses and fades."""
    return 4 * group * dim * (2 if wants_kbar else 1)


@jit
def clear_part(part: int, dim: int, group: int, wants_kbar: bool) -> None:
    """Reset the partial result at an address to that of no token."""
    state = part + partial_state(group, dim, wants_kbar)
    for place in range(part, state, 64):
        store(place, splat(np.float32(0.0)))
    for g in range(group):
        put(state + 4 * g, NOTHING)
        put(state + 4 * (group + g), np.float32(0.0))


@jit
def _merge(first: int, rows: int, step: int, dim: int, group: int, sums: int, masses: int, target: int) -> None:
    """target[head] = the sum of the partial sums, each times its share; 0 where nothing was attended.

    Args:
        first: address of the first of `rows` partial results, `step` bytes apart.
        sums: offset in bytes of the sums [group, dim] in each.
        masses: offset of the shares [group] that `merge_masses` writes.
    """
    for head in range(group):
        for d in range(0, dim, 16):
            place = sums + 4 * (head * dim + d)
            total = splat(np.float32(0.0))
            for row in range(rows):
                share = splat(get(first + row * step + masses + 4 * head))
                total = fma(load_f32(first + row * step + place), share, total)
            store(target + 4 * (head * dim + d), total)


@jit
def merge_masses(first: int, rows: int, step: int, group: int, state: int, state_step: int, lse: Array) -> None:
    """Write each head's lse [group], and into each part's fade the factor of its sums in the merged result."""
    for head in range(group):
        place = first + state + 4 * head
        peak, mass = NOTHING, np.float32(0.0)
        for row in range(rows):
            peak = max(peak, get(place + row * step))
        for row in range(rows):
            fade = np.float32(math.exp(get(place + row * step) - peak))
            put(place + row * step + 2 * state_step, fade)
            mass += get(place + row * step + state_step) * fade
        none = mass == np.float32(0.0)
        inverse = np.float32(0.0) if none else np.float32(1.0) / mass
        for row in range(rows):
            share = place + row * step + 2 * state_step
            put(share, get(share) * inverse)
        lse[head] = -np.inf if none else peak + np.log(mass)


@jit
def merge_parts(
    first: int, rows: int, step: int, dim: int, group: int, wants_kbar: bool, lse: Array, out: int, kbar: int
) -> None:
    """Merge `rows` partial results, `step` bytes apart, into lse [G] and, at addresses, out [G, D] and kbar [G, D]."""
    state, state_step = partial_state(group, dim, wants_kbar), 4 * group
    merge_masses(first, rows, step, group, state, state_step, lse)
    shares = state + 2 * state_step
    _merge(first, rows, step, dim, group, 0, shares, out)
    if wants_kbar:
        _merge(first, rows, step, dim, group, 4 * group * dim, shares, kbar)
