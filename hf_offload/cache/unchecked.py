"""Blocks of a mapped file that nobody has read yet: each record is compared with its checksum when it is read first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hf_offload.cpu.checksum import checksum_records

if TYPE_CHECKING:
    from hf_offload.cache.host_pool import HostPool


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


def record_sums(addresses: np.ndarray, plain_bytes: int, packed_bytes: int) -> np.ndarray:
    """Checksums of records at addresses that are marked as in `HostPool.block_ptr`; int64 `[n]`."""
    sums = np.zeros(len(addresses), np.int64)
    for kind, nbytes in ((0, plain_bytes), (1, packed_bytes)):
        mine = (addresses & 1) == kind
        part = np.zeros(int(mine.sum()), np.int64)
        checksum_records(addresses[mine] - kind, nbytes, part).run("checksums")
        sums[mine] = part
    return sums
