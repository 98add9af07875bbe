"""Single numbers and rows of them, bfloat16 or float32, as compiled code reads, rounds and writes them."""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from .launch import jit
from .memory import get, put
from .vector import BITS16, BITS32, FLOAT, get_upper, lowered, pointer


def _emit_round(builder: Any, value: Any) -> Any:
    """The bits of a float32 rounded to the nearest bfloat16, ties to even."""
    bits = builder.bitcast(value, BITS32)
    odd = builder.and_(builder.lshr(bits, ir.Constant(BITS32, 16)), ir.Constant(BITS32, 1))
    near = builder.add(bits, builder.add(odd, ir.Constant(BITS32, 0x7FFF)))
    unordered = builder.fcmp_unordered("uno", value, value)
    near = builder.select(unordered, ir.Constant(BITS32, 0x7FC00000), near)
    return builder.and_(near, ir.Constant(BITS32, 0xFFFF0000))


@lowered
def _to_bfloat16(typing: Any, value: Any) -> Any:
    """A float32 rounded to the nearest bfloat16."""
    return types.float32(types.float32), lambda c, b, sig, args: b.bitcast(_emit_round(b, args[0]), FLOAT)


@lowered
def _put_upper(typing: Any, address: Any, value: Any) -> Any:
    """Write a float32 that is a bfloat16 as one."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.lshr(builder.bitcast(args[1], BITS32), ir.Constant(BITS32, 16))
        builder.store(builder.trunc(bits, BITS16), pointer(builder, args[0], BITS16), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), emit


@jit
def read(short: bool, base: int, index: int) -> Any:
    """Number `index` at `base`: a bfloat16 if `short`, or a float32."""
    return get_upper(base + 2 * index) if short else get(base + 4 * index)


@jit
def rounded(short: bool, value: Any) -> Any:
    """A float32, rounded to the nearest bfloat16 if `short`."""
    return _to_bfloat16(value) if short else value


@jit
def write(short: bool, base: int, index: int, value: Any) -> None:
    """Write a number, which is `rounded`."""
    if short:
        _put_upper(base + 2 * index, value)
    else:
        put(base + 4 * index, value)


@jit
def narrow(short: bool, source: int, target: int, count: int) -> None:
    """Copy float32 numbers, rounded to bfloat16 if `short`.

    Args:
        short: whether bfloat16 is wanted; float32 otherwise.
        source, target: addresses of `count` numbers each.
        count: how many.
    """
    for i in range(count):
        write(short, target, i, rounded(short, get(source + 4 * i)))
