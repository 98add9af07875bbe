"""Conversions of float32 rows to int16, of queries and outputs; partial loads and stores at the end of a row."""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types

from hf_offload.cpu.launch import F32, Array, Launch, jit, kernel, require, tag_of
from hf_offload.cpu.memory import address_of, count_up, get, hold, next_task
from hf_offload.cpu.simd.register_tiles import emit_offset, emit_quarter_sums
from hf_offload.cpu.simd.vectors import (
    BITS8,
    BITS16,
    BITS32,
    FLOAT,
    FLOATS,
    HALF,
    LANES,
    ROUNDER,
    VECTOR,
    WORDS,
    constant,
    emit_call,
    emit_fma,
    emit_splat,
    emit_widen,
    has_half,
    load,
    load_f32,
    lowered,
    lowered_as,
    pointer,
    shuffle,
    store,
    word_constant,
)

_LONG = ir.IntType(64)
_QUAD = ir.VectorType(FLOAT, 4)


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.icmp_unsigned(">", x, y), x, y)


def _size(builder: Any, x: Any) -> Any:
    """The magnitudes as integers, which have the same order; NaN is the largest."""
    return builder.and_(builder.bitcast(x, WORDS), word_constant(0x7FFFFFFF))


@lowered
def scale_rows(
    typing: Any, peaks: Any, rows: Any, row_step: Any, scales: Any, target: Any, target_step: Any, heads: Any
) -> Any:
    """Write 16 entries of each float32 row times `scales`; return each head's larger magnitudes of these and `peaks`.

    NaN propagates.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        sizes = []
        for head in range(heads.count):
            row = emit_widen(context, builder, types.float32, emit_offset(builder, args[1], args[2], head))
            scaled = builder.fmul(row, args[3])
            builder.store(scaled, pointer(builder, emit_offset(builder, args[4], args[5], head), FLOATS), align=4)
            size = _larger(
                builder, _size(builder, scaled), builder.bitcast(builder.extract_value(args[0], head), WORDS)
            )
            sizes.append(builder.bitcast(size, FLOATS))
        return context.make_tuple(builder, peaks, sizes)

    ptr = types.int64
    return peaks(peaks, ptr, ptr, VECTOR, ptr, ptr, heads), emit


@lowered
def choose_units(typing: Any, peaks: Any, units: Any) -> Any:
    """Write each head's unit, peak / 32767, then its inverse, 32767 / peak: 4 float32 each.

    The inverse is 0 for peaks below 1e-34, where it would overflow.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        sizes = [builder.bitcast(builder.extract_value(args[0], head), WORDS) for head in range(peaks.count)]
        sizes += [word_constant(0)] * (4 - len(sizes))
        joined = emit_quarter_sums(builder, sizes, _larger)  # lane 4 * quarter + head
        for turn in (4, 8):
            turned = shuffle(builder, joined, joined, [(lane + turn) % LANES for lane in range(LANES)])
            joined = _larger(builder, joined, turned)
        quad = builder.bitcast(shuffle(builder, joined, joined, range(4)), _QUAD)
        top, tiny = (ir.Constant(_QUAD, [value] * 4) for value in (32767.0, float(np.float32(1e-34))))
        inverse = builder.select(
            builder.fcmp_ordered("<", quad, tiny), ir.Constant(_QUAD, None), builder.fdiv(top, quad)
        )
        for offset, value in ((0, builder.fdiv(quad, top)), (16, inverse)):
            ptr = builder.add(args[1], ir.Constant(_LONG, offset))
            builder.store(value, pointer(builder, ptr, _QUAD), align=4)

    return types.void(peaks, types.int64), emit


@lowered
def round_rows(typing: Any, rows: Any, row_step: Any, units: Any, target: Any, target_step: Any, heads: Any) -> Any:
    """Write 16 entries of each float32 row, divided by the row's unit (`choose_units`), rounded to int16."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for head in range(heads.count):
            row = emit_widen(context, builder, types.float32, emit_offset(builder, args[0], args[1], head))
            ptr = builder.add(args[2], ir.Constant(_LONG, 16 + 4 * head))
            inverse = emit_splat(builder, builder.load(pointer(builder, ptr, FLOAT), align=4))
            shorts = builder.trunc(
                builder.bitcast(emit_fma(builder, row, inverse, ROUNDER), WORDS), ir.VectorType(BITS16, LANES)
            )
            builder.store(shorts, pointer(builder, emit_offset(builder, args[3], args[4], head), shorts.type), align=2)

    return types.void(types.int64, types.int64, types.int64, types.int64, types.int64, heads), emit


@lowered_as(VECTOR(VECTOR))
def first_half(builder: Any, x: Any) -> Any:
    """The first 8 lanes; 0 in the others."""
    return shuffle(builder, x, constant(0.0), [*range(8), *range(16, 24)])


SHORT = torch.float32, torch.bfloat16
"""The dtypes that `narrow` covers."""


def _emit_rounded(context: Any, builder: Any, element: Any, value: Any) -> Any:
    """A float32 rounded to a stored element, ties to even."""
    if element == types.float32:
        return value
    if element == types.int16:
        assert has_half(context), "rounding to float16 needs an instruction"
        return builder.fptrunc(value, HALF)
    assert element == types.uint16, f"no conversion to {element}"
    bits = builder.bitcast(value, BITS32)
    odd = builder.and_(builder.lshr(bits, ir.Constant(BITS32, 16)), ir.Constant(BITS32, 1))
    near = builder.add(bits, builder.add(odd, ir.Constant(BITS32, 0x7FFF)))
    unordered = builder.fcmp_unordered("uno", value, value)
    near = builder.select(unordered, ir.Constant(BITS32, 0x7FC00000), near)
    return builder.trunc(builder.lshr(near, ir.Constant(BITS32, 16)), BITS16)


@lowered
def put_rounded(typing: Any, tag: Any, address: Any, value: Any) -> Any:
    """Store a float32 in the tag's dtype, rounded to the nearest, ties to even; float16 needs F16C or ARM."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        rounded = _emit_rounded(context, builder, tag.dtype, args[2])
        builder.store(rounded, pointer(builder, args[1], rounded.type), align=tag.dtype.bitwidth // 8)

    return types.void(tag, types.int64, types.float32), emit


@kernel
def narrow_kernel(ticket: Array, tasks: int, tag: Array, source: Array, target: int) -> None:
    """One task = one row."""
    count = source.shape[1]
    row = count_up(ticket, 0)
    while row < tasks:
        ptr = address_of(source[row])
        for i in range(count):
            put_rounded(tag, target + tag.itemsize * (row * count + i), get(ptr + 4 * i))
        row = next_task(ticket)
    hold(source)


def narrow(source: Array, target: torch.Tensor) -> Launch:
    """Prepare the copy of a float32 array into a tensor, rounded to its dtype.

    Args:
        source: float32 `[rows, n]`.
        target: contiguous CPU tensor of float32 or bfloat16 with as many elements; written.

    Raises:
        ValueError: another number of elements, or a target that is not contiguous.
        TypeError: another dtype.
    """
    require("source", source, F32, source.shape)
    if target.dtype not in SHORT:
        raise TypeError(f"target has dtype {target.dtype}; expected torch.float32 or torch.bfloat16")
    if target.numel() != source.size or not target.is_contiguous():
        raise ValueError(f"target has shape {tuple(target.shape)} and source {source.shape}; pass a contiguous target")
    args = (tag_of(target.dtype), source, target.data_ptr())
    return Launch(narrow_kernel, len(source), args, source.nbytes, (target,))


@kernel
def widen_kernel(
    ticket: Array, tasks: int, source: int, row_stride: int, head_stride: int, tag: Array, query: Array
) -> None:
    """One task = one row; strides in bytes."""
    heads, dim = query.shape[1], query.shape[2]
    b = count_up(ticket, 0)
    while b < tasks:
        for h in range(heads):
            ptr = source + b * row_stride + h * head_stride
            for d in range(0, dim, LANES):
                store(address_of(query[b, h]) + 4 * d, load(tag, ptr + d * tag.itemsize))
        b = next_task(ticket)


def widen(source: torch.Tensor, query: Array) -> Launch:
    """Prepare the exact conversion of a query to float32.

    Args:
        source: `[B, Hq, …, D]` CPU tensor of float32, float16 or bfloat16 with middle axes of length 1, a contiguous
            last dimension and any other strides.
        query: float32 `[B, Hq, D]`, written; D a multiple of 16.

    Raises:
        ValueError: shapes or strides that the kernel does not cover.
        TypeError: an array or a tensor of another dtype.
    """
    batch, heads, dim = query.shape
    require("query", query, F32, (batch, heads, dim))
    if source.numel() != query.size or (*source.shape[:2], source.shape[-1]) != query.shape:
        raise ValueError(f"source has shape {tuple(source.shape)} and query {query.shape}; they must agree")
    if source.stride(-1) != 1 or dim % LANES:
        raise ValueError(f"the last dimension, of {dim}, must be contiguous and a multiple of {LANES}")
    size = source.element_size()
    args = (source.data_ptr(), source.stride(0) * size, source.stride(1) * size, tag_of(source.dtype), query)
    return Launch(widen_kernel, batch, args, query.nbytes, (source,))


_MASK, _BYTES = ir.VectorType(ir.IntType(1), LANES), ir.VectorType(BITS8, LANES)


def _first_lanes(builder: Any, count: Any) -> Any:
    lanes = ir.Constant(WORDS, list(range(LANES)))
    return builder.icmp_signed("<", lanes, emit_splat(builder, builder.trunc(count, BITS32), WORDS))


def _load(builder: Any, name: str, kind: Any, address: Any, align: int, mask: Any, others: Any) -> Any:
    ptr = pointer(builder, address, kind)
    return emit_call(builder, f"llvm.masked.load.{name}.p0", kind, ptr, ir.Constant(BITS32, align), mask, others)


def _emit_marks(builder: Any, octets: Any) -> Any:
    return builder.uitofp(builder.zext(octets, WORDS), FLOATS)


@lowered_as(VECTOR(types.int64, types.int64))
def _load_some(builder: Any, address: Any, count: Any) -> Any:
    return _load(builder, "v16f32", FLOATS, address, 4, _first_lanes(builder, count), constant(0.0))


@lowered_as(types.void(types.int64, types.int64, VECTOR))
def _store_some(builder: Any, address: Any, count: Any, vector: Any) -> None:
    ptr, mask = pointer(builder, address, FLOATS), _first_lanes(builder, count)
    emit_call(builder, "llvm.masked.store.v16f32.p0", ir.VoidType(), vector, ptr, ir.Constant(BITS32, 4), mask)


@lowered_as(VECTOR(types.int64, types.int64))
def _load_some_marks(builder: Any, address: Any, count: Any) -> Any:
    none = ir.Constant(_BYTES, [0] * LANES)
    return _emit_marks(builder, _load(builder, "v16i8", _BYTES, address, 1, _first_lanes(builder, count), none))


@lowered_as(VECTOR(types.int64))
def _load_all_marks(builder: Any, address: Any) -> Any:
    return _emit_marks(builder, builder.load(pointer(builder, address, _BYTES), align=1))


@jit
def load_first(address: int, count: int) -> Any:
    """The first `count` of 16 float32 at `address`, 0 in the other lanes; all 16 if count is larger."""
    return load_f32(address) if count >= 16 else _load_some(address, count)


@jit
def store_first(address: int, count: int, vector: Any) -> None:
    """Write the first `count` of 16 lanes at `address`; all 16 if count is larger."""
    if count >= 16:
        store(address, vector)
    else:
        _store_some(address, count, vector)


@jit
def load_marks(address: int, count: int) -> Any:
    """The first `count` of 16 unsigned bytes at `address` as float32, 0 in the other lanes."""
    return _load_all_marks(address) if count >= 16 else _load_some_marks(address, count)
