"""`linear`: products of a few rows against float64, at odd sizes, beside poisoned memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear as stock

from hf_offload.cpu.kernels.linear import MOST_ROWS, linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Compiled for each dtype and tile of up to four rows: all tiles in float32, the smallest and the largest in the others.
ROWS = {torch.float32: range(1, MOST_ROWS + 1), torch.bfloat16: (1, 4, 7, 8), torch.float16: (1, 4, 7, 8)}
SIZES = [(1, 1), (5, 3), (16, 31), (37, 32), (33, 47), (17, 95), (100, 576)]
POISON = float("nan")


def inputs(rows: int, size: tuple[int, int], dtype: torch.dtype, bias: bool = True) -> tuple[torch.Tensor, ...]:
    """x, weight, bias: weights and bias lie among NaN."""
    torch.manual_seed(rows)
    tall, dim = size
    weight = torch.full((tall + 2, dim + 7), POISON, dtype=dtype)[1:-1, 3:-4]
    weight.copy_(torch.randn(size))
    more = torch.full((tall + 2,), POISON, dtype=dtype)[1:-1].copy_(torch.randn(tall))
    return torch.randn(rows, dim).to(dtype), weight, more if bias else None


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, threads: int = 1) -> torch.Tensor:
    beside = torch.full((len(x) * len(weight) + 2,), POISON, dtype=x.dtype)
    out = beside[1:-1].view(len(x), len(weight))
    linear(x, weight, bias, out, threads).run()
    assert beside[[0, -1]].isnan().all(), "nothing is written beside the result"
    return out


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return stock(x.double(), weight.double(), None if bias is None else bias.double())


@pytest.mark.parametrize(("rows", "dtype"), [(rows, dtype) for dtype in DTYPES for rows in ROWS[dtype]], ids=str)
def test_products_of_every_size(rows: int, dtype: torch.dtype) -> None:
    for size in SIZES:
        for bias in (False, True):
            given = inputs(rows, size, dtype, bias)
            want = exact(*given)
            # Half a unit in the last place of the result, and of sums in float32.
            bound = want.abs() * torch.finfo(dtype).eps / 2 + 1e-6 * size[1] ** 0.5
            assert ((multiply(*given).double() - want).abs() <= bound).all(), (size, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_no_larger_than_torchs(dtype: torch.dtype) -> None:
    x, weight, bias = inputs(4, (512, 1536), dtype)
    want = exact(x, weight, bias)
    ours, theirs = (
        (found.double() - want).abs().mean() for found in (multiply(x, weight, bias), stock(x, weight, bias))
    )
    assert ours <= 1.05 * theirs


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_among_others_and_on_threads(dtype: torch.dtype) -> None:
    x, weight, bias = inputs(MOST_ROWS, (300, 100), dtype)
    alone = torch.cat([multiply(row[None], weight, bias) for row in x])
    for rows in ROWS[dtype]:
        assert torch.equal(multiply(x[:rows], weight, bias), alone[:rows])
    for threads in (2, 3, 64):
        assert torch.equal(multiply(x, weight, bias, threads), alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_where_it_is(dtype: torch.dtype) -> None:
    x, weight, bias = inputs(4, (40, 77), dtype)
    weight[7, 70], weight[20, 0], x[1, 76] = float("inf"), float("nan"), float("-inf")
    found, want = multiply(x, weight, bias), exact(x, weight, bias)
    for holds in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(holds(found), holds(want))


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "dtypes or devices differ", {"x": torch.zeros(1, 8, dtype=torch.float16)}),
        (ValueError, "are not covered", {"x": torch.zeros(9, 8), "out": torch.zeros(9, 4)}),
        (ValueError, "do not fit", {"x": torch.zeros(1, 9)}),
        (ValueError, "must be contiguous", {"weight": torch.zeros(8, 4).T}),
    ],
)
def test_what_is_not_covered_is_refused(error: type[Exception], message: str, change: dict[str, object]) -> None:
    given = {"x": torch.zeros(1, 8), "weight": torch.zeros(4, 8), "bias": None, "out": torch.zeros(1, 4), "threads": 1}
    with pytest.raises(error, match=message):
        linear(**(given | change))
