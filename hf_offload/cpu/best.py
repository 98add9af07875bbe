"""Which of many scores are the best ones, by vectors: a bound is found by halving, and marked is what reaches it."""

from __future__ import annotations

import numpy as np

from .launch import Array, jit
from .memory import get, put
from .vector import choose_less, lane_max, lane_sum, load_f32, splat, store, vmax

SPARE = 64
"""Floats behind the scores of a row that are written and read, too."""
_NEVER = np.float32(-np.inf)
_LOWEST = np.float32(-3.4e38)  # only -inf is smaller
_FLIP = 0x7FFFFFFF


@jit
def copy_scores(source: int, count: int, row: int) -> None:
    """Copy so many float32 between addresses, with -inf for NaN and behind them, up to a whole `SPARE`."""
    low, lowest = splat(_NEVER), splat(_LOWEST)
    whole = count & ~15
    for i in range(0, 4 * whole, 64):
        x = load_f32(source + i)
        store(row + i, choose_less(lowest, x, x, low))
    for i in range(4 * whole, 4 * ((count + SPARE - 1) // SPARE * SPARE), 4):
        x = get(source + i) if i < 4 * count else _NEVER
        put(row + i, x if x > _LOWEST else _NEVER)


@jit
def _below(row: int, size: int, bound: float) -> int:
    """How many of the scores in `size` bytes are below a bound."""
    zero, one, limit = splat(np.float32(0.0)), splat(np.float32(1.0)), splat(np.float32(bound))
    a, b, c, d = zero, zero, zero, zero
    for i in range(row, row + size, 256):
        a = a + choose_less(load_f32(i), limit, one, zero)
        b = b + choose_less(load_f32(i + 64), limit, one, zero)
        c = c + choose_less(load_f32(i + 128), limit, one, zero)
        d = d + choose_less(load_f32(i + 192), limit, one, zero)
    return int(lane_sum((a + b) + (c + d)))


@jit
def _key(x: float, word: Array) -> int:
    """An integer in the order of the floats."""
    word.view(np.float32)[0] = np.float32(x) + np.float32(0.0)  # -0 and +0 tie
    bits = np.int64(word[0])
    return int(bits if bits >= 0 else bits ^ _FLIP)


@jit
def _value(key: int, word: Array) -> float:
    word[0] = np.int32(key if key >= 0 else key ^ _FLIP)
    return float(word.view(np.float32)[0])


@jit
def bound_of(row: int, count: int, want: int, word: Array) -> tuple[float, int]:
    """What the best `want` scores reach, and how many of those that equal it are among them, at most `count`.

    Args:
        row: address of scores, as `copy_scores` writes them; want: at least 1.
        word: scratch int32 [1].
    """
    size = 4 * ((count + SPARE - 1) // SPARE * SPARE)
    total = size // 4
    usable = total - _below(row, size, float(_LOWEST))
    if usable <= want:
        return float(_LOWEST), count
    low, lowest, zero = splat(_NEVER), splat(_LOWEST), splat(np.float32(0.0))
    most, least = low, low
    for i in range(row, row + size, 64):
        x = load_f32(i)
        most, least = vmax(most, x), vmax(least, choose_less(x, lowest, low, zero - x))
    below, above = _key(-lane_max(least), word), _key(lane_max(most), word)
    while below < above:
        middle = (below + above + 1) >> 1
        found = total - _below(row, size, _value(middle, word))
        if found == want:
            return _value(middle, word), count
        if found > want:
            below = middle
        else:
            above = middle - 1
    bound = _value(below, word)
    above = 0 if bound == np.inf else total - _below(row, size, _value(below + 1, word))
    return bound, want - above


@jit
def mark_best(row: int, count: int, want: int, marks: int, word: Array) -> None:
    """Put 1 where one of the best `want` scores is, and leave the others as they are; of equal ones the first count.

    Args:
        row: address of scores, as `copy_scores` writes them; want: at least 1.
        marks: address of float32 [count up to a whole `SPARE`].
        word: scratch int32 [1].
    """
    bound, ties = bound_of(row, count, want, word)
    one, limit, place = splat(np.float32(1.0)), splat(np.float32(bound)), 4 * count
    left = ties
    for i in range(0, place if ties < count else 0, 4):  # where the ties end that count
        if get(row + i) == np.float32(bound):
            if left == 0:
                place = i
                break
            left -= 1
    for i in range(0, place & ~63, 64):
        store(marks + i, choose_less(load_f32(row + i), limit, load_f32(marks + i), one))
    for i in range(place & ~63, 4 * count, 4):
        x = get(row + i)
        if x > np.float32(bound) or (i < place and x == np.float32(bound)):
            put(marks + i, np.float32(1.0))


@jit
def list_marked(marks: int, count: int, first: int, blocks: Array) -> int:
    """Write first + i for every mark i that is set, ascending, and return how many there are; marks: address."""
    found = 0
    for i in range(count):
        if get(marks + 4 * i) > np.float32(0.0):
            blocks[found] = first + i
            found += 1
    return found


@jit
def clear_marks(marks: int, count: int) -> None:
    """Take all marks away, up to a whole `SPARE`."""
    zero = splat(np.float32(0.0))
    for i in range(0, 4 * ((count + SPARE - 1) // SPARE * SPARE), 64):
        store(marks + i, zero)
