"""`cpu.simd`: conversions of dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pools import DTYPES, run

from hf_offload.cpu.launch import jit_for_python, tag_of
from hf_offload.cpu.memory import address_of
from hf_offload.cpu.simd import vectors as vector
from hf_offload.cpu.simd.convert import narrow, widen


@jit_for_python
def _widen(tag: Any, address: int, target: Any) -> None:
    for i in range(0, target.size, 16):
        vector.store(address_of(target) + 4 * i, vector.load(tag, address + i * tag.itemsize))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_value(dtype: torch.dtype) -> None:
    stored = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    got = np.empty(2**16, np.float32)
    _widen(tag_of(dtype), stored.data_ptr(), got)
    np.testing.assert_array_equal(got, stored.float().numpy())


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
