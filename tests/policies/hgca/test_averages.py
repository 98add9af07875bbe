"""Weights of queries and moving averages, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pools import Case, make_case, packed_case, run
from references import hgca as reference

from hf_offload.policies.hgca.kernels.moving_average import move_averages
from hf_offload.policies.hgca.kernels.query_weights import Queries, query_lse, weigh_tokens

SLOW = pytest.mark.slow

# --- weights of queries -----------------------------------------------------------------------------------------------


def _check_weights(
    case: Case, group: int, queries: int, first: int, stop: int, start: int, softcap: float | None = None,
    skipped: int = 0, largest: bool = False, threads: int = 1,
) -> None:  # fmt: skip
    """Both kernels, one after the other."""
    kv_heads, dim = case.clean.shape[1], case.clean.shape[4]
    batch = len(case.table)
    query = torch.randn(batch, kv_heads * group, queries, dim) * 2
    at = case.valid[:, start : start + queries] == 0
    query[at[:, None].expand(-1, kv_heads * group, -1)] = math.nan
    lse = torch.full(query.shape[:3], 7.0)
    asked = Queries(query.numpy(), kv_heads, start, first, stop, dim**-0.5, softcap)
    run(query_lse(case.host_blocks, asked, lse.numpy()), threads)
    scores = reference.query_scores(
        query, case.clean, case.table, case.valid, first, stop, start, scale=dim**-0.5, softcap=softcap
    )
    want = scores.logsumexp(-1)
    assert ((want == -math.inf) | want.isfinite()).all()
    digits = 1e-4 if case.packed else 1e-5  # a query that meets codes is rounded to 16 bits
    bound = digits * (1 + want[want.isfinite()].abs().max().item()) if want.isfinite().any() else 0
    torch.testing.assert_close(lse.double(), want, rtol=0, atol=bound)
    lse[0, 0, queries // 2] = -math.inf
    average = torch.full((batch, kv_heads * group, case.valid.shape[1] + 16), 7.0)
    average[..., first:stop] = math.nan
    coefficient = None if largest else torch.rand(queries) / queries
    expected = reference.weigh_tokens(scores, lse, coefficient, average, case.valid, first, stop, start, skipped)
    joining = None if coefficient is None else coefficient.numpy()
    launch = weigh_tokens(case.host_blocks, asked, lse.numpy(), joining, average.numpy(), skipped=skipped)
    run(launch, threads)
    assert launch.cost > 0
    average[..., stop : stop + 15] = 7.0  # may be overwritten
    torch.testing.assert_close(average.double(), expected, rtol=3 * digits, atol=digits / 10)


@pytest.mark.parametrize(
    ("group", "dim", "block_size", "dtype", "queries", "softcap", "skipped", "largest"),
    [
        (3, 64, 32, torch.bfloat16, 37, None, 9, False),
        (7, 64, 128, torch.bfloat16, 20, 5.0, 30, True),
        (4, 80, 8, torch.float32, 33, None, 0, False),
        (1, 16, 64, torch.bfloat16, 150, None, 64, True),
        pytest.param(1, 128, 16, torch.bfloat16, 1, 20.0, 1, False, marks=SLOW),
        pytest.param(4, 80, 8, torch.float16, 33, None, 0, False, marks=SLOW),
        pytest.param(7, 128, 8, torch.float32, 5, None, 5, False, marks=SLOW),
    ],
    ids=str,
)
def test_weights(
    group: int, dim: int, block_size: int, dtype: torch.dtype, queries: int, softcap: float | None, skipped: int,
    largest: bool,
) -> None:  # fmt: skip
    torch.manual_seed(group * dim)
    length = 9 * 32 + 133  # the last block is not full
    case = make_case(3, 2, dim, block_size, length, dtype, padding=(0, 200, length - 2), scattered=0.05)
    case.valid[2, :length] = 0  # a row in which nothing is valid
    # All of it; a middle part that the queries see all of; one that none sees.
    for first, stop, start in ((0, length, length), (block_size, 256, length), (256, length, 256)):
        _check_weights(case, group, queries, first, stop, start - queries, softcap, skipped, largest)


@pytest.mark.parametrize("largest", [False, True])
def test_parts_and_rows_are_shared_by_threads(largest: bool) -> None:
    torch.manual_seed(4)
    case = make_case(2, 2, 64, 32, 3000, torch.bfloat16, padding=(0, 700), scattered=0.01)
    for queries, threads in ((100, 3), (1, 4)):
        _check_weights(case, 3, queries, 0, 3000, 3000 - queries, largest=largest, threads=threads)


@pytest.mark.slow
def test_packed_blocks() -> None:
    torch.manual_seed(6)
    _check_weights(packed_case(2, 2, 64, 32, 200, torch.bfloat16), 3, 21, 0, 200, 179)


# --- moving averages --------------------------------------------------------------------------------------------------


def _request(batch: int, heads: int, first: int, length: int, capacity: int, width: int) -> tuple[torch.Tensor, ...]:
    """Averages, scores and their lse; scores of some tokens and heads are -inf, of tokens behind the last NaN."""
    average, scores = torch.rand(batch, heads, capacity), torch.randn(batch, heads, width) * 5
    scores[torch.rand(scores.shape) < 0.1] = -math.inf
    padding = torch.rand(batch, length - first) < 0.2
    scores[..., : length - first][padding[:, None].expand(-1, heads, -1)] = -math.inf
    scores[..., length - first :] = math.nan
    lse = torch.where(scores.isnan(), -math.inf, scores).logsumexp(-1) + 0.5
    lse[0, -1] = -math.inf
    return average, scores, lse


PEAK: dict[str, Any] = {"share": 0.5, "after": 7}


@pytest.mark.parametrize("way", [{}, PEAK], ids=["mean", "peak"])
@pytest.mark.parametrize(
    ("first", "length", "capacity", "width"), [(0, 33, 33, 33), (5, 37, 64, 32), (40, 40, 48, 3), (3, 4000, 4096, 4100)]
)
def test_averages_move(first: int, length: int, capacity: int, width: int, way: dict[str, Any]) -> None:
    """Where the average is the mean of all (alpha 0), follows (1), or is in between."""
    for alpha, threads in ((0.3, 1), (0.3, 3), (0.0, 1), (1.0, 1)):
        torch.manual_seed(length)
        average, scores, lse = _request(2, 5, first, length, capacity, width)
        average[:, :, :first], average[:, :, length:] = math.nan, math.nan  # nobody touches what is outside
        want = reference.move_averages(average, scores, lse, first, length, alpha=alpha, **way)
        launch = move_averages(average.numpy(), scores.numpy(), lse.numpy(), first, length, alpha=alpha, **way)
        run(launch, threads)
        torch.testing.assert_close(average.double(), want, rtol=1e-5, atol=1e-7, equal_nan=True)
