"""Digests brought near in the order of memory, while a chunk is scored head by head.

An array holds one row a physical block, with a piece for every KV head in it. A head's pieces lie as far apart as a row
is long: often a power of two, and memory serves such a walk at a fraction of its speed. So the KV heads of a chunk take
turns, and each of them has a share of the next chunk's whole rows prefetched meanwhile, some lines a step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .launch import Array, jit
from .memory import LINE, prefetch


class Sweep(NamedTuple):
    """Where one array's sweep stands: table[place] is the block, `line` the next line of its row."""

    base: int
    row: int
    lines: int
    place: int
    line: int
    each: int


@jit
def sweep_from(base: int, row: int, begin: int, end: int, h: int, kv_heads: int, steps: int) -> Any:
    """KV head h's share of the rows of blocks begin..end-1 (of `row` bytes each, at `base`), in so many steps."""
    lines = (row + LINE - 1) // LINE
    total = max(end - begin, 0) * lines
    first, last = total * h // kv_heads, total * (h + 1) // kv_heads
    each = (last - first + steps - 1) // steps
    return Sweep(base, row, lines, begin + first // lines, first % lines, each)


@jit
def sweep_on(sweep: Any, table: Array, end: int) -> Any:
    """Prefetch one step's lines, none of blocks from `end` on; what to go on with."""
    place, line, left = sweep.place, sweep.line, sweep.each
    while left > 0 and place < end:
        start = sweep.base + table[place] * sweep.row
        upto = min(line + left, sweep.lines)
        for i in range(line, upto):
            prefetch(start + i * LINE, 2)
        left -= upto - line
        line = upto
        if line == sweep.lines:
            place, line = place + 1, 0
    return Sweep(sweep.base, sweep.row, sweep.lines, place, line, sweep.each)
