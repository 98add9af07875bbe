"""Moving averages of resident tokens' attention weights, on the device that updates them (HGCA §3.2.1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hf_offload.blocks.device_mirror import to_host
from hf_offload.blocks.resident_set import FREE, ResidentSet


class ResidentMass:
    """`average` `[B, Hq, R, block_size]` fp32 on the device, by slot; `TokenMass` has those of other tokens.

    Args:
        resident: the slots.
        average: float32 `[B, Hq, T]`, of all tokens; those in blocks from `first` on are copied.
        first: the first block of the window.
    """

    def __init__(self, resident: ResidentSet, average: np.ndarray, first: int) -> None:
        self.resident = resident
        store, size = resident.store, resident.store.block_size
        with torch.inference_mode(False):
            self.average = torch.zeros(
                (store.batch, average.shape[1], resident.slots, size), device=store.device, dtype=torch.float32
            )
        host = torch.from_numpy(np.ascontiguousarray(average[:, :, first * size : store.num_blocks * size]))
        grouped = self._grouped()
        source = host.to(self.average.device).view(*grouped.shape[:3], store.num_blocks - first, size)
        grouped.scatter_(3, self._index(first, store.num_blocks), source)

    def _grouped(self) -> torch.Tensor:
        """`[B, Hkv, G, R, block_size]`."""
        batch, _, slots, size = self.average.shape
        return self.average.view(batch, self.resident.store.num_kv_heads, -1, slots, size)

    def _index(self, first: int, stop: int) -> torch.Tensor:
        """Where blocks lie, as an index into the slots of `_grouped`."""
        slots = self.resident.slot_of[:, :, first:stop].clamp(min=0).long()[:, :, None, :, None]
        grouped = self._grouped()
        return slots.expand(-1, -1, grouped.shape[2], -1, grouped.shape[4])

    def read(self, first: int, stop: int) -> torch.Tensor:
        """The averages `[B, Hq, (stop - first) · block_size]` of resident blocks, on the device."""
        return self._grouped().gather(3, self._index(first, stop)).flatten(3).flatten(1, 2)

    def open(self, block: int) -> None:
        """Set the averages of a block that got a slot to 0."""
        self._grouped().scatter_(3, self._index(block, block + 1), 0.0)

    def write_back(self, average: np.ndarray, first: int) -> None:
        """Copy those of blocks from `first` on to `[B, Hq, T]`, except of blocks without a slot (a copy failed)."""
        store, size = self.resident.store, self.resident.store.block_size
        stop = store.num_blocks
        there = (self.resident.slot_of[:, :, first:stop] >= 0).cpu().numpy()
        there = there.repeat(size, 2).repeat(self.average.shape[1] // there.shape[1], 1)
        np.copyto(average[:, :, first * size : stop * size], self.read(first, stop).cpu().numpy(), where=there)

    def leave(self, first: int, stop: int) -> tuple[Callable[[np.ndarray], None], Callable[[], None]]:
        """Start to copy the averages of blocks that leave the window to the host.

        Returns:
            A function for the job, which waits for the copy and writes it to `[B, Hq, T]`; one that frees the slots.
        """
        values, wait = to_host(self.read(first, stop), "averages of attention weights")
        size, resident = self.resident.store.block_size, self.resident

        def arrive(average: np.ndarray) -> None:
            wait()
            average[:, :, first * size : stop * size] = values.numpy()

        def free() -> None:
            gone = (resident.block_of >= first) & (resident.block_of < stop)
            resident.block_of.masked_fill_(gone, FREE)
            resident.slot_of[:, :, first:stop] = FREE

        return arrive, free

    def select_rows(self, rows: np.ndarray) -> None:
        """Keep the rows of an index, in its order."""
        index = torch.from_numpy(np.asarray(rows, np.int64)).to(self.average.device)
        with torch.inference_mode(False):
            self.average = self.average[index]
