"""`simd.vectors`: accuracy of exp and log, conversions, reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_offload.cpu.launch import head_tiles, jit_for_python, tag_of
from hf_offload.cpu.memory import address_of
from hf_offload.cpu.simd import vectors as vector

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


def test_exp() -> None:
    x = np.linspace(-87.3, 88, 1 << 16, dtype=np.float32)
    got = np.empty_like(x)
    _map(0, x, got)
    want = np.exp(x.astype(np.float64))
    assert np.abs(got / want - 1).max() <= 2e-7
    x = np.full(16, -1e30, np.float32)
    x[:4] = 0, -np.inf, np.nan, -88
    got = np.empty_like(x)
    _map(0, x, got)
    assert got[0] == 1
    assert got[1] == 0
    assert np.isnan(got[2])
    assert (got[3:] == 0).all()


@pytest.mark.parametrize(("kind", "rest", "error"), [(2, _REST, 2e-7), (3, 0.0, 3e-6)])
def test_exp2(kind: int, rest: float, error: float) -> None:
    x = np.linspace(-126, 127, 1 << 16, dtype=np.float32)
    got = np.empty_like(x)
    _map(kind, x, got)
    assert np.abs(got / np.exp2(x.astype(np.float64) * (1.0 + rest)) - 1).max() <= error
    x = np.full(16, -1e30, np.float32)
    x[:4] = 0, -np.inf, np.nan, -126.5
    got = np.empty_like(x)
    _map(kind, x, got)
    assert abs(got[0] - 1) <= error
    assert got[1] == 0
    assert np.isnan(got[2])
    assert (got[3:] == 0).all()


def test_log() -> None:
    x = np.exp(np.linspace(-80, 80, 1 << 14)).astype(np.float32)
    got = np.empty_like(x)
    _map(1, x, got)
    want = np.log(x.astype(np.float64))
    assert np.abs(got - want).max() <= 1e-5
    assert np.abs(got - want)[np.abs(want) < 4].max() <= 4e-7


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
