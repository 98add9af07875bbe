"""The one token of a decode step on its way into host blocks: the launch of the step before, with other numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_offload.cpu import pool as movers
from hf_offload.cpu.standing import ANYWHERE, Kept

if TYPE_CHECKING:
    from hf_offload.cache.store import BlockStore


class TokenWriter:
    """Writes single tokens into the blocks of one layer, in host memory."""

    def __init__(self) -> None:
        self._writing = Kept("an append")

    def write(self, store: BlockStore, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write K and V `[B, Hkv, 1, D]` of the store's dtype, on the CPU, as token `store.length`."""
        numbers = k.shape, k.stride(), v.stride()
        if numbers[1][3] != 1 or numbers[2][3] != 1:
            k, v = k.contiguous(), v.contiguous()
            numbers = k.shape, k.stride(), v.stride()
        arrays = store.table, store.pool.block_ptr
        standing = self._writing.find(arrays, numbers)
        if standing is None:
            launch = movers.write_tokens(k, v, store.pool.block_ptr, store.table, store.length, store.block_size)
            last = store.table.shape[1] * store.block_size - 1
            standing = self._writing.keep(launch, arrays, numbers, keys=ANYWHERE, values=ANYWHERE, start=last)
        standing.run(k.data_ptr(), v.data_ptr(), store.length)
