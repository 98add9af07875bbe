"""Operations of matrix products on register tiles: bfloat16 dot products, transposes, interleaving, rounding.

A pair is two bfloat16 in 32 bits. Kernels treat pairs as float32 lanes, whose bits alone count: `load_columns` and
`spread` of `register_tiles.py` read them, too. With AVX512_BF16 an instruction adds both products of a pair.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.registry import cpu_target

from hf_offload.cpu.simd.register_tiles import _pack, _unpack
from hf_offload.cpu.simd.vectors import (
    BITS16,
    FLOATS,
    LANES,
    VECTOR,
    WORDS,
    emit_call,
    emit_fma,
    emit_widen,
    lowered,
    lowered_as,
    pointer,
    shuffle,
)


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)
_ROUNDED = ir.VectorType(_BFloat(), LANES)
_SHORTS = ir.VectorType(BITS16, LANES)
_LONG = ir.IntType(64)


@functools.cache  # each layer of a prompt asks; a signal that interrupts llvmlite makes it free memory twice
def has_feature(name: str) -> bool:
    """Whether code is compiled for x86-64 with a feature of LLVM's, such as `avx512bf16`."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return triple.startswith("x86_64") and f"+{name}" in features


@lowered
def outer_dot(typing: Any, tile: Any, columns: Any, heads: Any) -> Any:
    """tile[head, column] += the products of two pairs, columns[column] · heads[head]; with AVX512_BF16 only."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        old, x, y = (_unpack(builder, arg, kind) for arg, kind in zip(args, (tile, columns, heads), strict=True))
        x, y = ([builder.bitcast(vector, _PAIRS) for vector in vectors] for vectors in (x, y))
        name, wide = "llvm.x86.avx512bf16.dpbf16ps.512", len(x)
        sums = [emit_call(builder, name, FLOATS, z, y[i // wide], x[i % wide]) for i, z in enumerate(old)]
        return _pack(context, builder, sums)

    return tile(tile, columns, heads), emit


@lowered
def add(typing: Any, tile: Any, other: Any) -> Any:
    """The sum of two tiles."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        left, right = (_unpack(builder, arg, kind) for arg, kind in zip(args, (tile, other), strict=True))
        return _pack(context, builder, [builder.fadd(x, y) for x, y in zip(left, right, strict=True)])

    return tile(tile, other), emit


@lowered
def add_faded(typing: Any, tile: Any, old: Any, fades: Any) -> Any:
    """tile[head, column] + old[head, column] · fades[head]."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        new, before, factors = (_unpack(builder, arg, kind) for arg, kind in zip(args, (tile, old, fades), strict=True))
        columns = len(new) // len(factors)
        joined = [
            emit_fma(builder, x, factors[i // columns], z) for i, (x, z) in enumerate(zip(before, new, strict=True))
        ]
        return _pack(context, builder, joined)

    return tile(tile, old, fades), emit


@lowered_as(types.void(types.int64, VECTOR))
def store_pairs(builder: Any, address: Any, vector: Any) -> None:
    """Write 16 lanes as bfloat16, rounded to the nearest; with AVX512_BF16 only."""
    rounded = emit_call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _ROUNDED, vector)
    shorts = builder.bitcast(rounded, _SHORTS)
    builder.store(shorts, pointer(builder, address, _SHORTS), align=2)


@lowered
def transpose(typing: Any, tag: Any, rows: Any, offset: Any, target: Any, step: Any, words: Any) -> Any:
    """Transpose 16 rows of 16 or 8 (`words`, a literal) elements of the tag's dtype, as float32 or pairs.

    Args:
        rows: address of 16 int64, the rows' addresses.
        offset: bytes of a row before the first element.
        target: address of the first column's 16 float32; step: bytes from one column to the next.
    """
    count = words.literal_value

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lines = []
        for i in range(LANES):
            ptr = builder.add(args[1], ir.Constant(_LONG, 8 * i))
            row = builder.add(builder.load(pointer(builder, ptr, _LONG), align=8), args[2])
            if count == LANES:
                line = emit_widen(context, builder, tag.dtype, row)
            else:  # what lies beyond the row may be no memory
                half = builder.load(pointer(builder, row, ir.VectorType(ir.FloatType(), count)), align=2)
                line = shuffle(builder, half, half, [lane % count for lane in range(LANES)])
            lines.append(builder.bitcast(line, WORDS))
        for width in (1, 2, 4, 8):
            old = list(lines)
            for i in (i for i in range(LANES) if not i & width):
                low = [lane if not lane & width else LANES + (lane ^ width) for lane in range(LANES)]
                high = [lane ^ width if not lane & width else LANES + lane for lane in range(LANES)]
                lines[i] = shuffle(builder, old[i], old[i | width], low)
                lines[i | width] = shuffle(builder, old[i], old[i | width], high)
        for i, line in enumerate(lines[:count]):
            ptr = builder.add(args[3], builder.mul(args[4], ir.Constant(_LONG, i)))
            builder.store(builder.bitcast(line, FLOATS), pointer(builder, ptr, FLOATS), align=4)

    return types.void(tag, types.int64, types.int64, types.int64, types.int64, words), emit


@lowered_as(types.void(types.int64, types.int64, types.int64))
def interleave(builder: Any, first: Any, second: Any, target: Any) -> None:
    """Write 16 pairs of the bfloat16 at two addresses."""
    one, two = (builder.load(pointer(builder, ptr, _SHORTS), align=2) for ptr in (first, second))
    lanes = [lane for i in range(LANES) for lane in (i, LANES + i)]
    both = shuffle(builder, one, two, lanes)
    builder.store(both, pointer(builder, target, both.type), align=4)


@lowered_as(VECTOR())
def lane_numbers(builder: Any) -> Any:
    """0 … 15."""
    return ir.Constant(FLOATS, [float(lane) for lane in range(LANES)])
