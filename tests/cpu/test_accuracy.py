"""Accuracy of attention against float64 on the same stored values, with difficult sums and exponentials."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pools import UNEVEN, Case, attend, make_case
from references import cpu as reference

DTYPE, GROUP = UNEVEN
BATCH, HEADS, DIM, BLOCK, LENGTH = 2, 2, 64, 16, 200


def _random(case: Case, query: torch.Tensor) -> None:
    query *= 3


def _one_huge_logit(case: Case, query: torch.Tensor) -> None:
    """One key along the query of every head, at other places, forty times as long as it should be."""
    for b in range(BATCH):
        block = case.table[b, 5 + b]
        for h in range(HEADS):
            _write(case, int(block), h, 3, 40 * query[b, h * GROUP])


def _all_equal(case: Case, query: torch.Tensor) -> None:
    for pool in [*case.slabs, case.clean]:
        pool[:, :, 0] = pool[:, :, 0].nan_to_num(0) * 0 + 0.25


def _denormals(case: Case, query: torch.Tensor) -> None:
    for pool in [*case.slabs, case.clean]:
        pool[:, :, 1] = (pool[:, :, 1].nan_to_num(0).double() * torch.finfo(pool.dtype).tiny / 8).to(pool.dtype)


def _almost_nothing_valid(case: Case, query: torch.Tensor) -> None:
    case.valid[:, : LENGTH - 3] = 0
    case.holes[:] = 1


def _write(case: Case, block: int, head: int, token: int, key: torch.Tensor) -> None:
    half = len(case.slabs[0])
    slab, place = (case.slabs[0], block) if block < half else (case.slabs[1], block - half)
    for pool, index in ((slab, place), (case.clean, block)):
        pool[index, head, 0, token] = key.to(pool.dtype)


KINDS: dict[str, Callable[[Case, torch.Tensor], None]] = {
    "one huge logit": _one_huge_logit,
    "all equal": _all_equal,
    "denormals": _denormals,
    "almost nothing valid": _almost_nothing_valid,
}
CASES = [(seed, "random") for seed in range(8)] + [(seed, kind) for kind in KINDS for seed in range(3)]


@pytest.mark.parametrize(
    "dtype",
    [DTYPE, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float16))],
    ids=str,
)
@pytest.mark.parametrize(("seed", "kind"), CASES)
def test_decode(seed: int, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(seed)
    case = make_case(BATCH, HEADS, DIM, BLOCK, LENGTH, dtype, padding=(0, 21), scattered=0.0)
    query = torch.randn(BATCH, HEADS * GROUP, DIM)
    KINDS.get(kind, _random)(case, query)
    count = case.table.shape[1]
    blocks = torch.arange(count, dtype=torch.int32).expand(BATCH, HEADS, -1).contiguous()
    counts = torch.full((BATCH, HEADS), count, dtype=torch.int32)
    given = blocks, counts, LENGTH
    out, lse, *_ = attend(query, case.host_blocks, *given, scale=DIM**-0.5, means=False, threads=2)
    want_out, want_lse, _ = reference.attend_blocks(
        query, case.clean, case.table, blocks, counts, case.valid, LENGTH, scale=DIM**-0.5, softcap=None
    )
    keys = case.clean[case.table.long()][:, :, :, 0].double().repeat_interleave(GROUP, 2)
    largest = torch.einsum("bhd,bnhtd->bhnt", query.double(), keys).abs().max().item() * DIM**-0.5
    bound = 1e-5 * (1 + largest)
    torch.testing.assert_close(out.double(), want_out, rtol=0, atol=bound)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=bound)
