"""Integer lanes over int4 codes: loads of several blocks' words into one register and dot products with int16 queries.

The layout is that of `packing.py`. A register of 16 words holds the sub-means of `pieces` blocks (16 / S of them, at
least 1; a block of 32 sub-means fills two registers), the number coming from the length of a tuple tag.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import models, register_model

from .vector import (
    BITS16,
    BITS32,
    FLOATS,
    LANES,
    VECTOR,
    WORDS,
    emit_splat,
    lowered,
    pointer,
    shuffle,
    word_constant,
)

_LONG = ir.IntType(64)
_SHORTS = ir.VectorType(BITS16, 2 * LANES)


class WordsType(types.Type):  # type: ignore[misc]
    """Numba type of 16 lanes of 32 bits."""

    def __init__(self) -> None:
        super().__init__("i32x16")


WORDS_TYPE = WordsType()


@register_model(WordsType)
class _WordsModel(models.PrimitiveModel):  # type: ignore[misc]
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
    kind = types.UniTuple(WORDS_TYPE, 2)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vectors = [_emit_pieces(builder, places, args[2], pieces.count) for places in args[:2]]
        return context.make_tuple(builder, kind, vectors)

    return kind(types.int64, types.int64, types.int64, pieces), emit


def _pair_dots(builder: Any, x: Any, y: Any, total: Any) -> Any:
    # total + x.low * y.low + x.high * y.high on the 16-bit halves of each lane, written the way LLVM recognises as one
    # instruction (pmaddwd, vpdpwssd) where the CPU has it.
    x, y = (builder.bitcast(value, _SHORTS) for value in (x, y))
    products = []
    for half in range(2):
        picks = range(half, 2 * LANES, 2)
        a, b = (builder.sext(shuffle(builder, value, value, picks), WORDS) for value in (x, y))
        products.append(builder.mul(a, b, flags=["nsw"]))
    return builder.add(total, builder.add(*products))


@lowered
def fill_counters(typing: Any, starts: Any, heads: Any) -> Any:
    """Two registers of integer sums a head, head-major, that begin at each head's int32 at `starts`."""
    kind = types.UniTuple(WORDS_TYPE, 2 * heads.count)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vectors = []
        for head in range(heads.count):
            place = builder.add(args[0], ir.Constant(_LONG, 4 * head))
            vectors += [emit_splat(builder, builder.load(pointer(builder, place, BITS32), align=4), WORDS)] * 2
        return context.make_tuple(builder, kind, vectors)

    return kind(types.int64, heads), emit


@lowered
def add_code_dots(typing: Any, sums: Any, words: Any, query: Any, stride: Any, heads: Any) -> Any:
    """Add the products of 8 dimensions to `sums`; a head's query is 4 words of 2 int16 at `query` + head * stride.

    Word i pairs the query of dimension i with that of dimension i + 4, as a shift by 4 * i pairs their nibbles.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        totals = [builder.extract_value(args[0], i) for i in range(sums.count)]
        columns = [builder.extract_value(args[1], i) for i in range(2)]
        for i in range(4):
            nibbles = [
                builder.and_(builder.lshr(word, word_constant(4 * i)), word_constant(0x000F000F)) for word in columns
            ]
            for head in range(heads.count):
                row = builder.add(args[2], builder.mul(args[3], ir.Constant(_LONG, head)))
                place = builder.add(row, ir.Constant(_LONG, 4 * i))
                pair = emit_splat(builder, builder.load(pointer(builder, place, BITS32), align=4), WORDS)
                for column in range(2):
                    at = 2 * head + column
                    totals[at] = _pair_dots(builder, nibbles[column], pair, totals[at])
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
