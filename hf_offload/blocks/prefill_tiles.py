"""Double-buffered prefetch of cached tokens for prompts and appends: the next tile is copied while one is attended."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.device_mirror import pause
from hf_offload.blocks.memory import LOWER_TILE, TILE, host_empty, memory_for
from hf_offload.cpu.thread_pool import Job, Worker
from hf_offload.gpu.streams import TILES, stream_for


class _DeviceTiles:
    """Tiles of CUDA memory, and the stream that fills them from the host.

    The copy stream waits until the model's stream has read the old tile, and the model's stream waits for the copy as
    soon as it is started. The memory therefore belongs to the model's stream and may be freed at any time.

    Args:
        host: `[tiles, n]`, the tiles in host memory.
        device: the model's device.
        worker: has the delay that tests ask for.
    """

    def __init__(self, host: torch.Tensor, device: torch.device, worker: Worker) -> None:
        self.worker = worker
        with memory_for(TILE, LOWER_TILE, host.nbytes):
            self.tiles = torch.empty_like(host, device=device)
        self.model = torch.cuda.current_stream(device)
        self.side = stream_for(TILES, device)
        self.read = [torch.cuda.Event() for _ in host]  # type: ignore[no-untyped-call, unused-ignore]
        self.copied = [torch.cuda.Event(blocking=True) for _ in host]  # type: ignore[no-untyped-call, unused-ignore]
        for event in self.read:  # earlier users of this memory may still be reading it
            event.record(self.model)

    def copy(self, i: int, host: torch.Tensor) -> torch.Tensor:
        """Start the copy of the host's tile i to the device; return the tile for use on the model's stream."""
        target = self.tiles[i, : host.numel()].view(host.shape)
        self.side.wait_event(self.read[i])
        with torch.cuda.stream(self.side):
            pause(self.worker, target.device)
            target.copy_(host, non_blocking=True)
        self.copied[i].record(self.side)
        self.model.wait_event(self.copied[i])
        return target

    def release(self, i: int) -> None:
        """Record that the model's stream has all work that reads tile i."""
        self.read[i].record(self.model)

    def wait(self, i: int) -> None:
        """Wait until the host's tile i was copied, so that it may be overwritten."""
        self.copied[i].synchronize()


def read_tiles(store: BlockStore, stop: int, tile: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The first `stop` tokens of a store as pieces of at most `tile`: (first token, K, V), each until the next one."""
    if store.worker is not None:
        return _tiles_ahead(store, store.worker, stop, tile)
    return ((first, *store.gather(first, min(tile, stop - first))) for first in range(0, stop, tile))


def _tiles_ahead(
    store: BlockStore, worker: Worker, stop: int, tile: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """The first `stop` tokens in tiles of at most `tile` tokens, double-buffered.

    While the caller uses a tile, a thread gathers the next one, and on a CUDA device a separate stream copies it.

    Args:
        store: the tokens; nothing may write into it meanwhile.
        worker: the threads that gather.
        stop, tile: numbers of tokens.

    Yields:
        First token, K and V `[B, Hkv, t, D]` on the model's device, valid until the next tile.

    Raises:
        WorkerError: a gather failed.
        HostMemoryError, torch.OutOfMemoryError: there is no memory for two tiles.
    """
    firsts = range(0, stop, tile)
    turns = min(len(firsts), 2)
    if turns == 0:
        return
    lead = (2, store.batch, store.num_kv_heads)
    size = math.prod(lead) * min(tile, stop) * store.head_dim
    cuda = store.device.type == "cuda"
    host = host_empty((turns, size), store.dtype, pin=cuda, what=TILE, lower=LOWER_TILE)
    unpacked = None  # packed blocks are gathered as float32 first
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
