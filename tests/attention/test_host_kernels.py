"""Buffers and launches that are used again from step to step."""

from __future__ import annotations

import pytest
import torch

from hf_offload.attention.host_kernels import HostKernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_query_is_taken_and_an_answer_given_in_its_dtype(dtype: torch.dtype) -> None:
    query = torch.randn(2, 1, 3, 48).to(dtype).transpose(1, 2)
    kernels = HostKernels(0, (2, 3, 48))
    for source in (query, query.double()):
        kernels.query[:] = 0.0
        taking, places, read = kernels.take(source)
        taking.run(*places)
        assert torch.equal(torch.from_numpy(kernels.query), query[:, :, 0].float())
        assert places == (read.data_ptr(),)
    out = torch.randn(2, 3, 48) * 10.0 ** torch.randint(-30, 30, (48,))
    out[0, 0, :4] = torch.tensor([1.00390625, 1.01171875, -0.0, float("-inf")])  # ties, both ways
    kernels.out_tensor.copy_(out)
    found = kernels.give(query)
    assert (found is None) == (dtype == torch.float16)
    if found is not None:
        giving, address, given = found
        giving.run(address)
        kernels.out_tensor.fill_(0.0)
        assert torch.equal(given, out.to(dtype).unsqueeze(1))
        assert given.is_contiguous()
