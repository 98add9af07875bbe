"""Averages of attention weights of the tokens that are resident, where the device moves them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import torch

from hf_offload.cache.mirror import brought
from hf_offload.cache.resident import FREE, ResidentSet
from hf_offload.cache.salience import Salience


class NearAverages:
    """`average` `[B, Hq, R, block_size]` fp32 on the device, by slot; those of all other tokens lie in `Salience`.

    Args:
        resident: the slots.
        salience: of the same layer.
    """

    def __init__(self, resident: ResidentSet, salience: Salience) -> None:
        self.resident = resident
        self._salience = weakref.ref(salience)  # which holds these
        heads, size = salience.average.shape[1], resident.store.block_size
        shape = (resident.store.batch, heads, resident.slots, size)
        with torch.inference_mode(False):
            self.average = torch.zeros(shape, device=resident.pool.device)

    @property
    def salience(self) -> Salience:
        """That of the same layer."""
        salience = self._salience()
        assert salience is not None, "these outlive it only while a job ends"
        return salience

    def _grouped(self) -> torch.Tensor:
        """`[B, Hkv, G, R, block_size]`."""
        batch, _, slots, size = self.average.shape
        return self.average.view(batch, self.resident.store.num_kv_heads, -1, slots, size)

    def _index(self, first: int, stop: int) -> torch.Tensor:
        """Where blocks lie, as an index into the slots of `_grouped`."""
        slots = self.resident.slot_of[:, :, first:stop].clamp(min=0).long()[:, :, None, :, None]
        mine = self._grouped()
        return slots.expand(-1, -1, mine.shape[2], -1, mine.shape[4])

    def load(self) -> None:
        """Take the averages of the blocks that were made resident."""
        store, salience = self.resident.store, self.salience
        first, stop, size = salience.evicted, store.num_blocks, store.block_size
        there = np.ascontiguousarray(salience.average[:, :, first * size : stop * size])
        mine = self._grouped()
        source = torch.from_numpy(there).to(self.average.device)
        source = source.view(*mine.shape[:3], stop - first, size)
        mine.scatter_(3, self._index(first, stop), source)

    def read(self, first: int, stop: int) -> torch.Tensor:
        """The averages `[B, Hq, (stop - first) · block_size]` of resident blocks, on the device."""
        return self._grouped().gather(3, self._index(first, stop)).flatten(3).flatten(1, 2)

    def open(self, block: int) -> None:
        """A block has got a slot: its tokens begin with 0."""
        self._grouped().scatter_(3, self._index(block, block + 1), 0.0)

    def write_back(self) -> None:
        """Let `Salience` know the averages of all resident tokens; a block whose copy failed is not resident."""
        store, salience = self.resident.store, self.salience
        first, stop, size = salience.evicted, store.num_blocks, store.block_size
        if first < stop:
            salience.reserve(stop * size, self.average.shape[1])
            there = (self.resident.slot_of[:, :, first:stop] >= 0).cpu().numpy()
            there = there.repeat(size, 2).repeat(self.average.shape[1] // there.shape[1], 1)
            average = salience.average[:, :, first * size : stop * size]
            np.copyto(average, self.read(first, stop).cpu().numpy(), where=there)

    def leave(self, first: int, stop: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """Blocks leave the window: what brings their averages to `Salience`, in a thread; what frees their slots."""
        values, wait = brought(self.read(first, stop), "averages of attention weights")
        size = self.resident.store.block_size
        salience, resident = self.salience, self.resident

        def arrive() -> None:
            wait()
            salience.average[:, :, first * size : stop * size] = values.numpy()

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
