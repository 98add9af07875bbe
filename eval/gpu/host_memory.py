"""CPU attention from pinned memory by the size of its pages, and how fast either kind is pinned."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import percentiles
from gpu.models import free_pinned
from gpu.options import Options
from hf_offload.cpu.host_signals import Doorbell, Item
from hf_offload.cpu.kernels.decode_attention import decode_attention
from hf_offload.cpu.kernels.record import HostBlocks
from hf_offload.cpu.launch import Launch, tag_of
from hf_offload.gpu import kv_copy
from hf_offload.gpu.streams import RECALLS, stream_for

PAGES = ("ordinary", "huge")
THREADS = (4, 8, 15)
BATCHES = (1, 8)
"""Rows of which so many blocks a KV head are attended: 6.5 and 52 MB."""
BLOCKS = 50
ROUNDS, WARM_UP = 24, 4
FETCHES = 3  # beside a round: they outlast it
MOVES = 64  # blocks of a row and KV head that a fetch moves
SLAB_BYTES = 4 << 30
KV_HEADS, GROUP, DIM, BLOCK = 8, 4, 128, 32
_HUGE = 2 << 20
_LINE = 16  # int32 of a cache line


def attend(options: Options, pages: str) -> Iterator[dict[str, Any]]:
    """GB/s of pinning a slab, then microseconds and GB/s of CPU attention to blocks all over it.

    By bytes and threads, alone and beside fetches of other blocks of the slab. `huge_share`: of the slab, what the
    system counts as huge pages.
    """
    size = 1 << 24 if options.quick else SLAB_BYTES
    pin = pin_huge if pages == "huge" else pin_ordinary
    free_pinned(options)
    before, start = huge_bytes(), time.perf_counter()
    memory, let_go = pin(options, size)
    spent = time.perf_counter() - start
    yield {
        "variant": f"{pages}, pinning", "gb_per_s": size / spent / 1e9,
        "huge_share": max(huge_bytes() - before, 0) / size,
    }  # fmt: skip
    memory.fill_(60)  # 0.01 in bf16
    most = max((os.cpu_count() or 2) - 1, 1)
    try:
        blocks = Blocks(options, memory)
        for threads in (1,) if options.quick else sorted({min(count, most) for count in THREADS}):
            for batch in (1,) if options.quick else BATCHES:
                for fetches in (0, FETCHES) if options.on_gpu else (0,):
                    times = blocks.times(batch, threads, fetches)
                    nbytes = batch * KV_HEADS * blocks.count * blocks.record
                    spread = percentiles(times)
                    yield {
                        "variant": f"{pages}, {'beside a fetch' if fetches else 'alone'}", "batch": batch,
                        "host_threads": threads, "megabytes": nbytes / 1e6, **spread,
                        "gb_per_s": nbytes / spread["p50"] / 1000,
                    }  # fmt: skip
    finally:
        options.synchronize()
        let_go()


def pin_ordinary(options: Options, size: int) -> tuple[torch.Tensor, Callable[[], None]]:
    """Bytes that CUDA's allocator pins, and a function that gives them back."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=options.on_gpu), lambda: None


def pin_huge(options: Options, size: int) -> tuple[torch.Tensor, Callable[[], None]]:
    """Bytes on huge pages, which torch's threads touch before they are registered with CUDA.

    Raises:
        RuntimeError: CUDA refuses to register them.
    """
    region = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE
    memory = whole[begin : begin + size].zero_()
    if not options.on_gpu:
        return memory, lambda: None
    runtime = torch.cuda.cudart()
    if (code := int(runtime.cudaHostRegister(memory.data_ptr(), size, 0))) != 0:
        raise RuntimeError(f"cudaHostRegister of {size} bytes gave error {code}")
    return memory, lambda: runtime.cudaHostUnregister(memory.data_ptr())


def huge_bytes() -> int:
    """Bytes of this process that lie on huge pages; 0 where the system does not tell."""
    try:
        told = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"AnonHugePages:\s+(\d+) kB", told)
    return 1024 * int(found[1]) if found else 0


class Blocks:
    """Blocks in pinned memory that CPU threads attend and the device fetches.

    Args:
        options: the check's.
        memory: uint8.
    """

    def __init__(self, options: Options, memory: torch.Tensor) -> None:
        self.options, self.dtype = options, torch.bfloat16
        self.record = 2 * BLOCK * DIM * self.dtype.itemsize  # bytes of a block and KV head
        self.physical = len(memory) // (KV_HEADS * self.record)
        self.count = min(BLOCKS, self.physical // 2)
        self.address = memory.data_ptr() + KV_HEADS * self.record * np.arange(self.physical, dtype=np.int64)
        self.rng = np.random.default_rng(0)
        self._memory = memory

    def chosen(self, batch: int, count: int) -> np.ndarray:
        """`[B, Hkv, count]` int32, ascending, anywhere in the memory."""
        lines = [self.rng.choice(self.physical, count, replace=False) for _ in range(batch * KV_HEADS)]
        return np.sort(np.stack(lines), -1).reshape(batch, KV_HEADS, count).astype(np.int32)

    def launches(self, batch: int, count: int) -> list[Launch]:
        """Attention of a batch, so many times, to blocks that are chosen anew each time."""
        table = np.repeat(np.arange(self.physical, dtype=np.int32)[None], batch, 0)
        length = self.physical * BLOCK
        holes, valid = np.zeros((batch, self.physical), np.uint8), np.ones((batch, length), np.uint8)
        held = HostBlocks(tag_of(self.dtype), self.address, table, holes, valid, BLOCK)

        def one() -> Launch:
            query = self.rng.standard_normal((batch, GROUP * KV_HEADS, DIM), dtype=np.float32)
            blocks = self.chosen(batch, self.count)
            return decode_attention(
                query, held, blocks, np.full(blocks.shape[:2], self.count, np.int32), length, np.empty_like(query),
                np.empty(query.shape[:2], np.float32), np.empty_like(query), scale=DIM**-0.5, softcap=None,
            )  # fmt: skip

        return [one() for _ in range(count)]

    def times(self, batch: int, threads: int, fetches: int) -> list[float]:
        """Microseconds from a flag to the answer of the threads that serve a replayed step."""
        rounds = (2, 1) if self.options.quick else (ROUNDS, WARM_UP)
        launches = self.launches(batch, sum(rounds))
        flags = np.zeros((2 * len(launches) + 1, _LINE), np.int32)
        places = [int(flag.ctypes.data) for flag in flags]
        items = [
            Item(places[2 * i], places[2 * i + 1], places[-1], launch, "attention", keep=(flags, self._memory))
            for i, launch in enumerate(launches)
        ]
        fetch = self.fetch() if fetches else None
        doorbell = Doorbell(threads)
        doorbell.replace(items)
        found = []
        try:
            for item in items:
                self.options.synchronize()
                for _ in range(fetches):
                    assert fetch is not None
                    fetch()
                found.append(_answered(item))
            doorbell.check()
        finally:
            self.options.synchronize()
            doorbell.stop()
        return found[rounds[1] :]

    def fetch(self) -> Callable[[], None]:
        """A call that starts a fetch of blocks of eight rows on the stream of recalls."""
        device, lines = self.options.device, (BATCHES[-1], KV_HEADS)
        pool = torch.empty(*lines, MOVES, 2, BLOCK, DIM, dtype=self.dtype, device=device)
        slots = torch.arange(MOVES, dtype=torch.int32, device=device).expand(*lines, -1).contiguous()
        blocks = torch.from_numpy(self.chosen(lines[0], MOVES)).to(device)
        counts = torch.full(lines, MOVES, dtype=torch.int32, device=device)
        address = torch.from_numpy(self.address).to(device)
        table = torch.arange(self.physical, dtype=torch.int32, device=device).expand(lines[0], -1).contiguous()
        stream = stream_for(RECALLS, torch.device("cuda", torch.cuda.current_device()))
        torch.cuda.synchronize()

        def call() -> None:
            with torch.cuda.stream(stream):
                kv_copy.fetch(pool, slots, blocks, counts, address, table, packed=None)

        call()  # compiles
        return call


def _answered(item: Item, seconds: float = 20.0) -> float:
    """Microseconds from the announcement of an item's first epoch to its answer.

    Raises:
        TimeoutError: nobody answers.
    """
    ready, done = (ctypes.c_int32.from_address(place) for place in (item.ready, item.done))
    start = time.perf_counter()
    ready.value = 1
    while done.value != 1:
        if time.perf_counter() - start > seconds:
            raise TimeoutError(f"{item.label} was not done within {seconds:.0f} s")
    return 1e6 * (time.perf_counter() - start)
