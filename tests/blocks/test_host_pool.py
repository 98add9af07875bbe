"""The host pool: slabs, reference counts, addresses."""

from __future__ import annotations

import numpy as np
import torch
from pools import used_blocks

from hf_offload.blocks.host_pool import HostPool


def test_blocks_stay_where_they_are_until_their_last_holder_lets_go() -> None:
    pool = HostPool(num_kv_heads=2, block_size=8, head_dim=16, dtype=torch.float32)
    assert pool.block_bytes == 2 * 2 * 8 * 16 * 4
    ids = pool.allocate(4)
    before = pool.block_ptr[ids].copy()
    assert before[0] == pool.slabs[0].data_ptr()
    more = pool.allocate(500)
    assert len(pool.slabs) > 1
    assert np.array_equal(pool.block_ptr[ids], before)
    pool.release(more)
    pool.retain(ids[:2])
    pool.release(ids)
    assert used_blocks(pool) == 2
    pool.retain(ids[:1])
    pool.release(np.concatenate([ids[:2], ids[:1]]))  # twice in one call counts twice
    assert used_blocks(pool) == 0
    there = pool.num_blocks
    assert len(set(pool.allocate(504).tolist())) == 504
    assert pool.num_blocks == there
