"""`move_records`: writes and gathers of tokens; `blocks/test_resident_set.py` copies records."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pools import DTYPES, bits, run
from references import cpu as reference

from hf_offload.cpu.kernels.move_records import gather_tokens, write_tokens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (13, 1), (5, 27), (3, 600)])
def test_write_then_gather(dtype: torch.dtype, start: int, tokens: int) -> None:
    batch, heads, size, dim = 2, 3, 8, 48
    logical = -(-(start + tokens) // size)
    pool = torch.zeros(batch * logical, heads, 2, size, dim, dtype=dtype)
    block_ptr = pool.data_ptr() + np.arange(len(pool), dtype=np.int64) * pool[0].nbytes
    table = torch.randperm(len(pool)).view(batch, logical).int()
    # [B, T, H, D] memory seen as [B, H, T, D], as projections produce it; v has tokens that lie together.
    k = torch.randn(batch, tokens, heads, dim).to(dtype).transpose(1, 2)
    v = torch.randn(batch, heads, tokens, dim).to(dtype)
    run(write_tokens(bits(k), bits(v), block_ptr, table.numpy(), start, size), threads=2)
    got_k, got_v = reference.read_tokens(pool, table, start, tokens)
    assert torch.equal(got_k, k)
    assert torch.equal(got_v, v)
    assert pool.count_nonzero() == k.count_nonzero() + v.count_nonzero()  # nothing else was written
    k_out = torch.empty_like(v)
    v_out = torch.empty(batch, tokens, heads, dim, dtype=dtype).transpose(1, 2)
    run(gather_tokens(bits(k_out), bits(v_out), block_ptr, table.numpy(), start, size), threads=2)
    assert torch.equal(k_out, k)
    assert torch.equal(v_out, v)
