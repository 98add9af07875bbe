"""`scoring`, `submeans` and `packing` against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_offload.cpu import reference
from hf_offload.cpu.packing import pack_codes, unpack_codes
from hf_offload.cpu.scoring import join_scores, score_vectors
from hf_offload.cpu.submeans import score_submeans

from ._pools import bits, run


def _table(batch: int, physical: int, blocks: int) -> torch.Tensor:
    return torch.stack([torch.randperm(physical)[:blocks] for _ in range(batch)]).int()


@pytest.mark.parametrize(
    ("group", "width", "dtype", "blocks"),
    [
        (3, 128, torch.bfloat16, 37),
        (3, 64, torch.bfloat16, 4),
        (3, 16, torch.bfloat16, 1),
        (1, 160, torch.float32, 1031),
        (12, 128, torch.float16, 30),
    ],
)
def test_score_vectors(group: int, width: int, dtype: torch.dtype, blocks: int) -> None:
    torch.manual_seed(group)
    query, vectors = torch.randn(2, 2 * group, width), torch.randn(blocks + 3, 2, width).to(dtype)
    bias = torch.randn(blocks + 3)
    table = _table(2, blocks + 3, blocks)
    dead = int(table[0, 0])
    bias[dead], vectors[dead] = -math.inf, math.nan
    logmass = torch.full((2, 2 * group, blocks + 2), 7.0)
    launch = score_vectors(
        query.numpy(), bits(vectors), bias.numpy(), table.numpy(), blocks, logmass.numpy(), dtype=dtype
    )
    run(launch, threads=2)
    want = reference.score_vectors(query, vectors, bias, table, blocks)
    torch.testing.assert_close(logmass[..., :blocks].double(), want, rtol=0, atol=1e-4)
    assert (logmass[..., blocks:] == 7).all()
    assert (logmass[0, :, 0] == -math.inf).all()


@pytest.mark.parametrize(
    ("submeans", "dim", "group", "blocks"),
    [(8, 64, 3, 1037), (8, 80, 3, 5), (2, 16, 3, 33), (4, 128, 5, 21), (16, 64, 3, 19), (32, 96, 3, 18)],
)
def test_score_submeans(submeans: int, dim: int, group: int, blocks: int) -> None:
    torch.manual_seed(submeans)
    physical = blocks + 3
    codes = torch.randint(-7, 8, (physical, 2, submeans, dim), dtype=torch.int8)
    scales = torch.rand(physical, 2, submeans) * 0.3
    bias = torch.randint(0, 5, (physical, submeans)).float().log()  # some sub-means have no token
    bias[:3] = -math.inf
    center, sigma = torch.randn(2, dim), torch.rand(2, dim) + 0.5
    table = _table(2, physical, blocks)
    query = torch.randn(2, 2 * group, dim)
    want = reference.score_submeans(query, codes, scales, bias, center, sigma, table, blocks, scale=dim**-0.5)
    scales[bias[:, None].expand(scales.shape) == -math.inf] = math.nan
    logmass = torch.full((2, 2 * group, blocks + 1), 7.0)
    arrays = (query, pack_codes(codes), scales, bias, center, sigma, table)
    launch = score_submeans(*(x.numpy() for x in arrays), blocks, logmass.numpy(), scale=dim**-0.5)
    run(launch, threads=2)
    torch.testing.assert_close(logmass[..., :blocks].double(), want, rtol=0, atol=3e-4)
    assert (logmass[..., blocks:] == 7).all()


def test_packing() -> None:
    codes = torch.randint(-7, 8, (5, 3, 8, 80), dtype=torch.int8)
    packed = pack_codes(codes)
    assert packed.dtype == torch.uint8
    assert packed.shape == (5, 3, 320)
    assert torch.equal(unpack_codes(packed, 8, 80), codes)
    words = packed.numpy().view(np.uint32).reshape(5, 3, 10, 8)
    assert (int(words[0, 0, 2, 5] >> 12) + 8) % 16 - 8 == codes[0, 0, 5, 8 * 2 + 3]
    with pytest.raises(ValueError, match="multiple of 8"):
        pack_codes(codes[..., :12])
    with pytest.raises(ValueError, match="320"):
        unpack_codes(packed, 4, 80)


@pytest.mark.parametrize("join", ["max", "mean", "raw"])
def test_join(join: str) -> None:
    torch.manual_seed(0)
    for group, blocks in ((3, 37), (1, 16), (5, 1)):
        logmass = torch.randn(2, 2 * group, blocks + 2) * 8
        logmass[0, 0] -= 300  # a head whose blocks vanish beside its tail: shares underflow to 0
        logmass[1, :, ::3] = -math.inf
        tail = torch.randn(2, 2 * group)
        tail[1, 0] = -math.inf
        score = torch.full((2, 2, blocks + 1), 7.0)
        run(join_scores(logmass.numpy(), tail.numpy(), blocks, score.numpy(), join=join), threads=2)
        want = reference.join_scores(logmass[..., :blocks], tail, 2, join=join)
        torch.testing.assert_close(score[..., :blocks].double(), want, rtol=1e-5, atol=1e-6)
        assert torch.equal(score[..., :blocks] == -math.inf, want == -math.inf)
        assert (score[..., blocks:] == 7).all()


def test_join_of_nothing() -> None:
    logmass, tail = np.full((1, 2, 5), -np.inf, np.float32), np.full((1, 2), -np.inf, np.float32)
    for join in ("max", "mean", "raw"):
        score = np.zeros((1, 1, 5), np.float32)
        join_scores(logmass, tail, 5, score, join=join)()
        assert (score == -np.inf).all()
    with pytest.raises(ValueError, match="'sum'"):
        join_scores(logmass, tail, 5, score, join="sum")
    with pytest.raises(ValueError, match="n_blocks 6"):
        join_scores(logmass, tail, 6, score, join="max")
