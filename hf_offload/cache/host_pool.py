"""Host memory for KV blocks: slabs that never move, physical blocks counted by reference."""

from __future__ import annotations

import numpy as np
import torch

from hf_offload.cache.memory import host_empty

MIN_SLAB_BLOCKS = 64


class HostPool:
    """Blocks `[blocks, Hkv, 2 (K, V), block_size, D]` in slabs, pinned when a GPU will read them.

    A slab is never moved or grown, so a block's address is good for as long as the pool lives; a larger context adds
    slabs. A physical block is shared by the rows and forks that hold a reference to it.

    Args:
        num_kv_heads, block_size, head_dim: the shape of one block.
        dtype: how K and V are stored.
        pin: whether slabs are page-locked (for copies to and from a GPU that do not wait).
    """

    def __init__(
        self, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, *, pin: bool = False
    ) -> None:
        self.block_shape = (num_kv_heads, 2, block_size, head_dim)
        self.dtype = dtype
        self.pin = pin
        self.slabs: list[torch.Tensor] = []
        self.block_ptr = np.zeros(0, np.int64)
        self.refcount = np.zeros(0, np.int32)
        self._free: list[int] = []
        self.shared = False
        """Whether any block was ever held twice; until then no writer needs to look."""

    @property
    def num_blocks(self) -> int:
        """Physical blocks that exist, used or free."""
        return len(self.block_ptr)

    @property
    def block_bytes(self) -> int:
        """Bytes of one physical block, all KV heads."""
        return int(np.prod(self.block_shape)) * self.dtype.itemsize

    @property
    def record_bytes(self) -> int:
        """Bytes of one block of one KV head, K and V."""
        return self.block_bytes // self.block_shape[0]

    @property
    def used_blocks(self) -> int:
        """Physical blocks that somebody holds."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> np.ndarray:
        """Take blocks, each with one reference; int32 `[count]`."""
        if count > len(self._free):
            self._add_slab(max(count - len(self._free), MIN_SLAB_BLOCKS, self.num_blocks // 4))
        ids = np.array([self._free.pop() for _ in range(count)], np.int32)
        self.refcount[ids] = 1
        return ids

    def _add_slab(self, blocks: int) -> None:
        with torch.inference_mode(False):
            slab = host_empty((blocks, *self.block_shape), self.dtype, pin=self.pin)
        first = self.num_blocks
        pointers = slab.data_ptr() + np.arange(blocks, dtype=np.int64) * self.block_bytes
        self.slabs.append(slab)
        self.block_ptr = np.concatenate([self.block_ptr, pointers])
        self.refcount = np.concatenate([self.refcount, np.zeros(blocks, np.int32)])
        self._free.extend(range(first + blocks - 1, first - 1, -1))  # popped from the end: ascending addresses

    def retain(self, ids: np.ndarray) -> None:
        """Add one reference for every occurrence of a block in `ids`."""
        np.add.at(self.refcount, ids.ravel(), 1)
        self.shared = True

    def release(self, ids: np.ndarray) -> None:
        """Drop one reference for every occurrence in `ids`; blocks that nobody holds are free again."""
        ids = ids.ravel()
        np.subtract.at(self.refcount, ids, 1)
        held = np.unique(ids)
        assert (self.refcount[held] >= 0).all(), "a block was released more often than it was taken"
        self._free.extend(held[self.refcount[held] == 0][::-1].tolist())
