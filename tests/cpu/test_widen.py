"""`convert.widen`: queries converted to float32 exactly, with any strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pools import DTYPES, run

from hf_offload.cpu.simd.convert import widen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 16), (2, 1, 48), (3, 5, 128)])
def test_every_number_arrives_as_it_is(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    batch, heads, dim = shape
    # [B, 1, H, D] memory seen as [B, H, 1, D], as projections produce it.
    source = (torch.randn(batch, 1, heads, dim) * 10.0 ** torch.randint(-4, 4, (dim,))).to(dtype).transpose(1, 2)
    source[0, 0, 0, :3] = torch.tensor([0.0, float("inf"), float("-inf")])
    query = np.full(shape, np.nan, np.float32)
    run(widen(source, query), threads=2)
    assert torch.equal(torch.from_numpy(query), source[:, :, 0].float())
    query[:] = np.nan
    run(widen(source[:, :, 0], query))
    assert torch.equal(torch.from_numpy(query), source[:, :, 0].float())


def test_widen_refuses() -> None:
    query = np.zeros((1, 2, 16), np.float32)
    with pytest.raises(ValueError, match="must agree"):
        widen(torch.zeros(1, 3, 16), query)
    with pytest.raises(ValueError, match="contiguous"):
        widen(torch.zeros(1, 2, 32)[..., ::2], query)
    with pytest.raises(TypeError, match="float64"):
        widen(torch.zeros(1, 2, 16, dtype=torch.float64), query)
