"""The choice of blocks against sorting: odd sizes, ties, -inf and NaN; and the prefetch of the next chunk's digests."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from pools import for_python, run
from references import cpu as reference

from hf_offload.cpu.kernels import block_topk, submean_scores
from hf_offload.cpu.kernels.block_topk import SPARE, select_blocks
from hf_offload.cpu.launch import Array

clear_marks, copy_scores, list_marked, mark_best = for_python(
    block_topk.clear_marks, block_topk.copy_scores, block_topk.list_marked, block_topk.mark_best
)
sweep_from, sweep_on = for_python(submean_scores.sweep_from, submean_scores.sweep_on)


def check_marks(scores: Array, want: int, before: list[int]) -> None:
    """The best are marked beside those that were; NaN lies behind the row."""
    count = len(scores)
    row, marks = (np.full(count + SPARE, np.nan, np.float32) for _ in range(2))
    copy_scores(scores.ctypes.data, count, row.ctypes.data)
    clear_marks(marks.ctypes.data, count)
    marks[before] = 1.0
    mark_best(row.ctypes.data, count, want, marks.ctypes.data, np.empty(1, np.int32))
    blocks = np.full(count + 1, -1, np.int32)
    found = list_marked(marks.ctypes.data, count, 7, blocks)
    assert (blocks[found:] == -1).all()
    usable = [i for i in range(count) if scores[i] > -np.inf]
    best = sorted(usable, key=lambda i: (-scores[i], i))[:want]
    assert (blocks[:found] - 7).tolist() == sorted({*best, *before})


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
        check_marks(scores, int(rng.integers(1, count + 2)), np.flatnonzero(rng.random(count) < 0.1).tolist())


@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-30, -3e38])
def test_values_that_are_odd(value: float) -> None:
    for want in range(1, 9):
        check_marks(np.array([1.0, value, -1.0, value, 0.0, value, 2.0], np.float32), want, [])


def check_selection(
    score: torch.Tensor, n_sealed: int, n_blocks: int, lo: list[int], hi: list[int], recent: int, k: int
) -> None:
    sink_lo, sink_hi = torch.tensor(lo).int(), torch.tensor(hi).int()
    blocks = np.full((*score.shape[:2], n_blocks), -1, np.int32)
    counts = np.empty(score.shape[:2], np.int32)
    sinks = sink_lo.numpy(), sink_hi.numpy()
    run(select_blocks(score.numpy(), n_sealed, n_blocks, *sinks, recent, k, blocks, counts), threads=2)
    want = reference.select_blocks(score, n_sealed, n_blocks, sink_lo, sink_hi, recent, k)
    assert [
        [row[:count].tolist() for row, count in zip(*heads, strict=True)]
        for heads in zip(blocks, counts, strict=True)
    ] == want  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_selection(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_blocks = int(rng.integers(0, 150))
    n_sealed = max(0, n_blocks - int(rng.integers(0, 3)))
    score = torch.from_numpy(rng.standard_normal((3, 2, n_blocks + 2)).astype(np.float32))
    if seed % 3 == 0:
        score = (score * 2).round()
    if seed % 4 == 0:
        score[0, :, ::2], score[1, :, ::3] = -math.inf, math.nan
    lo = rng.integers(0, max(1, n_blocks) + 3, 3).tolist() if seed % 2 else [0, 0, n_blocks // 2]
    hi = [x + int(rng.integers(0, 4)) for x in lo]
    check_selection(score, n_sealed, n_blocks, lo, hi, int(rng.integers(0, 5)), int(rng.integers(0, n_blocks + 3)))


def test_ties_and_signed_zero() -> None:
    check_selection(torch.tensor([[[0.0, -0.0, 0.0, -0.0, -1.0]]]), 5, 5, [0], [0], 0, 2)
    check_selection(torch.full((1, 1, 40), 0.25), 40, 41, [0], [1], 1, 17)
    check_selection(torch.tensor([[[math.inf, 1.0, math.inf, -math.inf]]]), 4, 4, [0], [0], 0, 1)


def test_what_does_not_fit_is_refused() -> None:
    score, sinks = np.zeros((1, 1, 10), np.float32), np.zeros(1, np.int32)
    for sealed, room, why in ((10, 3, "holds 3"), (11, 11, "n_sealed 11")):
        with pytest.raises(ValueError, match=why):
            select_blocks(
                score, sealed, sealed, sinks, sinks + 2, 2, 2, np.zeros((1, 1, room), np.int32), sinks[None].copy()
            )


@pytest.mark.parametrize(("begin", "end", "steps"), [(128, 256, 64), (128, 133, 64), (7, 8, 1), (130, 229, 3)])
def test_the_prefetched_shares_of_all_heads_cover_every_line(begin: int, end: int, steps: int) -> None:
    table = np.arange(300, dtype=np.int32)[::-1].copy()
    for kv_heads, row in itertools.product((1, 3, 8), (64, 96, 1536)):
        memory, lines = np.zeros(300 * row, np.uint8), -(-row // 64)
        reached = begin * lines
        for h in range(kv_heads):
            sweep = sweep_from(memory.ctypes.data, row, begin, end, h, kv_heads, steps)
            assert sweep.position * lines + sweep.line <= reached, "a gap behind the head before"
            for _ in range(steps):
                sweep = sweep_on(sweep, table, end)
            reached = sweep.position * lines + sweep.line
        assert reached == end * lines


def test_nothing_lies_behind_the_last_chunk() -> None:
    sweep = sweep_from(0, 64, 256, 256, 0, 1, 5)
    assert sweep_on(sweep, np.zeros(0, np.int32), 256)[3:5] == (256, 0), "no block was looked up, no address touched"
