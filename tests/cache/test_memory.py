"""Host memory of any size: aligned when large, and as long-lived as the tensor."""

from __future__ import annotations

import gc

import pytest
import torch

from hf_offload.cache.memory import host_empty


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.uint8])
def test_large_tensors_are_aligned_and_writable(dtype: torch.dtype) -> None:
    tensor = host_empty((3, 1 << 20, 2), dtype)
    assert tensor.shape == (3, 1 << 20, 2)
    assert tensor.data_ptr() % (2 << 20) == 0
    part = tensor[2, 5:]
    part.fill_(7)
    del tensor
    gc.collect()
    assert (part == 7).all()


def test_small_tensors() -> None:
    assert host_empty((0, 4), torch.float32).shape == (0, 4)
    assert host_empty((3, 4), torch.float32).stride() == (4, 1)
