"""`BlockStore`: one layer's KV blocks in host memory, their block table and digests."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import numpy as np
import torch

from hf_offload.blocks.device_mirror import pause, sent
from hf_offload.blocks.digests import DigestStore
from hf_offload.blocks.host_format import FORMATS
from hf_offload.blocks.host_pool import HostPool
from hf_offload.blocks.memory import LOWER_TILE, TILE, host_empty, memory_for
from hf_offload.blocks.padding import Padding
from hf_offload.blocks.view import View
from hf_offload.cpu.kernels import move_records as movers
from hf_offload.cpu.kernels.move_records import copy_records
from hf_offload.cpu.kernels.record import HostBlocks
from hf_offload.cpu.launch import Launch, tag_of
from hf_offload.cpu.thread_pool import Worker
from hf_offload.gpu.block_topk import spare_width
from hf_offload.gpu.kv_copy import store_tokens

KEEP_TOKENS = 128
"""The newest full blocks, of this many tokens, are never packed, so that a usual `crop` meets unpacked blocks."""

TABLE_STEP = 64
"""The width of a block table is a multiple of this."""


def narrow(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round unpacked float32 to the model's dtype, clamped to its finite range."""
    most = torch.finfo(dtype).max
    return x if dtype == torch.float32 else x.clamp(-most, most).to(dtype)


class BlockStore:
    """The blocks of one layer for every row, by logical number.

    Logical block n of a row holds the tokens from `n·block_size` on; `table[row, n]` is its physical block. Rows may
    share physical blocks (beams, forks); a row gets its own copy of a shared block before it writes into it.

    Args:
        batch, num_kv_heads, head_dim: sizes of K and V.
        dtype: dtype of K and V.
        block_size: tokens in a block.
        device: the model's device; digests are stored there.
        digest: the kind of digest, or None for policies that score no blocks.
        padding: validity of the tokens, shared by the layers.
        host_dtype: the format of older full blocks (`FORMATS`).
        worker: prefetches tiles while the model attends others (`blocks.prefill_tiles`), or None with one memory.
        scored_on_host: whether the digests are stored in host memory instead.
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
        host_dtype: str | None = None,
        worker: Worker | None = None,
        scored_on_host: bool = False,
    ) -> None:
        self.batch, self.num_kv_heads, self.head_dim = batch, num_kv_heads, head_dim
        self.dtype, self.block_size, self.device = dtype, block_size, device
        self.padding, self.worker = padding, worker
        self.format = FORMATS[host_dtype](dtype, head_dim, block_size)
        self.pool = HostPool(
            num_kv_heads, block_size, head_dim, dtype, pin=device.type == "cuda", packed_bytes=self.format.record_bytes
        )
        where, self.scored_on_host = torch.device("cpu") if scored_on_host else device, scored_on_host
        self.digests = None if digest is None else digest(num_kv_heads, head_dim, block_size, where)
        self.table = np.zeros((batch, 0), np.int32)
        self.tables = TableMirror(self)
        self._view: View | None = None
        self._tag = tag_of(dtype)
        self.revision = 0
        """Incremented whenever the table changes."""
        self.length = 0
        self.reserved = 0
        """Number of logical blocks that have a physical one; those after the last token are empty."""
        self.packed_blocks = 0
        """All logical blocks before this one are packed; later ones may be, too, if they were old when they arrived."""
        self.sealed = 0
        """Number of full blocks, after `sealing.seal`. They have digests unless the store awaits them."""
        self.event: torch.cuda.Event | None = None
        """On a CUDA device: recorded after the last work that writes into blocks."""
        if device.type == "cuda":
            self.event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            # Freed slabs may be reused at once.
            weakref.finalize(self.pool, self.event.synchronize).atexit = False

    @property
    def num_blocks(self) -> int:
        """Logical blocks that hold at least one token."""
        return -(-self.length // self.block_size)

    @property
    def awaits_digests(self) -> bool:
        """Whether full blocks have no digests yet, for want of tokens for the statistics (`DigestStore.freeze`)."""
        return self.digests is not None and not self.digests.frozen

    @property
    def host_bytes(self) -> int:
        """Bytes of the blocks that the rows hold, each counted once; forks may share them."""
        return self.pool.bytes_of(np.unique(self.table[:, : self.reserved]))

    @property
    def shared_bytes(self) -> int:
        """Bytes of the blocks that forks share."""
        ids, own_counts = np.unique(self.table[:, : self.reserved], return_counts=True)
        return self.pool.bytes_of(ids[self.pool.refcount[ids] > own_counts])

    @property
    def digest_bytes(self) -> int:
        """Bytes of the digests."""
        return self.digests.nbytes if self.digests is not None else 0

    def reserve(self, length: int, packed: range = range(0)) -> None:
        """Allocate unshared physical blocks for the tokens from `self.length` to `length - 1`.

        Args:
            length: tokens of a row.
            packed: new logical blocks that are to be packed.
        """
        have, need = self.reserved, -(-length // self.block_size)
        if self.pool.shared and self.length < min(length, have * self.block_size):  # even an empty block may be shared
            own_block(self, self.length // self.block_size)
        if need > have:
            self.reserve_table(need)
            taken: list[np.ndarray] = []
            try:
                for first, stop in ((have, packed.start), (packed.start, packed.stop), (max(have, packed.stop), need)):
                    count = max(stop - first, 0)
                    taken.append(self.pool.allocate(self.batch * count, packed=first in packed))
                    self.table[:, first : first + count] = taken[-1].reshape(self.batch, count)
                self.reserve_digests()
            except BaseException:  # no memory: take all blocks or none
                self.pool.release(np.concatenate([np.zeros(0, np.int32), *taken]))
                raise
            self.reserved = need
            self.revision += 1

    def reserve_digests(self) -> None:
        """Make room for the digest of every physical block."""
        if self.digests is not None:
            self.digests.reserve(self.pool.num_blocks)

    def reserve_table(self, blocks: int) -> None:
        """Make room in the table for `blocks` logical blocks."""
        if blocks > self.table.shape[1]:
            # A multiple of a cache line: kernels use wide loads, and one compiled variant serves every length.
            width = -(-max(blocks, spare_width(self.table.shape[1])) // TABLE_STEP) * TABLE_STEP
            wide = np.zeros((self.batch, width), np.int32)
            wide[:, : self.table.shape[1]] = self.table
            self.table = wide
            self.revision += 1

    def written(self) -> None:
        """Record that the model's stream got work that writes into blocks."""
        assert self.event is not None
        self.event.record(torch.cuda.current_stream(self.device))

    def wait(self) -> None:
        """Wait until the stream's writes into blocks are done; call it before the host reads blocks."""
        if self.event is not None:
            self.event.synchronize()

    def own(self, blocks: range) -> None:
        """Copy shared blocks before they are written to or get other digests; the other holders keep the old ones."""
        for block in blocks if self.pool.shared else ():
            own_block(self, block)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Append K and V `[B, Hkv, T, D]`, on the model's device or on the host, to the stored tokens."""
        stop = self.length + k.shape[2]
        old = self.packed_on_arrival(self.length, stop)
        self._release(self.num_blocks)
        self.reserve(stop, old)
        try:
            self._write(k, v, old)
        except BaseException:
            self._release(self.num_blocks)
            raise
        self.length = stop

    @property
    def host_blocks(self) -> HostBlocks:
        """The rows' blocks as kernels read them; the arrays may be replaced when the store grows."""
        padding = self.padding
        return HostBlocks(
            self._tag, self.pool.block_ptr, self.table, padding.holes, padding.valid, self.block_size,
            self.format.packed,
        )  # fmt: skip

    def view(self, length: int) -> View:
        """The `View` for a step, with unshared blocks for the tokens from `self.length` to `length - 1`."""
        pool, padding, digests, old = self.pool, self.padding, self.digests, self._view
        if length > self.length and (length > self.reserved * self.block_size or pool.shared):
            self.reserve(length)
        digest = None if digests is None or self.awaits_digests else digests.identity
        if (
            old is not None
            and old.blocks.table is self.table
            and old.blocks.block_ptr is pool.block_ptr
            and old.blocks.valid is padding.valid
            and old.blocks.holes is padding.holes
            and old.first is padding.first
            and old.digest is digest
            and old.revision == padding.revision
        ):
            return old
        blocks = min(self.table.shape[1], padding.holes.shape[1])
        covered = min(padding.valid.shape[1], blocks * self.block_size)
        self._view = View(self.host_blocks, padding.first, digest, padding.revision, covered)
        return self._view

    def packed_on_arrival(self, start: int, stop: int) -> range:
        """Logical blocks that are packed at once when tokens start … stop - 1 arrive, since they are old already."""
        first = -(-start // self.block_size)
        return range(first, max(first, self._old(stop))) if self.format.packs else range(0)

    def _write(self, k: torch.Tensor, v: torch.Tensor, old: range) -> None:
        start, stop, size = self.length, self.length + k.shape[2], self.block_size
        by_device = k.is_cuda and self.pool.pinned and not old
        if self.device.type != "cpu" and not by_device:
            k, v = k.to("cpu"), v.to("cpu")
        if k.stride(-1) != 1 or v.stride(-1) != 1:
            k, v = k.contiguous(), v.contiguous()
        if by_device:
            pause(self.worker, self.device)
            with torch.cuda.device(self.device):
                store_tokens(k, v, self.tables.block_ptr(), self.tables.table(), start, size)
            self.written()
            return
        for first, end in ((start, old.start * size), (old.stop * size, stop)) if old else ((start, stop),):
            part = slice(first - start, end - start)
            if end > first:
                movers.write_tokens(k[:, :, part], v[:, :, part], self.pool.block_ptr, self.table, first, size).run(
                    "an append"
                )
        if old:
            pack_tokens(self, k, v, old)

    def any_packed(self, length: int) -> bool:
        """Whether any block of the first `length` tokens is packed."""
        blocks = self.table[:, : -(-length // self.block_size)]
        return self.format.packs and bool((self.pool.block_ptr[blocks] & 1).any())

    def has_old(self, length: int) -> bool:
        """Whether `pack_old` would have blocks to pack."""
        return self.format.packs and self._old(length) > self.packed_blocks

    def _old(self, length: int) -> int:
        return length // self.block_size - -(-KEEP_TOKENS // self.block_size)

    def pack_old(self, length: int) -> None:
        """Pack the full blocks that are old at a length of `length` tokens; nothing may be reading them."""
        if self.has_old(length):
            self.wait()
            pack_blocks(self, self._old(length))

    def packed_so_far(self) -> tuple[int, int]:
        """A state for `unpack`, valid until `pool.let_go`.

        Raises:
            ValueError: forks share blocks; packing copies those, which `unpack` cannot undo.
        """
        if self.format.packs and self.pool.shared and self.shared_bytes:
            raise ValueError(
                "host_dtype packs blocks: drafts cannot be verified while a fork shares blocks with this cache; drop "
                "the forks, or leave host_dtype out"
            )
        return self.packed_blocks, self.pool.keep()

    def unpack(self, packed: tuple[int, int]) -> None:
        """Undo all packing since `packed_so_far` returned this state."""
        self.packed_blocks = packed[0]
        self.pool.unpack(packed[1])

    def gather(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of tokens `first … first + count - 1` as contiguous `[B, Hkv, count, D]` on the model's device."""
        shape = (self.batch, self.num_kv_heads, count, self.head_dim)
        dtype = self.format.gather_dtype
        pin = self.device.type == "cuda" and dtype == self.dtype
        k, v = (host_empty(shape, dtype, pin=pin, brief=True, what=TILE, lower=LOWER_TILE) for _ in range(2))
        self.gathering(k, v, first).run("a gather")
        with memory_for(TILE, LOWER_TILE, 2 * k.nbytes):
            return self.narrowed(k).to(self.device), self.narrowed(v).to(self.device)

    def narrowed(self, gathered: torch.Tensor) -> torch.Tensor:
        """Convert gathered tokens to the model's dtype."""
        return gathered if gathered.dtype == self.dtype else narrow(gathered, self.dtype)

    def gathering(self, k: torch.Tensor, v: torch.Tensor, first: int) -> Launch:
        """Prepare the copy of `count` tokens from `first` on into contiguous tensors in host memory.

        Args:
            k, v: `[B, Hkv, count, D]` of `format.gather_dtype`, written.
            first: number of the first token.
        """
        self.wait()
        if self.format.packs:
            return gathering_packed(self, k, v, first)
        return movers.gather_tokens(k, v, self.pool.block_ptr, self.table, first, self.block_size)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; on failure nothing has changed."""
        self.open(length)
        self.sealed = min(self.sealed, length // self.block_size)
        if self.digests is not None:
            self.digests.crop(length)
        self.packed_blocks = min(self.packed_blocks, length // self.block_size)
        self.length = length  # last but the release: if interrupted before this, another crop completes it
        self._release(self.num_blocks)

    def open(self, length: int) -> None:
        """Unpack the last of the blocks of `length` tokens if it is packed, so that tokens can be appended to it."""
        block = length // self.block_size
        if length % self.block_size and (self.pool.block_ptr[self.table[:, block]] & 1).any():
            self._reopen(block)

    def _release(self, keep: int) -> None:
        """Release the physical blocks after the first `keep` logical ones."""
        if keep < self.reserved:
            unused, self.reserved = self.table[:, keep : self.reserved], keep
            self.pool.release(unused)

    def _reopen(self, block: int) -> None:
        first, table = block * self.block_size, self.table.copy()
        k, v = (x.to("cpu") for x in self.gather(first, min(self.block_size, self.length - first)))
        table[:, block] = self.pool.allocate(self.batch)
        try:
            self.reserve_digests()
            movers.write_tokens(k, v, self.pool.block_ptr, table, first, self.block_size).run("a crop")
            if self.digests is not None:
                self.digests.copy(self.table[:, block], table[:, block])
        except BaseException:
            self.pool.release(table[:, block])
            raise
        before, self.table = self.table[:, block], table
        self.revision += 1
        self.pool.release(before)

    def select_rows(self, rows: np.ndarray) -> None:
        """Keep the rows of an index `[B']`, in its order and with repeats; K and V are not copied."""
        kept = self.table[rows]
        self.pool.retain(kept[:, : self.reserved])
        self.pool.release(self.table[:, : self.reserved])
        if self.digests is not None:
            self.digests.select_rows(rows)
        self.table, self.batch = np.ascontiguousarray(kept), len(rows)
        self.revision += 1

    def __del__(self) -> None:
        pool = getattr(self, "pool", None)
        if pool is not None and pool.shared and not sys.is_finalizing():  # an unshared pool is freed with the store
            self.wait()
            pool.leave(self.table[:, : self.reserved])


def pack_tokens(store: BlockStore, k: torch.Tensor, v: torch.Tensor, blocks: range) -> None:
    """Pack whole blocks of new K and V `[B, Hkv, T, D]`, whose first token is number `store.length`."""
    rows, heads, block = (x.ravel() for x in np.indices((store.batch, store.num_kv_heads, len(blocks))))
    token = (block + blocks.start) * store.block_size - store.length
    size = store.dtype.itemsize
    keys, values = (
        x.data_ptr() + size * (rows * x.stride(0) + heads * x.stride(1) + token * x.stride(2)) for x in (k, v)
    )
    records = store.pool.addresses(store.table[rows, block + blocks.start], heads) - 1
    store.format.pack(keys, values, size * k.stride(2), size * v.stride(2), records, keep=(k, v)).run("packing")


def pack_blocks(store: BlockStore, stop: int) -> None:
    """Pack the unpacked logical blocks before `stop`; nothing may be reading them."""
    ids, own_counts = np.unique(store.table[:, store.packed_blocks : stop], return_counts=True)
    plain = store.pool.block_ptr[ids] & 1 == 0
    ids, own_counts = ids[plain], own_counts[plain]
    others = store.pool.refcount[ids] > own_counts  # other holders may be reading these: they are copied, not moved
    heads, step = np.arange(store.num_kv_heads), store.head_dim * store.dtype.itemsize

    def pack(old: np.ndarray, new: np.ndarray) -> None:
        keys = (old[:, None] + store.pool.record_bytes * heads).ravel()
        records = (new[:, None] + store.pool.packed_record_bytes * heads).ravel()
        store.format.pack(keys, keys + store.pool.record_bytes // 2, step, step, records).run("packing")

    if others.any():
        _pack_apart(store, ids[others], pack)
    if not others.all():
        store.pool.repack(ids[~others], pack)
    store.packed_blocks = stop


def _pack_apart(store: BlockStore, ids: np.ndarray, pack: Callable[[np.ndarray, np.ndarray], None]) -> None:
    """Pack shared blocks (`ids` ascending) into new blocks of this store; arguments as in `HostPool.repack`."""
    new = store.pool.allocate(len(ids), packed=True)
    try:
        store.reserve_digests()
        pack(store.pool.block_ptr[ids], store.pool.block_ptr[new] - 1)
        if store.digests is not None:
            store.digests.copy(ids, new)
    except BaseException:
        store.pool.release(new)
        raise
    table = store.table.copy()
    held = np.isin(table[:, : store.reserved], ids).nonzero()
    old = store.table[held]
    table[held] = new[np.searchsorted(ids, old)]
    store.pool.retain(table[held])
    store.pool.release(new)
    store.pool.release(old)
    store.table = table
    store.revision += 1


def gathering_packed(store: BlockStore, k: torch.Tensor, v: torch.Tensor, first: int) -> Launch:
    """`BlockStore.gathering` for a store with packed blocks."""
    size, count = store.block_size, k.shape[2]
    blocks = np.arange(first // size, -(-(first + count) // size))
    rows, heads, block = (x.ravel() for x in np.indices((store.batch, store.num_kv_heads, len(blocks))))
    begins = np.maximum(blocks * size, first)  # the first wanted token of each block
    ends = np.minimum((blocks + 1) * size, first + count)
    line = store.format.gather_dtype.itemsize * store.head_dim
    offsets = line * ((rows * store.num_kv_heads + heads) * count + (begins - first)[block])
    return store.format.unpack(
        store.pool.addresses(store.table[rows, blocks[block]], heads), (begins % size).astype(np.int32)[block],
        (ends - begins).astype(np.int32)[block], k.data_ptr() + offsets, v.data_ptr() + offsets, keep=(k, v),
    )  # fmt: skip


def share_blocks(store: BlockStore, other: BlockStore) -> None:
    """Let an empty store share the blocks of another one of the same sizes, without a copy.

    Digests are shared, too.
    """
    other.wait()
    store.pool, store.sealed = other.pool, other.sealed
    store.digests = None if other.digests is None else other.digests.fork()
    store.reserve_digests()
    store.pool.retain(other.table[:, : other.num_blocks])  # from here on this store releases them
    store.table, store.reserved = other.table.copy(), other.num_blocks
    store.length, store.packed_blocks = other.length, other.packed_blocks
    store.revision += 1
    if store.event is not None:
        weakref.finalize(store.pool, store.event.synchronize).atexit = False


def own_block(store: BlockStore, block: int) -> None:
    """Give every row its own physical copy of a logical block, without the digest."""
    ids, pool = store.table[:, block], store.pool
    if (pool.refcount[ids] == 1).all():
        return
    store.wait()
    for row in range(store.batch):
        old = ids[row]
        if pool.refcount[old] == 1:
            continue
        source = pool.block_ptr[old : old + 1]
        packed = bool(source[0] & 1)
        new = pool.allocate(1, packed=packed)
        try:
            store.reserve_digests()
            nbytes = store.num_kv_heads * (pool.packed_record_bytes if packed else pool.record_bytes)
            copy_records(source & ~1, pool.block_ptr[new] & ~1, nbytes).run("a copy of shared blocks")
        except BaseException:
            pool.release(new)
            raise
        store.table[row, block] = new[0]
        store.revision += 1
        pool.release(np.array([old]))


class TableMirror:
    """Device copies of one layer's block table and block addresses.

    Args:
        store: the layer's blocks, the owner of this object.
    """

    def __init__(self, store: BlockStore) -> None:
        self.store: BlockStore = weakref.proxy(store)  # a reference cycle would delay freeing the slabs
        self._copies: dict[str, tuple[int, torch.Tensor]] = {}

    def table(self) -> torch.Tensor:
        """`[B, N]` int32, the physical block of each logical one."""
        return self._copy("table", self.store.table, self.store.revision)

    def block_ptr(self) -> torch.Tensor:
        """`[P]` int64, the address of each physical block in host memory."""
        return self._copy("block_ptr", self.store.pool.block_ptr, self.store.pool.revision)

    def _copy(self, name: str, array: np.ndarray, revision: int) -> torch.Tensor:
        """The copy of an array, made again when its revision has changed."""
        made, old = self._copies.get(name, (-1, None))
        if old is None or made != revision:
            old = sent(array, self.store.device, old)
            self._copies[name] = revision, old
        return old
