"""Linux futex calls and a monotonic clock for compiled code."""

# mypy: allow-untyped-calls
from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from hf_offload.cpu.simd.vectors import BITS32, emit_call, lowered_as

FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
"""Number of the futex system call; 0 where it is unknown, and then `wake` and `wait_for_change` must not be called."""
LOWER = (1 << 32) - 1
"""Mask of the half of an int64 that a futex waits on: the lower 32 bits, which come first in memory."""

_WAIT, _WAKE = 128, 129  # FUTEX_WAIT and FUTEX_WAKE with FUTEX_PRIVATE_FLAG
_LONG = ir.IntType(64)
_NOTHING = ir.Constant(_LONG, 0)
_SECOND = ir.Constant(_LONG, 10**9)


def _call(builder: Any, *args: Any) -> None:
    kind = ir.FunctionType(_LONG, [_LONG], var_arg=True)
    function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    builder.call(function, [ir.Constant(_LONG, FUTEX), *args])


@lowered_as(types.void(types.int64, types.int64))
def wake(builder: Any, address: Any, threads: Any) -> None:
    """Wake up to `threads` threads that wait on the int32 at `address`."""
    _call(builder, address, ir.Constant(_LONG, _WAKE), threads, _NOTHING, _NOTHING, _NOTHING)


@lowered_as(types.void(types.int64, types.int64))
def wait_for_change(builder: Any, address: Any, value: Any) -> None:
    """Sleep until `wake` is called for `address`; return at once if the int32 there is not `value`."""
    _call(builder, address, ir.Constant(_LONG, _WAIT), value, _NOTHING, _NOTHING, _NOTHING)


@lowered_as(types.int64())
def now(builder: Any) -> Any:
    """Nanoseconds of the monotonic clock."""
    both = cgutils.alloca_once(builder, ir.ArrayType(_LONG, 2))
    emit_call(builder, "clock_gettime", BITS32, ir.Constant(BITS32, 1), both)
    seconds, rest = (builder.extract_value(builder.load(both), index) for index in range(2))
    return builder.add(builder.mul(seconds, _SECOND), rest)
