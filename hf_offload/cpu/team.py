"""The threads that torch computes with, lent to a kernel: none of ours to wake, none that fights with torch's.

Torch's operators run on the OpenMP team of the thread that calls them, and between two of them the team waits for the
next, spinning for a while. A kernel that joins that team through the runtime's own entry point starts within
microseconds.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils, types

from .vector import lowered

_POINTER = ir.IntType(8).as_pointer()


def _entry_point() -> int:
    """Address of `GOMP_parallel` in the OpenMP runtime that torch is linked with (libgomp or LLVM's); 0 without one."""
    if sys.platform != "linux":
        return 0  # nobody has tried it elsewhere, and what goes wrong in there ends the process
    try:
        function = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_RUNTIME = _entry_point()


def _leave() -> None:
    global _RUNTIME
    _RUNTIME = 0  # the team did not come along


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave)


ALONE = (0, 1)
"""The team of the caller alone."""


def team() -> tuple[int, int]:
    """The team that torch computes with in this thread: the runtime's entry point (0: none), the number of threads."""
    return _RUNTIME, torch.get_num_threads()


@lowered
def share(typing: Any, team: Any, kernel: Any, args: Any) -> Any:
    """Call a compiled kernel with the same arguments on all threads of a team at once; return when all have returned.

    What a kernel raises is raised where it runs alone, and lost in a team: then some of its tasks are never done.
    """
    body = kernel.get_call_type(typing, tuple(args), {})
    compiled = kernel.dispatcher.get_compile_result(body)

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        context.add_linking_libs([compiled.library])
        runtime, threads = cgutils.unpack_tuple(builder, values[0], 2)
        packed = cgutils.alloca_once_value(builder, values[2])

        def unpack(inner: Any, bundle: Any) -> list[Any]:
            return [inner.extract_value(bundle, i) for i in range(len(args))]

        with builder.if_else(cgutils.is_null(builder, runtime)) as (alone, together):
            with alone:
                context.call_internal(builder, compiled.fndesc, body, unpack(builder, values[2]))
            with together:
                entry = ir.FunctionType(ir.VoidType(), [_POINTER])
                name = builder.module.get_unique_name("share")
                function = ir.Function(builder.module, entry, name)
                function.linkage = "internal"
                inner = ir.IRBuilder(function.append_basic_block())
                bundle = inner.load(inner.bitcast(function.args[0], packed.type))
                context.call_internal_no_propagate(inner, compiled.fndesc, body, unpack(inner, bundle))
                inner.ret_void()
                word = ir.IntType(32)
                kind = ir.FunctionType(ir.VoidType(), [entry.as_pointer(), _POINTER, word, word])
                parallel = builder.inttoptr(runtime, kind.as_pointer())
                count = builder.trunc(threads, word)
                builder.call(parallel, [function, builder.bitcast(packed, _POINTER), count, ir.Constant(word, 0)])
        return context.get_dummy_value()

    return types.void(team, kernel, args), emit
