"""HGCA's context cache: ragged per-head lists of retained tokens, stored contiguously (sections 3.3 and 4)."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import torch

from hf_offload.blocks.host_pool import HostPool
from hf_offload.cpu.kernels.move_records import copy_records
from hf_offload.cpu.kernels.record import HostBlocks
from hf_offload.cpu.launch import Launch, tag_of

LIST_STEP = 4
"""Lists grow by a multiple of this number of blocks; a prepared launch stays valid until they do."""


class RetainedTokens:
    """K and V of retained tokens, contiguous for each row and KV head: list row · Hkv + head, in ascending order.

    Lists lie in blocks of a pool with one KV head. Rows and forks share the blocks that they both hold; an append to a
    shared block copies it first. To an attention kernel each list is a row with one KV head.

    Args:
        lists: rows times KV heads.
        block_size, head_dim, dtype: as of the tokens' own blocks.
        blocks: of each list at first. The kernel cuts lists into tasks by their capacity, so rounding depends on it.
    """

    def __init__(self, lists: int, block_size: int, head_dim: int, dtype: torch.dtype, blocks: int = 0) -> None:
        self.block_size, self.head_dim, self.dtype = block_size, head_dim, dtype
        self.pool = HostPool(1, block_size, head_dim, dtype)
        self.counts = np.zeros(lists, np.int64)
        """Tokens of each list."""
        self._shape(lists, blocks)

    def _shape(self, lists: int, blocks: int) -> None:
        """Make arrays of empty lists with a capacity of `blocks` blocks each."""
        tokens = blocks * self.block_size
        self.table = np.zeros((lists, blocks), np.int32)
        self.positions = np.zeros((lists, tokens), np.int32)
        """`[lists, E]`, the position in its row of each retained token."""
        self.valid = np.zeros((lists, tokens), np.uint8)
        self.holes = np.ones((lists, blocks), np.uint8)
        self.blocks = np.broadcast_to(np.arange(blocks, dtype=np.int32), (lists, 1, blocks)).copy()
        self.block_counts = np.zeros((lists, 1), np.int32)

    @property
    def lists(self) -> int:
        """Rows times KV heads."""
        return len(self.counts)

    @property
    def capacity(self) -> int:
        """The most tokens of a list before it grows."""
        return self.positions.shape[1]

    @property
    def host_blocks(self) -> HostBlocks:
        """The lists as rows of blocks."""
        return HostBlocks(tag_of(self.dtype), self.pool.block_ptr, self.table, self.holes, self.valid, self.block_size)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays that kernels read."""
        return self.blocks, self.block_counts, self.table, self.pool.block_ptr, self.valid, self.holes

    @property
    def nbytes(self) -> int:
        """Bytes of K and V; a shared block counts once."""
        held = [self.table[i, :n] for i, n in self._held()]
        return self.pool.bytes_of(np.unique(np.concatenate(held))) if held else 0

    def _held(self) -> Iterator[tuple[int, int]]:
        """Lists that hold blocks, and how many each holds."""
        return ((i, int(n)) for i, n in enumerate(self.block_counts[:, 0]) if n)

    def append(self, k: torch.Tensor, v: torch.Tensor, kept: np.ndarray, first: int) -> Launch:
        """Append the marked ones of a run of tokens to the lists; the launch copies K and V.

        Args:
            k, v: `[B, Hkv, t, D]`, contiguous, on the CPU: tokens `first` to `first + t - 1`.
            kept: `[B, Hkv, T]` uint8, marks by token.
            first: the position of the first one.
        """
        heads, tokens = k.shape[1:3]
        row, head, token = np.nonzero(kept[:, :, first : first + tokens])
        index = row * heads + head
        more = np.bincount(index, minlength=self.lists)
        counts = self.counts + more
        self._reserve(counts)
        # The marked tokens of a list follow each other: `entry` is the number of each in its list.
        entry = np.arange(len(index)) + (self.counts - more.cumsum() + more)[index]
        block, offset = np.divmod(entry, self.block_size)
        line = self.head_dim * self.dtype.itemsize
        source = line * (index * tokens + token)
        target = self.pool.block_ptr[self.table[index, block]] + line * offset
        full = block < (counts // self.block_size)[index]
        self.positions[index, entry], self.valid[index, entry] = first + token, 1
        self.holes[index[full], block[full]] = 0
        self.counts[:] = counts
        sources = np.concatenate((k.data_ptr() + source, v.data_ptr() + source))
        targets = np.concatenate((target, target + line * self.block_size))
        return copy_records(sources, targets, line, keep=(k, v))

    def _reserve(self, counts: np.ndarray) -> None:
        """Allocate blocks for lists that grow to these lengths, and copy shared last blocks that they append to."""
        need = (-(-counts // self.block_size)).astype(np.int32)
        widest = int(need.max(initial=0))
        if widest > self.table.shape[1]:
            self._widen(-(-max(widest, self.table.shape[1] * 5 // 4) // LIST_STEP) * LIST_STEP)
        grows = np.flatnonzero(counts > self.counts)
        if self.pool.shared:
            self._copy_shared(grows[self.counts[grows] % self.block_size > 0])
        have = self.block_counts[:, 0]
        missing = np.maximum(need - have, 0)
        taken = self.pool.allocate(int(missing.sum()))
        used = 0
        for i in np.flatnonzero(missing):
            self.table[i, have[i] : need[i]] = taken[used : used + missing[i]]
            used += missing[i]
        np.maximum(have, need, out=have)

    def _widen(self, blocks: int) -> None:
        names = ("table", "positions", "valid", "holes")
        old: list[np.ndarray] = [getattr(self, name) for name in names]
        counts = self._forget_blocks()
        self._shape(self.lists, blocks)
        for name, before in zip(names, old, strict=True):
            getattr(self, name)[:, : before.shape[1]] = before
        self.block_counts[:] = counts

    def _forget_blocks(self) -> np.ndarray:
        """Take the lists' block counts away, and return them for the caller to set again.

        An interruption in between then loses blocks, and never releases one twice.
        """
        counts, self.block_counts = self.block_counts, np.zeros_like(self.block_counts)
        return counts

    def _copy_shared(self, lists: np.ndarray) -> None:
        """Replace the last blocks of lists by copies where others hold them, too."""
        for i in lists:
            number = self.counts[i] // self.block_size
            old = self.table[i, number]
            if self.pool.refcount[old] == 1:
                continue
            new = self.pool.allocate(1)
            source = self.pool.block_ptr[old : old + 1]
            copy_records(source, self.pool.block_ptr[new], self.pool.record_bytes).run("a copy of kept tokens")
            self.table[i, number] = new[0]
            self.pool.release(np.array([old]))

    def truncate(self, border: int) -> None:
        """Drop the tokens from position `border` on."""
        for i in range(self.lists):
            self._cut(i, int(np.searchsorted(self.positions[i, : self.counts[i]], border)))

    def _cut(self, index: int, count: int) -> None:
        if count == self.counts[index]:
            return
        have, need = int(self.block_counts[index, 0]), -(-count // self.block_size)
        self.counts[index] = count
        self.valid[index, count:] = 0
        self.holes[index, count // self.block_size :] = 1
        unused = self.table[index, need:have].copy()
        self.block_counts[index, 0] = need
        self.pool.release(unused)

    def select_lists(self, index: np.ndarray) -> None:
        """Keep the lists of an index, in its order and as often as it names them; K and V are not copied."""
        before = [self.table[i, :n].copy() for i, n in self._held()]
        for i in index:
            self.pool.retain(self.table[i, : self.block_counts[i, 0]])
        counts = self._forget_blocks()
        for name in ("counts", "table", "positions", "valid", "holes", "blocks"):
            setattr(self, name, np.ascontiguousarray(getattr(self, name)[index]))
        self.block_counts = np.ascontiguousarray(counts[index])
        for ids in before:
            self.pool.release(ids)

    def fork(self) -> RetainedTokens:
        """A copy that shares K and V."""
        other = RetainedTokens(self.lists, self.block_size, self.head_dim, self.dtype)
        other.pool = self.pool
        self.pool.shared = True  # even when nothing is held yet: the pool outlives each of the two
        for i, n in self._held():
            self.pool.retain(self.table[i, :n])
        for name in ("counts", "table", "positions", "valid", "holes", "blocks", "block_counts"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def __del__(self) -> None:
        pool = getattr(self, "pool", None)
        if pool is not None and pool.shared and not sys.is_finalizing():  # otherwise the pool goes, too
            for i, n in self._held():
                pool.leave(self.table[i, :n])
