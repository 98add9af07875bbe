"""Host memory: huge or pinned pages where the system gives them, and errors that name what could not be had."""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import mmap
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

_HUGE = 2 << 20  # bytes of a huge page on x86-64, and on ARM with 4 KiB pages
TILE, LOWER_TILE = "tiles of cached tokens", "a smaller prefill_tile or fewer rows need less"
"""For errors: what could not be had, and what needs less."""


class HostMemoryError(MemoryError, RuntimeError):
    """The host has no memory left: a `MemoryError`, and a `RuntimeError` as torch's own is."""


def size_text(nbytes: int) -> str:
    """Bytes for people to read, such as `1.5 GiB`."""
    power = 0 if nbytes < 1024 else min((nbytes.bit_length() - 1) // 10, 4)
    return f"{nbytes} bytes" if power == 0 else f"{nbytes / 1024**power:.1f} {'KMGT'[power - 1]}iB"


@contextlib.contextmanager
def memory_for(what: str, lower: str, nbytes: int | None = None) -> Iterator[None]:
    """Let memory that cannot be had in this context say what it was for; the first error's text is kept.

    Args:
        what: what the memory is for.
        lower: what the user can do to need less.
        nbytes: how much it is, where that is known.

    Raises:
        torch.OutOfMemoryError: a device has no memory left.
        HostMemoryError: the host has none.
    """
    size = "" if nbytes is None else f" ({size_text(nbytes)})"
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"no device memory left for {what}{size}; {lower}. {error}") from error
    except (MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, HostMemoryError) or not _is_shortage(error):
            raise
        raise HostMemoryError(f"no host memory left for {what}{size}; {lower}. {error}") from error


def _is_shortage(error: BaseException) -> bool:
    """Whether an error says that the host has no memory left: Python's, the system's or torch's own way to say it."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    told = ("DefaultCPUAllocator", "Cannot allocate memory")  # torch's allocator, and its way to map a file
    return isinstance(error, MemoryError) or any(words in str(error) for words in told)


def host_empty(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    pin: bool = False,
    brief: bool = False,
    what: str = "cached tokens",
    lower: str = 'host_dtype="int8", fewer rows or a shorter context need less',
) -> torch.Tensor:
    """An uninitialised CPU tensor; large ones lie on huge pages, so that reading blocks here and there misses no TLB.

    Args:
        shape, dtype: of the tensor.
        pin: page-locked memory from CUDA's allocator instead; where that cannot be had, a warning and pageable memory.
        brief: let go soon: ordinary pages, which the allocator hands out again without the system clearing them anew.
        what, lower: for the error: what the tensor is for, what the user can do to need less.

    Raises:
        HostMemoryError: there is no memory left.
    """
    if pin:
        try:
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as error:
            _tell_pageable(str(error).partition("\n")[0])
    size = math.prod(shape) * dtype.itemsize
    with memory_for(what, lower, size):
        if brief or size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.empty(shape, dtype=dtype, device="cpu")
        # One page more than needed, so that there is an aligned start; what is never touched costs nothing.
        region = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    with contextlib.suppress(OSError):  # a kernel without huge pages gives ordinary ones
        region.madvise(mmap.MADV_HUGEPAGE)
    return whole[start : start + size].view(dtype).view(shape)


def host_mapped(path: Path) -> torch.Tensor:
    """The bytes of a file as a CPU tensor: pages come when they are touched; what is written never reaches the file."""
    with path.open("rb") as file:
        region = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(region, dtype=torch.uint8)


@functools.cache
def _tell_pageable(reason: str) -> None:
    """Warn of pageable memory, once a process for each reason."""
    warnings.warn(
        f"pinned host memory cannot be had ({reason}); HybridCache goes on with pageable memory: the results are the "
        "same, but copies to and from the GPU are slower and hold up the thread that starts them",
        RuntimeWarning,
        stacklevel=3,
    )
