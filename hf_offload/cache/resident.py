"""The blocks of one layer that lie in device memory: a fixed number of slots for each row and KV head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hf_offload.cache.store import BlockStore, narrow
from hf_offload.cpu import pool as movers
from hf_offload.cpu.packed import unpack_records
from hf_offload.cpu.worker import Job, Worker

FREE = -1


@dataclass(slots=True)
class Transfer:
    """Blocks on their way to the device: the copy into `staging` (owned by this transfer), and where they go."""

    job: Job
    rows: np.ndarray
    heads: np.ndarray
    slots: np.ndarray
    staging: torch.Tensor


class ResidentSet:
    """Slots `[B, Hkv, R, 2 (K, V), block_size, D]` on the device and which logical block each of them holds.

    The metadata (`block_of`, `slot_of`) say what is resident from the moment that a move is decided; the data follow
    asynchronously and are waited for (`wait`) before anything reads a slot.

    Args:
        store: the layer's blocks in host memory.
        slots: blocks that are resident for a row and KV head.
        worker: runs the copies.
    """

    def __init__(self, store: BlockStore, slots: int, worker: Worker) -> None:
        self.store, self.worker, self.slots = store, worker, slots
        shape = (store.batch, store.num_kv_heads, slots)
        with torch.inference_mode(False):
            size = (*shape, 2, store.block_size, store.head_dim)
            self.pool = torch.zeros(size, dtype=store.dtype, device=store.device)
        self.block_of = np.full(shape, FREE, np.int32)
        self.slot_of = np.full((*shape[:2], 0), FREE, np.int32)
        self.worth = np.zeros((*shape[:2], 0), np.float32)
        """How much each block has been wanted lately, as far as `learn` was told; see `known`."""
        self.known = 0
        """Blocks that `worth` says something of; later ones are newer than any score."""
        self._transfer: Transfer | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return int(self.pool.nbytes)

    def reserve(self, blocks: int) -> None:
        """Have room in `slot_of` for `blocks` logical blocks."""
        have = self.slot_of.shape[2]
        if blocks > have:
            wide = np.full((*self.slot_of.shape[:2], max(blocks, have * 5 // 4, 64)), FREE, np.int32)
            wide[:, :, :have] = self.slot_of
            self.slot_of = wide

    def learn(self, score: np.ndarray, blocks: int, smoothing: float) -> None:
        """Take in how much blocks are wanted now: worth ← smoothing·worth + (1 − smoothing)·score.

        Args:
            score: `[B, Hkv, N]` fp32, of the first `blocks` blocks.
            blocks: how many.
            smoothing: weight of what was known before, 0 … 1.
        """
        if self.worth.shape[2] < blocks:
            wide = np.zeros((*self.worth.shape[:2], self.slot_of.shape[2]), np.float32)
            wide[:, :, : self.known] = self.worth[:, :, : self.known]
            self.worth = wide
        old = min(self.known, blocks) if smoothing else 0  # no weight on the past: not even on its −inf
        self.worth[:, :, :old] = smoothing * self.worth[:, :, :old] + (1 - smoothing) * score[:, :, :old]
        self.worth[:, :, old:blocks] = score[:, :, old:blocks]
        self.known = blocks

    def assign(self, rows: np.ndarray, heads: np.ndarray, slots: np.ndarray, blocks: np.ndarray) -> None:
        """Say that from now on a slot holds another block (or none, `FREE`); what it held is resident no more."""
        old = self.block_of[rows, heads, slots]
        held = old != FREE
        self.slot_of[rows[held], heads[held], old[held]] = FREE
        self.block_of[rows, heads, slots] = blocks
        taken = blocks != FREE
        self.slot_of[rows[taken], heads[taken], blocks[taken]] = slots[taken]

    def clear(self) -> None:
        """Nothing is resident."""
        self.wait()
        self.block_of.fill(FREE)
        self.slot_of.fill(FREE)
        self.known = 0

    def fetch(self, rows: np.ndarray, heads: np.ndarray, slots: np.ndarray, blocks: np.ndarray, label: str) -> int:
        """Make blocks resident: metadata now, data by the next `wait`. Returns the bytes on their way."""
        self.wait()
        self.assign(rows, heads, slots, blocks)
        store, record = self.store, self.store.pool.record_bytes
        pin = store.device.type == "cuda"
        dtype = torch.float32 if store.packs else store.dtype
        staging = torch.empty((len(rows), 2, store.block_size, store.head_dim), dtype=dtype, pin_memory=pin)
        source = store.pool.addresses(store.table[rows, blocks], heads.astype(np.int64))
        target = staging.data_ptr() + np.arange(len(rows), dtype=np.int64) * (staging[:1].nbytes)
        if store.packs:
            none, all_tokens = np.zeros(len(rows), np.int32), np.full(len(rows), store.block_size, np.int32)
            launch = unpack_records(
                source, none, all_tokens, target, target + staging[:1].nbytes // 2, kv_dtype=store.dtype,
                dim=store.head_dim, block_size=store.block_size,
            )  # fmt: skip
        else:
            launch = movers.copy_records(source, target, record)
        self._transfer = Transfer(
            self.worker.submit(launch, label, keep=(staging, store.pool)), rows, heads, slots, staging
        )
        return len(rows) * record

    def wait(self) -> None:
        """Everything that was asked for has arrived.

        Raises:
            WorkerError: a copy failed; the blocks that it carried count as not resident again, nothing is lost.
        """
        transfer, self._transfer = self._transfer, None
        if transfer is None:
            return
        rows, heads, slots = transfer.rows, transfer.heads, transfer.slots
        try:
            transfer.job.result()
        except BaseException:
            self.assign(rows, heads, slots, np.full(len(rows), FREE, np.int32))
            raise
        flat = (rows.astype(np.int64) * self.block_of.shape[1] + heads) * self.slots + slots
        index = torch.from_numpy(flat).to(self.pool.device)
        self.pool.flatten(0, 2)[index] = narrow(transfer.staging, self.pool.dtype).to(self.pool.device)

    def write_token(self, k: torch.Tensor, v: torch.Tensor, position: int) -> None:
        """Write one token `[B, Hkv, D]` into the slot of its block, which is resident."""
        block, offset = divmod(position, self.store.block_size)
        slots = torch.from_numpy(self.slot_of[:, :, block].astype(np.int64)).to(self.pool.device)
        assert (self.slot_of[:, :, block] != FREE).all(), f"the block of token {position} has no slot"
        at = self.pool.flatten(0, 1)
        line = torch.arange(at.shape[0], device=self.pool.device)
        at[line, slots.flatten(), 0, offset] = k.flatten(0, 1)
        at[line, slots.flatten(), 1, offset] = v.flatten(0, 1)

    def store_blocks(self, first: int, stop: int, tokens: int) -> None:
        """Copy resident blocks `first … stop - 1` to the host, up to token `tokens`."""
        self.wait()
        for block in range(first, stop):
            slots = torch.from_numpy(self.slot_of[:, :, block].astype(np.int64)).to(self.pool.device)
            index = slots[:, :, None, None, None, None].expand(-1, -1, 1, *self.pool.shape[3:])
            data = self.pool.gather(2, index)[:, :, 0, :, : tokens - block * self.store.block_size].to("cpu")
            k, v = data[:, :, 0], data[:, :, 1]
            movers.write_tokens(
                k,
                v,
                self.store.pool.block_ptr,
                self.store.table,
                block * self.store.block_size,
                self.store.block_size,
            )()

    def select_rows(self, rows: np.ndarray) -> None:
        """Keep the rows of an index, in its order."""
        self.wait()
        self.block_of, self.slot_of, self.worth = self.block_of[rows], self.slot_of[rows], self.worth[rows]
        with torch.inference_mode(False):  # the pool is written outside of inference mode too
            self.pool = self.pool[torch.from_numpy(np.asarray(rows, np.int64)).to(self.pool.device)]
