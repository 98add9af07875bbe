"""How fast memory is pinned: torch's ordinary pages, and the package's huge ones."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu import models
from gpu.options import Options
from gpu.supervise import Cases
from hf_offload.blocks.memory import host_empty

SECONDS = 60
SHOWN = ("piece", "variant", "gb_per_s", "huge_share")
SLAB_BYTES = 4 << 30


def cases(options: Options) -> Cases:
    """A case for each size of pages."""
    ways: dict[str, Callable[[int], torch.Tensor]] = {
        "ordinary": lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=options.on_gpu),
        "huge": lambda size: host_empty((size,), torch.uint8, pin=options.on_gpu),
    }
    return {
        f"pinned memory, {pages} pages": (SECONDS, partial(pin, options, pages, way)) for pages, way in ways.items()
    }


def pin(options: Options, pages: str, make: Callable[[int], torch.Tensor]) -> Iterator[dict[str, Any]]:
    """GB/s of pinning a slab; `huge_share`: of the slab, what the system counts as huge pages."""
    size = 1 << 24 if options.quick else SLAB_BYTES
    models.free_pinned(options)
    before, start = huge_bytes(), time.perf_counter()
    slab = make(size)
    told = {"gb_per_s": size / (time.perf_counter() - start) / 1e9}
    told["huge_share"] = max(huge_bytes() - before, 0) / slab.nbytes
    yield {"piece": "pinned memory", "variant": f"{pages}, pinning", **told}


def huge_bytes() -> int:
    """Bytes of this process that lie on huge pages; 0 where the system does not tell."""
    try:
        told = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return 0
    found = re.search(r"AnonHugePages:\s+(\d+) kB", told)
    return 1024 * int(found[1]) if found else 0
