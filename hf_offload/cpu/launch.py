"""Kernels and their launches: compile options, arguments laid out once, sequences of launches, argument checks."""

# mypy: allow-untyped-calls
from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn, TypeVar, cast

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.core.caching import FunctionCache
from numpy.typing import NDArray

from hf_offload.cpu.simd.vectors import lowered, pointer

from .memory import count_up, get_word, put_word
from .openmp_team import ALONE, ENTRY, call_entry, call_team, team
from .room import have_room

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


class Launch:
    """A kernel with its arguments, laid out once in memory: compiled code runs it any number of times by its address.

    Whoever makes a launch checks its arguments. Numbers among them may be written between two runs (`word`). A kernel
    that raises leaves tasks undone, whoever runs it; `check` raises then.

    Args:
        kernel: made by `kernel`; takes task numbers from the ticket until none is left.
        tasks: how many tasks there are.
        args: the arguments of the kernel behind ticket and tasks.
        cost: bytes that the kernel reads, roughly (an upper bound).
        keep: objects whose memory the kernel reaches only by address, kept alive as long as the launch.
        counters: int64, what the kernel counts in beside the ticket; 0 when it starts.
        ticket: int64: the next task, how many are done, how many threads take part; a new one by default.
        dealt: whether others take tasks, too: those that the kernel has taken, as the ticket says, must be done.
        label: what an error message calls it.
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
        """The same launch over a ticket that lies elsewhere, under another name; the two share counters and buffers."""
        form = (self.kernel, self.tasks, self.args, self.cost, self.keep, self.counters)
        return Launch(*form, ticket=ticket, dealt=self.dealt, label=label)

    @property
    def bound(self) -> _Bound:
        """Where it lies in memory; laid out at the first use.

        Raises:
            TypeError: the kernel is not one that `kernel` made.
        """
        if self._bound is None:
            self._bound = _bind(self.kernel, (self.ticket, self.tasks, *self.args))
        return self._bound

    @property
    def address(self) -> tuple[int, int]:
        """The entry, a C function, and its argument: one participant's share of the tasks."""
        return self.bound.entry, self.bound.place

    @property
    def shared(self) -> bool:
        """Whether it is worth a team."""
        return self.cost >= SHARE_BYTES and self.tasks > 1

    def word(self, name: str) -> tuple[memoryview, int]:
        """Where a number among the arguments lies: int64 words, and which of them."""
        return self.bound.words, self.bound.offsets[self.kernel.names.index(name)]  # type: ignore[attr-defined]

    def open(self, participants: int) -> None:
        """Make ready for so many participants, each of which calls `address` or `take_part`."""
        _ = self.bound  # before others come: each of two that lay it out at once would free what the other reads
        self.ticket[:3] = 0, 0, participants
        if self.counters is not None:
            self.counters.fill(0)

    def __call__(self) -> None:
        """Do all tasks now, in this thread alone.

        Raises:
            MemoryError: not all tasks were done.
        """
        self.open(1)
        self.take_part()
        self.check()

    def take_part(self) -> None:
        """Do one participant's share, after `open`; when all have returned, see `check`."""
        _call(*self.address)

    def check(self) -> None:
        """After all participants have returned: raise MemoryError unless all tasks were done."""
        done, wanted = int(self.ticket[1]), int(self.ticket[0]) if self.dealt else self.tasks
        if done != wanted:
            raise MemoryError(f"{self.label}: only {done} of {wanted} tasks were done; is memory left?")

    def run(self, label: str | None = None) -> None:
        """Do all tasks now, on torch's team where that is worth it.

        Raises:
            MemoryError: not all tasks were done; `label` says of what.
        """
        if label is not None:
            self.label = label
        LaunchSequence((self,)).run()


class LaunchSequence:
    """Launches that one compiled call runs, one after the other, each on torch's team where that is worth it.

    Args:
        launches: in this order; nobody else runs them meanwhile.
    """

    __slots__ = ("__weakref__", "_address", "_rows", "_shared", "launches")

    def __init__(self, launches: Iterable[Launch]) -> None:
        self.launches = tuple(launches)
        self._rows: Array = np.zeros((len(self.launches), _WIDTH), np.int64)
        for row, launch in zip(self._rows, self.launches, strict=True):
            counters = launch.counters
            row[:] = (
                *launch.address, launch.ticket.ctypes.data, launch.tasks, launch.shared,
                0 if counters is None else counters.ctypes.data, 0 if counters is None else len(counters),
            )  # fmt: skip
        self._address = self._rows.ctypes.data
        self._shared = any(launch.shared for launch in self.launches)

    def set_tasks(self, tasks: Callable[[Launch], int]) -> None:
        """Have other numbers of tasks done from now on: none, to see what is left without a kernel."""
        for row, launch in zip(self._rows, self.launches, strict=True):
            words, i = launch.word("tasks")
            words[i] = row[_TASKS] = tasks(launch)

    def run(self) -> None:
        """Do all tasks now.

        Raises:
            MemoryError: a launch could not do all its tasks; those behind it were not begun.
        """
        runtime, threads = team() if self._shared else ALONE
        undone = _run_all(self._address, len(self.launches), runtime, threads)
        if undone >= 0:
            self.launches[undone].check()


_ENTRY, _PLACE, _TICKET, _TASKS, _SHARED, _COUNTERS, _COUNT = range(7)
_WIDTH = 7
_ALL_DONE = -1


@dataclass(frozen=True, slots=True)
class _Bound:
    """A launch in memory.

    Args:
        entry: address of the function that makes the call.
        place: address of what it reads.
        words: int64, what lies there.
        offsets: where in `words` ticket, tasks and the arguments lie.
    """

    entry: int
    place: int
    words: memoryview
    offsets: tuple[int, ...]


def _source_digest(folder: Path) -> str:
    """A digest of a folder's sources."""
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_HERE = Path(__file__).parent
_sources: dict[Path, str] = {_HERE: _source_digest(_HERE)}
"""Digests of the folders that have kernels: this one, from which all may import, and the methods' own."""


class _KernelCache(FunctionCache):
    """Numba's disk cache, which looks at the file of the compiled function, made to look at all that it may import."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        own = Path(self._py_func.__code__.co_filename).parent
        if own not in _sources:
            _sources[own] = _source_digest(own)
        return (*super()._index_key(sig, codegen), _sources[_HERE], _sources[own])

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
            found = super().load_overload(sig, target_context)
        except (ImportError, AttributeError, EOFError, UnpicklingError):
            self.flush()
        if found is None:
            have_room(COMPILE_BYTES, f"compiling the kernel {self._py_func.__name__}")
        return found


def jit(function: Function) -> Function:
    """Compile with the options that all kernels share: no GIL, no bounds checks, cached on disk."""
    compiled: Any = numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function)
    compiled._cache = _KernelCache(function)
    return cast(Function, compiled)


def kernel(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a kernel `(ticket, tasks, *args)`, one participant's share of the tasks; `names` are its arguments'."""
    compiled: Any = jit(function)
    compiled.names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return cast(Callable[..., None], compiled)


@jit
def _call(entry: int, place: int) -> None:
    call_entry(entry, place)


@jit
def _number(row: int, index: int) -> int:
    return int(np.int64(get_word(row + 8 * index)))


@jit
def _run_all(rows: int, count: int, runtime: int, threads: int) -> int:
    """Run so many launches; the first that did not do all its tasks, or `_ALL_DONE`."""
    for i in range(count):
        row = rows + 8 * _WIDTH * i
        entry, place, ticket = _number(row, _ENTRY), _number(row, _PLACE), _number(row, _TICKET)
        for n in range(_number(row, _COUNT)):
            put_word(_number(row, _COUNTERS) + 8 * n, 0)
        put_word(ticket, 0)
        put_word(ticket + 8, 0)
        if runtime != 0 and _number(row, _SHARED) != 0:
            put_word(ticket + 16, threads)
            call_team(runtime, entry, place, threads)
        else:
            put_word(ticket + 16, 1)
            call_entry(entry, place)
        if _number(ticket, 1) != _number(row, _TASKS):
            return i
    return _ALL_DONE


def _stored(context: Any, args: Any) -> Any:
    """LLVM type of what lies at a place: the kernel's address and its arguments."""
    return ir.LiteralStructType([ir.IntType(64), context.get_value_type(args)])


def _borrow(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """The value with arrays that own nothing: no reference is counted for them, by any thread."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = ir.Constant(array.meminfo.type, None)
        array.parent = ir.Constant(array.parent.type, None)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        for i, element in enumerate(cast(Any, kind)):
            part = _borrow(context, builder, element, builder.extract_value(value, i))
            value = builder.insert_value(value, part, i)
        return value
    assert not context.data_model_manager[kind].contains_nrt_meminfo(), f"a kernel argument of type {kind}"
    return value


def _offsets_of(context: Any, args: Any) -> tuple[int, ...]:
    """Bytes from a place to each argument, and the bytes of all."""
    data, kind = context.target_data, _stored(context, args)
    begin, count = kind.get_element_offset(data, 1), len(args.types)
    found = [begin + kind.elements[1].get_element_offset(data, i) for i in range(count)]
    return (*found, kind.get_abi_size(data))


@lowered
def _emit_entry(typing: Any, target: Any, args: Any, place: Any) -> Any:
    """Write a call of the compiled function at `target` to `place`; the address of the `ENTRY` that makes it."""

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        kind, convention = _stored(context, args), context.call_conv
        call = builder.insert_value(ir.Constant(kind, ir.Undefined), values[0], 0)
        call = builder.insert_value(call, _borrow(context, builder, args, values[1]), 1)
        builder.store(call, pointer(builder, values[2], kind))
        entry = ir.Function(builder.module, ENTRY, builder.module.get_unique_name("entry"))
        entry.linkage = "internal"
        inner = ir.IRBuilder(entry.append_basic_block())
        stored = inner.load(inner.bitcast(entry.args[0], kind.as_pointer()))
        function = convention.get_function_type(types.none, args.types).as_pointer()
        each = [inner.extract_value(stored, (1, i)) for i in range(len(args.types))]
        compiled = inner.inttoptr(inner.extract_value(stored, 0), function)
        convention.call_function(inner, compiled, types.none, args.types, each)  # what it raises: tasks are not done
        inner.ret_void()
        return builder.ptrtoint(entry, ir.IntType(64))

    return types.int64(types.int64, args, types.int64), emit


@jit
def _enter(target: int, args: Any, place: int) -> int:
    return int(_emit_entry(target, args, place))


_layouts: dict[tuple[Any, ...], tuple[int, tuple[int, ...]]] = {}
"""The compiled kernel's address and layout, by kernel and kinds of arguments: Numba takes long to name their types."""


def _kinds_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What decides the compiled form of a kernel that gets these arguments."""
    return tuple(
        [
            (x.dtype, x.ndim)
            if isinstance(x, np.ndarray)
            else (type(x), *_kinds_of(x))
            if isinstance(x, tuple)
            else type(x)
            for x in args
        ]
    )


def _bind(compiled: Any, args: tuple[Any, ...]) -> _Bound:
    if not hasattr(compiled, "overloads"):
        raise TypeError(f"{compiled!r} is not a compiled kernel")
    key = compiled, _kinds_of(args)
    if key not in _layouts:
        kinds = numba.typeof(args)
        compiled.compile(kinds.types)
        result = compiled.overloads[kinds.types]
        target = result.library.get_pointer_to_function(result.fndesc.llvm_func_name)
        _layouts[key] = target, tuple([number // 8 for number in _offsets_of(compiled.targetctx, kinds)])
    target, (*offsets, words) = _layouts[key]
    memory: Array = np.zeros(words + 1, np.int64)
    return _Bound(_enter(target, args, memory.ctypes.data), memory.ctypes.data, memory.data, tuple(offsets))


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


def cap_of(softcap: float | None) -> float | None:
    """A softcap as kernels take it.

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
