"""Buffers and launches that are used again from step to step: only while nobody else works in them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_offload.attention.host_kernels import HostKernels, kernels_of
from hf_offload.cpu.worker import Worker


def test_buffers_of_a_job_that_was_given_up_are_left_to_it() -> None:
    layer: Any = SimpleNamespace(index=0, kernels={})
    first = kernels_of(layer, torch.Size((1, 4, 16)), ahead=True)
    assert kernels_of(layer, torch.Size((1, 4, 16)), ahead=True) is first
    assert kernels_of(layer, torch.Size((1, 4, 16)), ahead=False) is not first
    gate = threading.Event()
    first.job = Worker().submit(gate.wait)
    second = kernels_of(layer, torch.Size((1, 4, 16)), ahead=True)
    assert second is not first
    gate.set()
    second.lent = True
    third = kernels_of(layer, torch.Size((1, 4, 16)), ahead=True)
    assert third is not second
    assert kernels_of(layer, torch.Size((1, 4, 16)), ahead=True) is third


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_given_is_a_copy_in_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    query = torch.randn(2, 1, 3, 48).to(dtype).transpose(1, 2)
    kernels = HostKernels(0, (2, 3, 48))
    kernels.take(query)
    assert torch.equal(torch.from_numpy(kernels.query), query[:, :, 0].float())
    kernels.take(query.double())
    assert torch.equal(torch.from_numpy(kernels.query), query[:, :, 0].float())
    out = torch.randn(2, 3, 48) * 10.0 ** torch.randint(-30, 30, (48,))
    out[0, 0, :4] = torch.tensor([1.00390625, 1.01171875, -0.0, float("-inf")])  # ties, both ways
    kernels.out_tensor.copy_(out)
    given = kernels.give(query)
    kernels.out_tensor.fill_(0.0)
    assert torch.equal(given, out.to(dtype).unsqueeze(1))
    assert given.is_contiguous()
