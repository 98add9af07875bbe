"""Cached tokens on their way to where the model attends, tile by tile: while one is attended, the next one comes."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

from hf_offload.cache.block_store import BlockStore
from hf_offload.cache.device_mirror import pause
from hf_offload.cache.memory import LOWER_TILE, TILE, host_empty, memory_for
from hf_offload.cpu.thread_pool import Job, Worker
from hf_offload.gpu.streams import TILES, stream_for


class _DeviceTiles:
    """Tiles of CUDA memory, and the stream that fills them from the host.

    That stream waits until the model's has read what a tile held, and the model's waits for the copy. It does so at
    once: the memory is its own, like all that is made on it, and may be let go whenever nothing more is started.

    Args:
        host: `[tiles, n]`, the tiles in host memory.
        device: where the model computes.
        worker: says how slow tests want it to be.
    """

    def __init__(self, host: torch.Tensor, device: torch.device, worker: Worker) -> None:
        self.worker = worker
        with memory_for(TILE, LOWER_TILE, host.nbytes):
            self.tiles = torch.empty_like(host, device=device)
        self.model = torch.cuda.current_stream(device)
        self.side = stream_for(TILES, device)
        self.read = [torch.cuda.Event() for _ in host]  # type: ignore[no-untyped-call, unused-ignore]
        self.copied = [torch.cuda.Event(blocking=True) for _ in host]  # type: ignore[no-untyped-call, unused-ignore]
        for event in self.read:  # who had this memory before may not have read it yet
            event.record(self.model)

    def copy(self, i: int, host: torch.Tensor) -> torch.Tensor:
        """Start the copy into tile i of what the host's tile i holds; the result is for the model's stream."""
        target = self.tiles[i, : host.numel()].view(host.shape)
        self.side.wait_event(self.read[i])
        with torch.cuda.stream(self.side):
            pause(self.worker, target.device)
            target.copy_(host, non_blocking=True)
        self.copied[i].record(self.side)
        self.model.wait_event(self.copied[i])
        return target

    def release(self, i: int) -> None:
        """Say that the model's stream was given all that reads tile i."""
        self.read[i].record(self.model)

    def wait(self, i: int) -> None:
        """Wait until the host's tile i has been read, so that it may be written again."""
        self.copied[i].synchronize()


def read_tiles(store: BlockStore, stop: int, tile: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The first `stop` tokens of a store as pieces of at most `tile`: (first token, K, V), each until the next one."""
    if store.worker is not None:
        return _tiles_ahead(store, store.worker, stop, tile)
    return ((first, *store.gather(first, min(tile, stop - first))) for first in range(0, stop, tile))


def _tiles_ahead(
    store: BlockStore, worker: Worker, stop: int, tile: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The first `stop` tokens as pieces of at most `tile` tokens, in two buffers that take turns.

    While the caller works with one, a thread gathers the next one, and on a CUDA device a stream of its own copies it.

    Args:
        store: of the tokens; nobody may write into it meanwhile.
        worker: gathers.
        stop, tile: tokens.

    Yields:
        First token, K and V `[B, Hkv, t, D]` on the model's device, good until the next are asked for.

    Raises:
        WorkerError: the gathering failed.
        HostMemoryError, torch.OutOfMemoryError: there is no room for two tiles.
    """
    firsts = range(0, stop, tile)
    turns = min(len(firsts), 2)
    if turns == 0:
        return
    lead = (2, store.batch, store.num_kv_heads)
    size = math.prod(lead) * min(tile, stop) * store.head_dim
    cuda = store.device.type == "cuda"
    host = host_empty((turns, size), store.dtype, pin=cuda, what=TILE, lower=LOWER_TILE)
    unpacked = None  # blocks that may be packed are gathered in another dtype first
    if store.format.gather_dtype != store.dtype:
        unpacked = host_empty((size,), store.format.gather_dtype, brief=True, what=TILE, lower=LOWER_TILE)
    device = _DeviceTiles(host, store.device, worker) if cuda else None

    def piece(memory: torch.Tensor, n: int) -> torch.Tensor:
        shape = (*lead, min(tile, stop - firsts[n]), store.head_dim)
        return memory[: math.prod(shape)].view(shape)

    def gather(n: int) -> Job:
        if device is not None:
            device.wait(n % 2)
        k, v = piece(host[n % 2] if unpacked is None else unpacked, n)
        work = functools.partial(worker.divide, store.gathering(k, v, firsts[n]))
        label = f"gathering tokens {firsts[n]} to {firsts[n] + k.shape[2] - 1}"
        return worker.submit(work, label, keep=store.pool)

    job = gather(0)
    for n, first in enumerate(firsts):
        job.result()
        both = piece(host[n % 2], n)
        if unpacked is not None:
            both.copy_(store.narrowed(piece(unpacked, n)))
        here = both.to(store.device) if device is None else device.copy(n % 2, both)
        if n + 1 < len(firsts):
            job = gather(n + 1)
        yield first, here[0], here[1]
        if device is not None:
            device.release(n % 2)
