"""`block_topk.mark_best` against sorting: odd sizes, ties, -inf and NaN, and values after the end of a row."""

from __future__ import annotations

import numpy as np
import pytest
from pools import for_python

from hf_offload.cpu.kernels import block_topk
from hf_offload.cpu.kernels.block_topk import SPARE
from hf_offload.cpu.launch import Array

clear_marks, copy_scores, list_marked, mark_best = for_python(
    block_topk.clear_marks, block_topk.copy_scores, block_topk.list_marked, block_topk.mark_best
)


def marked(scores: Array, want: int, before: list[int]) -> list[int]:
    """The places that are marked, of which `before` were already."""
    count = len(scores)
    row, marks = (np.full(count + SPARE, np.nan, np.float32) for _ in range(2))
    copy_scores(scores.ctypes.data, count, row.ctypes.data)
    clear_marks(marks.ctypes.data, count)
    marks[before] = 1.0
    mark_best(row.ctypes.data, count, want, marks.ctypes.data, np.empty(1, np.int32))
    blocks = np.full(count + 1, -1, np.int32)
    found = list_marked(marks.ctypes.data, count, 7, blocks)
    assert (blocks[found:] == -1).all()
    return (blocks[:found] - 7).tolist()


def wanted(scores: Array, want: int, before: list[int]) -> list[int]:
    usable = [i for i in range(len(scores)) if scores[i] > -np.inf]
    best = sorted(usable, key=lambda i: (-scores[i], i))[:want]
    return sorted({*best, *before})


@pytest.mark.parametrize("count", [1, 15, 16, 17, 63, 64, 65, 500, 2031])
def test_the_best_are_marked(count: int) -> None:
    rng = np.random.default_rng(count)
    for number in range(40):
        scores = (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4)).astype(np.float32)
        if number % 4 == 1:
            scores = scores.round()  # many ties, and both zeros
        if number % 4 == 2:
            scores[rng.random(count) < 0.5] = -np.inf
        if number % 8 == 3:
            scores[rng.random(count) < 0.2] = np.nan
        if number % 10 == 4:
            scores[:] = scores[0]
        want = int(rng.integers(1, count + 2))
        before = np.flatnonzero(rng.random(count) < 0.1).tolist()
        assert marked(scores, want, before) == wanted(scores, want, before)


@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -3e38])
def test_values_that_are_odd(value: float) -> None:
    scores = np.array([1.0, value, -1.0, value, 0.0, value, 2.0], np.float32)
    for want in range(1, 9):
        assert marked(scores, want, []) == wanted(scores, want, [])
