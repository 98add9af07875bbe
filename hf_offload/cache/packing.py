"""Blocks of a store on their way into the format of old blocks and back (`cache/host_format.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from hf_offload.cpu.launch import Launch

if TYPE_CHECKING:
    from hf_offload.cache.store import BlockStore


def pack_tokens(store: BlockStore, k: torch.Tensor, v: torch.Tensor, blocks: range) -> None:
    """Pack whole blocks of new K and V `[B, Hkv, T, D]`, which begin at token `store.length`."""
    rows, heads, block = (x.ravel() for x in np.indices((store.batch, store.num_kv_heads, len(blocks))))
    token = (block + blocks.start) * store.block_size - store.length
    size = store.dtype.itemsize
    keys, values = (
        x.data_ptr() + size * (rows * x.stride(0) + heads * x.stride(1) + token * x.stride(2)) for x in (k, v)
    )
    records = store.pool.addresses(store.table[rows, block + blocks.start], heads) - 1
    store.format.pack(keys, values, size * k.stride(2), size * v.stride(2), records, keep=(k, v)).run("packing")


def pack_blocks(store: BlockStore, stop: int) -> None:
    """Pack the logical blocks before `stop`, as far as they are not packed; nothing may be reading them."""
    ids, mine = np.unique(store.table[:, store.packed_blocks : stop], return_counts=True)
    plain = store.pool.block_ptr[ids] & 1 == 0
    ids, mine = ids[plain], mine[plain]
    others = store.pool.refcount[ids] > mine  # they may be reading: what they hold stays where it is
    heads, step = np.arange(store.num_kv_heads), store.head_dim * store.dtype.itemsize

    def pack(old: np.ndarray, new: np.ndarray) -> None:
        keys = (old[:, None] + store.pool.record_bytes * heads).ravel()
        records = (new[:, None] + store.pool.packed_record_bytes * heads).ravel()
        store.format.pack(keys, keys + store.pool.record_bytes // 2, step, step, records).run("packing")

    if others.any():
        _pack_apart(store, ids[others], pack)
    if not others.all():
        store.pool.repack(ids[~others], pack)
    store.packed_blocks = stop


def _pack_apart(store: BlockStore, ids: np.ndarray, pack: Callable[[np.ndarray, np.ndarray], None]) -> None:
    """Pack blocks, ascending, into blocks of one's own; arguments as in `HostPool.repack`."""
    new = store.pool.allocate(len(ids), packed=True)
    try:
        store.reserve_digests()
        pack(store.pool.block_ptr[ids], store.pool.block_ptr[new] - 1)
        if store.digests is not None:
            store.digests.copy(ids, new)
    except BaseException:
        store.pool.release(new)
        raise
    table = store.table.copy()
    held = np.isin(table[:, : store.reserved], ids).nonzero()
    old = store.table[held]
    table[held] = new[np.searchsorted(ids, old)]
    store.pool.retain(table[held])
    store.pool.release(new)
    store.pool.release(old)
    store.table = table
    store.revision += 1


def gathering_packed(store: BlockStore, k: torch.Tensor, v: torch.Tensor, first: int) -> Launch:
    """As `BlockStore.gathering`, where blocks may be packed."""
    size, count = store.block_size, k.shape[2]
    blocks = np.arange(first // size, -(-(first + count) // size))
    rows, heads, block = (x.ravel() for x in np.indices((store.batch, store.num_kv_heads, len(blocks))))
    begins = np.maximum(blocks * size, first)  # of each block, the tokens that are wanted
    ends = np.minimum((blocks + 1) * size, first + count)
    line = store.format.gather_dtype.itemsize * store.head_dim
    places = line * ((rows * store.num_kv_heads + heads) * count + (begins - first)[block])
    return store.format.unpack(
        store.pool.addresses(store.table[rows, blocks[block]], heads), (begins % size).astype(np.int32)[block],
        (ends - begins).astype(np.int32)[block], k.data_ptr() + places, v.data_ptr() + places, keep=(k, v),
    )  # fmt: skip
