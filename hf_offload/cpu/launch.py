"""Compiled CPU kernels and their launches: `kernel`, `Launch`, `LaunchSequence`, and the checks of kernel arguments."""

# mypy: allow-untyped-calls
from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, NoReturn, TypeVar, cast

import numba
import numpy as np
import torch
from numba.core import types
from numba.core.registry import CPUDispatcher
from numba.extending import overload
from numpy.typing import NDArray

from .kernel_cache import KernelCache, note_source
from .kernel_entry import KernelCompiler, entry_of, lay_out
from .linked_code import LinkedCompiler
from .memory import count_up, get_word, put_word
from .openmp_team import ALONE, call_entry, call_team, team

Array = NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])

F32 = np.dtype(np.float32)
I32 = np.dtype(np.int32)
I64 = np.dtype(np.int64)
U8 = np.dtype(np.uint8)
U32 = np.dtype(np.uint32)
BLOCK_SIZES = (8, 16, 32, 64, 128)

# Launches that read fewer bytes run in the calling thread alone. An OpenMP team that sleeps between parallel regions
# (OMP_WAIT_POLICY=passive) takes 50 us to wake, one that spins takes one or two.
_PATIENT = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
SHARE_BYTES = 1 << 20 if _PATIENT else 1 << 16

# Kernels read the pool through raw addresses; the type of an empty array (a tag) tells Numba the dtype of the pool.
# Numba has no 16-bit floats on the CPU: int16 stands for float16, uint16 for bfloat16.
TAGS: dict[torch.dtype, Array] = {
    torch.float32: np.empty(0, np.float32),
    torch.float16: np.empty(0, np.int16),
    torch.bfloat16: np.empty(0, np.uint16),
}

# The length of such a tuple gives a kernel, at compile time, the number of query heads of a register tile.
_HEADS: tuple[tuple[int, ...], ...] = ((), (0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))


class Launch:
    """A kernel and its arguments, laid out once in memory; compiled code runs it any number of times by its address.

    The function that makes a launch checks the arguments. Scalar arguments may be overwritten between two runs
    (`word`). A kernel that raises leaves tasks undone; `check` then raises in the caller.

    Args:
        kernel: made by `kernel`; it takes task numbers from the ticket (`memory.next_task`) until none is left.
        tasks: the number of tasks.
        args: the kernel's arguments after ticket and tasks: arrays, ints, floats, None, or tuples of these; and bools,
            which are ints to the kernel.
        cost: an upper bound of the bytes that the kernel reads.
        keep: objects whose memory the kernel reaches only by address, kept alive as long as the launch.
        counters: int64, further counters of the kernel, set to 0 before each run; or None.
        ticket: int64 [3 or more]: next task, finished tasks, participating threads; a new array by default.
        dealt: whether others also take tasks from this kernel; then only the tasks that it took must be done.
        label: its name in error messages.
    """

    __slots__ = ("_bound", "args", "cost", "counters", "dealt", "keep", "kernel", "label", "tasks", "ticket")

    def __init__(
        self,
        kernel: Callable[..., None],
        tasks: int,
        args: tuple[Any, ...],
        cost: int,
        keep: tuple[Any, ...] = (),
        counters: Array | None = None,
        ticket: Array | None = None,
        dealt: bool = False,
        label: str = "a kernel",
    ) -> None:
        self.kernel, self.tasks, self.args, self.cost, self.keep = kernel, tasks, args, cost, keep
        self.counters, self.dealt, self.label = counters, dealt, label
        self.ticket: Array = np.zeros(3, np.int64) if ticket is None else ticket
        self._bound: _Bound | None = None

    def with_ticket(self, ticket: Array, label: str) -> Launch:
        """Return the same launch with another ticket and label; the two share counters and buffers."""
        form = (self.kernel, self.tasks, self.args, self.cost, self.keep, self.counters)
        return Launch(*form, ticket=ticket, dealt=self.dealt, label=label)

    @property
    def bound(self) -> _Bound:
        """The launch in memory, laid out at the first use.

        Raises:
            TypeError: the kernel was not made by `kernel`.
        """
        if self._bound is None:
            self._bound = _bind(self.kernel, (self.ticket, self.tasks, *self.args))
        return self._bound

    @property
    def address(self) -> tuple[int, int]:
        """Addresses of a C function of one pointer and of its argument; a call runs one participant's share."""
        return self.bound.entry, self.bound.argument

    @property
    def shared(self) -> bool:
        """Whether the launch is large enough to run on a team of threads."""
        return self.cost >= SHARE_BYTES and self.tasks > 1

    def arg(self, name: str) -> Any:
        """An argument by the name of the kernel's parameter, as it was given to the launch."""
        return self.args[self.kernel.names.index(name) - 2]  # type: ignore[attr-defined]

    def word(self, name: str) -> tuple[memoryview, int]:
        """The location of a scalar argument: the launch's int64 words, and the index into them."""
        return self.bound.words, self.bound.offsets[self.kernel.names.index(name)]  # type: ignore[attr-defined]

    def open(self, participants: int) -> None:
        """Reset ticket and counters for a number of participants, each of which then calls `address` or `take_part`."""
        _ = self.bound  # laid out before participants come: two that did so at once would free each other's memory
        self.ticket[:3] = 0, 0, participants
        if self.counters is not None:
            self.counters.fill(0)

    def __call__(self) -> None:
        """Run all tasks in this thread alone.

        Raises:
            MemoryError: tasks were left undone.
        """
        self.open(1)
        self.take_part()
        self.check()

    def take_part(self) -> None:
        """Run one participant's share, after `open`; call `check` when all participants have returned."""
        _call(*self.address)

    def check(self) -> None:
        """Raise MemoryError unless all tasks were done; call it after all participants have returned."""
        done, wanted = int(self.ticket[1]), int(self.ticket[0]) if self.dealt else self.tasks
        if done != wanted:
            raise MemoryError(f"{self.label}: only {done} of {wanted} tasks were done; is memory left?")

    def run(self, label: str | None = None) -> None:
        """Run all tasks now, on torch's OpenMP team if the launch is large enough.

        Args:
            label: a new name in error messages, or None.

        Raises:
            MemoryError: tasks were left undone.
        """
        if label is not None:
            self.label = label
        LaunchSequence((self,)).run()


class LaunchSequence:
    """Launches that one compiled call runs in order, each on torch's OpenMP team if it is large enough.

    Args:
        launches: nothing else may run them at the same time.
    """

    __slots__ = ("__weakref__", "_address", "_rows", "_shared", "launches")

    def __init__(self, launches: Iterable[Launch]) -> None:
        self.launches = tuple(launches)
        self._rows: Array = np.zeros((len(self.launches), _WIDTH), np.int64)
        for row, launch in zip(self._rows, self.launches, strict=True):
            counters = launch.counters
            row[:] = (
                *launch.address, launch.ticket.ctypes.data, launch.tasks, launch.shared,
                0 if counters is None else counters.ctypes.data, 0 if counters is None else len(counters), launch.dealt,
            )  # fmt: skip
        self._address = self._rows.ctypes.data
        self._shared = any(launch.shared for launch in self.launches)

    def run(self) -> None:
        """Run all launches.

        Raises:
            MemoryError: a launch left tasks undone; the launches after it were not started.
        """
        runtime, threads = team() if self._shared else ALONE
        undone = _run_all(self._address, len(self.launches), runtime, threads)
        if undone >= 0:
            self.launches[undone].check()


_ENTRY, _ARGUMENT, _TICKET, _TASKS, _SHARED, _COUNTERS, _COUNT, _DEALT = range(8)
_WIDTH = 8
_ALL_DONE = -1


@dataclass(frozen=True, slots=True)
class _Bound:
    """A launch in memory.

    Args:
        entry: address of the C function that calls the kernel.
        argument: address of that function's argument: the kernel's arguments.
        words: int64, the memory at `argument`.
        offsets: indices into `words` of ticket, tasks and the other arguments.
    """

    entry: int
    argument: int
    words: memoryview
    offsets: tuple[int, ...]


class _Internal(CPUDispatcher):
    """A function that compiled code alone calls, or that a launch enters.

    Numba would also compile a wrapper for calls from Python, and a copy for each constant that a caller passes:
    together a quarter of the time of a first `generate()`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"{self.py_func.__name__} serves compiled code; compile it by `jit_for_python` to call it")

    def get_call_template(self, args: Any, kws: Any) -> Any:
        return super().get_call_template(tuple(map(types.unliteral, args)), kws)


_OPTIONS: Any = {
    "nopython": True,
    "nogil": True,
    "boundscheck": False,
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
}


def jit(function: Function) -> Function:
    """Compile a function for compiled callers, without the GIL and bounds checks; its code is kept as part of theirs.

    A call from Python raises TypeError (`jit_for_python`).
    """
    return _linked(function, _OPTIONS)


def _linked(function: Function, options: Any) -> Function:
    note_source(function)
    return cast(Function, _Internal(function, targetoptions=options | _UNWRAPPED, pipeline_class=LinkedCompiler))


_UNWRAPPED: Any = {"no_cpython_wrapper": True}
_BORROWING: Any = _OPTIONS | {"_nrt": False}


def borrowing(function: Function, *, inline: bool = False) -> Function:
    """Compile as `jit` does a function that allocates nothing: references to its arrays are not counted.

    A count is an atomic operation or a call, for each array of each NamedTuple that a function hands on.

    Args:
        function: the function.
        inline: whether its code goes into that of its callers.
    """
    return _linked(function, _BORROWING | {"forceinline": inline})


def jit_for_python(function: Function) -> Function:
    """Compile a function that Python calls, too; its code is kept on disk."""
    compiled: Any = CPUDispatcher(function, targetoptions=_OPTIONS)
    compiled._cache = KernelCache(function, for_python=True)
    return cast(Function, compiled)


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a kernel `(ticket, tasks, *args)`, which runs one participant's share; its code is kept on disk.

    Its attribute `names` lists its arguments.
    """
    options = _OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": False}
    compiled: Any = _Internal(function, targetoptions=options, pipeline_class=KernelCompiler)
    compiled._cache = KernelCache(function, for_python=False)
    compiled.names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return cast(Callable[..., None], compiled)


@jit_for_python
def _call(entry: int, argument: int) -> None:
    call_entry(entry, argument)


@jit
def _number(row: int, index: int) -> int:
    return int(np.int64(get_word(row + 8 * index)))


@jit_for_python
def _run_all(rows: int, count: int, runtime: int, threads: int) -> int:
    """Run `count` launches; return the index of the first that left tasks undone, or `_ALL_DONE`."""
    for i in range(count):
        row = rows + 8 * _WIDTH * i
        entry, argument, ticket = _number(row, _ENTRY), _number(row, _ARGUMENT), _number(row, _TICKET)
        for n in range(_number(row, _COUNT)):
            put_word(_number(row, _COUNTERS) + 8 * n, 0)
        put_word(ticket, 0)
        put_word(ticket + 8, 0)
        if runtime != 0 and _number(row, _SHARED) != 0:
            put_word(ticket + 16, threads)
            call_team(runtime, entry, argument, threads)
        else:
            put_word(ticket + 16, 1)
            call_entry(entry, argument)
        if _number(ticket, 1) != (_number(ticket, 0) if _number(row, _DEALT) != 0 else _number(row, _TASKS)):
            return i
    return _ALL_DONE


_layouts: dict[tuple[Any, ...], tuple[int, tuple[int, ...], int]] = {}
"""What `entry_of` returns, by kernel and `_kinds_of`: `numba.typeof` is slow."""


_ORDERS = 0b11  # of an array's flags: in C's and in Fortran's order


def _kinds_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A cheap key of the argument types: equal keys get the same compiled kernel."""
    return tuple(
        [
            (x.dtype, x.ndim, x.flags.num & _ORDERS)
            if isinstance(x, np.ndarray)
            else (type(x), *_kinds_of(x))
            if isinstance(x, tuple)
            else type(x)
            for x in args
        ]
    )


def _bind(compiled: Any, args: tuple[Any, ...]) -> _Bound:
    if not hasattr(compiled, "names"):
        raise TypeError(f"{compiled!r} was not made by `kernel`; decorate it by that")
    args = tuple([int(x) if type(x) is bool else x for x in args])  # memory has no bool
    words: list[int] = []
    lay_out(args, words)
    memory: Array = np.array(words, np.int64)
    key = compiled, _kinds_of(args)
    if key not in _layouts:
        _layouts[key] = entry_of(compiled, numba.typeof(args).types)
    entry, offsets, size = _layouts[key]
    assert len(words) == size, f"{len(words)} words of {args}"
    return _Bound(entry, memory.ctypes.data, memory.data, offsets)


@jit
def reserve(ticket: Array, tasks: int) -> int:
    """Take a second task in advance, to prefetch for it: its number, or `tasks` if few are left."""
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
    """Return the tag (an empty array) of a storage dtype.

    Raises:
        TypeError: the dtype is not float32, float16 or bfloat16.
    """
    tag = TAGS.get(dtype)
    if tag is None:
        raise TypeError(f"dtype {dtype} has no CPU kernel; use torch.float32, torch.float16 or torch.bfloat16")
    return tag


def check_geometry(dim: int, block_size: int) -> None:
    """Raise ValueError unless the kernels cover the head dimension and the block size."""
    if dim % 16 or not 16 <= dim <= 256:
        raise ValueError(f"head dimension {dim} is not a multiple of 16 in 16..256; pad the heads")
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size {block_size} is not one of {BLOCK_SIZES}")


def cap_of(softcap: float | None) -> float | None:
    """Return a softcap as float, or None.

    Raises:
        ValueError: it is not positive.
    """
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}; pass None for no cap")
    return None if softcap is None else float(softcap)


def group_size(query_heads: int, kv_heads: int) -> int:
    """Return how many query heads share a KV head.

    Raises:
        ValueError: the query heads do not divide evenly among the KV heads.
    """
    if kv_heads < 1 or query_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads cannot share {kv_heads} KV heads evenly")
    return query_heads // kv_heads


def head_tiles(group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split a group of query heads into register tiles of at most 4; return the tags of the first and the last tile."""
    tiles = -(-group // 4)
    full = -(-group // tiles)
    return _HEADS[full], _HEADS[group - full * (tiles - 1)]


def by_tiles(work: Callable[..., None]) -> Callable[..., None]:
    """Compile `tiles(full, rest, group, *args)`, which calls `work(tile, done, *args)` for each register tile of heads.

    Args:
        work: compiled; `done` is the number of heads before the tile.
    """

    def tiles(full: Any, rest: Any, group: int, *args: Any) -> None:
        done = 0
        while done < group:
            if done + len(full) <= group:
                work(full, done, *args)
                done += len(full)
            else:
                work(rest, done, *args)
                done += len(rest)

    return borrowing(tiles, inline=True)


def by_types(pick: Callable[..., Any], *, allocating: bool = False) -> Callable[..., Any]:
    """A function for compiled code: that which `pick` returns for the types of its arguments.

    Args:
        pick: called with Numba's types; returns a Python function, which is compiled into its callers. The function has
            the same parameters as `pick`, annotations included.
        allocating: whether such functions allocate memory; if not, they are compiled as `borrowing` does.
    """

    def function(*args: Any) -> Any:
        raise TypeError("for compiled code")

    options = (_OPTIONS if allocating else _BORROWING) | _UNWRAPPED | {"pipeline_class": LinkedCompiler}
    overload(function, jit_options=options)(pick)
    return function


def by_class(choices: Mapping[type, Callable[..., Any]], *, allocating: bool = False) -> Callable[..., Any]:
    """A function for compiled code, chosen by the NamedTuple class of its first argument.

    Args:
        choices: functions with the same parameters by class, `NoneType` for None.
        allocating: as for `by_types`.
    """

    def pick(first: Any, *args: Any) -> Callable[..., Any]:
        return choices[NoneType if isinstance(first, types.NoneType) else first.instance_class]

    pick.__signature__ = inspect.signature(next(iter(choices.values())))  # type: ignore[attr-defined]
    return by_types(pick, allocating=allocating)
