"""Integer lanes over int4 codes: loads of several blocks' words into one register and dot products with int16 queries.

The layout is that of `packing.py`. A register of 16 words holds the sub-means of `pieces` blocks (16 / S of them, at
least 1; a block of 32 sub-means fills two registers), the number coming from the length of a tuple tag.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import models, register_model

from .vector import (
    BITS16,
    BITS32,
    FLOATS,
    LANES,
    VECTOR,
    WORDS,
    lowered,
    pointer,
    shuffle,
    uniform,
    word_constant,
)

_LONG = ir.IntType(64)
_SHORTS = ir.VectorType(BITS16, 2 * LANES)


class WordsType(types.Type):
    """Numba type of 16 lanes of 32 bits."""

    def __init__(self) -> None:
        super().__init__("i32x16")


WORDS_TYPE = WordsType()


@register_model(WordsType)
class _WordsModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, WORDS)


def _emit_pieces(builder: Any, places: Any, offset: Any, pieces: int) -> Any:
    """Concatenate 16 / pieces words from each of the addresses that are listed at `places`."""
    width = LANES // pieces
    short = ir.VectorType(BITS32, width)
    parts = []
    for i in range(pieces):
        place = builder.add(places, ir.Constant(_LONG, 8 * i))
        address = builder.add(builder.load(pointer(builder, place, _LONG)), offset)
        parts.append(builder.load(pointer(builder, address, short), align=1))
    while len(parts) > 1:
        size = 2 * parts[0].type.count
        parts = [shuffle(builder, a, b, range(size)) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


@lowered
def load_pieces(typing: Any, places: Any, offset: Any, pieces: Any) -> Any:
    """A vector of float32 from several addresses (listed at `places`), `offset` bytes further."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(_emit_pieces(builder, args[0], args[1], pieces.count), FLOATS)

    return VECTOR(types.int64, types.int64, pieces), emit


@lowered
def load_word_pair(typing: Any, left: Any, right: Any, offset: Any, pieces: Any) -> Any:
    """Two registers of words, each from several addresses (listed at `left` and at `right`)."""
    kind = uniform(WORDS_TYPE, 2)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vectors = [_emit_pieces(builder, places, args[2], pieces.count) for places in args[:2]]
        return context.make_tuple(builder, kind, vectors)

    return kind(types.int64, types.int64, types.int64, pieces), emit


def _pair_dots(context: Any, builder: Any, x: Any, y: Any, total: Any) -> Any:
    """total + x.even * y.even + x.odd * y.odd on pairs of 16-bit lanes."""
    triple, _, features = context.codegen().magic_tuple()
    if triple.startswith("x86_64") and "+avx2" in features:
        # LLVM rarely finds this instruction in the plain form below, which then costs four times as much.
        part, result = ir.VectorType(BITS16, LANES), ir.VectorType(BITS32, LANES // 2)
        kind = ir.FunctionType(result, [part, part])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.wd")
        halves = [range(LANES), range(LANES, 2 * LANES)]
        low, high = (builder.call(function, [shuffle(builder, v, v, half) for v in (x, y)]) for half in halves)
        return builder.add(total, shuffle(builder, low, high, range(LANES)))
    products = []
    for first in range(2):
        picks = range(first, 2 * LANES, 2)
        a, b = (builder.sext(shuffle(builder, value, value, picks), WORDS) for value in (x, y))
        products.append(builder.mul(a, b, flags=["nsw"]))
    return builder.add(total, builder.add(*products))


@lowered
def zero_counters(typing: Any, heads: Any) -> Any:
    """Two registers of integer sums a head, head-major, all 0."""
    kind = uniform(WORDS_TYPE, 2 * heads.count)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.make_tuple(builder, kind, [word_constant(0)] * kind.count)

    return kind(heads), emit


@lowered
def add_code_dots(typing: Any, sums: Any, words: Any, query: Any, stride: Any, heads: Any) -> Any:
    """Add the products of 8 dimensions to `sums`; a head's query is 4 registers at `query` + head * stride.

    Register i holds, 16 times over, the int16 of dimension i and that of dimension i + 4, as a shift by 4 * i aligns
    their nibbles.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        totals = [builder.extract_value(args[0], i) for i in range(sums.count)]
        columns = [builder.bitcast(builder.extract_value(args[1], i), _SHORTS) for i in range(2)]
        for i in range(4):
            left, right = (ir.Constant(_SHORTS, [bits] * (2 * LANES)) for bits in (12 - 4 * i, 12))
            codes = [builder.ashr(builder.shl(column, left), right) for column in columns]
            for head in range(heads.count):
                row = builder.add(args[2], builder.mul(args[3], ir.Constant(_LONG, head)))
                place = builder.add(row, ir.Constant(_LONG, 64 * i))
                pairs = builder.load(pointer(builder, place, _SHORTS), align=4)
                for column in range(2):
                    at = 2 * head + column
                    totals[at] = _pair_dots(context, builder, codes[column], pairs, totals[at])
        return context.make_tuple(builder, sums, totals)

    return sums(sums, words, types.int64, types.int64, heads), emit


@lowered
def store_counters(typing: Any, address: Any, sums: Any) -> Any:
    """Write the integer sums, one register after the other, as float32."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for i in range(sums.count):
            place = builder.add(args[0], ir.Constant(_LONG, 64 * i))
            value = builder.sitofp(builder.extract_value(args[1], i), FLOATS)
            builder.store(value, pointer(builder, place, FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, sums), emit
