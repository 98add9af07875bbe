"""The one token of a decode step on its way into host blocks: the launch of the step before, with other numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from hf_offload.cpu import pool as movers
from hf_offload.cpu.standing import ANYWHERE, Kept, Standing

if TYPE_CHECKING:
    from hf_offload.cache.store import BlockStore


class Writing(NamedTuple):
    """A token that is counted, but not in its block yet.

    Args:
        launch: writes it, with these numbers.
        numbers: where K and V are, and which token it is.
        keep: what must live until then.
    """

    launch: Standing
    numbers: tuple[int, int, int]
    keep: tuple[torch.Tensor, torch.Tensor]


class TokenWriter:
    """Writes single tokens into the blocks of one layer, in host memory."""

    def __init__(self) -> None:
        self._writing = Kept("an append")

    def count(self, store: BlockStore, k: torch.Tensor, v: torch.Tensor) -> Writing:
        """Count K and V `[B, Hkv, 1, D]` of the store's dtype, on the CPU, as one more token, still to be written."""
        shape, key, value = k.shape, k.stride(), v.stride()
        if key[3] != 1 or value[3] != 1:
            k, v = k.contiguous(), v.contiguous()
            key, value = k.stride(), v.stride()
        arrays, numbers = (store.table, store.pool.block_ptr), (shape, key, value)
        standing = self._writing.find(arrays, numbers)
        if standing is None:
            launch = movers.write_tokens(k, v, store.pool.block_ptr, store.table, store.length, store.block_size)
            last = store.table.shape[1] * store.block_size - 1
            standing = self._writing.keep(launch, arrays, numbers, keys=ANYWHERE, values=ANYWHERE, start=last)
        start = store.length
        store.length = start + 1
        return Writing(standing, (k.data_ptr(), v.data_ptr(), start), (k, v))
