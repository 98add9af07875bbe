"""How fast memory is pinned, by the size of its pages."""

from __future__ import annotations

import mmap
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from gpu.models import free_pinned
from gpu.options import Options

SLAB_BYTES = 4 << 30
_HUGE = 2 << 20


def pin(options: Options, pages: str) -> Iterator[dict[str, Any]]:
    """GB/s of pinning a slab; `huge_share`: of the slab, what the system counts as huge pages."""
    size = 1 << 24 if options.quick else SLAB_BYTES
    free_pinned(options)
    before, start = huge_bytes(), time.perf_counter()
    if pages == "huge":
        memory, let_go = pin_huge(options, size)
    else:
        memory, let_go = torch.empty(size, dtype=torch.uint8, pin_memory=options.on_gpu), lambda: None
    spent = time.perf_counter() - start
    huge_share = max(huge_bytes() - before, 0) / size
    del memory
    let_go()
    yield {"variant": f"{pages}, pinning", "gb_per_s": size / spent / 1e9, "huge_share": huge_share}


def pin_huge(options: Options, size: int) -> tuple[torch.Tensor, Callable[[], Any]]:
    """Bytes on huge pages, which torch's threads touch before they are registered with CUDA, and their release."""
    region = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE
    memory = whole[begin : begin + size].zero_()
    if not options.on_gpu:
        return memory, lambda: None
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    if (code := int(runtime.cudaHostRegister(address, size, 0))) != 0:
        raise RuntimeError(f"cudaHostRegister of {size} bytes gave error {code}")
    return memory, lambda: (runtime.cudaHostUnregister(address), whole)


def huge_bytes() -> int:
    """Bytes of this process that lie on huge pages; 0 where the system does not tell."""
    try:
        told = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"AnonHugePages:\s+(\d+) kB", told)
    return 1024 * int(found[1]) if found else 0
