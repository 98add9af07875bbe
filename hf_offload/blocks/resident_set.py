"""`ResidentSet`: one layer's blocks in device memory, in a fixed number of slots for each row and KV head."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.copying import Moves, copies
from hf_offload.blocks.device_mirror import DeviceMirror
from hf_offload.blocks.memory import memory_for
from hf_offload.cpu.kernels import move_records as movers
from hf_offload.cpu.thread_pool import Job
from hf_offload.gpu import exchange as exchanging
from hf_offload.gpu import kv_copy

FREE = -1
RESIDENT, LOWER_RESIDENT = "resident blocks", "a smaller resident or device_budget or fewer rows need less"


class Transfer(NamedTuple):
    """Blocks in flight, and the end of their copy: a job, or an event recorded after the copy kernel."""

    moves: Moves
    end: Job | torch.cuda.Event


class ResidentSet:
    """Slots `[B, Hkv, R, 2 (K, V), block_size, D]` on the device, and the logical block in each of them.

    The metadata (`block_of`, `slot_of`) are device tensors and are changed on the device, so that a step needs no
    answer from it. They change when a move is decided. The data follow asynchronously; `wait` precedes every read of a
    slot.

    Args:
        store: the layer's blocks in host memory.
        slots: resident blocks for each row and KV head.
        mirror: what layers on the device share.
    """

    def __init__(self, store: BlockStore, slots: int, mirror: DeviceMirror) -> None:
        self.store, self.slots, self.mirror = store, slots, mirror
        self.tables = store.tables
        shape = (store.batch, store.num_kv_heads, slots)
        size = (*shape, 2, store.block_size, store.head_dim)
        with torch.inference_mode(False), memory_for(RESIDENT, LOWER_RESIDENT, math.prod(size) * store.dtype.itemsize):
            self.pool = torch.zeros(size, dtype=store.dtype, device=store.device)
            self.block_of = torch.full(shape, FREE, dtype=torch.int32, device=store.device)
            self.slot_of = torch.full((*shape[:2], 0), FREE, dtype=torch.int32, device=store.device)
            self.worth = torch.zeros((*shape[:2], 0), dtype=torch.float32, device=store.device)
            self.scored = torch.zeros(1, dtype=torch.int32, device=store.device)
        self._transfer: Transfer | None = None
        self.lacks = False
        """Whether a copy has failed since the set was placed, so that blocks may be missing though there are slots."""

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return int(self.pool.nbytes)

    def reserve(self) -> None:
        """Grow the metadata to the width of the block table."""
        have, need = self.slot_of.shape[2], self.store.table.shape[1]
        if need > have:
            with torch.inference_mode(False):
                self.slot_of = functional.pad(self.slot_of, (0, need - have), value=FREE)
                self.worth = functional.pad(self.worth, (0, need - have))

    def copy_from(self, other: ResidentSet) -> None:
        """Copy another set with as many slots over a store with the same tokens."""
        other.wait()
        with torch.inference_mode(False):
            self.pool.copy_(other.pool)
            self.block_of, self.slot_of, self.worth, self.scored = other.state()

    def reload(self, block_of: torch.Tensor, worth: torch.Tensor, scored: torch.Tensor) -> None:
        """Restore a saved set with as many slots over a store with the same tokens; arguments: its attributes.

        Blocks after the store's tokens are empty: they get a slot without data.
        """
        self.store.reserve_table(self.store.num_blocks + 2)  # with room for the next block
        self.reserve()
        device = self.pool.device
        self.block_of.copy_(block_of)
        self.worth[:, :, : worth.shape[2]] = worth[:, :, : self.worth.shape[2]].to(device)
        self.scored.copy_(scored)
        rows, heads, slots = (block_of >= 0).nonzero(as_tuple=True)
        self.slot_of[rows, heads, block_of[rows, heads, slots].long()] = slots.int().to(device)
        wanted = (block_of >= 0) & (block_of < self.store.num_blocks)
        order = (~wanted).int().argsort(dim=-1, stable=True)  # slots with data first
        moves = Moves(order.int().to(device), block_of.gather(2, order).to(device), wanted.sum(-1).int().to(device))
        self.fetch(moves, "a saved resident set")
        self.wait()

    def learn(self, score: torch.Tensor, limits: torch.Tensor, smoothing: float) -> None:
        """Update the blocks' worth by their scores: worth ← smoothing·worth + (1 − smoothing)·score.

        Args:
            score: `[B, Hkv, N]` fp32, of the sealed blocks.
            limits: int32 `[2]`, (length, sealed).
            smoothing: weight of the old worth, 0 … 1; 0 replaces it, also where it is −inf.
        """
        if smoothing:
            old = self.mirror.numbers(score.shape[2]) < self.scored
            torch.where(old, torch.add((1 - smoothing) * score, self.worth, alpha=smoothing), score, out=self.worth)
        else:
            self.worth.copy_(score)
        self.scored.copy_(limits[1:])

    def free(self) -> None:
        """Give the memory of the slots back; another set takes this one's place, or is tried again to be had."""
        self.wait()
        self.pool, self.slots = self.pool[:, :, :0].clone(), 0

    def clear(self) -> None:
        """Make all slots free."""
        self.wait()
        self.lacks = False
        self.block_of.fill_(FREE)
        self.slot_of.fill_(FREE)
        self.scored.zero_()

    def load(self, blocks: torch.Tensor, counts: torch.Tensor, label: str) -> None:
        """Replace the set by these blocks, in slots from 0 on, and wait: `[B, Hkv, M]` and `[B, Hkv]` int32."""
        self.wait()
        slots = torch.arange(blocks.shape[2], device=blocks.device, dtype=torch.int32)
        meant = slots < counts[..., None]
        self.block_of.fill_(FREE)
        self.block_of[:, :, : blocks.shape[2]] = torch.where(meant, blocks, FREE)
        beyond = self.slot_of.shape[2]
        wide = torch.full((*self.slot_of.shape[:2], beyond + 1), FREE, dtype=torch.int32, device=blocks.device)
        wide.scatter_(2, torch.where(meant, blocks, beyond).long(), slots.expand_as(blocks))
        self.slot_of.copy_(wide[:, :, :beyond])
        self.fetch(Moves(slots.expand_as(blocks).contiguous(), blocks, counts), label)
        self.wait()

    def exchange(
        self, limits: torch.Tensor, sinks: tuple[torch.Tensor, torch.Tensor], recent: int, due: torch.Tensor | None
    ) -> Moves:
        """Decide which blocks of high worth replace resident blocks of low worth; `fetch` then copies them.

        Args:
            limits: int32 `[2]`, (length, sealed).
            sinks: `[B]` int32 each, first block and end of each row's sinks, which stay resident.
            recent: number of newest sealed blocks, which stay resident.
            due: int32 `[1]`, 0: nothing moves; None: always due.
        """
        return Moves(
            *exchanging.exchange(
                self.worth, self.scored, self.block_of, self.slot_of, *sinks, limits, recent=recent, due=due
            )
        )

    def open_block(self, limits: torch.Tensor, sinks: tuple[torch.Tensor, torch.Tensor], recent: int) -> None:
        """Give the block of the next token the slot of the block of least worth; arguments as in `exchange`."""
        self.wait()
        exchanging.open_block(
            self.worth, self.scored, self.block_of, self.slot_of, *sinks, limits,
            block_size=self.store.block_size, recent=recent,
        )  # fmt: skip

    def fetch(self, moves: Moves, label: str) -> None:
        """Start copying the data of blocks whose metadata have changed; the next `wait` waits for them.

        Args:
            moves: blocks and slots.
            label: its name in error messages.
        """
        self.wait()
        if self.read_by_kernels:
            self._read(moves)
        elif self.mirror.stream is None:
            job = self.mirror.worker.submit(
                copies(self.store, self.pool, moves), label, keep=(self.store.pool, self.pool)
            )
            self._transfer = Transfer(moves, job)
        else:
            copies(self.store, self.pool, moves)()

    def bring(self, moves: Moves, into: torch.Tensor | None = None) -> None:
        """Copy the data of blocks in the order of the model's stream.

        Args:
            moves: blocks and slots.
            into: `[B, Hkv, M, 2, block_size, D]`, the target in place of the slots.
        """
        self.wait()
        pool = self.pool if into is None else into
        if self.read_by_kernels:
            tables = self.tables.block_ptr(), self.tables.table()
            kv_copy.fetch(pool, *moves, *tables, packed=self.store.format.device_layout)
        else:
            copies(self.store, pool, moves)()

    @property
    def read_by_kernels(self) -> bool:
        """Whether GPU kernels read host blocks directly, which needs pinned memory and a format that they know.

        A captured graph always does so, since it cannot get addresses from the host.
        """
        readable = self.store.pool.pinned and self.store.format.read_by_device
        return readable or self.mirror.capture is not None

    def _read(self, moves: Moves) -> None:
        """Start a kernel on the recall stream that reads the blocks in host memory."""
        stream, tables = self.mirror.stream, (self.tables.block_ptr(), self.tables.table())
        with self.mirror.beside():
            kv_copy.fetch(self.pool, *moves, *tables, packed=self.store.format.device_layout)
        if self.mirror.capture is not None:
            self.mirror.capture.keep(moves)
        elif stream is not None:
            for tensor in (self.pool, *moves, *tables):  # their allocator must wait for this stream too
                tensor.record_stream(stream)
            self._transfer = Transfer(moves, stream.record_event())

    def wait(self) -> None:
        """Make the current stream wait for all copies in flight.

        Raises:
            WorkerError: a copy failed; its blocks are then not resident, and the host still has them.
        """
        under_way = self._transfer
        if under_way is None:
            return
        moves, end = under_way
        if isinstance(end, Job):
            try:
                end.result()
            except BaseException:
                if end.done():  # otherwise it still writes into slots, and the next call waits again
                    self._forget(moves)
                    self._transfer = None
                raise
        else:
            torch.cuda.current_stream(self.pool.device).wait_event(end)
        self._transfer = None

    def _forget(self, moves: Moves) -> None:
        meant = torch.arange(moves.slots.shape[2], device=moves.counts.device) < moves.counts[..., None]
        rows, heads, column = meant.nonzero(as_tuple=True)
        self.lacks = True
        self.block_of[rows, heads, moves.slots[rows, heads, column].long()] = FREE
        self.slot_of[rows, heads, moves.blocks[rows, heads, column].long()] = FREE

    def state(self) -> tuple[torch.Tensor, ...]:
        """A copy of the metadata: `block_of`, `slot_of`, `worth`, `scored`."""
        return tuple(part.clone() for part in (self.block_of, self.slot_of, self.worth, self.scored))

    def restore(self, state: tuple[torch.Tensor, ...], label: str) -> None:
        """Restore the metadata of `state`; blocks that have lost their slot since then are fetched.

        A block that was not on the host then was stored there before it could lose its slot.
        """
        self.wait()
        block_of, slot_of, worth, scored = state
        lost, slots = ((block_of != self.block_of) & (block_of != FREE)).sort(dim=-1, descending=True, stable=True)
        self.block_of.copy_(block_of)
        self.slot_of.fill_(FREE)
        self.slot_of[:, :, : slot_of.shape[2]] = slot_of
        self.worth[:, :, : worth.shape[2]] = worth
        self.scored.copy_(scored)
        self.fetch(Moves(slots.int(), block_of.gather(2, slots), lost.sum(-1, dtype=torch.int32)), label)

    def keys(self, block: int) -> torch.Tensor:
        """The keys `[B, Hkv, block_size, D]` of a resident block."""
        return self.block(block)[:, :, 0]

    def block(self, block: int) -> torch.Tensor:
        """K and V `[B, Hkv, 2, block_size, D]` of a resident block."""
        index = self.slot_of[:, :, block].long()[:, :, None, None, None, None].expand(-1, -1, 1, *self.pool.shape[3:])
        return self.pool.gather(2, index)[:, :, 0]

    def store_block(self, block: int, tokens: int) -> None:
        """Copy a resident block to the host, filled up to a length of `tokens` tokens."""
        self.wait()
        if self.store.pool.pinned:
            self.mirror.pause()
            kv_copy.store_block(self.pool, self.slot_of, block, self.tables.block_ptr(), self.tables.table())
            self.store.written()
            return
        first = block * self.store.block_size
        k, v = self.block(block)[:, :, :, : tokens - first].cpu().unbind(2)
        movers.write_tokens(k, v, self.store.pool.block_ptr, self.store.table, first, self.store.block_size)()

    def synchronize(self) -> None:
        """Wait on the host for all copies in both directions; host blocks may change afterwards.

        Raises:
            RuntimeError: a step is being captured, where nothing may wait; the capturing code undoes the step.
        """
        if self.mirror.capture is not None:
            raise RuntimeError("a step is being captured as a CUDA graph; nothing may wait for the device")
        self.wait()
        if self.mirror.stream is not None:
            torch.cuda.current_stream(self.pool.device).synchronize()

    def select_rows(self, rows: np.ndarray) -> None:
        """Keep the rows of an index `[B']`, in its order."""
        self.wait()
        index = torch.from_numpy(np.asarray(rows, np.int64)).to(self.pool.device)
        nbytes = len(index) * self.pool[0].nbytes
        # No inference tensors: they are also written outside of inference mode.
        with torch.inference_mode(False), memory_for(RESIDENT, LOWER_RESIDENT, nbytes):
            self.pool, self.block_of, self.slot_of, self.worth = (
                part[index] for part in (self.pool, self.block_of, self.slot_of, self.worth)
            )
