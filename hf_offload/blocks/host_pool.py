"""`HostPool`: reference-counted KV blocks in host memory, in slabs that never move."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from hf_offload.blocks.memory import host_empty

MIN_SLAB_BLOCKS = 64


def growth(blocks: int, free: int, count: int) -> int:
    """The number of blocks that a pool of `blocks`, `free` of them free, adds when `count` are allocated."""
    return max(count - free, MIN_SLAB_BLOCKS, blocks // 4) if count > free else 0


class _Slabs:
    """An allocator of equal records in slabs; slabs never move or grow, the allocator adds more."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, pin: bool) -> None:
        self.shape, self.dtype, self.pin = shape, dtype, pin
        self.pinned = pin
        """Whether all slabs are page-locked; the system may refuse to lock pages."""
        self.tensors: list[torch.Tensor] = []
        self.nbytes = math.prod(shape) * dtype.itemsize
        """Bytes of one record."""
        self.records = 0
        self.free: list[int] = []

    def adopt(self, slab: torch.Tensor) -> np.ndarray:
        """Add a slab whose records are all in use; return their addresses, int64."""
        self.pinned = self.pinned and slab.is_pinned()
        self.tensors.append(slab)
        self.records += len(slab)
        return slab.data_ptr() + np.arange(len(slab), dtype=np.int64) * self.nbytes

    def take(self, count: int) -> np.ndarray:
        """Take free records; return their addresses, int64 `[count]`, ascending in new slabs."""
        if more := growth(self.records, len(self.free), count):
            with torch.inference_mode(False):
                slab = host_empty((more, *self.shape), self.dtype, pin=self.pin)
            self.free.extend(self.adopt(slab)[::-1].tolist())
        return _pop(self.free, count, np.int64)


def _pop(stack: list[int], count: int, dtype: type[np.generic]) -> np.ndarray:
    """Remove and return the last `count` entries of a list, the last one first."""
    first = len(stack) - count
    taken = np.array(stack[first:][::-1], dtype)
    del stack[first:]
    return taken


def _longer(array: np.ndarray, size: int) -> np.ndarray:
    """A copy of the array, extended with zeros to `size`."""
    grown = np.zeros(size, array.dtype)
    grown[: len(array)] = array
    return grown


class HostPool:
    """Reference-counted blocks in slabs, which are pinned for a GPU.

    A block is `[Hkv, 2 (K, V), block_size, D]` in the model's dtype or, after `repack`, Hkv packed records. The lowest
    bit of its address in `block_ptr` is 1 if it is packed. An address is valid until the block is packed or released.
    Rows and forks share a block by references. Forks may run in different threads: `lock` is held while blocks are
    allocated or released, and a block does not change while a reader holds a reference.

    Args:
        num_kv_heads, block_size, head_dim: the shape of one block.
        dtype: dtype of K and V in blocks that are not packed.
        pin: whether slabs are page-locked, for asynchronous copies to and from a GPU.
        packed_bytes: bytes of a packed record of one KV head; 0: nothing is packed.
    """

    def __init__(
        self, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, *, pin: bool = False,
        packed_bytes: int = 0,
    ) -> None:  # fmt: skip
        self.block_shape = (num_kv_heads, 2, block_size, head_dim)
        self.dtype = dtype
        self._plain = _Slabs(self.block_shape, dtype, pin)
        self._packed = _Slabs((num_kv_heads, packed_bytes), torch.uint8, pin)
        self.record_bytes, self.packed_record_bytes = self._plain.nbytes // num_kv_heads, packed_bytes
        """Bytes of one block of one KV head, K and V: not packed, and packed."""
        self.block_ptr = np.zeros(0, np.int64)
        self.refcount = np.zeros(0, np.int32)
        self._free: list[int] = []
        self.revision = 0
        """Incremented whenever an address in `block_ptr` changes."""
        self.shared = False
        """Whether any block was ever shared; until then no writer needs to check."""
        self.lock = threading.RLock()
        self._left: deque[np.ndarray] = deque()
        self._kept: list[tuple[np.ndarray, np.ndarray]] | None = None

    @property
    def slabs(self) -> list[torch.Tensor]:
        """The slabs of the blocks that are not packed."""
        return self._plain.tensors

    @property
    def packed_slabs(self) -> list[torch.Tensor]:
        """The slabs of the packed blocks."""
        return self._packed.tensors

    @property
    def pinned(self) -> bool:
        """Whether a GPU can read and write every block by its address."""
        return self._plain.pinned and self._packed.pinned

    @property
    def num_blocks(self) -> int:
        """Physical blocks that exist, used or free."""
        return len(self.block_ptr)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block that is not packed, all KV heads."""
        return self._plain.nbytes

    def allocate(self, count: int, *, packed: bool = False) -> np.ndarray:
        """Allocate blocks with one reference each; return them, int32 `[count]`."""
        with self.lock:
            self._collect()
            return self._allocate(count, packed)

    def _allocate(self, count: int, packed: bool) -> np.ndarray:
        if count > len(self._free):
            first, more = self.num_blocks, growth(self.num_blocks, len(self._free), count)
            self.refcount = _longer(self.refcount, first + more)
            self.block_ptr = _longer(self.block_ptr, first + more)
            self._free.extend(range(first + more - 1, first - 1, -1))
        addresses = self._packed.take(count) | 1 if packed else self._plain.take(count)
        ids = _pop(self._free, count, np.int32)
        self.refcount[ids] = 1
        self.block_ptr[ids] = addresses
        self.revision += 1
        return ids

    def adopt(self, slabs: Sequence[torch.Tensor], table: np.ndarray) -> None:
        """Fill an empty pool with slabs; their blocks are numbered in this order.

        Args:
            slabs: contiguous: `[n, Hkv, 2, block_size, D]`, or uint8 `[n, Hkv, record]` of packed blocks.
            table: of any shape; each occurrence of a block is one reference. Blocks without any are free.
        """
        assert not self.num_blocks
        parts = [np.zeros(0, np.int64)]
        for slab in slabs:
            parts.append(self._plain.adopt(slab) if slab.ndim == 5 else self._packed.adopt(slab) | 1)
        self.block_ptr = np.concatenate(parts)
        used = np.bincount(table.ravel(), minlength=self.num_blocks)
        self.refcount = (used + 1).astype(np.int32)
        self._release(np.arange(self.num_blocks))
        self.shared = bool((self.refcount > 1).any())
        self.revision += 1

    def bytes_of(self, ids: np.ndarray) -> int:
        """Bytes of the blocks `ids`."""
        packed = int(np.count_nonzero(self.block_ptr[ids] & 1))
        return (len(ids) - packed) * self._plain.nbytes + packed * self._packed.nbytes

    def repack(self, ids: np.ndarray, pack: Callable[[np.ndarray, np.ndarray], None]) -> None:
        """Move blocks to packed records; on failure nothing has changed.

        Args:
            ids: physical blocks that are not packed.
            pack: called with the old addresses and those of the packed records (int64) to write the records.
        """
        with self.lock:
            old, new = self.block_ptr[ids], self._packed.take(len(ids))
            try:
                pack(old, new)
                self.block_ptr[ids] = new | 1
                self.revision += 1
            except BaseException:
                self.block_ptr[ids] = old
                self._packed.free.extend(new[::-1].tolist())
                raise
            if self._kept is None:
                self._plain.free.extend(old[::-1].tolist())
            else:
                self._kept.append((ids, old))

    def keep(self) -> int:
        """Keep the old records of blocks that `repack` packs from now on; return the number of such calls so far."""
        with self.lock:
            if self._kept is None:
                self._kept = []
            return len(self._kept)

    def unpack(self, repacks: int) -> None:
        """Undo every `repack` since `keep` except the first `repacks`."""
        with self.lock:
            while self._kept is not None and len(self._kept) > repacks:
                ids, records = self._kept.pop()
                self._packed.free.extend((self.block_ptr[ids] - 1)[::-1].tolist())
                self.block_ptr[ids] = records
                self.revision += 1

    def let_go(self) -> None:
        """Free the records that `keep` kept."""
        with self.lock:
            kept, self._kept = self._kept, None
            for _, records in kept or ():
                self._plain.free.extend(records[::-1].tolist())

    def addresses(self, ids: np.ndarray, heads: np.ndarray) -> np.ndarray:
        """Addresses, int64, of the records of blocks `ids`, KV heads `heads`; packed ones marked as in `block_ptr`."""
        blocks = self.block_ptr[ids]
        addresses: np.ndarray = blocks + np.where(blocks & 1, self.packed_record_bytes, self.record_bytes) * heads
        return addresses

    def retain(self, ids: np.ndarray) -> None:
        """Add one reference for every occurrence of a block in `ids`."""
        with self.lock:
            np.add.at(self.refcount, ids.ravel(), 1)
            self.shared = True

    def leave(self, ids: np.ndarray) -> None:
        """Release blocks later: for an owner that is garbage-collected, which may happen during an allocation."""
        self._left.append(ids)

    def _collect(self) -> None:
        with self.lock:
            while self._left:
                self._release(self._left.popleft().ravel())

    def release(self, ids: np.ndarray) -> None:
        """Drop one reference for every occurrence in `ids`; blocks without references become free."""
        with self.lock:
            self._release(ids.ravel())

    def _release(self, ids: np.ndarray) -> None:
        np.subtract.at(self.refcount, ids, 1)
        held = np.unique(ids)
        assert (self.refcount[held] >= 0).all(), "a block was released more often than it was taken"
        unused = held[self.refcount[held] == 0][::-1]
        self._free.extend(unused.tolist())
        addresses = self.block_ptr[unused]
        self._plain.free.extend(addresses[addresses & 1 == 0].tolist())
        self._packed.free.extend((addresses[addresses & 1 == 1] - 1).tolist())
