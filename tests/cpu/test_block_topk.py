"""The choice of blocks against sorting: odd sizes, ties, signed zeros, infinities and NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pools import run
from references import cpu as reference

from hf_offload.cpu.kernels.block_topk import select_blocks

SIZES = [0, 1, 15, 16, 17, 31, 63, 64, 65, 149, 500, 2031]


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


@pytest.mark.parametrize("n_blocks", SIZES)
def test_selection(n_blocks: int) -> None:
    for seed in range(12):
        rng = np.random.default_rng((n_blocks, seed))
        n_sealed = max(0, n_blocks - int(rng.integers(0, 3)))
        scores = rng.standard_normal((3, 2, n_blocks + 2)) * 10.0 ** rng.integers(-3, 4)
        score = torch.from_numpy(scores.astype(np.float32))
        if seed % 3 == 0:
            score = score.round()  # many ties, and both zeros
        if seed % 4 == 0:
            score[0, :, ::2], score[1, :, ::3] = -math.inf, math.nan
        if seed % 5 == 4:
            score[1] = score[1, :, :1]
        lo = rng.integers(0, max(1, n_blocks) + 3, 3).tolist() if seed % 2 else [0, 0, n_blocks // 2]
        hi = [x + int(rng.integers(0, 4)) for x in lo]
        check_selection(score, n_sealed, n_blocks, lo, hi, int(rng.integers(0, 5)), int(rng.integers(0, n_blocks + 3)))


@pytest.mark.parametrize("value", [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30, -3e38])
def test_values_that_are_odd(value: float) -> None:
    for k in range(1, 9):
        check_selection(torch.tensor([[[1.0, value, -1.0, value, 0.0, value, 2.0]]]), 7, 7, [0], [0], 0, k)


def test_what_does_not_fit_is_refused() -> None:
    score, sinks = np.zeros((1, 1, 10), np.float32), np.zeros(1, np.int32)
    for sealed, room, why in ((10, 3, "holds 3"), (11, 11, "n_sealed 11")):
        with pytest.raises(ValueError, match=why):
            select_blocks(
                score, sealed, sealed, sinks, sinks + 2, 2, 2, np.zeros((1, 1, room), np.int32), sinks[None].copy()
            )
