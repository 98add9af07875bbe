"""Register tiles: tuples of vectors that a kernel updates together, so that each load serves several query heads.

A tile of m heads by n columns is a tuple of m * n vectors, head-major. The length of a tuple tag gives m (see
`launch.head_tiles`), a literal gives n; both are fixed at compile time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types

from hf_offload.cpu.launch import jit
from hf_offload.cpu.simd.vectors import (
    BITS32,
    FLOAT,
    FLOATS,
    VECTOR,
    constant,
    emit_add,
    emit_fma,
    emit_splat,
    emit_widen,
    lowered,
    lowered_as,
    pointer,
    shuffle,
    uniform,
)

_QUAD = ir.VectorType(FLOAT, 4)


def _pack(context: Any, builder: Any, vectors: Any) -> Any:
    return context.make_tuple(builder, uniform(VECTOR, len(vectors)), vectors)


def _unpack(builder: Any, value: Any, kind: Any) -> list[Any]:
    return [builder.extract_value(value, i) for i in range(kind.count)]


def emit_offset(builder: Any, address: Any, stride: Any, times: int, more: int = 0) -> Any:
    """address + times * stride + more."""
    ptr = builder.add(address, builder.mul(stride, ir.Constant(stride.type, times)))
    return builder.add(ptr, ir.Constant(stride.type, more))


@lowered
def zeros(typing: Any, heads: Any, columns: Any) -> Any:
    """A tile of zeros."""
    count = heads.count * columns.literal_value
    kind = uniform(VECTOR, count)
    return kind(heads, columns), lambda c, b, sig, args: _pack(c, b, [constant(0.0)] * count)


@lowered
def load_at(typing: Any, tag: Any, addresses: Any, offset: Any) -> Any:
    """One vector from each address of a tuple, `offset` bytes further."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        starts = _unpack(builder, args[1], addresses)
        return _pack(
            context, builder, [emit_widen(context, builder, tag.dtype, builder.add(x, args[2])) for x in starts]
        )

    return uniform(VECTOR, addresses.count)(tag, addresses, types.int64), emit


@lowered
def load_columns(typing: Any, tag: Any, address: Any, columns: Any) -> Any:
    """Consecutive vectors from one address."""
    count, step = columns.literal_value, 16 * tag.dtype.bitwidth // 8

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        ptrs = [builder.add(args[1], ir.Constant(args[1].type, step * i)) for i in range(count)]
        return _pack(context, builder, [emit_widen(context, builder, tag.dtype, ptr) for ptr in ptrs])

    return uniform(VECTOR, count)(tag, types.int64, columns), emit


@lowered
def load_tile(typing: Any, address: Any, stride: Any, heads: Any, columns: Any) -> Any:
    """A float32 tile from memory: heads `stride` bytes apart, columns consecutive."""
    count = columns.literal_value

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vectors = []
        for head in range(heads.count):
            row = emit_offset(builder, args[0], args[1], head)
            ptrs = [builder.add(row, ir.Constant(row.type, 64 * i)) for i in range(count)]
            vectors += [emit_widen(context, builder, types.float32, ptr) for ptr in ptrs]
        return _pack(context, builder, vectors)

    return uniform(VECTOR, heads.count * count)(types.int64, types.int64, heads, columns), emit


@lowered
def store_tile(typing: Any, address: Any, stride: Any, heads: Any, tile: Any) -> Any:
    """Write a tile to memory, as `load_tile` reads it."""
    columns = tile.count // heads.count

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for i, vector in enumerate(_unpack(builder, args[3], tile)):
            row = emit_offset(builder, args[0], args[1], i // columns)
            ptr = builder.add(row, ir.Constant(row.type, 64 * (i % columns)))
            builder.store(vector, pointer(builder, ptr, FLOATS), align=4)

    return types.void(types.int64, types.int64, heads, tile), emit


@lowered
def spread(typing: Any, address: Any, stride: Any, heads: Any) -> Any:
    """One float32 of each head, `stride` bytes apart, copied into all lanes."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        ptrs = [emit_offset(builder, args[0], args[1], head) for head in range(heads.count)]
        scalars = [builder.load(pointer(builder, ptr, FLOAT), align=4) for ptr in ptrs]
        return _pack(context, builder, [emit_splat(builder, scalar) for scalar in scalars])

    return uniform(VECTOR, heads.count)(types.int64, types.int64, heads), emit


@lowered
def outer_fma(typing: Any, tile: Any, columns: Any, heads: Any) -> Any:
    """tile[head, column] += columns[column] * heads[head]."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        old, x, y = (_unpack(builder, arg, kind) for arg, kind in zip(args, (tile, columns, heads), strict=True))
        return _pack(context, builder, [emit_fma(builder, x[i % len(x)], y[i // len(x)], z) for i, z in enumerate(old)])

    return tile(tile, columns, heads), emit


def _quarters(*picks: int) -> list[int]:
    return [4 * quarter + lane for quarter in picks for lane in range(4)]


def _in_quarters(*picks: int) -> list[int]:
    return [4 * quarter + (pick % 4) + 16 * (pick // 4) for quarter in range(4) for pick in picks]


def _add_halves(builder: Any, x: Any, y: Any, first: Any, second: Any, add: Any = emit_add) -> Any:
    return add(builder, shuffle(builder, x, y, first), shuffle(builder, x, y, second))


def emit_quarter_sums(builder: Any, vectors: Any, add: Callable[[Any, Any, Any], Any]) -> Any:
    """Sum each quarter of four vectors, into lane 4 * quarter + vector of the result."""
    a, b, c, d = vectors
    ab = _add_halves(builder, a, b, _in_quarters(0, 4, 1, 5), _in_quarters(2, 6, 3, 7), add)
    cd = _add_halves(builder, c, d, _in_quarters(0, 4, 1, 5), _in_quarters(2, 6, 3, 7), add)
    return _add_halves(builder, ab, cd, _in_quarters(0, 1, 4, 5), _in_quarters(2, 3, 6, 7), add)


@lowered
def quad_sums(typing: Any, tile: Any) -> Any:
    """Sum each vector of an m x 4 tile over its lanes, into lane 4 * head + column of the result."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vectors = _unpack(builder, args[0], tile)
        folded = [emit_quarter_sums(builder, vectors[i : i + 4], emit_add) for i in range(0, tile.count, 4)]
        folded += [constant(0.0)] * (4 - len(folded))
        first = _add_halves(builder, folded[0], folded[1], _quarters(0, 1, 4, 5), _quarters(2, 3, 6, 7))
        second = _add_halves(builder, folded[2], folded[3], _quarters(0, 1, 4, 5), _quarters(2, 3, 6, 7))
        return _add_halves(builder, first, second, _quarters(0, 2, 4, 6), _quarters(1, 3, 5, 7))

    return VECTOR(tile), emit


@lowered
def store_quads(typing: Any, address: Any, stride: Any, heads: Any, vector: Any) -> Any:
    """Write lanes 4 * head .. 4 * head + 3 of `vector` to each head's row (`stride` bytes apart)."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for head in range(heads.count):
            quad = shuffle(builder, args[3], args[3], range(4 * head, 4 * head + 4))
            builder.store(quad, pointer(builder, emit_offset(builder, args[0], args[1], head), _QUAD), align=4)

    return types.void(types.int64, types.int64, heads, VECTOR), emit


@lowered_as(VECTOR(types.float32, types.float32, types.float32, types.float32))
def repeat_quad(builder: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Four float32, repeated in lanes 0..3, 4..7, 8..11 and 12..15."""
    quad = ir.Constant(_QUAD, ir.Undefined)
    for lane, scalar in enumerate((a, b, c, d)):
        quad = builder.insert_element(quad, scalar, ir.Constant(BITS32, lane))
    return shuffle(builder, quad, quad, list(range(4)) * 4)


@jit
def dot_quad(tag: Any, heads: Any, addresses: Any, query: int, dim: int) -> Any:
    """Dot products of 4 stored vectors with m float32 query rows: lane 4 * head + vector."""
    tile = zeros(heads, 4)
    for d in range(0, dim, 16):
        tile = outer_fma(tile, load_at(tag, addresses, d * tag.itemsize), load_tile(query + 4 * d, 4 * dim, heads, 1))
    return quad_sums(tile)
