"""What every kernel launch is made of: the `Launch`, argument checks, dtype tags and the compile options."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn, TypeVar, cast

import numba
import numpy as np
import torch
from numba.core.caching import FunctionCache
from numpy.typing import NDArray

from .memory import count_up
from .room import have_room
from .team import ALONE, share, team

Array = NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])

F32 = np.dtype(np.float32)
I32 = np.dtype(np.int32)
I64 = np.dtype(np.int64)
U8 = np.dtype(np.uint8)
BLOCK_SIZES = (8, 16, 32, 64, 128)

LOAD_BYTES, COMPILE_BYTES = 64 << 20, 256 << 20
"""What must be free before a kernel is loaded or compiled, more than that takes: LLVM ends a process that has none."""

# Launches that read less are run by the caller alone. A team that sleeps between its works (OMP_WAIT_POLICY=passive)
# takes 50 us to wake, one that waits for the next takes one or two.
_PATIENT = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
SHARE_BYTES = 1 << 20 if _PATIENT else 1 << 16

# Kernels read the pool through raw addresses; an empty array tells them (and Numba's specialisation) what lies there.
# Numba has no 16-bit floats on CPU: signed bits stand for float16, unsigned bits for bfloat16.
TAGS: dict[torch.dtype, Array] = {
    torch.float32: np.empty(0, np.float32),
    torch.float16: np.empty(0, np.int16),
    torch.bfloat16: np.empty(0, np.uint16),
}

# The length of such a tuple tells a kernel, at compile time, how many query heads it keeps in registers at once.
_HEADS: tuple[tuple[int, ...], ...] = ((), (0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))


@dataclass(slots=True)
class Launch:
    """One kernel call whose tasks any number of threads may share; it runs once, or again and again by a `Doorbell`.

    Args:
        kernel: made by `kernel`: takes a team, then task numbers from `ticket` until none is left.
        tasks: how many tasks there are.
        args: the remaining arguments of the kernel.
        ticket: from `new_ticket`.
        cost: bytes that the kernel reads, roughly (an upper bound).
        keep: objects whose memory the kernel reaches only by address, kept alive as long as the launch.
        counters: int64, what the kernel counts in beside the ticket; 0 when it starts.
    """

    kernel: Callable[..., None]
    tasks: int
    args: tuple[Any, ...]
    ticket: Array
    cost: int
    keep: tuple[Any, ...] = field(default=())
    counters: Array | None = None

    def __call__(self) -> None:
        """Do one participant's share; when every participant has returned, all tasks are done."""
        self.kernel(ALONE, self.ticket, self.tasks, *self.args)

    def run(self, label: str = "a kernel") -> None:
        """Do all tasks now, together with the threads that torch uses here where that is worth it.

        Raises:
            MemoryError: a thread of the team could not do its tasks; `label` says of what.
        """
        shared = self.cost >= SHARE_BYTES and self.tasks > 1
        who = team() if shared else ALONE
        self.ticket[2] = who[1]
        self.kernel(who, self.ticket, self.tasks, *self.args)
        if shared and self.ticket[1] != self.tasks:
            raise MemoryError(f"{label}: only {self.ticket[1]} of {self.tasks} tasks were done; is memory left?")


def new_ticket() -> Array:
    """Return a fresh ticket, int64 [3]: the number of the next task, how many are done, how many threads take part."""
    ticket = np.zeros(3, np.int64)
    ticket[2] = 1
    return ticket


def _source_digest() -> str:
    """A digest of this folder's sources."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_SOURCES = _source_digest()


class _KernelCache(FunctionCache):
    """Numba's disk cache, which looks at the file of the compiled function, made to look at all that it may import."""

    _kind = ""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (*super()._index_key(sig, codegen), _SOURCES, self._kind)  # type: ignore[no-untyped-call]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled for a signature, or None.

        An index names all signatures that there ever were. One that cannot be read (a version before this one had types
        that are gone, or a file was cut short) is begun anew.

        Raises:
            MemoryError: too little is left to load it, or to compile it if it is not there.
        """
        have_room(LOAD_BYTES, f"the kernel {self._py_func.__name__}")
        found = None
        try:
            found = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except (ImportError, AttributeError, EOFError, UnpicklingError):
            self.flush()  # type: ignore[no-untyped-call]
        if found is None:
            have_room(COMPILE_BYTES, f"compiling the kernel {self._py_func.__name__}")
        return found


def jit(function: Function) -> Function:
    """Compile with the options that all kernels share: no GIL, no bounds checks, cached on disk."""
    return cast(Function, _compile(function, function, _KernelCache))


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a kernel `(ticket, tasks, *args)` that does one participant's share of the tasks.

    The result takes a team before these arguments (`ALONE`, or what `team()` returned) and lets all of it take part.
    Its `names` are those of the arguments.
    """
    body = jit(function)

    def call(team: Any, *args: Any) -> None:
        share(team, body, args)

    compiled = _compile(call, function, _SharedKernelCache)
    compiled.names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return cast(Callable[..., None], compiled)


class _SharedKernelCache(_KernelCache):
    _kind = "shared"


def _compile(function: Callable[..., Any], source: Callable[..., Any], cache: type[_KernelCache]) -> Any:
    compiled: Any = numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function)
    compiled._cache = cache(source)
    return compiled


@jit
def reserve(ticket: Array, tasks: int) -> int:
    """Take another task beside the one in hand, to prepare for it: its number, or `tasks` if few are left."""
    return int(count_up(ticket, 0) if ticket[0] + ticket[2] < tasks else tasks)


def require(name: str, array: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Raise unless `array` is a writable, aligned, C-contiguous array of this dtype and shape.

    Any other memory layout would compile a second version of the kernel, in the middle of a decode step.
    """
    if array.dtype != dtype or array.shape != shape or not array.flags.carray:
        _refuse(name, array, dtype, shape)


def _refuse(name: str, array: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NoReturn:
    if array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}; expected {dtype}")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; expected {shape}")
    raise ValueError(f"{name} must be C-contiguous, aligned and writable; pass a contiguous copy")


def tag_of(dtype: torch.dtype) -> Array:
    """Return the empty array that stands for a storage dtype.

    Raises:
        TypeError: the dtype is none of float32, float16, bfloat16.
    """
    tag = TAGS.get(dtype)
    if tag is None:
        raise TypeError(f"dtype {dtype} has no CPU kernel; use torch.float32, torch.float16 or torch.bfloat16")
    return tag


def check_geometry(dim: int, block_size: int) -> None:
    """Raise unless the head dimension and the block size are ones that the kernels cover."""
    if dim % 16 or not 16 <= dim <= 256:
        raise ValueError(f"head dimension {dim} is not a multiple of 16 in 16..256; pad the heads")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size {block_size} is not one of {BLOCK_SIZES}")


def group_size(query_heads: int, kv_heads: int) -> int:
    """Return how many query heads share a KV head.

    Raises:
        ValueError: the query heads do not divide evenly among the KV heads.
    """
    if kv_heads < 1 or query_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads cannot share {kv_heads} KV heads evenly")
    return query_heads // kv_heads


def head_tiles(group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split a group of query heads into register tiles of at most 4; return the tags of the first and of the last."""
    tiles = -(-group // 4)
    full = -(-group // tiles)
    return _HEADS[full], _HEADS[group - full * (tiles - 1)]


def check_blocks(table: Array, logmass: Array, batch: int, query_heads: int, n_blocks: int) -> None:
    """Raise unless the block table and the log masses fit the batch and hold n_blocks."""
    require("table", table, I32, (batch, table.shape[-1]))
    require("logmass", logmass, F32, (batch, query_heads, logmass.shape[-1]))
    if not 0 <= n_blocks <= min(table.shape[1], logmass.shape[2]):
        raise ValueError(f"n_blocks {n_blocks} exceeds table {table.shape} or logmass {logmass.shape}")
