"""What was computed in float32 on its way out of compiled code: rounded to bfloat16, or as it is."""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba.core import types

from .launch import F32, Array, Launch, kernel, require
from .memory import address_of, count_up, get, hold, put
from .vector import BITS16, BITS32, FLOAT, lowered, pointer

SHORT = {torch.float32: False, torch.bfloat16: True}
"""Whether numbers of a dtype are bfloat16; these are the dtypes that are covered."""


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


@kernel
def narrow_kernel(ticket: Array, tasks: int, short: bool, source: Array, target: int) -> None:
    """One task = one row."""
    count = source.shape[1]
    while True:
        row = count_up(ticket, 0)
        if row >= tasks:
            break
        place = address_of(source[row])
        for i in range(count):
            if short:
                _put_upper(target + 2 * (row * count + i), _to_bfloat16(get(place + 4 * i)))
            else:
                put(target + 4 * (row * count + i), get(place + 4 * i))
        count_up(ticket, 1)
    hold(source)


def narrow(source: Array, target: torch.Tensor) -> Launch:
    """Prepare the copy of float32 numbers into a tensor, rounded to its dtype.

    Args:
        source: float32 `[rows, n]`.
        target: CPU tensor of float32 or bfloat16, contiguous, with as many numbers; written.

    Raises:
        ValueError: another number of them, or a target that is not contiguous.
        TypeError: another dtype.
    """
    require("source", source, F32, source.shape)
    if target.dtype not in SHORT:
        raise TypeError(f"target has dtype {target.dtype}; expected torch.float32 or torch.bfloat16")
    if target.numel() != source.size or not target.is_contiguous():
        raise ValueError(f"target has shape {tuple(target.shape)} and source {source.shape}; pass a contiguous target")
    args = (SHORT[target.dtype], source, target.data_ptr())
    return Launch(narrow_kernel, len(source), args, source.nbytes, (target,))
