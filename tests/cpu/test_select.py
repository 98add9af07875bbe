"""`block_topk.select_blocks` against sorting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pools import run
from references import cpu as reference

from hf_offload.cpu.kernels.block_topk import select_blocks


def _check(
    score: torch.Tensor, n_sealed: int, n_blocks: int, lo: list[int], hi: list[int], recent: int, k: int
) -> None:
    batch, heads, _ = score.shape
    sink_lo, sink_hi = torch.tensor(lo).int(), torch.tensor(hi).int()
    blocks = torch.full((batch, heads, n_blocks), -1, dtype=torch.int32)
    counts = torch.empty(batch, heads, dtype=torch.int32)
    arrays = (sink_lo, sink_hi, blocks, counts)
    first, end, chosen, count = (x.numpy() for x in arrays)
    run(select_blocks(score.numpy(), n_sealed, n_blocks, first, end, recent, k, chosen, count), threads=2)
    want = reference.select_blocks(score, n_sealed, n_blocks, sink_lo, sink_hi, recent, k)
    got = [[blocks[b, h, : counts[b, h]].tolist() for h in range(heads)] for b in range(batch)]
    assert got == want


@pytest.mark.parametrize("seed", range(30))
def test_select(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_blocks = int(rng.integers(0, 150))
    n_sealed = max(0, n_blocks - int(rng.integers(0, 3)))
    score = torch.from_numpy(rng.standard_normal((3, 2, n_blocks + 2)).astype(np.float32))
    if seed % 3 == 0:
        score = (score * 2).round()  # many ties, and both zeros
    if seed % 4 == 0:
        score[0, :, ::2], score[1, :, ::3] = -math.inf, math.nan
    lo = rng.integers(0, max(1, n_blocks) + 3, 3).tolist() if seed % 2 else [0, 0, n_blocks // 2]
    hi = [x + int(rng.integers(0, 4)) for x in lo]
    _check(score, n_sealed, n_blocks, lo, hi, int(rng.integers(0, 5)), int(rng.integers(0, n_blocks + 3)))


def test_ties_and_signed_zero() -> None:
    score = torch.tensor([[[0.0, -0.0, 0.0, -0.0, -1.0]]])
    _check(score, 5, 5, [0], [0], 0, 2)
    _check(torch.full((1, 1, 40), 0.25), 40, 41, [0], [1], 1, 17)
    _check(torch.tensor([[[math.inf, 1.0, math.inf, -math.inf]]]), 4, 4, [0], [0], 0, 1)


def test_select_refuses_small_capacity() -> None:
    score, sinks = np.zeros((1, 1, 10), np.float32), np.zeros(1, np.int32)
    counts = np.zeros((1, 1), np.int32)
    with pytest.raises(ValueError, match="holds 3"):
        select_blocks(score, 10, 10, sinks, sinks + 2, 2, 2, np.zeros((1, 1, 3), np.int32), counts)
    with pytest.raises(ValueError, match="n_sealed 11"):
        select_blocks(score, 11, 11, sinks, sinks, 0, 2, np.zeros((1, 1, 11), np.int32), counts)
