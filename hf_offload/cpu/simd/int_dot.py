"""Integer dot products for sub-mean digests and int8 blocks.

Sub-means (int4 and 2-bit codes times int8 queries): a register of 16 words holds the codes of `pieces` blocks (16 / S
of them, at least 1), a number given by the length of a tuple tag; the layout is that of `gpu/seal.py`.

Int8 blocks: tiles of sums of int8 codes times int16 rows, exact in 32 bits. A lane adds two products at a time, one
instruction of x86 (`pmaddwd`; with VNNI it includes the sum). A tile of m heads by n columns is a tuple of m * n
registers of 16 words, head-major, as in `register_tiles.py`. Codes are laid out as in `kernels/int8_blocks.py`: of keys
by tokens, of values with two tokens side by side.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import models, register_model

from hf_offload.cpu.memory import emit_prefetch
from hf_offload.cpu.simd.register_tiles import emit_offset, emit_quarter_sums
from hf_offload.cpu.simd.vectors import (
    BITS8,
    BITS16,
    BITS32,
    FLOAT,
    FLOATS,
    LANES,
    MASKED,
    VECTOR,
    WORDS,
    constant,
    emit_bend,
    emit_call,
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


def _emit_pieces(builder: Any, ptrs: Any, offset: Any, pieces: int) -> Any:
    """Concatenate 16 / pieces words from each of the `pieces` addresses listed at `ptrs`."""
    width = LANES // pieces
    short = ir.VectorType(BITS32, width)
    parts = []
    for i in range(pieces):
        ptr = builder.add(ptrs, ir.Constant(_LONG, 8 * i))
        address = builder.add(builder.load(pointer(builder, ptr, _LONG)), offset)
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
        vectors = [_emit_pieces(builder, ptrs, args[2], pieces.count) for ptrs in args[:2]]
        return context.make_tuple(builder, kind, vectors)

    return kind(types.int64, types.int64, types.int64, pieces), emit


@lowered
def prefetch_word_pair(typing: Any, left: Any, right: Any, offset: Any, pieces: Any) -> Any:
    """Prefetch the lines that `load_word_pair` reads into the second-level cache."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for ptrs in args[:2]:
            for i in range(pieces.count):
                ptr = builder.add(ptrs, ir.Constant(_LONG, 8 * i))
                emit_prefetch(builder, builder.add(builder.load(pointer(builder, ptr, _LONG)), args[2]), 2)

    return types.void(types.int64, types.int64, types.int64, pieces), emit


def _octet_dots(context: Any, builder: Any, total: Any, small: Any, signed: Any) -> Any:
    """total + the dot product of each lane's four bytes: `small` in 0..15, `signed` in -127..127."""
    triple, _, features = context.codegen().magic_tuple()
    x86 = triple.startswith("x86_64")
    # LLVM does not select these instructions for the plain form below, which then takes several times as long.
    if x86 and "+avx512vnni" in features:
        return emit_call(builder, "llvm.x86.avx512.vpdpbusd.512", WORDS, total, small, signed)
    x, y = builder.bitcast(small, _BYTES), builder.bitcast(signed, _BYTES)
    if x86 and "+avx2" in features:
        pairs, words, parts = ir.VectorType(BITS16, LANES), ir.VectorType(BITS32, LANES // 2), []
        for lanes in (range(32), range(32, 64)):
            both = [shuffle(builder, v, v, lanes) for v in (x, y)]
            products = emit_call(builder, "llvm.x86.avx2.pmadd.ub.sw", pairs, *both)  # two fit 16 bits: 2 * 15 * 127
            parts.append(emit_call(builder, "llvm.x86.avx2.pmadd.wd", words, products, ir.Constant(pairs, [1] * LANES)))
        return builder.add(total, shuffle(builder, parts[0], parts[1], range(LANES)))
    for i in range(4):
        picks = range(i, 4 * LANES, 4)
        a = builder.zext(shuffle(builder, x, x, picks), WORDS)
        b = builder.sext(shuffle(builder, y, y, picks), WORDS)
        total = builder.add(total, builder.mul(a, b, flags=["nsw"]))
    return total


@lowered
def start_counters(typing: Any, address: Any, stride: Any, heads: Any) -> Any:
    """Two registers of integer sums for each head, head-major, filled with the int32 at address + head * stride."""
    kind = uniform(WORDS_TYPE, 2 * heads.count)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vectors = []
        for head in range(heads.count):
            ptr = builder.add(args[0], builder.mul(args[1], ir.Constant(_LONG, head)))
            vectors += [_emit_word(builder, ptr)] * 2
        return context.make_tuple(builder, kind, vectors)

    return kind(types.int64, types.int64, heads), emit


def _emit_word(builder: Any, ptr: Any) -> Any:
    """The 32 bits at an address in every lane."""
    return emit_splat(builder, builder.load(pointer(builder, ptr, BITS32), align=4), WORDS)


@lowered
def add_code_dots(typing: Any, sums: Any, words: Any, query: Any, stride: Any, heads: Any) -> Any:
    """Add the products of 8 dimensions to `sums`; a head's query is 8 int8 at `query` + head * stride.

    The first four int8 are the even dimensions, in the low nibbles, the others the odd dimensions.
    """
    return sums(sums, words, types.int64, types.int64, heads), _dots(sums.count, heads.count, 0x0F0F0F0F, (0, 4))


@lowered
def add_level_dots(typing: Any, sums: Any, words: Any, query: Any, stride: Any, heads: Any) -> Any:
    """Add the products of 16 dimensions with their levels 0..3, in the order of `add_code_dots`."""
    return sums(sums, words, types.int64, types.int64, heads), _dots(sums.count, heads.count, 0x03030303, (0, 2, 4, 6))


def _dots(registers: int, heads: int, mask: int, shifts: Iterable[int]) -> Any:
    """Emitter that adds the dot products of the bytes under `mask`, after each shift, with each head's next 4 int8."""

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
    ptrs: Any,
    pieces: Any,
    facts: Any,
    cap: Any,
    target: Any,
    stride: Any,
    heads: Any,
) -> Any:
    """Write the scores that follow from the integer sums, two registers for each head, heads `stride` bytes apart.

    score = mean + bias + log cosh(swing), where mean = sum * scale * unit + middle and swing = (swing - rest) * size *
    unit; a softcap (or None) applies to the scores of the two keys, mean +- swing. MASKED where the bias is -inf. The
    addresses of the words that hold scale (high half) and size (low half) as bfloat16, then those of the biases, are
    listed at `ptrs`; a head's unit, middle and rest are float32 at facts + 12 * head.
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

    address = types.int64
    return types.void(sums, swings, address, pieces, address, cap, address, address, heads), emit


_SHORTS = ir.VectorType(BITS16, 2 * LANES)


def _load(builder: Any, address: Any, element: Any, count: int) -> Any:
    return builder.load(pointer(builder, address, ir.VectorType(element, count)), align=1)


def _load_codes(builder: Any, address: Any) -> Any:
    return builder.sext(_load(builder, address, BITS8, 2 * LANES), _SHORTS)


def _multiply(context: Any, builder: Any, x: Any, y: Any) -> Any:
    """x[2 i] * y[2 i] + x[2 i + 1] * y[2 i + 1], 32 int16 each."""
    triple, _, features = context.codegen().magic_tuple()
    # LLVM does not select this instruction for the plain form below, which then takes several times as long.
    if triple.startswith("x86_64") and "+avx512bw" in features:
        return emit_call(builder, "llvm.x86.avx512.pmaddw.d.512", WORDS, x, y)
    if triple.startswith("x86_64") and "+avx2" in features:
        halves = [[shuffle(builder, v, v, lanes) for v in (x, y)] for lanes in (range(16), range(16, 32))]
        words = ir.VectorType(BITS32, LANES // 2)
        low, high = (emit_call(builder, "llvm.x86.avx2.pmadd.wd", words, *pair) for pair in halves)
        return shuffle(builder, low, high, range(LANES))
    parts = [[builder.sext(shuffle(builder, v, v, range(odd, 32, 2)), WORDS) for v in (x, y)] for odd in (0, 1)]
    return _plus(builder, *(builder.mul(*pair) for pair in parts))


def _plus(builder: Any, x: Any, y: Any) -> Any:
    return builder.add(x, y)


@lowered
def no_sums(typing: Any, heads: Any, columns: Any) -> Any:
    """A tile of zeros."""
    count = heads.count * columns.literal_value
    kind = uniform(WORDS_TYPE, count)
    return kind(heads, columns), lambda c, b, sig, args: c.make_tuple(b, kind, [word_constant(0)] * count)


@lowered
def add_row_dots(typing: Any, tile: Any, addresses: Any, rows: Any, stride: Any, heads: Any) -> Any:
    """Add the products of 32 dimensions of the keys at 4 addresses with int16 rows, heads `stride` bytes apart."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        codes = [_load_codes(builder, builder.extract_value(args[1], i)) for i in range(4)]
        totals = []
        for head in range(heads.count):
            query = _load(builder, emit_offset(builder, args[2], args[3], head), BITS16, 2 * LANES)
            for i in range(4):
                old = builder.extract_value(args[0], 4 * head + i)
                totals.append(builder.add(old, _multiply(context, builder, codes[i], query)))
        return context.make_tuple(builder, tile, totals)

    return tile(tile, addresses, types.int64, types.int64, heads), emit


def _join(builder: Any, x: Any, y: Any, width: int) -> Any:
    """Add the odd runs of `width` words of two registers to the even ones."""
    even = [lane for lane in range(2 * LANES) if lane // width % 2 == 0]
    return _plus(builder, shuffle(builder, x, y, even), shuffle(builder, x, y, [lane + width for lane in even]))


@lowered
def row_scores(typing: Any, tile: Any, units: Any) -> Any:
    """Scores from `add_row_dots`' sums: lane 4 * head + token.

    They are multiplied by the head's float32 at units + 4 * head; that at units + 32 + 4 * head is added.
    """

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        quads = [_load(builder, builder.add(args[1], ir.Constant(_LONG, at)), FLOAT, 4) for at in (0, 32)]
        factors, more = (shuffle(builder, quad, quad, [lane // 4 for lane in range(LANES)]) for quad in quads)
        sums = [builder.extract_value(args[0], i) for i in range(tile.count)]
        while len(sums) > tile.count // 4:  # halves first: with AVX2 they are registers
            width = 8 if len(sums) == tile.count else 4
            sums = [_join(builder, a, b, width) for a, b in zip(sums[::2], sums[1::2], strict=True)]
        quarters = emit_quarter_sums(builder, sums + [word_constant(0)] * (4 - len(sums)), _plus)
        turned = shuffle(builder, quarters, quarters, [4 * (lane % 4) + lane // 4 for lane in range(LANES)])
        return emit_fma(builder, builder.sitofp(turned, FLOATS), factors, more)

    return VECTOR(tile, types.int64), emit


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
def add_sums(typing: Any, target: Any, stride: Any, units: Any, heads: Any, tile: Any) -> Any:
    """float32 at target + head * stride += the head's sums * float32 at units + 4 * head."""
    columns = tile.count // heads.count

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for head in range(heads.count):
            unit = builder.load(pointer(builder, builder.add(args[2], ir.Constant(_LONG, 4 * head)), FLOAT), align=4)
            factor = emit_splat(builder, unit)
            for i in range(columns):
                total = builder.sitofp(builder.extract_value(args[4], head * columns + i), FLOATS)
                ptr = pointer(builder, emit_offset(builder, args[0], args[1], head, 64 * i), FLOATS)
                builder.store(emit_fma(builder, total, factor, builder.load(ptr, align=4)), ptr, align=4)

    return types.void(types.int64, types.int64, types.int64, heads, tile), emit
