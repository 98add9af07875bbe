"""`linear`: products of a few rows against float64, at odd sizes, beside poisoned memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear as stock

from hf_offload.cpu.kernels.linear import MOST_ROWS, faster_than_torch, linear
from hf_offload.cpu.simd.matrix_tiles import has_feature

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Compiled for each dtype and tile of up to four rows: all tiles in float32, the smallest and the largest in the others.
ROWS = {torch.float32: range(1, MOST_ROWS + 1), torch.bfloat16: (1, 4, 7, 8), torch.float16: (1, 4, 7, 8)}
SIZES = [(1, 1), (5, 3), (16, 31), (37, 32), (33, 47), (64, 64), (17, 95), (100, 576), (40, 1000)]
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
    x, weight, bias = inputs(MOST_ROWS, (1000, 300), dtype)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_rounded_to_even(dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    for ties in (0.5, 1.5):
        x = torch.tensor([[1.0, ties * step]], dtype=dtype)
        assert multiply(x, torch.ones(1, 2, dtype=dtype), None).item() == (1.0 if ties == 0.5 else 1 + 2 * step)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "dtypes or devices differ", {"x": torch.zeros(1, 8, dtype=torch.float16)}),
        (TypeError, "has no CPU kernel", dict.fromkeys(("x", "weight", "out"), torch.zeros(1, 8, dtype=torch.float64))),
        (ValueError, "are not covered", {"x": torch.zeros(9, 8), "out": torch.zeros(9, 4)}),
        (ValueError, "are not covered", {"x": torch.zeros(8)}),
        (ValueError, "are not covered", {"weight": torch.zeros(4, 0), "x": torch.zeros(1, 0)}),
        (ValueError, "threads=0", {"threads": 0}),
        (ValueError, "do not fit", {"x": torch.zeros(1, 9)}),
        (ValueError, "do not fit", {"out": torch.zeros(2, 4)}),
        (ValueError, "do not fit", {"bias": torch.zeros(5)}),
        (ValueError, "must be contiguous", {"weight": torch.zeros(8, 4).T}),
        (ValueError, "must be contiguous", {"x": torch.zeros(2, 16)[:, ::2], "out": torch.zeros(2, 4)}),
    ],
)
def test_what_is_not_covered_is_refused(error: type[Exception], message: str, change: dict[str, object]) -> None:
    given = {"x": torch.zeros(1, 8), "weight": torch.zeros(4, 8), "bias": None, "out": torch.zeros(1, 4), "threads": 1}
    with pytest.raises(error, match=message):
        linear(**(given | change))


def test_the_crossing() -> None:
    assert not faster_than_torch(torch.float64, 1, 64)
    served = faster_than_torch(torch.float32, 1, 1 << 20)
    for dtype in DTYPES:
        assert not faster_than_torch(dtype, MOST_ROWS + 1, 64)
        assert faster_than_torch(dtype, 2, 2048) == served
    assert faster_than_torch(torch.float32, MOST_ROWS, 1 << 20) == served
    if served and not has_feature("avx512f"):
        assert not faster_than_torch(torch.bfloat16, 1, 64)
    elif served:
        assert faster_than_torch(torch.bfloat16, 1, 1 << 20)
        assert not faster_than_torch(torch.bfloat16, 2, 2049)
    assert not faster_than_torch(torch.float16, 1, 64)
