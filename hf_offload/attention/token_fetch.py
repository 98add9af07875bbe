"""Fetch of single tokens from the host to the device."""

from __future__ import annotations

import functools
import time
from contextlib import suppress

import numpy as np
import torch

from hf_offload.blocks.memory import host_empty
from hf_offload.cache.layer import HybridLayer
from hf_offload.cpu.kernels import move_records as movers
from hf_offload.cpu.thread_pool import WorkerError


class TokenFetch:
    """K and V of chosen tokens of each row and KV head, gathered on the host by a worker thread.

    Args:
        layer: the layer; all its tokens must be on the host.
        numbers: `[B, Hkv, M]` int64, token numbers; entries from `counts` on are ignored.
        counts: `[B, Hkv]` int64.
        label: the job's name in error messages.
    """

    def __init__(self, layer: HybridLayer, numbers: torch.Tensor, counts: torch.Tensor, label: str) -> None:
        store = layer.store
        assert store is not None
        self.layer = layer
        wanted, number = numbers.cpu().numpy(), counts.cpu().numpy()
        most = max(int(number.max(initial=0)), 1)
        valid = np.arange(most) < number[..., None]
        self.valid = torch.from_numpy(valid).to(store.device)
        """Bool `[B, Hkv, m]`, the valid entries of the result of `arrive`."""
        pin = store.pool.pinned and not store.format.packs
        shape = (*number.shape, most, 2, store.head_dim)
        self._host = host_empty(shape, store.format.gather_dtype, pin=pin, brief=True, what="chosen tokens")
        store.wait()
        blocks = (wanted[:, :, :most] // store.block_size).astype(np.int32)
        rows, heads, columns = np.nonzero(valid)
        source = store.pool.addresses(store.table[rows, blocks[valid]], heads)
        first = (wanted[:, :, :most][valid] % store.block_size).astype(np.int32)
        line = self._host[0, 0, 0, 0].nbytes
        target = self._host.data_ptr() + 2 * line * ((rows * number.shape[1] + heads) * most + columns).astype(np.int64)
        if store.format.packs:
            launch = store.format.unpack(source, first, np.ones_like(first), target, target + line)
        else:
            source = np.concatenate((source, source + store.pool.record_bytes // 2)) + np.tile(first, 2) * line
            launch = movers.copy_records(source, np.concatenate((target, target + line)), line)
        if layer.two_memories:
            layer.stats.recall_bytes += len(first) * 2 * store.head_dim * store.dtype.itemsize
            layer.stats.recalls += 1
        worker = layer.settings.worker
        self._job = worker.submit(functools.partial(worker.divide, launch), label, keep=(store.pool, self._host))

    def cancel(self) -> None:
        """Wait for the job and drop its result, so that nothing reads blocks that are about to change."""
        with suppress(WorkerError):  # the result is dropped, its error too
            self._job.result()

    def arrive(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the job and copy its result to the device.

        Returns:
            K, V `[B, Hkv, m, D]` in the model's dtype; entries that are not `valid` are undefined.

        Raises:
            WorkerError: the job failed.
        """
        store = self.layer.store
        assert store is not None
        began = time.perf_counter()
        self._job.result()
        self.layer.stats.wait_seconds += time.perf_counter() - began
        key, value = store.narrowed(self._host).to(store.device, non_blocking=True).unbind(3)
        return key, value
