"""Int8 blocks against plain torch: packing and unpacking; `test_decode_attention.py` attends them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pools import DTYPES, pack_blocks, packed_pool
from references import cpu as reference

from hf_offload.blocks.host_pool import HostPool
from hf_offload.cpu.kernels.int8_blocks import packed_bytes, unpack_records

GEOMETRIES = [(64, 32), (96, 8), (80, 16), (16, 128), (128, 32), (256, 8)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "block_size"), GEOMETRIES)
def test_what_is_packed_reads_back_as_its_codes_say(dim: int, block_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    blocks, kv_heads = 5, 2
    pool, held = packed_pool(kv_heads, dim, block_size, blocks, dtype)
    rows = blocks * kv_heads
    tokens = np.arange(rows, dtype=np.int32) % 3
    counts = np.full(rows, block_size - 4, np.int32)
    out = torch.full((2, rows, block_size - 4, dim), 7.0)
    where = pool.addresses(np.repeat(np.arange(blocks), kv_heads), np.tile(np.arange(kv_heads), blocks))
    place = out.data_ptr() + np.arange(rows) * out[0, 0].nbytes
    unpack_records(
        where, tokens, counts, place, place + out[0].nbytes, kv_dtype=dtype, dim=dim, block_size=block_size
    ).run()
    for row in range(rows):
        want = held.flatten(0, 1)[row, :, tokens[row] : tokens[row] + counts[row]]
        assert torch.equal(out[:, row], want.float())


def test_elements_that_are_not_finite_and_zeros_pack_as_zero() -> None:
    pool = HostPool(1, 8, 16, torch.float32, packed_bytes=packed_bytes(16, 8))
    ids = pool.allocate(1)
    content = torch.randn(2, 8, 16)
    content[0, 3], content[1, 5, 2], content[0, :, 7], content[1, 6] = float("nan"), float("inf"), 0.0, 0.0
    pool.slabs[0][0, 0] = content
    pack_blocks(pool, ids)
    record = pool.addresses(ids, np.zeros(1, np.int64))
    out = torch.full((2, 8, 16), 7.0)
    place, zero = np.array([out.data_ptr()]), np.zeros(1, np.int32)
    unpack_records(
        record, zero, zero + 8, place, place + 8 * 16 * 4, kv_dtype=torch.float32, dim=16, block_size=8
    ).run()
    want = torch.stack(reference.pack_block(content[0].double(), content[1].double()))
    assert torch.equal(out, want.float())
    assert (out[0, 3].abs() <= content[0].nan_to_num().abs().amax(0) / 127).all()  # zero, rounded
    assert (out[0, :, 7] == 0).all()
    assert out[1, 5, 2] == 0
