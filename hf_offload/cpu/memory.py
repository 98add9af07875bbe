"""Raw memory access for kernels: addresses, scalars, prefetch, copies, and atomics shared between threads."""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from hf_offload.cpu.simd.vectors import BITS32, FLOAT, lowered, pointer

_BYTE, _LONG = ir.IntType(8), ir.IntType(64)
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
    """Keep an array alive up to here: Numba frees it after its last use by name, and sees no use by address."""
    return types.void(array), lambda context, builder, sig, args: context.get_dummy_value()


@lowered
def get(typing: Any, address: Any) -> Any:
    """The float32 at `address`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(pointer(builder, args[0], FLOAT), align=4)

    return types.float32(types.int64), emit


@lowered
def get_word(typing: Any, address: Any) -> Any:
    """The 64-bit word at `address`, unsigned."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load(pointer(builder, args[0], _LONG), align=8)

    return types.uint64(types.int64), emit


@lowered
def put_word(typing: Any, address: Any, value: Any) -> Any:
    """Write one 64-bit word at `address`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], _LONG), align=8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@lowered
def put(typing: Any, address: Any, value: Any) -> Any:
    """Write one float32 at `address`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], FLOAT), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), emit


def emit_prefetch(builder: Any, address: Any, level: int) -> None:
    """Emit a prefetch of the cache line of `address` into the cache of a level (1 or 2)."""
    target = pointer(builder, address, _BYTE)
    kind = ir.FunctionType(ir.VoidType(), [target.type, BITS32, BITS32, BITS32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    locality = {1: 3, 2: 2}[level]
    builder.call(function, [target, *(ir.Constant(BITS32, value) for value in (0, locality, 1))])


@lowered
def prefetch(typing: Any, address: Any, level: Any) -> Any:
    """Prefetch the cache line of `address`; level (a literal) as in `emit_prefetch`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0], level.literal_value)
        return context.get_dummy_value()

    return types.void(types.int64, level), emit


@lowered
def copy_bytes(typing: Any, target: Any, source: Any, count: Any) -> Any:
    """memcpy of `count` bytes between addresses."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        to, origin = pointer(builder, args[0], _BYTE), pointer(builder, args[1], _BYTE)
        kind = ir.FunctionType(ir.VoidType(), [to.type, origin.type, _LONG, ir.IntType(1)])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.memcpy.p0.p0.i64")
        builder.call(function, [to, origin, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@lowered
def count_up(typing: Any, counters: Any, index: Any) -> Any:
    """Atomically add 1 to an entry of an int64 array; return the value before."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        counter = builder.gep(_data(context, builder, counters, args[0]), [args[1]])
        return builder.atomic_rmw("add", counter, ir.Constant(_LONG, 1), "seq_cst")

    return types.int64(counters, types.int64), emit


@lowered
def add_to(typing: Any, counters: Any, index: Any, amount: Any) -> Any:
    """Atomically add to an entry of an int64 array."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        counter = builder.gep(_data(context, builder, counters, args[0]), [args[1]])
        builder.atomic_rmw("add", counter, args[2], "seq_cst")
        return context.get_dummy_value()

    return types.void(counters, types.int64, types.int64), emit


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


@lowered
def load_flag(typing: Any, address: Any) -> Any:
    """Load the int32 at `address` (acquire order)."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.load_atomic(pointer(builder, args[0], BITS32), "acquire", 4)

    return types.int32(types.int64), emit


@lowered
def store_flag(typing: Any, address: Any, value: Any) -> Any:
    """Store an int32 at `address` (release order)."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store_atomic(args[1], pointer(builder, args[0], BITS32), "release", 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int32), emit
