"""Copies of blocks into slots where no GPU kernel can read the pool: the CPU gathers records into a staging buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from hf_offload.blocks.block_store import BlockStore, narrow
from hf_offload.blocks.device_mirror import sent
from hf_offload.blocks.memory import host_empty, memory_for
from hf_offload.cpu.kernels import move_records as movers

PIECE_BYTES = 32 << 20
"""Size of the staging buffer in bytes."""


class Moves(NamedTuple):
    """Blocks to copy into slots, for each row and KV head; entries from `counts` on are ignored.

    Args:
        slots, blocks: `[B, Hkv, M]` int32.
        counts: `[B, Hkv]` int32.
    """

    slots: torch.Tensor
    blocks: torch.Tensor
    counts: torch.Tensor


def copies(store: BlockStore, pool: torch.Tensor, moves: Moves) -> Callable[[], None]:
    """Return a callable that copies blocks into slots, on a CUDA device in order of its thread's current stream.

    Args:
        store: the blocks.
        pool: `[B, Hkv, R, 2, block_size, D]`, written by the callable.
        moves: read at once.
    """
    slots, blocks, counts = moves.slots.cpu().numpy(), moves.blocks.cpu().numpy(), moves.counts.cpu().numpy()
    rows, heads, column = np.nonzero(np.arange(slots.shape[2]) < counts[..., None])
    slot, block = slots[rows, heads, column], blocks[rows, heads, column]
    source = store.pool.addresses(store.table[rows, block], heads)
    return _copies(store, pool.flatten(0, 2), source, (rows * pool.shape[1] + heads) * pool.shape[2] + slot)


def bring(store: BlockStore, into: torch.Tensor, row: int, head: int, blocks: np.ndarray) -> None:
    """Copy blocks of one row and KV head, on a CUDA device in order of its current stream.

    Args:
        store: the blocks.
        into: `[n, 2, block_size, D]`, contiguous; the first m entries are written.
        row, head: row and KV head of the blocks.
        blocks: logical blocks, int `[m]`, at most n.
    """
    source = store.pool.addresses(store.table[row, blocks], np.full(len(blocks), head))
    _copies(store, into, source, np.arange(len(blocks), dtype=np.int64))()


def _copies(store: BlockStore, into: torch.Tensor, source: np.ndarray, index: np.ndarray) -> Callable[[], None]:
    """Return a callable that copies records, directly if both lie on the host and none is packed; as `staged`."""
    if store.device.type == into.device.type == "cpu" and not store.format.packs:
        record = store.pool.record_bytes
        return movers.copy_records(source, into.data_ptr() + index * record, record)
    return staged(store, into, source, index)


def staged(store: BlockStore, into: torch.Tensor, source: np.ndarray, index: np.ndarray) -> Callable[[], None]:
    """Return a callable that copies records through a staging buffer on the host, in which they are unpacked.

    Args:
        store: gives the format of the records.
        into: `[n, 2, block_size, D]`, written by the callable.
        source: int64 `[m]`, addresses of the records, packed ones marked.
        index: int64 `[m]`, entry of `into` for each record.
    """
    dtype = store.format.gather_dtype
    shape = (2, store.block_size, store.head_dim)
    most = max(PIECE_BYTES // (into[:1].numel() * dtype.itemsize), 1)

    def copy() -> None:
        for first in range(0, len(source), most):
            some, rows = source[first : first + most], index[first : first + most]
            together = host_empty((len(some), *shape), dtype, brief=True, what="a recall")
            _bring_together(store, some, together)
            with memory_for("a recall", "fewer rows or a smaller budget need less"):
                moved = torch.empty((len(some), *shape), dtype=into.dtype, device=into.device)
            moved.copy_(narrow(together, store.dtype) if store.format.packs else together)
            into.index_copy_(0, sent(rows.astype(np.int64), into.device), moved)

    return copy


def _bring_together(store: BlockStore, source: np.ndarray, together: torch.Tensor) -> None:
    nbytes = together[:1].nbytes
    target = together.data_ptr() + np.arange(len(source), dtype=np.int64) * nbytes
    if not store.format.packs:
        movers.copy_records(source, target, nbytes)()
        return
    first, tokens = np.zeros(len(source), np.int32), np.full(len(source), store.block_size, np.int32)
    store.format.unpack(source, first, tokens, target, target + nbytes // 2)()
