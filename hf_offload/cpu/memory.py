"""Raw memory access for kernels: addresses, scalars, prefetch, copies, and atomics shared between threads."""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from hf_offload.cpu.simd.vectors import BITS32, FLOAT, emit_call, lowered, lowered_as, pointer

_BYTE, _LONG = ir.IntType(8), ir.IntType(64)
_ONE = ir.Constant(_LONG, 1)
LINE = 64  # bytes of a cache line
PAGE = 4096  # bytes of the smallest page


def _data(context: Any, builder: Any, array_type: Any, array: Any) -> Any:
    return context.make_array(array_type)(context, builder, array).data


@lowered
def address_of(typing: Any, array: Any) -> Any:
    """Address of an array's first element; call `hold(array)` after the last use of it."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(_data(context, builder, array, args[0]), _LONG)

    return types.int64(array), emit


@lowered
def hold(typing: Any, array: Any) -> Any:
    """Keep an array (or a tuple of some) alive: Numba frees it after its last use by name, and sees none by address."""
    return types.void(array), lambda context, builder, sig, args: None


@lowered_as(types.float32(types.int64))
def get(builder: Any, address: Any) -> Any:
    """The float32 at `address`."""
    return builder.load(pointer(builder, address, FLOAT), align=4)


@lowered_as(types.uint64(types.int64))
def get_word(builder: Any, address: Any) -> Any:
    """The 64-bit word at `address`, unsigned."""
    return builder.load(pointer(builder, address, _LONG), align=8)


@lowered_as(types.void(types.int64, types.int64))
def put_word(builder: Any, address: Any, value: Any) -> None:
    """Write one 64-bit word at `address`."""
    builder.store(value, pointer(builder, address, _LONG), align=8)


@lowered_as(types.void(types.int64, types.float32))
def put(builder: Any, address: Any, value: Any) -> None:
    """Write one float32 at `address`."""
    builder.store(value, pointer(builder, address, FLOAT), align=4)


def emit_prefetch(builder: Any, address: Any, level: int) -> None:
    """Emit a prefetch of the cache line of `address` into the cache of a level (1 or 2)."""
    options = (ir.Constant(BITS32, value) for value in (0, {1: 3, 2: 2}[level], 1))  # the second: the locality
    emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer(builder, address, _BYTE), *options)


@lowered
def prefetch(typing: Any, address: Any, level: Any) -> Any:
    """Prefetch the cache line of `address`; level (a literal) as in `emit_prefetch`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0], level.literal_value)

    return types.void(types.int64, level), emit


@lowered_as(types.void(types.int64, types.int64, types.int64))
def copy_bytes(builder: Any, target: Any, source: Any, count: Any) -> None:
    """memcpy of `count` bytes between addresses."""
    to, origin = pointer(builder, target, _BYTE), pointer(builder, source, _BYTE)
    emit_call(builder, "llvm.memcpy.p0.p0.i64", ir.VoidType(), to, origin, count, ir.Constant(ir.IntType(1), 0))


def _add(context: Any, builder: Any, kind: Any, counters: Any, index: Any, amount: Any) -> Any:
    counter = builder.gep(_data(context, builder, kind, counters), [index])
    return builder.atomic_rmw("add", counter, amount, "seq_cst")


@lowered
def add_to(typing: Any, counters: Any, index: Any, amount: Any) -> Any:
    """Atomically add to an entry of an int64 array; return the value before."""
    return types.int64(counters, types.int64, types.int64), lambda c, b, sig, args: _add(c, b, counters, *args)


@lowered
def count_up(typing: Any, counters: Any, index: Any) -> Any:
    """`add_to` with 1."""
    return types.int64(counters, types.int64), lambda c, b, sig, args: _add(c, b, counters, args[0], args[1], _ONE)


@lowered
def next_task(typing: Any, ticket: Any) -> Any:
    """Count a task of a launch as done and take another: return its number, which is too large if none is left."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        _add(context, builder, ticket, args[0], _ONE, _ONE)
        return _add(context, builder, ticket, args[0], ir.Constant(_LONG, 0), _ONE)

    return types.int64(ticket), emit


@lowered
def peek(typing: Any, counters: Any, index: Any) -> Any:
    """Load an entry of an int64 array that other threads write (acquire order)."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(builder.gep(_data(context, builder, counters, args[0]), [args[1]]), "acquire", 8)

    return types.int64(counters, types.int64), emit


@lowered
def swap_if(typing: Any, counters: Any, index: Any, old: Any, new: Any) -> Any:
    """Compare and swap an entry of an int64 array from `old` to `new`; return whether it was `old`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        counter = builder.gep(_data(context, builder, counters, args[0]), [args[1]])
        return builder.extract_value(builder.cmpxchg(counter, args[2], args[3], "seq_cst", "seq_cst"), 1)

    return types.boolean(counters, types.int64, types.int64, types.int64), emit


@lowered_as(types.int32(types.int64))
def load_flag(builder: Any, address: Any) -> Any:
    """Load the int32 at `address` (acquire order)."""
    return builder.load_atomic(pointer(builder, address, BITS32), "acquire", 4)


@lowered_as(types.void(types.int64, types.int32))
def store_flag(builder: Any, address: Any, value: Any) -> None:
    """Store an int32 at `address` (release order)."""
    builder.store_atomic(value, pointer(builder, address, BITS32), "release", 4)
