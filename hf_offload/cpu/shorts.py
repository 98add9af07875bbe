"""Tiles of integer sums: int8 codes times int16 rows, exact in 32 bits.

A lane adds two products at a time, one instruction of x86 (`pmaddwd`; with VNNI the sum is part of it). A
tile of m heads by n columns is a tuple of m * n registers of 16 words, head-major, as in `tile.py`. The codes are laid
out as `packed.py` says, so that what meets in a lane lies together.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from .codes import WORDS_TYPE
from .tile import emit_offset, emit_quarter_sums
from .vector import (
    BITS8,
    BITS16,
    BITS32,
    FLOAT,
    FLOATS,
    LANES,
    VECTOR,
    WORDS,
    emit_fma,
    emit_splat,
    lowered,
    pointer,
    shuffle,
    uniform,
    word_constant,
)

_LONG = ir.IntType(64)
_SHORTS = ir.VectorType(BITS16, 2 * LANES)


def _load(builder: Any, address: Any, element: Any, count: int) -> Any:
    return builder.load(pointer(builder, address, ir.VectorType(element, count)), align=1)


def _load_codes(builder: Any, address: Any) -> Any:
    return builder.sext(_load(builder, address, BITS8, 2 * LANES), _SHORTS)


def _multiply(context: Any, builder: Any, x: Any, y: Any) -> Any:
    """x[2 i] * y[2 i] + x[2 i + 1] * y[2 i + 1], 32 int16 each."""
    triple, _, features = context.codegen().magic_tuple()
    # LLVM does not find this instruction in the plain form below, which then costs several times as much.
    if triple.startswith("x86_64") and "+avx512bw" in features:
        return _call(builder, "llvm.x86.avx512.pmaddw.d.512", x, y)
    if triple.startswith("x86_64") and "+avx2" in features:
        halves = [[shuffle(builder, v, v, lanes) for v in (x, y)] for lanes in (range(16), range(16, 32))]
        low, high = (_call(builder, "llvm.x86.avx2.pmadd.wd", *pair) for pair in halves)
        return shuffle(builder, low, high, range(LANES))
    parts = [[builder.sext(shuffle(builder, v, v, range(odd, 32, 2)), WORDS) for v in (x, y)] for odd in (0, 1)]
    return _plus(builder, *(builder.mul(*pair) for pair in parts))


def _call(builder: Any, name: str, x: Any, y: Any) -> Any:
    words = ir.VectorType(BITS32, x.type.count // 2)
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(words, [x.type, y.type]), name)
    return builder.call(function, [x, y])


def _plus(builder: Any, x: Any, y: Any) -> Any:
    return builder.add(x, y)


@lowered
def no_sums(typing: Any, heads: Any, columns: Any) -> Any:
    """A tile of zeros."""
    count = heads.count * columns.literal_value
    kind = uniform(WORDS_TYPE, count)
    return kind(heads, columns), lambda c, b, sig, args: c.make_tuple(b, kind, [word_constant(0)] * count)


@lowered
def add_token_dots(typing: Any, tile: Any, keys: Any, step: Any, rows: Any, stride: Any, heads: Any) -> Any:
    """Add the products of 16 dimensions of 8 tokens with int16 rows, heads `stride` bytes apart, to an m x 4 tile.

    The codes of the first 4 tokens are at `keys`, of the others `step` bytes on. A quarter of a register is a token;
    the columns are the first four tokens' dimensions 0..7 and 8..15, then those of the others: two sums of each
    token, as each addition waits for the last.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        codes = [_load_codes(builder, emit_offset(builder, args[1], args[2], i // 2, 32 * (i % 2))) for i in range(4)]
        totals = []
        for head in range(heads.count):
            halves = [_load(builder, emit_offset(builder, args[3], args[4], head, 16 * i), BITS16, 8) for i in (0, 1)]
            queries = [shuffle(builder, half, half, list(range(8)) * 4) for half in halves]
            for i in range(4):
                old = builder.extract_value(args[0], 4 * head + i)
                totals.append(builder.add(old, _multiply(context, builder, codes[i], queries[i % 2])))
        return context.make_tuple(builder, tile, totals)

    return tile(tile, types.int64, types.int64, types.int64, types.int64, heads), emit


@lowered
def token_scores(typing: Any, tile: Any, units: Any) -> Any:
    """What `add_token_dots` summed, of 4 tokens and of the others: lane 4 * head + token.

    It is multiplied by the head's float32 at units + 4 * head (4 of them are read).
    """
    heads = tile.count // 4

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        quad = _load(builder, args[1], FLOAT, 4)
        factors = shuffle(builder, quad, quad, [lane // 4 for lane in range(LANES)])
        found = []
        for column in (0, 2):
            places = [4 * head + column for head in range(heads)]
            sums = [_plus(builder, *(builder.extract_value(args[0], place + i) for i in (0, 1))) for place in places]
            quarters = emit_quarter_sums(builder, sums + [word_constant(0)] * (4 - heads), _plus)
            turned = shuffle(builder, quarters, quarters, [4 * (lane % 4) + lane // 4 for lane in range(LANES)])
            found.append(builder.fmul(builder.sitofp(turned, FLOATS), factors))
        return context.make_tuple(builder, uniform(VECTOR, 2), found)

    return uniform(VECTOR, 2)(tile, types.int64), emit


@lowered
def add_value_pairs(typing: Any, tile: Any, values: Any, weights: Any, stride: Any, heads: Any) -> Any:
    """Add the products of two tokens' values with their two int16 at `weights`, heads `stride` bytes apart.

    A column is 16 dimensions.
    """
    columns = tile.count // heads.count

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        codes = [_load_codes(builder, builder.add(args[1], ir.Constant(_LONG, 32 * i))) for i in range(columns)]
        totals = []
        for head in range(heads.count):
            word = builder.load(pointer(builder, emit_offset(builder, args[2], args[3], head), BITS32), align=4)
            weight = builder.bitcast(emit_splat(builder, word, WORDS), _SHORTS)
            for i in range(columns):
                old = builder.extract_value(args[0], columns * head + i)
                totals.append(builder.add(old, _multiply(context, builder, codes[i], weight)))
        return context.make_tuple(builder, tile, totals)

    return tile(tile, types.int64, types.int64, types.int64, heads), emit


@lowered
def repeat_octet(typing: Any, source: Any, target: Any) -> Any:
    """Write the weights that `add_key_octets` wants for 8 tokens, from their int16 at `source`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        octet = _load(builder, args[0], BITS16, 8)
        repeated = shuffle(builder, octet, octet, [i for token in (0, 2, 1, 3) for i in 8 * [token, token + 4]])
        builder.store(repeated, pointer(builder, args[1], repeated.type), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@lowered
def add_key_octets(typing: Any, tile: Any, keys: Any, step: Any, weights: Any, stride: Any, heads: Any) -> Any:
    """Add the products of 8 tokens' keys (as in `add_token_dots`) with 64 int16 at `weights`, to an m x 2 tile.

    A column is 8 dimensions, twice, whose two sums belong together. The weights are from `repeat_octet`.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        codes = []
        for i in (0, 1):
            x, y = (_load(builder, emit_offset(builder, args[1], args[2], j, 32 * i), BITS8, 32) for j in (0, 1))
            for first in (0, 8):  # tokens 0 and 2 of the one, 4 and 6 of the other, then 1, 3 and 5, 7
                lanes = [place + i + 32 * odd for place in (first, first + 16) for i in range(8) for odd in (0, 1)]
                codes.append(builder.sext(shuffle(builder, x, y, lanes), _SHORTS))
        totals = []
        for head in range(heads.count):
            pairs = [_load(builder, emit_offset(builder, args[3], args[4], head, 64 * i), BITS16, 32) for i in (0, 1)]
            for i in (0, 1):
                total = builder.extract_value(args[0], 2 * head + i)
                for j in (0, 1):
                    total = builder.add(total, _multiply(context, builder, codes[2 * i + j], pairs[j]))
                totals.append(total)
        return context.make_tuple(builder, tile, totals)

    return tile(tile, types.int64, types.int64, types.int64, types.int64, heads), emit


@lowered
def join_key_sums(typing: Any, tile: Any) -> Any:
    """What `add_key_octets` summed, as a tile of one column of 16 dimensions."""
    heads = tile.count // 2

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        totals = []
        for head in range(heads):
            a, b = (builder.extract_value(args[0], 2 * head + i) for i in (0, 1))
            low, high = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
            totals.append(_plus(builder, shuffle(builder, a, b, low), shuffle(builder, a, b, high)))
        return context.make_tuple(builder, uniform(WORDS_TYPE, heads), totals)

    return uniform(WORDS_TYPE, heads)(tile), emit


@lowered
def add_sums(typing: Any, target: Any, stride: Any, units: Any, heads: Any, tile: Any) -> Any:
    """float32 at target + head * stride += the head's sums * float32 at units + 4 * head."""
    columns = tile.count // heads.count

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for head in range(heads.count):
            unit = builder.load(pointer(builder, builder.add(args[2], ir.Constant(_LONG, 4 * head)), FLOAT), align=4)
            factor = emit_splat(builder, unit)
            for i in range(columns):
                total = builder.sitofp(builder.extract_value(args[4], head * columns + i), FLOATS)
                place = pointer(builder, emit_offset(builder, args[0], args[1], head, 64 * i), FLOATS)
                builder.store(emit_fma(builder, total, factor, builder.load(place, align=4)), place, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, heads, tile), emit
