"""Host memory from huge pages, where the system gives them."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_HUGE = 2 << 20  # bytes of a huge page on x86-64, and on ARM with 4 KiB pages


def size_text(nbytes: int) -> str:
    """Bytes for people to read, such as `1.5 GiB`."""
    power = 0 if nbytes < 1024 else min((nbytes.bit_length() - 1) // 10, 4)
    return f"{nbytes} bytes" if power == 0 else f"{nbytes / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def host_empty(shape: tuple[int, ...], dtype: torch.dtype, *, pin: bool = False) -> torch.Tensor:
    """An uninitialised CPU tensor; large ones lie on huge pages, so that reading blocks here and there misses no TLB.

    Args:
        shape, dtype: of the tensor.
        pin: page-locked memory instead, from CUDA's allocator.
    """
    size = math.prod(shape) * dtype.itemsize
    if pin or size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, pin_memory=pin)
    # One page more than needed, so that there is an aligned start; what is never touched costs nothing.
    region = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    with contextlib.suppress(OSError):  # a kernel without huge pages gives ordinary ones
        region.madvise(mmap.MADV_HUGEPAGE)
    return whole[start : start + size].view(dtype).view(shape)
