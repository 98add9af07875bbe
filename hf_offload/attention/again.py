"""A decode step with one memory like the one before: the same launches, made again for another token."""

from __future__ import annotations

import torch

from hf_offload.attention.host_kernels import HostKernels
from hf_offload.cache.layer import HybridLayer
from hf_offload.cpu.standing import Standing

AGAIN = "again"
"""Where a layer has it, among its kernels."""


class Again:
    """The launches of a whole step, good as long as nothing but the token is another.

    That is so from one token of a block to the next, where the policy says so (`Policy.repeats`): the way through its
    plan, and through all that a plan depends on, takes Python longer than the rest of a step.

    Args:
        layer: its layer, behind the step.
        kernels: those of the step.
        launches: of the token, the query, the choice of blocks where there is one, attention, and the answer.
        reads_tail: whether the choice looks at tokens that have no digest yet.
        query, key, value: `[B, H, 1, D]`, as the step got them.
    """

    __slots__ = (
        "_arrays", "_chooses", "_dtype", "_first", "_kernels", "_last", "_launches", "_reads_tail", "_revision",
        "_scale", "_sealed", "_shape", "_softcap", "_strides",
    )  # fmt: skip

    def __init__(
        self, layer: HybridLayer, kernels: HostKernels, launches: tuple[Standing, ...], reads_tail: bool,
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    ) -> None:  # fmt: skip
        store = layer.store
        assert store is not None
        self._kernels, self._launches = kernels, launches
        self._chooses, self._reads_tail = kernels.choosing.standing in launches, reads_tail
        self._first, self._last = (store.num_blocks - 1) * store.block_size + 1, store.num_blocks * store.block_size - 1
        self._sealed, self._revision = store.sealed, layer.revision
        self._scale, self._softcap = layer.scale, layer.softcap
        self._strides = query.stride(), key.stride(), value.stride()
        self._shape, self._dtype = query.shape, query.dtype
        pool, padding = store.pool, store.padding
        bundle = None if store.digests is None else store.digests.bundle
        self._arrays = pool, store.table, pool.block_ptr, padding.valid, padding.holes, padding.first, bundle

    def step(
        self, layer: HybridLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor | None:
        """Append a token and attend with it: `[B, 1, Hq, D]`, or None, with nothing done, if it is no such step."""
        store = layer.store
        assert store is not None
        length, padding, digests = store.length, store.padding, store.digests
        pool, table, block_ptr, valid, holes, first, bundle = self._arrays
        same = (
            self._first <= length < self._last
            and store.sealed == self._sealed
            and layer.revision == self._revision
            and store.pool is pool
            and not pool.shared
            and store.table is table
            and pool.block_ptr is block_ptr
            and padding.valid is valid
            and padding.holes is holes
            and padding.first is first
            and (digests is None or digests.bundle is bundle)
            and layer.scale == self._scale
            and layer.softcap == self._softcap
            and query.dtype is self._dtype
            and query.shape == self._shape
            and (query.stride(), key.stride(), value.stride()) == self._strides
        )
        if not same:
            return None
        batch, heads, _, dim = self._shape
        given = query.new_empty((batch, 1, heads, dim))
        store.length = now = length + 1
        choice = (now if self._reads_tail else 0,) if self._chooses else ()
        places = key.data_ptr(), value.data_ptr(), length, query.data_ptr(), *choice, now, given.data_ptr()
        self._kernels.first.run(self._launches, places)
        return given
