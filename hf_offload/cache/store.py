"""The KV of one layer in host memory: blocks, the table that names them, and their digests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from hf_offload.cache.digests import DigestStore
from hf_offload.cache.host_pool import HostPool
from hf_offload.cache.padding import Padding
from hf_offload.cpu import pool as movers


class BlockStore:
    """Blocks of one layer for every row, by logical number.

    Logical block n of a row holds its tokens `n·block_size …`; `table[row, n]` names the physical block. Rows may share
    physical blocks (beams, forks); the one that writes into a shared block gets its own copy first.

    Args:
        batch, num_kv_heads, head_dim: sizes, from the tensors that arrived.
        dtype: of K and V.
        block_size: tokens a block.
        device: where the model computes (digests live there).
        digest: how blocks are summarised, or None for policies that score nothing.
        padding: validity of the tokens, shared by the layers.
    """

    def __init__(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        block_size: int,
        device: torch.device,
        digest: type[DigestStore] | None,
        padding: Padding,
    ) -> None:
        self.batch, self.num_kv_heads, self.head_dim = batch, num_kv_heads, head_dim
        self.dtype, self.block_size, self.device = dtype, block_size, device
        self.padding = padding
        self.pool = HostPool(num_kv_heads, block_size, head_dim, dtype, pin=device.type == "cuda")
        self.digests = None if digest is None else digest(num_kv_heads, head_dim, block_size, device)
        self.table = np.zeros((batch, 0), np.int32)
        self.length = 0
        self.sealed = 0
        """Blocks that have a digest: all full ones, once `seal` has run."""

    @property
    def num_blocks(self) -> int:
        """Logical blocks that hold at least one token."""
        return -(-self.length // self.block_size)

    @property
    def host_bytes(self) -> int:
        """Bytes of the blocks in use."""
        return self.pool.used_blocks * self.pool.block_bytes

    @property
    def digest_bytes(self) -> int:
        """Bytes of the digests."""
        return self.digests.nbytes if self.digests is not None else 0

    def reserve(self, length: int) -> None:
        """Have a physical block of one's own for every token from `self.length` to `length - 1`."""
        have, need = self.num_blocks, -(-length // self.block_size)
        if self.pool.shared and self.length % self.block_size and self.length < length:
            self._own(have - 1)
        if need > self.table.shape[1]:
            wide = np.zeros((self.batch, max(need, self.table.shape[1] * 5 // 4, 64)), np.int32)
            wide[:, : self.table.shape[1]] = self.table
            self.table = wide
        if need > have:
            ids = self.pool.allocate(self.batch * (need - have))
            self.table[:, have:need] = ids.reshape(self.batch, need - have)
            if self.digests is not None:
                self.digests.reserve(self.pool.num_blocks)

    def _own(self, block: int) -> None:
        ids = self.table[:, block]
        if (self.pool.refcount[ids] == 1).all():
            return
        for row in range(self.batch):
            old = ids[row]
            if self.pool.refcount[old] > 1:
                new = self.pool.allocate(1)
                source, target = self.pool.block_ptr[old : old + 1], self.pool.block_ptr[new]
                movers.copy_records(source, target, self.pool.block_bytes).run("a copy of shared blocks")
                self.pool.release(ids[row : row + 1])
                self.table[row, block] = new[0]

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write K and V `[B, Hkv, T, D]` behind the tokens that are there."""
        new = k.shape[2]
        self.reserve(self.length + new)
        if self.device.type != "cpu":
            k, v = k.to("cpu"), v.to("cpu")
        if k.stride(-1) != 1 or v.stride(-1) != 1:
            k, v = k.contiguous(), v.contiguous()
        movers.write_tokens(k, v, self.pool.block_ptr, self.table, self.length, self.block_size).run("an append")
        self.length += new

    def gather(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens `first … first + count - 1` as contiguous `[B, Hkv, count, D]` on the model's device."""
        shape = (self.batch, self.num_kv_heads, count, self.head_dim)
        pin = self.device.type == "cuda"
        k, v = (torch.empty(shape, dtype=self.dtype, pin_memory=pin) for _ in range(2))
        movers.gather_tokens(k, v, self.pool.block_ptr, self.table, first, self.block_size).run("a gather")
        return k.to(self.device), v.to(self.device)

    def tiles(self, stop: int, tile: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """The first `stop` tokens as pieces of at most `tile` tokens: (first token, K, V)."""
        for first in range(0, stop, tile):
            yield first, *self.gather(first, min(tile, stop - first))

    def seal(self, tile: int) -> None:
        """Build the digests of the blocks that are full and have none, `tile` tokens at a time."""
        full, size = self.length // self.block_size, self.block_size
        if self.digests is None:
            self.sealed = full
            return
        step = max(tile // size, 1)
        if not self.digests.frozen and full:
            self.digests.freeze(self._token_tiles(full * size, tile))
        for first in range(self.sealed, full, step):
            count = min(step, full - first)
            k = self.gather(first * size, count * size)[0]
            k = k.view(self.batch, self.num_kv_heads, count, size, self.head_dim).transpose(1, 2)
            valid = torch.from_numpy(self.padding.valid[:, first * size : (first + count) * size] != 0)
            ids = torch.from_numpy(self.table[:, first : first + count].astype(np.int64).ravel())
            self.digests.seal(ids, k.flatten(0, 1), valid.reshape(-1, size).to(self.device))
        self.sealed = full

    def _token_tiles(self, stop: int, tile: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for first, k, _ in self.tiles(stop, tile):
            yield k, torch.from_numpy(self.padding.valid[:, first : first + k.shape[2]] != 0).to(self.device)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        keep, have = -(-length // self.block_size), self.num_blocks
        if keep < have:
            self.pool.release(self.table[:, keep:have])
        self.length = length
        self.sealed = min(self.sealed, length // self.block_size)

    def select_rows(self, rows: np.ndarray) -> None:
        """Keep the rows of an index `[B']`, in its order and as often as it names them; K and V are not copied."""
        used = self.num_blocks
        kept = self.table[rows]
        self.pool.retain(kept[:, :used])
        self.pool.release(self.table[:, :used])
        self.table = np.ascontiguousarray(kept)
        self.batch = len(rows)
