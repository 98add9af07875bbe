"""`cpu.simd`: accuracy of exp and log, reductions, conversions of dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pools import DTYPES, run

from hf_offload.cpu.launch import head_tiles, jit_for_python, tag_of
from hf_offload.cpu.memory import address_of
from hf_offload.cpu.simd import vectors as vector
from hf_offload.cpu.simd.convert import narrow, widen

_REST = 5e-8


@jit_for_python
def _map(kind: int, source: Any, target: Any) -> None:
    for i in range(0, source.size, 16):
        x = vector.load_f32(address_of(source) + 4 * i)
        if kind == 0:
            y = vector.exp(x)
        elif kind == 1:
            y = vector.log(x)
        elif kind == 2:
            y = vector.exp2(x, vector.splat(np.float32(_REST)))
        else:
            y = vector.exp2_rough(x)
        vector.store(address_of(target) + 4 * i, y)


@jit_for_python
def _widen(tag: Any, address: int, target: Any) -> None:
    for i in range(0, target.size, 16):
        vector.store(address_of(target) + 4 * i, vector.load(tag, address + i * tag.itemsize))


@jit_for_python
def _reduce(source: Any) -> tuple[float, float]:
    x = vector.load_f32(address_of(source))
    return vector.lane_sum(x), vector.lane_max(x)


def mapped(kind: int, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    got = np.empty_like(x)
    _map(kind, x, got)
    return got


@pytest.mark.parametrize(
    ("kind", "least", "most", "error"), [(0, -87.3, 88, 2e-7), (2, -126, 127, 2e-7), (3, -126, 127, 3e-6)]
)
def test_exponentials(kind: int, least: float, most: float, error: float) -> None:
    x = np.linspace(least, most, 1 << 16, dtype=np.float32)
    exact = {0: np.exp, 2: lambda x: np.exp2(x * (1.0 + _REST)), 3: np.exp2}[kind]
    assert np.abs(mapped(kind, x) / exact(x.astype(np.float64)) - 1).max() <= error
    x = np.full(16, -1e30, np.float32)
    x[:4] = 0, -np.inf, np.nan, least - 0.7
    got = mapped(kind, x)
    assert abs(got[0] - 1) <= (error if kind else 0)
    assert got[1] == 0
    assert np.isnan(got[2])
    assert (got[3:] == 0).all()


def test_log() -> None:
    x = np.exp(np.linspace(-80, 80, 1 << 14)).astype(np.float32)
    want = np.log(x.astype(np.float64))
    error = np.abs(mapped(1, x) - want)
    assert error.max() <= 1e-5
    assert error[np.abs(want) < 4].max() <= 4e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value(dtype: torch.dtype) -> None:
    stored = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    got = np.empty(2**16, np.float32)
    _widen(tag_of(dtype), stored.data_ptr(), got)
    np.testing.assert_array_equal(got, stored.float().numpy())


def test_reductions() -> None:
    x = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    total, top = _reduce(x)
    assert abs(total - x.sum()) < 1e-5
    assert top == x.max()


def test_head_tiles_cover_the_group() -> None:
    for group in range(1, 33):
        full, rest = map(len, head_tiles(group))
        tiles = -(-group // full)
        assert 1 <= rest <= full <= 4
        assert (tiles - 1) * full + rest == group


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_are_widened_as_they_are_with_any_strides(dtype: torch.dtype) -> None:
    for shape in ((1, 3, 16), (2, 1, 48), (3, 5, 128)):
        batch, heads, dim = shape
        # [B, 1, H, D] memory seen as [B, H, 1, D], as projections produce it.
        source = (torch.randn(batch, 1, heads, dim) * 10.0 ** torch.randint(-4, 4, (dim,))).to(dtype).transpose(1, 2)
        source[0, 0, 0, :3] = torch.tensor([0.0, float("inf"), float("-inf")])
        for given in (source, source[:, :, 0]):
            query = np.full(shape, np.nan, np.float32)
            run(widen(given, query), threads=2)
            assert torch.equal(torch.from_numpy(query), source[:, :, 0].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    out = torch.randn(6, 48) * 10.0 ** torch.randint(-30, 30, (48,))
    out[0, :5] = torch.tensor([1.00390625, 1.01171875, -0.0, float("-inf"), float("nan")])  # ties, both ways
    target = torch.empty(2, 1, 3, 48, dtype=dtype)
    narrow(out.numpy(), target).run()
    assert torch.equal(target.view(6, 48).nan_to_num(7.0), out.to(dtype).nan_to_num(7.0))


def test_what_is_not_covered_is_refused() -> None:
    query, out = np.zeros((1, 2, 16), np.float32), np.zeros((2, 16), np.float32)
    with pytest.raises(ValueError, match="must agree"):
        widen(torch.zeros(1, 3, 16), query)
    with pytest.raises(ValueError, match="contiguous"):
        widen(torch.zeros(1, 2, 32)[..., ::2], query)
    with pytest.raises(TypeError, match="float64"):
        widen(torch.zeros(1, 2, 16, dtype=torch.float64), query)
    with pytest.raises(TypeError, match=r"target has dtype torch\.float16"):
        narrow(out, torch.empty(2, 16, dtype=torch.float16))
    with pytest.raises(ValueError, match="pass a contiguous target"):
        narrow(out, torch.empty(16, 2).T)
    with pytest.raises(TypeError, match="source has dtype float64"):
        narrow(out.astype(np.float64), torch.empty(2, 16))
