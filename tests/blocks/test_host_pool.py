"""The host pool: slabs, reference counts, addresses."""

from __future__ import annotations

import numpy as np
import torch
from pools import used_blocks

from hf_offload.blocks.host_pool import HostPool


def pool() -> HostPool:
    return HostPool(num_kv_heads=2, block_size=8, head_dim=16, dtype=torch.float32)


def test_addresses_stay_and_point_at_the_blocks() -> None:
    it = pool()
    first = it.allocate(3)
    before = it.block_ptr[first].copy()
    it.allocate(500)
    assert len(it.slabs) > 1
    assert np.array_equal(it.block_ptr[first], before)
    assert before[0] == it.slabs[0].data_ptr()
    assert it.block_bytes == 2 * 2 * 8 * 16 * 4


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    it = pool()
    ids = it.allocate(4)
    it.retain(ids[:2])
    it.release(ids)
    assert used_blocks(it) == 2
    it.release(ids[:2])
    assert used_blocks(it) == 0
    again = it.allocate(4)
    assert it.num_blocks == 64
    assert len(set(again.tolist())) == 4


def test_releasing_twice_in_one_call_counts_twice() -> None:
    it = pool()
    ids = it.allocate(1)
    it.retain(ids)
    it.release(np.concatenate([ids, ids]))
    assert used_blocks(it) == 0
