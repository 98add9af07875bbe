"""`VectorType`: 16 float32 lanes as a Numba value, with its elementary operations, on any CPU.

A vector is an LLVM `<16 x float>`: one register with AVX-512, two with AVX2, four with SSE or NEON. LLVM splits it.
Only the float16 conversion depends on the instruction set here, since LLVM cannot lower it everywhere. The functions
work in compiled code alone (`launch.jit`).
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.extending import intrinsic, lower_builtin, models, register_model
from numba.core.typing.templates import AbstractTemplate, infer_global, signature

LANES = 16
FLOAT, HALF = ir.FloatType(), ir.HalfType()
BITS8, BITS16, BITS32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)
FLOATS, WORDS = ir.VectorType(FLOAT, LANES), ir.VectorType(BITS32, LANES)

# MASKED: the score of a masked token, below any real one. NOTHING: the running maximum of a row without a token so far.
# As NOTHING is larger, exp(MASKED - maximum) is exactly 0 even in a row where every token is masked.
MASKED = np.float32(-1e30)
NOTHING = np.float32(-1e29)

# 2^r for r in [-1/2, 1/2], highest power first: the polynomial of degree 5 with the least relative error, 9.2e-8, among
# those that are 1 at 0.
_POWER = (1.3264727e-3, 9.6715127e-3, 5.5507337e-2, 2.4022242e-1, 6.9314698e-1, 1.0)
# The same of degree 4, 2.6e-6.
_ROUGH_POWER = (9.5701019e-3, 5.5917860e-2, 2.4024745e-1, 6.9312182e-1, 9.9999926e-1)
_LOG2_E, _LOG2_E_REST = 1.4426950216293335, 1.9259630e-08  # log2(e) is their sum


class VectorType(types.Type):
    """Numba type of 16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__("f32x16")


VECTOR = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, FLOATS)


def lowered(function: Callable[..., Any]) -> Any:
    """Turn a function that returns (signature, code generator) into one that compiled code can call.

    A generator of a function that returns nothing may return None.
    """

    @functools.wraps(function)
    def typed(*kinds: Any) -> Any:
        signature, emit = function(*kinds)

        def emit_all(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            value = emit(context, builder, sig, args)
            return context.get_dummy_value() if value is None else value

        return signature, emit_all

    return intrinsic(prefer_literal=True)(typed)


def lowered_as(sig: Any) -> Any:
    """Turn a code generator (builder, *values) for one signature into a function that compiled code can call."""

    def decorate(emit: Callable[..., Any]) -> Any:
        @functools.wraps(emit)
        def typed(typing: Any, *kinds: Any) -> Any:
            return sig, lambda context, builder, sig, args: emit(builder, *args)

        return lowered(typed)

    return decorate


def emit_call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Call a function of LLVM or of the C library."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def uniform(kind: Any, count: int) -> Any:
    """Numba type of a tuple of `count` values of one type."""
    return types.UniTuple(kind, count)


def constant(value: float) -> ir.Constant:
    """LLVM constant with `value` in every float lane."""
    return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)


# Added to a float of magnitude below 2^21, it rounds it to an integer, which then lies in the low bits of the sum.
ROUNDER = constant(1.5 * 2**23)


def word_constant(value: int) -> ir.Constant:
    """LLVM constant with `value` in every 32-bit lane."""
    return ir.Constant(WORDS, [value] * LANES)


def shuffle(builder: Any, left: Any, right: Any, lanes: Sequence[int]) -> Any:
    """Pick lanes from two vectors; lanes of the second are numbered after those of the first."""
    return builder.shuffle_vector(left, right, ir.Constant(ir.VectorType(BITS32, len(lanes)), list(lanes)))


def pointer(builder: Any, address: Any, element: Any) -> Any:
    """LLVM pointer to `element` at an integer address."""
    return builder.inttoptr(address, element.as_pointer())


def emit_splat(builder: Any, scalar: Any, vector_type: Any = FLOATS) -> Any:
    """Copy a scalar into every lane."""
    undefined = ir.Constant(vector_type, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(BITS32, 0))
    return shuffle(builder, first, undefined, [0] * LANES)


def emit_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z, fused where the CPU has it (LLVM's fmuladd, unlike fma, never becomes a library call)."""
    return emit_call(builder, "llvm.fmuladd.v16f32", FLOATS, x, y, z)


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def has_half(context: Any) -> bool:
    """Whether the code's CPU converts between float16 and float32."""
    triple, _, features = context.codegen().magic_tuple()  # what Numba compiles for, also under NUMBA_CPU_FEATURES
    return "+f16c" in features or triple.startswith(("aarch64", "arm64"))


def emit_widen(context: Any, builder: Any, element: Any, address: Any) -> Any:
    """Load 16 stored elements (float32, int8, or the bits of float16/bfloat16) as float lanes."""
    if element == types.float32:
        return builder.load(pointer(builder, address, FLOATS), align=4)
    if element == types.int8:
        octets = builder.load(pointer(builder, address, ir.VectorType(BITS8, LANES)), align=1)
        return builder.sitofp(builder.sext(octets, WORDS), FLOATS)
    if element == types.int16 and has_half(context):
        return builder.fpext(builder.load(pointer(builder, address, ir.VectorType(HALF, LANES)), align=2), FLOATS)
    bits = builder.zext(builder.load(pointer(builder, address, ir.VectorType(BITS16, LANES)), align=2), WORDS)
    if element == types.uint16:
        return builder.bitcast(builder.shl(bits, word_constant(16)), FLOATS)
    assert element == types.int16, f"no conversion from {element}"
    # float16 without a conversion instruction: after the shift the exponent is off by 112; inf and NaN need all ones.
    magnitude = builder.and_(bits, word_constant(0x7FFF))
    scaled = builder.fmul(builder.bitcast(builder.shl(magnitude, word_constant(13)), FLOATS), constant(2.0**112))
    wide = builder.bitcast(scaled, WORDS)
    special = builder.icmp_unsigned(">=", magnitude, word_constant(0x7C00))
    wide = builder.select(special, builder.or_(wide, word_constant(0x7F800000)), wide)
    sign = builder.shl(builder.and_(bits, word_constant(0x8000)), word_constant(16))
    return builder.bitcast(builder.or_(wide, sign), FLOATS)


@lowered
def load(typing: Any, tag: Any, address: Any) -> Any:
    """16 elements of the tag's dtype at `address`."""
    return VECTOR(tag, types.int64), lambda c, b, sig, args: emit_widen(c, b, tag.dtype, args[1])


@lowered_as(VECTOR(types.int64))
def load_f32(builder: Any, address: Any) -> Any:
    """16 float32 at `address`."""
    return builder.load(pointer(builder, address, FLOATS), align=4)


@lowered_as(types.void(types.int64, VECTOR))
def store(builder: Any, address: Any, vector: Any) -> None:
    """Write 16 float32 at `address`."""
    builder.store(vector, pointer(builder, address, FLOATS), align=4)


def _emit_upper(builder: Any, vector: Any, more: int) -> Any:
    """The words of 16 lanes as bfloat16 in their upper halves, after `more` is added to the lanes' bits."""
    words = builder.add(builder.bitcast(vector, WORDS), word_constant(more))
    return builder.and_(words, word_constant(0xFFFF0000))


@lowered_as(VECTOR(VECTOR))
def round_up(builder: Any, vector: Any) -> Any:
    """16 lanes, none negative, as bfloat16 rounded up."""
    return builder.bitcast(_emit_upper(builder, vector, 0xFFFF), FLOATS)


@lowered_as(VECTOR(VECTOR))
def round_nearest(builder: Any, vector: Any) -> Any:
    """16 lanes as the nearest bfloat16, ties away from zero."""
    return builder.bitcast(_emit_upper(builder, vector, 0x8000), FLOATS)


@lowered_as(types.void(types.int64, VECTOR))
def store_upper(builder: Any, address: Any, vector: Any) -> None:
    """Write 16 lanes, none negative, as bfloat16 rounded up."""
    words = _emit_upper(builder, vector, 0xFFFF)
    halves = builder.trunc(builder.lshr(words, word_constant(16)), ir.VectorType(BITS16, LANES))
    builder.store(halves, pointer(builder, address, halves.type), align=2)


@lowered_as(types.void(types.int64, VECTOR, VECTOR))
def store_halves(builder: Any, address: Any, high: Any, low: Any) -> None:
    """Write 16 words of two bfloat16 each, from lanes that bfloat16 holds exactly."""
    words = builder.or_(builder.bitcast(high, WORDS), builder.lshr(builder.bitcast(low, WORDS), word_constant(16)))
    builder.store(words, pointer(builder, address, WORDS), align=4)


def _emit_words(builder: Any, address: Any) -> Any:
    return builder.load(pointer(builder, address, WORDS), align=4)


@lowered_as(VECTOR(types.int64))
def load_high(builder: Any, address: Any) -> Any:
    """The bfloat16 in the high halves of 16 words at `address`."""
    return builder.bitcast(builder.and_(_emit_words(builder, address), word_constant(0xFFFF0000)), FLOATS)


@lowered_as(VECTOR(types.int64))
def load_low(builder: Any, address: Any) -> Any:
    """The bfloat16 in the low halves of 16 words at `address`."""
    return builder.bitcast(builder.shl(_emit_words(builder, address), word_constant(16)), FLOATS)


@lowered_as(types.float32(types.int64))
def get_upper(builder: Any, address: Any) -> Any:
    """The bfloat16 at `address`."""
    bits = builder.zext(builder.load(pointer(builder, address, BITS16), align=2), BITS32)
    return builder.bitcast(builder.shl(bits, ir.Constant(BITS32, 16)), FLOAT)


@lowered_as(VECTOR(types.float32))
def splat(builder: Any, scalar: Any) -> Any:
    """A float32 in every lane."""
    return emit_splat(builder, scalar)


@lowered_as(VECTOR(VECTOR, VECTOR, VECTOR))
def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z."""
    return emit_fma(builder, x, y, z)


@lowered_as(VECTOR(VECTOR, VECTOR))
def vmax(builder: Any, x: Any, y: Any) -> Any:
    """The larger of two, lane by lane; y where either is NaN."""
    return _larger(builder, x, y)


@lowered_as(VECTOR(VECTOR, VECTOR, VECTOR, VECTOR))
def choose_less(builder: Any, left: Any, right: Any, yes: Any, no: Any) -> Any:
    """`yes` in the lanes where left < right, `no` in the others (and where one is NaN)."""
    return builder.select(builder.fcmp_ordered("<", left, right), yes, no)


def _emit_exp(builder: Any, x: Any) -> Any:
    # exp(x) = 2^n 2^r, n = x log2(e) rounded to an integer by ROUNDER; r in two steps, since log2(e) has more digits
    # than a float32.
    shifted = emit_fma(builder, x, constant(_LOG2_E), ROUNDER)
    r = emit_fma(builder, x, constant(_LOG2_E), builder.fsub(ROUNDER, shifted))
    r = emit_fma(builder, x, constant(_LOG2_E_REST), r)
    power = _emit_power(builder, shifted, r, _POWER)
    return builder.select(builder.fcmp_ordered("<", x, constant(-87.33)), constant(0.0), power)


def _emit_power(builder: Any, shifted: Any, r: Any, factors: Sequence[float]) -> Any:
    # 2^n 2^r; n lies in the low bits of `shifted`.
    y = constant(factors[0])
    for factor in factors[1:]:
        y = emit_fma(builder, y, r, constant(factor))
    exponent = builder.shl(builder.add(builder.bitcast(shifted, WORDS), word_constant(127)), word_constant(23))
    return builder.fmul(y, builder.bitcast(exponent, FLOATS))


def _emit_exp2(builder: Any, x: Any, rest: Any, factors: Sequence[float]) -> Any:
    shifted = builder.fadd(x, ROUNDER)
    r = builder.fsub(x, builder.fsub(shifted, ROUNDER))
    if rest is not None:
        r = emit_fma(builder, x, rest, r)
    power = _emit_power(builder, shifted, r, factors)
    return builder.select(builder.fcmp_ordered("<", x, constant(-126.0)), constant(0.0), power)


@lowered_as(VECTOR(VECTOR))
def exp(builder: Any, x: Any) -> Any:
    """exp of lanes up to 88, within 2e-7 of the value; exactly 0 below -87.33 and at -inf; NaN stays NaN.

    Without FMA instructions the error is at most 1e-7 · |x| more.
    """
    return _emit_exp(builder, x)


@lowered_as(VECTOR(VECTOR, VECTOR))
def exp2(builder: Any, x: Any, rest: Any) -> Any:
    """2^(x + rest · x) of lanes up to 127, |rest| at most 1e-7, within 2e-7 of the value.

    Exactly 0 below -126 and at -inf; NaN stays NaN.
    """
    return _emit_exp2(builder, x, rest, _POWER)


@lowered_as(VECTOR(VECTOR))
def exp2_rough(builder: Any, x: Any) -> Any:
    """2^x as `exp2` takes it, within 3e-6 of the value: for what is rounded to bfloat16."""
    return _emit_exp2(builder, x, None, _ROUGH_POWER)


def emit_bend(builder: Any, x: Any, cap: Any) -> Any:
    """cap * tanh(x / cap); cap: a float64."""
    whole, inverse = (
        emit_splat(builder, builder.fptrunc(value, FLOAT))
        for value in (cap, builder.fdiv(ir.Constant(ir.DoubleType(), 1.0), cap))
    )
    zero, one = constant(0.0), constant(1.0)
    x = builder.fmul(x, inverse)
    minus = builder.fsub(zero, x)
    size = builder.select(builder.fcmp_ordered("<", x, zero), minus, x)
    # Near 0 the quotient below cancels; the series does not.
    square = builder.fmul(x, x)
    series = emit_fma(builder, square, constant(62.0 / 2835.0), constant(-17.0 / 315.0))
    series = emit_fma(builder, series, square, constant(2.0 / 15.0))
    series = emit_fma(builder, series, square, constant(-1.0 / 3.0))
    series = emit_fma(builder, builder.fmul(series, square), x, x)
    most = constant(20.0)
    bounded = builder.select(builder.fcmp_ordered("<", most, size), most, size)
    power = builder.fadd(_emit_exp(builder, builder.fadd(bounded, bounded)), one)
    far = builder.fsub(one, builder.fdiv(constant(2.0), power))
    far = builder.select(builder.fcmp_ordered("<", x, zero), builder.fsub(zero, far), far)
    return builder.fmul(builder.select(builder.fcmp_ordered("<", size, constant(0.2)), series, far), whole)


@lowered
def bend(typing: Any, x: Any, cap: Any) -> Any:
    """cap * tanh(x / cap) of every lane; x itself if the cap is None, which is known at compile time."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return args[0] if isinstance(cap, types.NoneType) else emit_bend(builder, *args)

    return VECTOR(VECTOR, cap), emit


def _emit_log(builder: Any, x: Any) -> Any:
    # x = 2^n m with m in [sqrt(1/2), sqrt(2)), then Cephes' polynomial in m - 1.
    bits = builder.bitcast(x, WORDS)
    shifted = builder.sub(bits, word_constant(0x3F3504F3))
    n = builder.sitofp(builder.ashr(shifted, word_constant(23)), FLOATS)
    mantissa = builder.add(builder.and_(shifted, word_constant(0x007FFFFF)), word_constant(0x3F3504F3))
    f = builder.fsub(builder.bitcast(mantissa, FLOATS), constant(1.0))
    y = constant(7.0376836292e-2)
    factors = (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1)
    for factor in (*factors, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):
        y = emit_fma(builder, y, f, constant(factor))
    square = builder.fmul(f, f)
    y = builder.fmul(builder.fmul(y, f), square)
    y = emit_fma(builder, n, constant(-2.12194440e-4), y)
    y = emit_fma(builder, square, constant(-0.5), y)
    return emit_fma(builder, n, constant(0.693359375), builder.fadd(f, y))


@lowered_as(VECTOR(VECTOR))
def log(builder: Any, x: Any) -> Any:
    """Natural logarithm of positive, normal, finite lanes."""
    return _emit_log(builder, x)


def emit_rotations(builder: Any, vector: Any, join: Callable[[Any, Any, Any], Any]) -> Any:
    """Reduce all lanes by `join` to one value, present in every lane."""
    for step in (2**i for i in reversed(range(int(math.log2(LANES))))):
        turned = shuffle(builder, vector, vector, [lane ^ step for lane in range(LANES)])
        vector = join(builder, vector, turned)
    return vector


def emit_add(builder: Any, x: Any, y: Any) -> Any:
    """x + y."""
    return builder.fadd(x, y)


def _first(builder: Any, vector: Any) -> Any:
    return builder.extract_element(vector, ir.Constant(BITS32, 0))


@lowered_as(types.float32(VECTOR))
def lane_max(builder: Any, x: Any) -> Any:
    """The largest lane, float32."""
    return _first(builder, emit_rotations(builder, x, _larger))


@lowered_as(types.float32(VECTOR))
def lane_sum(builder: Any, x: Any) -> Any:
    """The sum of the lanes, float32."""
    return _first(builder, emit_rotations(builder, x, emit_add))


@lowered
def run_totals(typing: Any, address: Any, runs: Any) -> Any:
    """The sums of 16 consecutive runs of float32 at `address`; the length of the tuple `runs` is that of a run."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        ptrs = [builder.add(args[0], ir.Constant(ir.IntType(64), 64 * i)) for i in range(runs.count)]
        parts = [emit_widen(context, builder, types.float32, ptr) for ptr in ptrs]
        while len(parts) > LANES:
            parts = [builder.fadd(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        while len(parts) > 1:  # adds neighbours, so that the runs stay in order
            pairs = zip(parts[::2], parts[1::2], strict=True)
            evens, odds = range(0, 2 * LANES, 2), range(1, 2 * LANES, 2)
            parts = [builder.fadd(shuffle(builder, a, b, evens), shuffle(builder, a, b, odds)) for a, b in pairs]
        return parts[0]

    return VECTOR(types.int64, runs), emit


@lowered_as(types.int64(VECTOR, types.int64, types.int64))
def exceeds(builder: Any, x: Any, order: Any, shift: Any) -> Any:
    """A bit for each lane of x that is more than its threshold, ((v >> 9) + 1/2) / 2 ** 23 with v = order + shift.

    `order` is the address of 16 uint32, `shift` an int64 of which the lower 32 bits count. NaN exceeds nothing.
    """
    words = builder.load(pointer(builder, order, WORDS), align=4)
    words = builder.add(words, emit_splat(builder, builder.trunc(shift, BITS32), WORDS))
    number = builder.sitofp(builder.lshr(words, word_constant(9)), FLOATS)
    threshold = builder.fmul(builder.fadd(number, constant(0.5)), constant(2.0**-23))
    hit = builder.fcmp_ordered("<", threshold, x)
    return builder.zext(builder.bitcast(hit, BITS16), ir.IntType(64))


@lowered
def words_with(typing: Any, address: Any, mask: Any, runs: Any) -> Any:
    """A bit for each 32-bit word at `address` with a bit of the literal `mask`; `runs` is a tuple, one entry a word."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        kind = ir.VectorType(BITS32, runs.count)
        words = builder.load(pointer(builder, args[0], kind), align=4)
        bits = builder.and_(words, ir.Constant(kind, [mask.literal_value] * runs.count))
        hit = builder.icmp_unsigned("!=", bits, ir.Constant(kind, [0] * runs.count))
        return builder.zext(builder.bitcast(hit, ir.IntType(runs.count)), ir.IntType(64))

    return types.int64(types.int64, mask, runs), emit


@lowered_as(types.int64(types.int64))
def lowest_bit(builder: Any, bits: Any) -> Any:
    """The number of the lowest bit that is set, of an int64 that is not 0."""
    return builder.cttz(bits, ir.Constant(ir.IntType(1), 1))


def _operator(symbol: Any, instruction: str) -> None:
    @infer_global(symbol)
    class _Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            return signature(VECTOR, VECTOR, VECTOR) if args == (VECTOR, VECTOR) else None

    @lower_builtin(symbol, VECTOR, VECTOR)
    def _lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _symbol, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_symbol, _instruction)
