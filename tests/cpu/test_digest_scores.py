"""`block_topk.choose_blocks` with every digest, and `gpu.seal`, against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pools import TINY, UNEVEN, bits, given_masses, make_case, random_submeans, run
from references import cpu as reference

from hf_offload.cpu.kernels.block_topk import choose_blocks
from hf_offload.cpu.kernels.digest_scores import Digest, vectors

JOINS = ("max", "mean", "raw")
SLOW = pytest.mark.slow  # tiles of heads and digests that no other test compiles
CAP = 0.7


def _table(batch: int, physical: int, blocks: int) -> torch.Tensor:
    return torch.stack([torch.randperm(physical)[:blocks] for _ in range(batch)]).int()


def _score(
    query: torch.Tensor, digest: Digest, table: torch.Tensor, kv_heads: int, blocks: int, tail: torch.Tensor, join: str,
    scale: float = 1.0, softcap: float | None = None, kv_dtype: torch.dtype = torch.float32, **options: Any,
) -> torch.Tensor:  # fmt: skip
    width = (blocks + 15) // 16 * 16 + 3
    masses = np.full((*query.shape[:2], width), np.nan, np.float32)
    score = torch.full((len(query), kv_heads, width), 7.0)
    launch = choose_blocks(
        query.numpy(), digest, table.numpy(), blocks, masses, tail.numpy(), score.numpy(), join=join, scale=scale,
        softcap=softcap, kv_dtype=kv_dtype, **options,
    )  # fmt: skip
    run(launch, threads=2)
    assert (score[..., (blocks + 15) // 16 * 16 :] == 7).all()
    return score[..., :blocks]


def _check(score: torch.Tensor, logmass: torch.Tensor, tail: torch.Tensor, join: str, atol: float = 1e-6) -> None:
    """Compare with the join of log masses; those far below the best of a softmax may be cut off."""
    want = reference.join_scores(logmass, tail, score.shape[1], join=join)
    assert torch.equal(score == -math.inf, want == -math.inf)
    torch.testing.assert_close(score.double(), want, rtol=max(1e-4, 20 * atol), atol=20 * atol)


@pytest.mark.parametrize(
    ("kind", "softcap", "shapes"),
    [
        (UNEVEN, CAP, [(128, 37), (64, 4), (16, 1)]),
        (TINY, None, [(160, 1031), (64, 30)]),
        pytest.param((torch.float16, 12), CAP, [(128, 30)], marks=SLOW),
    ],
)
def test_vectors(kind: tuple[torch.dtype, int], softcap: float | None, shapes: list[tuple[int, int]]) -> None:
    dtype, group = kind
    for width, blocks in shapes:
        torch.manual_seed(group)
        query, digests = torch.randn(2, 2 * group, width) / 4, torch.randn(blocks + 3, 2, width).to(dtype)
        bias, tail = torch.randn(blocks + 3), torch.randn(2, 2 * group)
        table = _table(2, blocks + 3, blocks)
        dead = int(table[0, 0])
        bias[dead], digests[dead] = -math.inf, math.nan
        digest = vectors(query.numpy(), bits(digests), bias.numpy(), dtype=dtype)
        want = reference.score_vectors(query, digests, bias, table, blocks, softcap)
        for join in JOINS:
            score = _score(query, digest, table, 2, blocks, tail, join, softcap=softcap, kv_dtype=dtype)
            assert (score[0, :, 0] == -math.inf).all()
            _check(score, want, tail, join)


@pytest.mark.parametrize(
    ("count", "group", "softcap", "shapes"),
    [
        (8, 2, None, [(64, 1037), (80, 5), (16, 33)]),
        (8, 2, 1.5, [(80, 5), (64, 275)]),
        pytest.param(4, 5, 0.5, [(128, 21)], marks=SLOW),
        pytest.param(16, 7, None, [(64, 1)], marks=SLOW),
        pytest.param(32, 3, None, [(96, 18)], marks=SLOW),
        pytest.param(64, 4, 1.5, [(64, 19)], marks=SLOW),
    ],
)
def test_submeans(count: int, group: int, softcap: float | None, shapes: list[tuple[int, int]]) -> None:
    for dim, blocks in shapes:
        torch.manual_seed(count)
        digest, parts = random_submeans(2, blocks + 3, count, dim)
        digest.bias[:3], parts[4][:3] = -np.inf, -math.inf
        table = _table(2, blocks + 3, blocks)
        query, tail, scale = torch.randn(2, 2 * group, dim), torch.randn(2, 2 * group), dim**-0.5
        logmass = reference.score_submeans(query, *parts, table, blocks, scale=scale, softcap=softcap)
        for join in JOINS:
            score = _score(query, digest, table, 2, blocks, tail, join, scale=scale, softcap=softcap)
            _check(score, logmass, tail, join, atol=1e-3)  # log cosh is a polynomial


@pytest.mark.parametrize("join", JOINS)
def test_masses_that_underflow_and_rows_without_any(join: str) -> None:
    torch.manual_seed(0)
    for blocks in (37, 1, 513):
        logmass, tail = torch.randn(2, 4, blocks) * 8, torch.randn(2, 4)
        logmass[0, 0] -= 300  # a head whose blocks vanish beside its tail: shares underflow to 0
        logmass[1, :, ::3], tail[1, 0] = -math.inf, -math.inf
        _check(_score(torch.zeros(2, 4, 16), *given_masses(logmass, 2), 2, blocks, tail, join), logmass, tail, join)
    query, tail = torch.zeros(1, 2, 16), torch.full((1, 2), -math.inf)
    digest, table = given_masses(torch.full((1, 2, 5), -math.inf), 1)
    assert (_score(query, digest, table, 1, 5, tail, join) == -math.inf).all()
    assert _score(query, digest, table, 1, 0, tail, join).shape == (1, 1, 0)
    assert _score(query, *given_masses(torch.empty(1, 2, 0), 1), 1, 0, tail, join).shape == (1, 1, 0)


@pytest.mark.parametrize(
    ("kind", "block_size", "softcap"),
    [(TINY, 8, None), (UNEVEN, 32, CAP), pytest.param((torch.bfloat16, 12), 128, 5.0, marks=SLOW)],
)
def test_the_tail_is_read(kind: tuple[torch.dtype, int], block_size: int, softcap: float | None) -> None:
    dtype, group = kind
    torch.manual_seed(4)
    length = 3 * block_size + 1
    case = make_case(3, 2, 64, block_size, length, dtype, padding=(0, block_size + 2, length))
    query = torch.randn(3, 2 * group, 64) * 3
    for sealed in (0, 2, 3, 4):
        logmass = torch.randn(3, 2 * group, sealed)
        tail = torch.full((3, 2 * group), 7.0)
        digest, table = given_masses(logmass, 2, case.table, dtype)
        score = _score(
            query, digest, table, 2, sealed, tail, "max", scale=0.125, softcap=softcap, kv_dtype=dtype,
            unsealed=case.host_blocks, length=length,
        )  # fmt: skip
        want = reference.tail_lse(
            query, case.clean, case.table, sealed, length, case.valid, scale=0.125, softcap=softcap
        )
        torch.testing.assert_close(tail.double(), want, rtol=0, atol=1e-5 * (1 + 20))
        assert (want[2] == -math.inf).all()
        logmass = logmass.to(dtype)
        _check(score, logmass if softcap is None else softcap * (logmass.double() / softcap).tanh(), want, "max")


@pytest.mark.parametrize("seed", range(6))
def test_scores_and_choice_in_one(seed: int) -> None:
    """Several chunks, several threads: the choice is the one that the scores alone lead to."""
    torch.manual_seed(seed)
    blocks, k = int(torch.randint(0, 900, ())), int(torch.randint(1, 64, ()))
    logmass, tail = torch.randn(2, 4, blocks) * 3, torch.randn(2, 4)
    chosen, counts = torch.full((2, 2, blocks + 2), -1, dtype=torch.int32), torch.empty(2, 2, dtype=torch.int32)
    low, high = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([1, 4], dtype=torch.int32)
    select = (low.numpy(), high.numpy(), 4, blocks + 1, k, chosen.numpy(), counts.numpy())
    score = _score(torch.zeros(2, 4, 16), *given_masses(logmass, 2), 2, blocks, tail, "max", select=select)
    _check(score, logmass, tail, "max")
    want = reference.select_blocks(score, blocks, blocks + 1, low, high, 4, k)
    assert [[chosen[b, h, : counts[b, h]].tolist() for h in range(2)] for b in range(2)] == want
