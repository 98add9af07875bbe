"""Blocks of a mapped file that nobody has read yet: each record is compared with its checksum when it is read first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hf_offload.cpu.checksum import checksum_records

if TYPE_CHECKING:
    from hf_offload.cache.host_pool import HostPool
    from hf_offload.cache.store import BlockStore


class Unchecked:
    """What is still to be checked of the first blocks of a pool, by (block, KV head).

    Args:
        sums: int64 `[P, Hkv]`, the checksums that were saved.
        path: of the file, for the error.
    """

    def __init__(self, sums: np.ndarray, path: Path) -> None:
        self.sums, self.path = sums, path
        self.todo = np.ones(sums.shape, bool)

    def check(self, pool: HostPool, ids: np.ndarray, heads: np.ndarray) -> None:
        """Check records that have not been checked (two equal arrays).

        Raises:
            ValueError: one of them is not what was saved.
        """
        ours = ids < len(self.todo)
        ids, heads = ids[ours], heads[ours]
        missing = self.todo[ids, heads]
        if not missing.any():
            return
        count = self.sums.shape[1]
        ids, heads = np.divmod(np.unique(ids[missing] * count + heads[missing]), count)
        addresses = pool.addresses(ids, heads)
        found = record_sums(addresses, pool.record_bytes, pool.packed_record_bytes)
        if (found != self.sums[ids, heads]).any():
            raise ValueError(
                f"{self.path} is not what was saved: a block of keys and values was altered; run the prompt again and "
                "save its cache anew"
            )
        self.todo[ids, heads] = False
        if not self.todo.any():
            pool.unchecked = None

    def forget(self, ids: np.ndarray) -> None:
        """These blocks get something else to hold."""
        self.todo[ids[ids < len(self.todo)]] = False


def check_blocks(store: BlockStore, first: int, stop: int) -> None:
    """Compare logical blocks of a mapped file that were not read before with what was saved.

    Raises:
        ValueError: the file was altered.
    """
    unchecked = store.pool.unchecked
    if unchecked is not None:
        ids = np.unique(store.table[:, first:stop]).astype(np.int64)
        heads = np.tile(np.arange(store.num_kv_heads), len(ids))
        unchecked.check(store.pool, np.repeat(ids, store.num_kv_heads), heads)


def check_selected(store: BlockStore, blocks: np.ndarray, counts: np.ndarray) -> None:
    """As `check_blocks`, the blocks that each row and KV head chose: `[B, Hkv, C]` and `[B, Hkv]` int32."""
    unchecked = store.pool.unchecked
    if unchecked is not None:
        meant = np.arange(blocks.shape[2]) < counts[:, :, None]
        rows, heads, _ = np.nonzero(meant)
        unchecked.check(store.pool, store.table[rows, blocks[meant]].astype(np.int64), heads)


def record_sums(addresses: np.ndarray, plain_bytes: int, packed_bytes: int) -> np.ndarray:
    """Checksums of records at addresses that are marked as in `HostPool.block_ptr`; int64 `[n]`."""
    sums = np.zeros(len(addresses), np.int64)
    for kind, nbytes in ((0, plain_bytes), (1, packed_bytes)):
        mine = (addresses & 1) == kind
        part = np.zeros(int(mine.sum()), np.int64)
        checksum_records(addresses[mine] - kind, nbytes, part).run("checksums")
        sums[mine] = part
    return sums
