"""Integer lanes over int4 codes: loads of several blocks' words into one register and dot products with int8 queries.

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
    FLOAT,
    FLOATS,
    LANES,
    MASKED,
    WORDS,
    constant,
    emit_fma,
    emit_splat,
    lowered,
    pointer,
    shuffle,
    uniform,
    word_constant,
)

_LONG, _BYTE = ir.IntType(64), ir.IntType(8)
_BYTES = ir.VectorType(_BYTE, 4 * LANES)


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
def load_word_pair(typing: Any, left: Any, right: Any, offset: Any, pieces: Any) -> Any:
    """Two registers of words, each from several addresses (listed at `left` and at `right`)."""
    kind = uniform(WORDS_TYPE, 2)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vectors = [_emit_pieces(builder, places, args[2], pieces.count) for places in args[:2]]
        return context.make_tuple(builder, kind, vectors)

    return kind(types.int64, types.int64, types.int64, pieces), emit


def _octet_dots(context: Any, builder: Any, total: Any, small: Any, signed: Any) -> Any:
    """total + the products of each lane's four bytes: `small` in 0..15, `signed` in -127..127."""
    triple, _, features = context.codegen().magic_tuple()
    x86 = triple.startswith("x86_64")
    # LLVM does not find these instructions in the plain form below, which then costs several times as much.
    if x86 and "+avx512vnni" in features:
        kind = ir.FunctionType(WORDS, [WORDS] * 3)
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")
        return builder.call(function, [total, small, signed])
    x, y = builder.bitcast(small, _BYTES), builder.bitcast(signed, _BYTES)
    if x86 and "+avx2" in features:
        half, pairs, words = ir.VectorType(_BYTE, 32), ir.VectorType(BITS16, LANES), ir.VectorType(BITS32, LANES // 2)
        multiply = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(pairs, [half, half]), "llvm.x86.avx2.pmadd.ub.sw"
        )  # two products fit 16 bits: 2 * 15 * 127
        add = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(words, [pairs, pairs]), "llvm.x86.avx2.pmadd.wd"
        )
        one, parts = ir.Constant(pairs, [1] * LANES), []
        for lanes in (range(32), range(32, 64)):
            both = [shuffle(builder, v, v, lanes) for v in (x, y)]
            parts.append(builder.call(add, [builder.call(multiply, both), one]))
        return builder.add(total, shuffle(builder, parts[0], parts[1], range(LANES)))
    for i in range(4):
        picks = range(i, 4 * LANES, 4)
        a = builder.zext(shuffle(builder, x, x, picks), WORDS)
        b = builder.sext(shuffle(builder, y, y, picks), WORDS)
        total = builder.add(total, builder.mul(a, b, flags=["nsw"]))
    return total


@lowered
def start_counters(typing: Any, address: Any, stride: Any, heads: Any) -> Any:
    """Two registers of integer sums a head, head-major, filled with the head's int32 at address + head * stride."""
    kind = uniform(WORDS_TYPE, 2 * heads.count)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vectors = []
        for head in range(heads.count):
            place = builder.add(args[0], builder.mul(args[1], ir.Constant(_LONG, head)))
            vectors += [_emit_word(builder, place)] * 2
        return context.make_tuple(builder, kind, vectors)

    return kind(types.int64, types.int64, heads), emit


def _emit_word(builder: Any, place: Any) -> Any:
    """The 32 bits at an address in every lane."""
    word = builder.load(pointer(builder, place, BITS32), align=4)
    undefined = ir.Constant(WORDS, ir.Undefined)
    first = builder.insert_element(undefined, word, ir.Constant(BITS32, 0))
    return shuffle(builder, first, undefined, [0] * LANES)


@lowered
def add_code_dots(typing: Any, sums: Any, words: Any, query: Any, stride: Any, heads: Any) -> Any:
    """Add the products of 8 dimensions to `sums`; a head's query is 8 int8 at `query` + head * stride.

    The first four of them are the even dimensions, which are the low nibbles, the others the odd ones.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        totals = [builder.extract_value(args[0], i) for i in range(sums.count)]
        columns = [builder.extract_value(args[1], i) for i in range(2)]
        low = word_constant(0x0F0F0F0F)
        for odd in range(2):
            codes = [builder.and_(builder.lshr(c, word_constant(4)) if odd else c, low) for c in columns]
            for head in range(heads.count):
                row = builder.add(args[2], builder.mul(args[3], ir.Constant(_LONG, head)))
                signed = _emit_word(builder, builder.add(row, ir.Constant(_LONG, 4 * odd)))
                for column in range(2):
                    at = 2 * head + column
                    totals[at] = _octet_dots(context, builder, totals[at], codes[column], signed)
        return context.make_tuple(builder, sums, totals)

    return sums(sums, words, types.int64, types.int64, heads), emit


@lowered
def store_scores(
    typing: Any, sums: Any, places: Any, pieces: Any, facts: Any, target: Any, stride: Any, heads: Any
) -> Any:
    """Write the scores that the integer sums stand for, two registers a head, heads `stride` bytes apart.

    score = sum * scale * unit + middle + bias, MASKED where the bias is -inf. The addresses of the scales, then those
    of the biases, are listed at `places`; a head's unit and middle are float32 at facts + 8 * head.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def at(address: Any, offset: int) -> Any:
            return builder.add(address, ir.Constant(_LONG, offset))

        zero, right = ir.Constant(_LONG, 0), 8 * pieces.count
        scales, biases = (
            [
                builder.bitcast(_emit_pieces(builder, at(args[1], i * right), zero, pieces.count), FLOATS)
                for i in (first, first + 1)
            ]
            for first in (0, 2)
        )
        empty = [builder.fcmp_ordered("<", bias, constant(-3.4e38)) for bias in biases]
        for head in range(heads.count):
            unit, middle = (
                emit_splat(builder, builder.load(pointer(builder, at(args[3], 8 * head + i), FLOAT), align=4))
                for i in (0, 4)
            )
            row = builder.add(args[4], builder.mul(args[5], ir.Constant(_LONG, head)))
            for i in range(2):
                dots = builder.sitofp(builder.extract_value(args[0], 2 * head + i), FLOATS)
                score = builder.fadd(emit_fma(builder, builder.fmul(dots, scales[i]), unit, middle), biases[i])
                score = builder.select(empty[i], constant(float(MASKED)), score)
                builder.store(score, pointer(builder, at(row, 64 * i), FLOATS), align=4)
        return context.get_dummy_value()

    return types.void(sums, types.int64, pieces, types.int64, types.int64, types.int64, heads), emit
