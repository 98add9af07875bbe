"""Split of a KV head's decode attention into parts for several threads, and their merge.

A partial result is float32: the weighted sum of V [G, D], that of K [G, D] if kbar is wanted, then peak, mass, fade
(as in `block.softmax_step`) and the drawn pairs' Σ (1 - x) y² [G] each.
"""

from __future__ import annotations

import math

import numpy as np

from hf_offload.cpu.launch import Array, borrowing, jit
from hf_offload.cpu.memory import get, put
from hf_offload.cpu.simd.vectors import NOTHING, fma, load_f32, splat, store

PART_TOKENS, PARTS = 512, 64
"""The least number of tokens of a part, and the largest number of tasks that parts are made for."""


def partial_results(count: int, group: int, dim: int, wants_kbar: bool) -> Array:
    """An uninitialised array for `count` partial results, one for each row."""
    width = group * (dim * (2 if wants_kbar else 1) + 4)
    return np.empty((count, -(-width // 16) * 16), np.float32)


@jit
def part_items(count: int, parts: int, unit: int, step: int) -> int:
    """Items in each part of a list of `count`; a short list has fewer than `parts` parts.

    Args:
        unit: tokens of an item.
        step: items of one softmax step; a part is a whole number of steps.
    """
    parts = min(parts, max((count * unit + PART_TOKENS - 1) // PART_TOKENS, 1))
    share = (count + parts - 1) // parts
    return max((share + step - 1) // step * step, step)


@borrowing
def part_of(task: int, parts: int, unit: int, step: int, counts: Array) -> tuple[int, int]:
    """The first of a task's items in its head's list, and their number; counts: [B, Hkv]."""
    head = task // parts
    count = counts[head // counts.shape[1], head % counts.shape[1]]
    share = part_items(count, parts, unit, step)
    begin = min(task % parts * share, count)
    return begin, min(count - begin, share)


@jit
def most_part_items(capacity: int, parts: int, unit: int, step: int) -> int:
    """An upper bound of `part_items` for all counts up to `capacity` (it is not monotonic in the count)."""
    share = max((capacity + parts - 1) // parts, PART_TOKENS // unit)
    return max((share + step - 1) // step * step, step)


@jit
def partial_state(group: int, dim: int, wants_kbar: bool) -> int:
    """Bytes of the sums in a partial result: the offset of what it has for each head."""
    return 4 * group * dim * (2 if wants_kbar else 1)


@jit
def clear_part(part: int, dim: int, group: int, wants_kbar: bool) -> None:
    """Reset the partial result at an address to that of no token."""
    state = part + partial_state(group, dim, wants_kbar)
    for address in range(part, state, 64):
        store(address, splat(np.float32(0.0)))
    for g in range(group):
        put(state + 4 * g, NOTHING)
        put(state + 4 * (group + g), np.float32(0.0))
        put(state + 4 * (3 * group + g), np.float32(0.0))


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
            offset = sums + 4 * (head * dim + d)
            total = splat(np.float32(0.0))
            for row in range(rows):
                share = splat(get(first + row * step + masses + 4 * head))
                total = fma(load_f32(first + row * step + offset), share, total)
            store(target + 4 * (head * dim + d), total)


@borrowing
def merge_masses(first: int, rows: int, step: int, group: int, state: int, state_step: int, lse: Array) -> None:
    """Write each head's lse [group], and into each part's fade the factor of its sums in the merged result."""
    for head in range(group):
        state_of_head = first + state + 4 * head
        peak, mass = NOTHING, np.float32(0.0)
        for row in range(rows):
            peak = max(peak, get(state_of_head + row * step))
        for row in range(rows):
            fade = np.float32(math.exp(get(state_of_head + row * step) - peak))
            put(state_of_head + row * step + 2 * state_step, fade)
            mass += get(state_of_head + row * step + state_step) * fade
        none = mass == np.float32(0.0)
        inverse = np.float32(0.0) if none else np.float32(1.0) / mass
        for row in range(rows):
            share = state_of_head + row * step + 2 * state_step
            put(share, get(share) * inverse)
        lse[head] = -np.inf if none else peak + np.log(mass)


@borrowing
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
