"""Blocks that several rows or forks hold: held once more, or copied before somebody writes into them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np

from hf_offload.cpu.pool import copy_records

if TYPE_CHECKING:
    from hf_offload.cache.store import BlockStore


def share_blocks(store: BlockStore, other: BlockStore) -> None:
    """Let a store hold the blocks of another one of the same sizes; it has none yet, and nothing is copied.

    Digests are shared as far as there are any: their statistics are fixed.
    """
    other.settle()
    store.pool = other.pool
    if other.digests is None or other.digests.frozen:
        store.digests, store.sealed = other.digests, other.sealed
    store.reserve_digests()
    store.pool.retain(other.table[:, : other.num_blocks])  # from here on they are this store's to release
    store.table, store.reserved = other.table.copy(), other.num_blocks
    store.length, store.packed_blocks = other.length, other.packed_blocks
    store.revision += 1
    if store.event is not None:
        weakref.finalize(store.pool, store.event.synchronize).atexit = False


def own_block(store: BlockStore, block: int) -> None:
    """Give every row a physical block of its own for a logical one, with what it holds but for its digest."""
    ids, pool = store.table[:, block], store.pool
    if (pool.refcount[ids] == 1).all():
        return
    store.settle()
    for row in range(store.batch):
        old = ids[row]
        if pool.refcount[old] == 1:
            continue
        source = pool.block_ptr[old : old + 1]
        packed = bool(source[0] & 1)
        new = pool.allocate(1, packed=packed)
        try:
            store.reserve_digests()
            nbytes = store.num_kv_heads * (pool.packed_record_bytes if packed else pool.record_bytes)
            copy_records(source & ~1, pool.block_ptr[new] & ~1, nbytes).run("a copy of shared blocks")
        except BaseException:
            pool.release(new)
            raise
        store.table[row, block] = new[0]
        store.revision += 1
        pool.release(np.array([old]))
