"""Rows of float32, one a head, rounded to int16: one unit a row, which makes its largest entry 32767."""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from .tile import emit_offset, emit_quarter_sums
from .vector import (
    BITS16,
    FLOAT,
    FLOATS,
    LANES,
    ROUNDER,
    VECTOR,
    WORDS,
    constant,
    emit_fma,
    emit_splat,
    emit_widen,
    lowered,
    pointer,
    shuffle,
    word_constant,
)

_LONG = ir.IntType(64)
_QUAD = ir.VectorType(FLOAT, 4)


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.icmp_unsigned(">", x, y), x, y)


def _size(builder: Any, x: Any) -> Any:
    """Bits of the magnitudes: as integers they are in the same order, and NaN above them all."""
    return builder.and_(builder.bitcast(x, WORDS), word_constant(0x7FFFFFFF))


@lowered
def scale_rows(
    typing: Any, peaks: Any, rows: Any, row_step: Any, scales: Any, target: Any, target_step: Any, heads: Any
) -> Any:
    """Write 16 entries of float32 rows times `scales`; return the larger magnitudes of these and `peaks`, a head each.

    They are NaN where one is.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        found = []
        for head in range(heads.count):
            row = emit_widen(context, builder, types.float32, emit_offset(builder, args[1], args[2], head))
            scaled = builder.fmul(row, args[3])
            builder.store(scaled, pointer(builder, emit_offset(builder, args[4], args[5], head), FLOATS), align=4)
            size = _larger(
                builder, _size(builder, scaled), builder.bitcast(builder.extract_value(args[0], head), WORDS)
            )
            found.append(builder.bitcast(size, FLOATS))
        return context.make_tuple(builder, peaks, found)

    place = types.int64
    return peaks(peaks, place, place, VECTOR, place, place, heads), emit


@lowered
def choose_units(typing: Any, peaks: Any, units: Any) -> Any:
    """Write each head's peak / 32767, and 32767 / peak behind these, 4 float32 each.

    The latter is 0 below 1e-34, where it would be infinite.
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
            place = builder.add(args[1], ir.Constant(_LONG, offset))
            builder.store(value, pointer(builder, place, _QUAD), align=4)
        return context.get_dummy_value()

    return types.void(peaks, types.int64), emit


@lowered
def round_rows(typing: Any, rows: Any, row_step: Any, units: Any, target: Any, target_step: Any, heads: Any) -> Any:
    """Write 16 entries of float32 rows in their units (from `choose_units`), rounded to int16."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for head in range(heads.count):
            row = emit_widen(context, builder, types.float32, emit_offset(builder, args[0], args[1], head))
            place = builder.add(args[2], ir.Constant(_LONG, 16 + 4 * head))
            inverse = emit_splat(builder, builder.load(pointer(builder, place, FLOAT), align=4))
            shorts = builder.trunc(
                builder.bitcast(emit_fma(builder, row, inverse, ROUNDER), WORDS), ir.VectorType(BITS16, LANES)
            )
            builder.store(shorts, pointer(builder, emit_offset(builder, args[3], args[4], head), shorts.type), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, types.int64, heads), emit


@lowered
def first_half(typing: Any, x: Any) -> Any:
    """The first 8 lanes; 0 in the others."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return shuffle(builder, args[0], constant(0.0), [*range(8), *range(16, 24)])

    return VECTOR(VECTOR), emit
