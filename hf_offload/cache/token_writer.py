"""The one token of a decode step on its way into host blocks: the launch of the step before, with other numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_offload.cpu import pool as movers
from hf_offload.cpu.standing import Kept

if TYPE_CHECKING:
    from hf_offload.cache.store import BlockStore

_ANYWHERE = 2**63 - 1


class TokenWriter:
    """Writes single tokens into the blocks of one layer, in host memory."""

    def __init__(self) -> None:
        self._writing = Kept("an append")

    def write(self, store: BlockStore, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write K and V `[B, Hkv, 1, D]` of the store's dtype, on the CPU, as token `store.length`."""
        if k.stride(-1) != 1 or v.stride(-1) != 1:
            k, v = k.contiguous(), v.contiguous()
        arrays, numbers = (store.table, store.pool.block_ptr), (k.shape, k.stride(), v.stride())
        standing = self._writing.find(arrays, numbers)
        if standing is None:
            launch = movers.write_tokens(k, v, store.pool.block_ptr, store.table, store.length, store.block_size)
            last = store.table.shape[1] * store.block_size - 1
            standing = self._writing.keep(launch, arrays, numbers, keys=_ANYWHERE, values=_ANYWHERE, start=last)
        standing.set("keys", k.data_ptr())
        standing.set("values", v.data_ptr())
        standing.set("start", store.length)
        standing.run()
