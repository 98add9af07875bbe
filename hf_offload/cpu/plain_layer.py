"""What plain decoder layers do around the projection of their queries, RMS norm and rotary positions: torch's bits.

In eager torch they are twenty operators on a few hundred numbers, each of which takes longer to reach than to compute.
Every intermediate result is rounded where those operators round it, and sums are taken in the order of theirs. Whoever
calls this compares it with the model's own modules first.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
from typing import Any

import numpy as np

from .launch import jit
from .narrow import read, rounded, write

_WIDTH, _ROWS, _LEVELS, _STEP = 8, 4, 4, 16  # of torch's cascade sum: lanes, rows of them, levels, rows of a level


@jit
def _mean_square(short: bool, source: int, width: int) -> Any:
    """The mean of the squares of a row: torch's `x.float().pow(2).mean()`."""
    sums = np.zeros((_LEVELS, _ROWS * _WIDTH), np.float32)
    groups = width // (_ROWS * _WIDTH)
    for group in range(groups):
        for lane in range(_ROWS * _WIDTH):
            x = read(short, source, group * _ROWS * _WIDTH + lane)
            sums[0, lane] += x * x
        done = group + 1
        if done % _STEP == 0:
            for level in range(1, _LEVELS):
                sums[level] += sums[level - 1]
                sums[level - 1] = np.float32(0.0)
                if done & ((_STEP - 1) * _STEP**level):
                    break
    for level in range(1, _LEVELS):
        sums[0] += sums[level]
    for start in range(groups * _ROWS * _WIDTH, width - _WIDTH + 1, _WIDTH):
        for lane in range(_WIDTH):
            x = read(short, source, start + lane)
            sums[0, lane] += x * x
    for row in range(1, _ROWS):
        for lane in range(_WIDTH):
            sums[0, lane] += sums[0, row * _WIDTH + lane]
    total = np.float32(0.0)
    for index in range(width // _WIDTH * _WIDTH, width):
        x = read(short, source, index)
        total += x * x
    for lane in range(_WIDTH):
        total += sums[0, lane]
    return total / np.float32(width)


@jit
def normalize(short: bool, source: int, weight: int, target: int, rows: int, width: int, eps: float) -> None:
    """RMS norm of rows: each x / sqrt(mean(x²) + eps), rounded, then times the weight.

    Args:
        short: whether all of them are bfloat16; float32 otherwise.
        source, weight, target: addresses of [rows, width], [width] and [rows, width], contiguous; the target may be the
            source.
        rows, width: sizes.
        eps: is added to the mean.
    """
    size = 2 if short else 4
    for row in range(rows):
        here, there = source + row * width * size, target + row * width * size
        factor = np.float32(1.0) / np.float32(math.sqrt(_mean_square(short, here, width) + np.float32(eps)))
        for i in range(width):
            x = rounded(short, read(short, here, i) * factor)
            write(short, there, i, rounded(short, read(short, weight, i) * x))


@jit
def rotate(short: bool, query: int, cos: int, sin: int, rows: int, tables: int, heads: int, dim: int) -> None:
    """Rotary positions, in place: q · cos + (−q₂, q₁) · sin, with q₁ and q₂ the halves of a head.

    Args:
        short: whether all of them are bfloat16; float32 otherwise.
        query: address of [rows, heads, dim], contiguous.
        cos, sin: addresses of [tables, dim], contiguous; row r has table r % tables.
        rows, tables, heads, dim: sizes; dim even.
    """
    size, half = 2 if short else 4, dim // 2
    for row in range(rows):
        shift = row % tables * dim * size
        for head in range(heads):
            here = query + (row * heads + head) * dim * size
            for i in range(half):
                x, y = read(short, here, i), read(short, here, half + i)
                left = rounded(short, x * read(short, cos + shift, i))
                right = rounded(short, -y * read(short, sin + shift, i))
                write(short, here, i, rounded(short, left + right))
                left = rounded(short, y * read(short, cos + shift, half + i))
                right = rounded(short, x * read(short, sin + shift, half + i))
                write(short, here, half + i, rounded(short, left + right))
