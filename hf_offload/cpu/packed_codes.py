"""Codes of a packed record, in the order that attention wants: 16 of a token at a time.

Keys lie [block_size / 4, D / 8, 4, 8]: the codes of 4 tokens in 8 dimensions are a register of int16. Values lie
[block_size / 2, D, 2]: those of 2 tokens in 16 dimensions are one.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from .launch import jit
from .vector import BITS8, FLOATS, LANES, ROUNDER, VECTOR, WORDS, lowered, pointer, shuffle

_LONG = ir.IntType(64)
_HALF, _WHOLE, _PAIR = (ir.VectorType(BITS8, count) for count in (LANES // 2, LANES, 2 * LANES))


@jit
def key_place(token: int, d: int, dim: int) -> int:
    """Bytes from the record's start to the key codes d..d+15 of a token; d is a multiple of 16."""
    return token // 4 * 4 * dim + 4 * d + token % 4 * 8


@jit
def value_place(token: int, d: int, dim: int, block_size: int) -> int:
    """Bytes from the record's start to the value codes d..d+15 of a token; d is a multiple of 16."""
    return (block_size + token // 2 * 2) * dim + 2 * d + token % 2


def _codes(builder: Any, vector: Any) -> Any:
    return builder.trunc(builder.bitcast(builder.fadd(vector, ROUNDER), WORDS), _WHOLE)


def _floats(builder: Any, codes: Any) -> Any:
    return builder.sitofp(builder.sext(codes, WORDS), FLOATS)


def _key_halves(builder: Any, address: Any) -> list[Any]:
    return [pointer(builder, builder.add(address, ir.Constant(_LONG, offset)), _HALF) for offset in (0, 32)]


@lowered
def store_key_codes(typing: Any, address: Any, codes: Any) -> Any:
    """Write 16 lanes of at most 127, rounded to int8, at a `key_place`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        whole = _codes(builder, args[1])
        for i, place in enumerate(_key_halves(builder, args[0])):
            builder.store(shuffle(builder, whole, whole, range(8 * i, 8 * i + 8)), place, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, VECTOR), emit


@lowered
def load_key_codes(typing: Any, address: Any) -> Any:
    """The 16 codes at a `key_place`, as floats."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        low, high = (builder.load(place, align=1) for place in _key_halves(builder, args[0]))
        return _floats(builder, shuffle(builder, low, high, range(LANES)))

    return VECTOR(types.int64), emit


@lowered
def store_value_codes(typing: Any, address: Any, even: Any, odd: Any) -> Any:
    """Write 16 lanes each of two tokens, at most 127, rounded to int8, at the `value_place` of the even token."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = [lane + LANES * odd for lane in range(LANES) for odd in (0, 1)]
        both = shuffle(builder, _codes(builder, args[1]), _codes(builder, args[2]), lanes)
        builder.store(both, pointer(builder, args[0], _PAIR), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, VECTOR, VECTOR), emit


@lowered
def load_value_codes(typing: Any, address: Any) -> Any:
    """The 16 codes at a `value_place`, as floats; a byte beyond them is read, which the record has."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        both = builder.load(pointer(builder, args[0], _PAIR), align=1)
        return _floats(builder, shuffle(builder, both, both, range(0, 2 * LANES, 2)))

    return VECTOR(types.int64), emit
