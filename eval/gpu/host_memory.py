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

PAGES = ("ordinary", "huge")
THREADS = (4, 8, 15)
BATCHES = (1, 8)
"""Rows of which so many blocks a KV head are attended: 6.5 and 52 MB."""
BLOCKS = 50
ROUNDS, WARM_UP = 24, 4
SLAB_BYTES = 4 << 30
KV_HEADS, GROUP, DIM, BLOCK = 8, 4, 128, 32
_HUGE = 2 << 20
_LINE = 16  # int32 of a cache line


def attend(options: Options, pages: str) -> Iterator[dict[str, Any]]:
    """GB/s of pinning a slab, then microseconds and GB/s of CPU attention to blocks all over it, by bytes and threads.

    `huge_share`: of the slab, what the system counts as huge pages.
    """
    size = 1 << 24 if options.quick else SLAB_BYTES
    free_pinned(options)
    before, start = huge_bytes(), time.perf_counter()
    memory, let_go = (pin_huge if pages == "huge" else pin_ordinary)(options, size)
    spent = time.perf_counter() - start
    huge_share = max(huge_bytes() - before, 0) / size
    yield {"variant": f"{pages}, pinning", "gb_per_s": size / spent / 1e9, "huge_share": huge_share}
    memory.fill_(60)  # 0.01 in bf16
    most = max((os.cpu_count() or 2) - 1, 1)
    try:
        for threads in (1,) if options.quick else sorted({min(count, most) for count in THREADS}):
            for batch in (1,) if options.quick else BATCHES:
                times, nbytes = attention_times(options, memory, batch, threads)
                spread = percentiles(times)
                yield {
                    "variant": f"{pages}, alone", "batch": batch, "host_threads": threads, "megabytes": nbytes / 1e6,
                    **spread, "gb_per_s": nbytes / spread["p50"] / 1000,
                }  # fmt: skip
    finally:
        options.synchronize()
        let_go()


def pin_ordinary(options: Options, size: int) -> tuple[torch.Tensor, Callable[[], Any]]:
    """Bytes that CUDA's allocator pins, and a function that gives them back."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=options.on_gpu), lambda: None


def pin_huge(options: Options, size: int) -> tuple[torch.Tensor, Callable[[], Any]]:
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


def attention_times(options: Options, memory: torch.Tensor, batch: int, threads: int) -> tuple[list[float], int]:
    """Microseconds from a flag to the answer of the threads that serve a replayed step, and the bytes that they read.

    The blocks lie anywhere in the memory, other ones each time.
    """
    rounds, warm_up = (1, 1) if options.quick else (ROUNDS, WARM_UP)
    record = 2 * BLOCK * DIM * 2  # bytes of a block and KV head, bfloat16
    physical = len(memory) // (KV_HEADS * record)
    count, length, rng = min(BLOCKS, physical // 2), physical * BLOCK, np.random.default_rng(0)
    table = np.repeat(np.arange(physical, dtype=np.int32)[None], batch, 0)
    address = memory.data_ptr() + KV_HEADS * record * np.arange(physical, dtype=np.int64)
    holes, valid = np.zeros((batch, physical), np.uint8), np.ones((batch, length), np.uint8)
    held = HostBlocks(tag_of(torch.bfloat16), address, table, holes, valid, BLOCK)

    def launch() -> Launch:
        query = rng.standard_normal((batch, GROUP * KV_HEADS, DIM), dtype=np.float32)
        lines = [rng.choice(physical, count, replace=False) for _ in range(batch * KV_HEADS)]
        blocks = np.sort(np.stack(lines), -1).reshape(batch, KV_HEADS, count).astype(np.int32)
        return decode_attention(
            query, held, blocks, np.full(blocks.shape[:2], count, np.int32), length, np.empty_like(query),
            np.empty(query.shape[:2], np.float32), np.empty_like(query), scale=DIM**-0.5, softcap=None,
        )  # fmt: skip

    flags = np.zeros((2 * (rounds + warm_up) + 1, _LINE), np.int32)
    ready, done, last = (flags[part].ctypes.data for part in (0, 1, -1))
    step = 2 * flags.strides[0]
    items = [
        Item(ready + i * step, done + i * step, last, launch(), "attention", keep=(flags, memory))
        for i in range(rounds + warm_up)
    ]
    doorbell = Doorbell(threads)
    doorbell.replace(items)
    try:
        found = [_answered(item) for item in items]
        doorbell.check()
    finally:
        doorbell.stop()
    return found[warm_up:], batch * KV_HEADS * count * record


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
