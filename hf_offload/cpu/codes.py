"""Integer lanes over packed codes: loads of several blocks' words into one register, dots with int8 queries.

The layout is that of `packing.py`. A register of 16 words holds the sub-means of `pieces` blocks (16 / S of them, at
least 1), the number coming from the length of a tuple tag.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import models, register_model

from .memory import emit_prefetch
from .vector import (
    BITS16,
    BITS32,
    FLOAT,
    FLOATS,
    LANES,
    MASKED,
    WORDS,
    constant,
    emit_bend,
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


@lowered
def prefetch_word_pair(typing: Any, left: Any, right: Any, offset: Any, pieces: Any) -> Any:
    """Ask for the lines that `load_word_pair` reads, for the second-level cache."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for places in args[:2]:
            for i in range(pieces.count):
                place = builder.add(places, ir.Constant(_LONG, 8 * i))
                emit_prefetch(builder, builder.add(builder.load(pointer(builder, place, _LONG)), args[2]), 2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, pieces), emit


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
    return sums(sums, words, types.int64, types.int64, heads), _dots(sums.count, heads.count, 0x0F0F0F0F, (0, 4))


@lowered
def add_level_dots(typing: Any, sums: Any, words: Any, query: Any, stride: Any, heads: Any) -> Any:
    """Add the products of 16 dimensions with their levels 0..3, in the order of `add_code_dots`."""
    return sums(sums, words, types.int64, types.int64, heads), _dots(sums.count, heads.count, 0x03030303, (0, 2, 4, 6))


def _dots(registers: int, heads: int, mask: int, shifts: Iterable[int]) -> Any:
    """Code that adds the dots of the bytes under `mask`, after each shift, with the next 4 int8 of every head."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        totals = [builder.extract_value(args[0], i) for i in range(registers)]
        columns = [builder.extract_value(args[1], i) for i in range(2)]
        for step, shift in enumerate(shifts):
            shifted = [builder.lshr(c, word_constant(shift)) if shift else c for c in columns]
            small = [builder.and_(c, word_constant(mask)) for c in shifted]
            for head in range(heads):
                row = builder.add(args[2], builder.mul(args[3], ir.Constant(_LONG, head)))
                signed = _emit_word(builder, builder.add(row, ir.Constant(_LONG, 4 * step)))
                for column in range(2):
                    at = 2 * head + column
                    totals[at] = _octet_dots(context, builder, totals[at], small[column], signed)
        return context.make_tuple(builder, uniform(WORDS_TYPE, registers), totals)

    return emit


def _emit_log_cosh(builder: Any, y: Any) -> Any:
    """log cosh within 0.012: a polynomial up to 4, a straight line beyond."""
    size = builder.bitcast(builder.and_(builder.bitcast(y, WORDS), word_constant(0x7FFFFFFF)), FLOATS)
    four = constant(4.0)
    near = builder.select(builder.fcmp_ordered("<", size, four), size, four)
    curve = emit_fma(builder, near, constant(0.01279919), constant(-0.1388327))
    curve = emit_fma(builder, near, curve, constant(0.55793519))
    return emit_fma(builder, builder.fmul(near, near), curve, builder.fsub(size, near))


@lowered
def store_scores(
    typing: Any,
    sums: Any,
    swings: Any,
    places: Any,
    pieces: Any,
    facts: Any,
    cap: Any,
    target: Any,
    stride: Any,
    heads: Any,
) -> Any:
    """Write the scores that the integer sums stand for, two registers a head, heads `stride` bytes apart.

    score = mean + bias + log cosh(swing), where mean = sum * scale * unit + middle and swing = (swing - rest) * size *
    unit; a cap (None: none) bends the scores of the two keys, mean +- swing. MASKED where the bias is -inf. The
    addresses of the words that hold scale (high half) and size (low half) as bfloat16, then those of the biases, are
    listed at `places`; a head's unit, middle and rest are float32 at facts + 12 * head.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def at(address: Any, offset: int) -> Any:
            return builder.add(address, ir.Constant(_LONG, offset))

        zero, right = ir.Constant(_LONG, 0), 8 * pieces.count
        words, biases = (
            [_emit_pieces(builder, at(args[2], i * right), zero, pieces.count) for i in (first, first + 1)]
            for first in (0, 2)
        )
        scales = [builder.bitcast(builder.and_(word, word_constant(0xFFFF0000)), FLOATS) for word in words]
        sizes = [builder.bitcast(builder.shl(word, word_constant(16)), FLOATS) for word in words]
        biases = [builder.bitcast(bias, FLOATS) for bias in biases]
        empty = [builder.fcmp_ordered("<", bias, constant(-3.4e38)) for bias in biases]
        for head in range(heads.count):
            unit, middle, rest = (
                emit_splat(builder, builder.load(pointer(builder, at(args[4], 12 * head + i), FLOAT), align=4))
                for i in (0, 4, 8)
            )
            row = builder.add(args[6], builder.mul(args[7], ir.Constant(_LONG, head)))
            for i in range(2):
                dots, swing = (builder.sitofp(builder.extract_value(x, 2 * head + i), FLOATS) for x in args[:2])
                mean = emit_fma(builder, builder.fmul(dots, scales[i]), unit, middle)
                swing = builder.fmul(builder.fmul(builder.fsub(swing, rest), sizes[i]), unit)
                if not isinstance(cap, types.NoneType):
                    more = emit_bend(builder, builder.fadd(mean, swing), args[5])
                    less = emit_bend(builder, builder.fsub(mean, swing), args[5])
                    half = constant(0.5)
                    mean = builder.fmul(builder.fadd(more, less), half)
                    swing = builder.fmul(builder.fsub(more, less), half)
                score = builder.fadd(builder.fadd(mean, biases[i]), _emit_log_cosh(builder, swing))
                score = builder.select(empty[i], constant(float(MASKED)), score)
                builder.store(score, pointer(builder, at(row, 64 * i), FLOATS), align=4)
        return context.get_dummy_value()

    address = types.int64
    return types.void(sums, swings, address, pieces, address, cap, address, address, heads), emit
