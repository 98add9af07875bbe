"""Kernels on torch's OpenMP team, through the runtime's entry point `GOMP_parallel`.

Torch's operators run on the OpenMP team of the thread that calls them. Between two operators the team spins for a
while. A kernel on that team therefore starts within microseconds, and no threads of ours compete with torch's for the
cores.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import torch
from llvmlite import ir
from numba.core import types

from hf_offload.cpu.simd.vectors import lowered_as

POINTER = ir.IntType(8).as_pointer()
ENTRY = ir.FunctionType(ir.VoidType(), [POINTER])
"""Type of the functions that are called by address: `void (void *)`, as OpenMP runtimes and C threads call it."""


def _entry_point() -> int:
    """Address of `GOMP_parallel` in the OpenMP runtime that torch is linked with (libgomp or LLVM's); 0 without one."""
    if sys.platform != "linux":
        return 0  # untested elsewhere, and a fault in the runtime ends the process
    try:
        function = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_RUNTIME = _entry_point()


def _leave() -> None:
    global _RUNTIME
    _RUNTIME = 0  # a forked child has no team


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave)


ALONE = (0, 1)
"""What `team` returns where the caller computes alone."""


def team() -> tuple[int, int]:
    """Address of `GOMP_parallel` (0: none) and the number of threads that torch uses in this thread."""
    return (_RUNTIME, torch.get_num_threads()) if _RUNTIME else ALONE


@lowered_as(types.void(types.int64, types.int64))
def call_entry(builder: Any, entry: Any, argument: Any) -> None:
    """Call the `ENTRY` at an address with the pointer `argument`."""
    function = builder.inttoptr(entry, ENTRY.as_pointer())
    builder.call(function, [builder.inttoptr(argument, POINTER)])


@lowered_as(types.void(types.int64, types.int64, types.int64, types.int64))
def call_team(builder: Any, runtime: Any, entry: Any, argument: Any, threads: Any) -> None:
    """Call an `ENTRY` on all threads of a team; return when all calls have returned."""
    word = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [ENTRY.as_pointer(), POINTER, word, word])
    function = builder.inttoptr(entry, ENTRY.as_pointer())
    argument, threads = builder.inttoptr(argument, POINTER), builder.trunc(threads, word)
    parallel = builder.inttoptr(runtime, kind.as_pointer())
    builder.call(parallel, [function, argument, threads, ir.Constant(word, 0)])
