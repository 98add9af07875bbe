"""Host memory allocation on pinned or huge pages, and out-of-memory errors that name purpose, size and remedy."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import math
import mmap
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hf_offload.gpu.streams import RECALLS, stream_for

_HUGE = 2 << 20  # bytes of a huge page on x86-64, and on ARM with 4 KiB pages
_TURN = 4
TILE, LOWER_TILE = "tiles of cached tokens", "a smaller prefill_tile or fewer rows need less"
"""For errors: what could not be had, and what needs less."""


def available_bytes() -> int:
    """Return the bytes of memory that programs may still have, by the system and by a container's limit (cgroup v2).

    Where the system does not tell, it is more than any machine has.
    """
    limits = [1 << 60]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    with contextlib.suppress(OSError, ValueError):
        limit, stat = (Path(f"/sys/fs/cgroup/memory.{name}").read_text() for name in ("max", "stat"))
        limits.append(int(limit) - int(stat.split()[1]))  # "anon BYTES" comes first; files are dropped when need be
    return max(min(limits), 0)


class HostMemoryError(MemoryError, RuntimeError):
    """The host is out of memory: a `MemoryError`, and a `RuntimeError` like torch's own error."""


def size_text(nbytes: int) -> str:
    """Format a number of bytes, such as `1.5 GiB`."""
    power = 0 if nbytes < 1024 else min((nbytes.bit_length() - 1) // 10, 4)
    return f"{nbytes} bytes" if power == 0 else f"{nbytes / 1024**power:.1f} {'KMGT'[power - 1]}iB"


@contextlib.contextmanager
def memory_for(what: str, lower: str, nbytes: int | None = None) -> Iterator[None]:
    """Extend out-of-memory errors of the body by purpose, size and remedy; the first error's text is kept.

    Args:
        what: the purpose of the memory.
        lower: what the user can do to need less.
        nbytes: the size, if known.

    Raises:
        torch.OutOfMemoryError: a device is out of memory.
        HostMemoryError: the host is out of memory.
    """
    size = "" if nbytes is None else f" ({size_text(nbytes)})"
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"no device memory left for {what}{size}; {lower}. {error}") from error
    except (MemoryError, OSError, RuntimeError) as error:
        if isinstance(error, HostMemoryError) or not is_shortage(error):
            raise
        raise HostMemoryError(f"no host memory left for {what}{size}; {lower}. {error}") from error


def is_shortage(error: BaseException) -> bool:
    """Whether an error of Python, the system or torch means that the host is out of memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    messages = ("DefaultCPUAllocator", "Cannot allocate memory")  # torch's allocator, torch's file mapping
    return isinstance(error, MemoryError) or any(words in str(error) for words in messages)


def host_empty(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    pin: bool = False,
    brief: bool = False,
    what: str = "cached tokens",
    lower: str = 'host_dtype="int8", fewer rows or a shorter context need less',
) -> torch.Tensor:
    """An uninitialised CPU tensor; large ones are on huge pages, so that scattered reads of blocks miss the TLB less.

    Args:
        shape, dtype: shape and dtype of the tensor.
        pin: page-locked memory; if the system refuses, warn and use pageable memory.
        brief: the tensor is freed soon: use ordinary pages, which the allocator reuses without clearing them.
        what, lower: purpose and remedy for the error, as in `memory_for`.

    Raises:
        HostMemoryError: the host is out of memory.
    """
    size = math.prod(shape) * dtype.itemsize
    ordinary = brief or size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE")
    if pin and (ordinary or not CAN_REGISTER):
        try:
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as error:
            _tell_pageable(str(error).partition("\n")[0])
    with memory_for(what, lower, size):
        if ordinary:
            return torch.empty(shape, dtype=dtype, device="cpu")
        # One huge page more than needed, for an aligned start; untouched pages cost nothing.
        region = _Region(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE
    with contextlib.suppress(OSError):  # a kernel without huge pages gives ordinary ones
        region.madvise(mmap.MADV_HUGEPAGE, start, size // _HUGE * _HUGE)  # what is left would take a whole one
    aligned = whole[start : start + size]
    if pin and CAN_REGISTER and (refused := region.register(aligned)):
        _tell_pageable(refused)
    return aligned.view(dtype).view(shape)


CAN_REGISTER = hasattr(torch._C, "_cudart")
"""Whether torch can page-lock memory that is there."""


class _Region(mmap.mmap):
    """Memory that is page-locked from `register` to its end.

    Pages that all of torch's threads have touched are locked in an eighth of the time that CUDA's allocator takes.
    """

    locked = 0  # address

    def register(self, part: torch.Tensor) -> str | None:
        """Page-lock bytes of it; return why not, or None."""
        part.zero_()
        code = _runtime().cudaHostRegister(part.data_ptr(), part.nbytes, 0)
        if int(code) != 0:
            return f"cudaHostRegister: {code}"
        self.locked = part.data_ptr()
        return None

    def __del__(self) -> None:
        if not self.locked:
            return
        with contextlib.suppress(Exception):  # at the end of the process CUDA may be gone
            # Kernels may still read it. What torch pins stays mapped; this does not.
            for device in (torch.device("cuda", number) for number in range(torch.cuda.device_count())):
                if torch.cuda.memory_allocated(device):
                    torch.cuda.current_stream(device).synchronize()
                    stream_for(RECALLS, device).synchronize()
            _runtime().cudaHostUnregister(self.locked)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def free_device_memory(device: torch.device) -> int | None:
    """The bytes that torch can allocate on a device now, those that it holds back included; None for the host."""
    if device.type != "cuda":
        return None
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


def host_mapped(file: BinaryIO) -> torch.Tensor:
    """Map a named file privately as a CPU tensor of bytes: pages are read on access, and writes never reach the file.

    The mapping keeps no descriptor.

    Raises:
        ValueError: the file is empty.
    """
    size = os.fstat(file.fileno()).st_size
    if not size:
        raise ValueError("the file is empty")
    return torch.from_file(file.name, shared=False, size=size, dtype=torch.uint8, device="cpu")


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # glibc's
_calls = itertools.count(1)


def trim_heap_by_turns() -> None:
    """Trim the heap at one call in `_TURN`, of all layers and caches: pages that are needed again at once cost time."""
    if next(_calls) % _TURN == 0:
        trim_heap()


def trim_heap() -> None:
    """Return the heap's free pages to the system, where the C library can do that; some milliseconds.

    What a model allocates in a layer of a prompt leaves holes between blocks that last, and the next layer's tensors do
    not fit them: torch aligns tensors, and glibc's heap does not search for room with alignment.
    """
    if _malloc_trim is not None:
        _malloc_trim(0)


@functools.cache
def _tell_pageable(reason: str) -> None:
    """Warn of pageable memory, once for each reason."""
    warnings.warn(
        f"pinned host memory cannot be had ({reason}); HybridCache goes on with pageable memory: the results are the "
        "same, but copies to and from the GPU are slower and block the thread that starts them",
        RuntimeWarning,
        stacklevel=3,
    )
