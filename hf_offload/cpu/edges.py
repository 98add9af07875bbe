"""Vectors at the end of a row: what lies behind it is neither read nor written. Marks: bytes as lanes."""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from .launch import jit
from .vector import BITS8, BITS32, FLOATS, LANES, VECTOR, WORDS, constant, emit_splat, load_f32, lowered, pointer, store

_MASK, _BYTES = ir.VectorType(ir.IntType(1), LANES), ir.VectorType(BITS8, LANES)


def _first_lanes(builder: Any, count: Any) -> Any:
    lanes = ir.Constant(WORDS, list(range(LANES)))
    return builder.icmp_signed("<", lanes, emit_splat(builder, builder.trunc(count, BITS32), WORDS))


def _load(builder: Any, name: str, kind: Any, address: Any, align: int, mask: Any, others: Any) -> Any:
    place = pointer(builder, address, kind)
    signature = ir.FunctionType(kind, [place.type, BITS32, _MASK, kind])
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.masked.load.{name}.p0")
    return builder.call(function, [place, ir.Constant(BITS32, align), mask, others])


def _emit_marks(builder: Any, octets: Any) -> Any:
    return builder.uitofp(builder.zext(octets, WORDS), FLOATS)


@lowered
def _load_some(typing: Any, address: Any, count: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _load(builder, "v16f32", FLOATS, args[0], 4, _first_lanes(builder, args[1]), constant(0.0))

    return VECTOR(types.int64, types.int64), emit


@lowered
def _store_some(typing: Any, address: Any, count: Any, vector: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = pointer(builder, args[0], FLOATS)
        signature = ir.FunctionType(ir.VoidType(), [FLOATS, place.type, BITS32, _MASK])
        function = cgutils.get_or_insert_function(builder.module, signature, "llvm.masked.store.v16f32.p0")
        builder.call(function, [args[2], place, ir.Constant(BITS32, 4), _first_lanes(builder, args[1])])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, VECTOR), emit


def _emit_octets(builder: Any, vector: Any) -> Any:
    return builder.trunc(builder.fptoui(vector, WORDS), _BYTES)


@lowered
def _store_all_marks(typing: Any, address: Any, vector: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        builder.store(_emit_octets(builder, args[1]), pointer(builder, args[0], _BYTES), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, VECTOR), emit


@lowered
def _store_some_marks(typing: Any, address: Any, count: Any, vector: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = pointer(builder, args[0], _BYTES)
        signature = ir.FunctionType(ir.VoidType(), [_BYTES, place.type, BITS32, _MASK])
        function = cgutils.get_or_insert_function(builder.module, signature, "llvm.masked.store.v16i8.p0")
        octets = _emit_octets(builder, args[2])
        builder.call(function, [octets, place, ir.Constant(BITS32, 1), _first_lanes(builder, args[1])])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, VECTOR), emit


@lowered
def _load_some_marks(typing: Any, address: Any, count: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        none = ir.Constant(_BYTES, [0] * LANES)
        return _emit_marks(builder, _load(builder, "v16i8", _BYTES, args[0], 1, _first_lanes(builder, args[1]), none))

    return VECTOR(types.int64, types.int64), emit


@lowered
def _load_all_marks(typing: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _emit_marks(builder, builder.load(pointer(builder, args[0], _BYTES), align=1))

    return VECTOR(types.int64), emit


@jit
def load_first(address: int, count: int) -> Any:
    """The first `count` of 16 float32 at `address`, 0 in the other lanes; all if there are 16 or more."""
    return load_f32(address) if count >= 16 else _load_some(address, count)


@jit
def store_first(address: int, count: int, vector: Any) -> None:
    """Write the first `count` of 16 lanes at `address`; all if there are 16 or more."""
    if count >= 16:
        store(address, vector)
    else:
        _store_some(address, count, vector)


@jit
def load_marks(address: int, count: int) -> Any:
    """The first `count` of 16 unsigned bytes at `address` as float32, 0 in the other lanes."""
    return _load_all_marks(address) if count >= 16 else _load_some_marks(address, count)


@jit
def store_marks(address: int, count: int, vector: Any) -> None:
    """Write the first `count` of 16 lanes, whole numbers of 0 to 255, as bytes at `address`; all if count is more."""
    if count >= 16:
        _store_all_marks(address, vector)
    else:
        _store_some_marks(address, count, vector)
