"""Kernel calls with their arguments in memory, which compiled code makes by address: no Python and no GIL on the way.

The arguments of a launch are written into a buffer together with the address of the compiled kernel. A small function,
compiled once for each list of argument types, reads them back and calls it. Kernels are not compiled again for it.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import types

from .launch import Array, Launch, jit
from .team import ALONE
from .vector import lowered, pointer

_LONG = ir.IntType(64)


@dataclass(frozen=True, slots=True)
class Bound:
    """One participant's share of a launch, ready to be called by `call_bound(entry, place)`.

    Args:
        entry: address of the function that makes the call.
        place: address of what it reads.
        memory: int64, what lies there; must outlive the calls, as must `launch`.
        offsets: where in `memory` ticket, tasks and the launch's arguments lie, in entries of 8 bytes; a number among
            them may be written there between calls.
        launch: what was bound.
    """

    entry: int
    place: int
    memory: Array
    offsets: tuple[int, ...]
    launch: Launch


def _borrow(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """The value with arrays that own nothing: no reference is counted for them, by any thread."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = ir.Constant(array.meminfo.type, None)
        array.parent = ir.Constant(array.parent.type, None)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        for i, element in enumerate(cast(Any, kind)):
            part = _borrow(context, builder, element, builder.extract_value(value, i))
            value = builder.insert_value(value, part, i)
        return value
    assert not context.data_model_manager[kind].contains_nrt_meminfo(), f"a kernel argument of type {kind}"
    return value


def _stored(context: Any, args: Any) -> Any:
    """LLVM type of what lies at a place: the kernel's address and its arguments."""
    return ir.LiteralStructType([_LONG, context.get_value_type(args)])


@lowered
def _stored_bytes(typing: Any, args: Any) -> Any:
    """Bytes of a place for these arguments."""

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        return ir.Constant(_LONG, context.get_abi_sizeof(_stored(context, args)))

    return types.int64(args), emit


@lowered
def _argument_offsets(typing: Any, args: Any) -> Any:
    """Bytes from a place to each of the arguments behind the team."""
    count = len(args.types[1].types)

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        data, kind = context.target_data, _stored(context, args)
        bundle, rest = kind.elements[1], kind.elements[1].elements[1]
        begin = kind.get_element_offset(data, 1) + bundle.get_element_offset(data, 1)
        offsets = [ir.Constant(_LONG, begin + rest.get_element_offset(data, i)) for i in range(count)]
        return context.make_tuple(builder, sig.return_type, offsets)

    return types.UniTuple(types.int64, count)(args), emit


@lowered
def _write_call(typing: Any, target: Any, args: Any, place: Any) -> Any:
    """Write a call of the compiled function at `target` to `place`; returns the address of what makes the call."""
    signature = types.none(types.int64)

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        kind, convention = _stored(context, args), context.call_conv
        bundle = _borrow(context, builder, args, values[1])
        call = builder.insert_value(ir.Constant(kind, ir.Undefined), values[0], 0)
        builder.store(builder.insert_value(call, bundle, 1), pointer(builder, values[2], kind))
        entry_type = convention.get_function_type(types.none, signature.args)
        entry = ir.Function(builder.module, entry_type, builder.module.get_unique_name("bound"))
        entry.linkage = "internal"
        inner = ir.IRBuilder(entry.append_basic_block("entry"))
        stored = inner.load(pointer(inner, convention.get_arguments(entry)[0], kind))
        kernel_type = convention.get_function_type(types.none, args.types)
        kernel = inner.inttoptr(inner.extract_value(stored, 0), kernel_type.as_pointer())
        each = [inner.extract_value(stored, (1, i)) for i in range(len(args.types))]
        status, _ = convention.call_function(inner, kernel, types.none, args.types, each)
        with inner.if_then(status.is_error, likely=False):
            convention.return_status_propagate(inner, status)
        convention.return_native_none(inner)
        return builder.ptrtoint(entry, _LONG)

    return types.int64(types.int64, args, types.int64), emit


@lowered
def call_bound(typing: Any, entry: Any, place: Any) -> Any:
    """Call what `bind` prepared; what the kernel raises is raised here."""

    def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
        convention = context.call_conv
        kind = convention.get_function_type(types.none, (types.int64,))
        function = builder.inttoptr(values[0], kind.as_pointer())
        status, _ = convention.call_function(builder, function, types.none, (types.int64,), [values[1]])
        with builder.if_then(status.is_error, likely=False):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@jit
def _place_bytes(args: Any) -> int:
    return int(_stored_bytes(args))


@jit
def _offsets(args: Any) -> tuple[int, ...]:
    return _argument_offsets(args)  # type: ignore[no-any-return]


@jit
def _bind(target: int, args: Any, place: int) -> int:
    return int(_write_call(target, args, place))


_Layout = tuple[int, int, tuple[int, ...]]
_layouts: dict[tuple[Any, ...], _Layout] = {}  # by kernel and types of its arguments; Numba takes long to name types


def _types_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What decides the compiled form of a kernel that gets these arguments."""
    return tuple(
        [
            (x.dtype, x.ndim)
            if isinstance(x, np.ndarray)
            else (type(x), *_types_of(x))
            if isinstance(x, tuple)
            else type(x)
            for x in args
        ]
    )


def _layout_of(launch: Launch, args: tuple[Any, ...]) -> _Layout:
    """Address of the compiled kernel, bytes of a place for its arguments, and where in it they lie."""
    compiled: Any = launch.kernel
    if not hasattr(compiled, "overloads"):
        raise TypeError(f"{launch.kernel!r} is not a compiled kernel")
    key = (compiled, _types_of(args))
    if key not in _layouts:
        team, rest = numba.typeof(args).types
        kinds = (team, types.StarArgTuple.from_types(rest.types))  # as Numba names what a kernel takes after its team
        compiled.compile(kinds)
        result = compiled.overloads[kinds]
        target = result.library.get_pointer_to_function(result.fndesc.llvm_func_name)
        _layouts[key] = target, _place_bytes(args), tuple([offset // 8 for offset in _offsets(args)])
    return _layouts[key]


def bind(launch: Launch) -> Bound:
    """Prepare a launch for calls from compiled code, each of them one participant's share.

    Raises:
        TypeError: the launch's kernel is not one that `launch.kernel` made.
    """
    args = (ALONE, (launch.ticket, launch.tasks, *launch.args))
    target, nbytes, offsets = _layout_of(launch, args)
    memory: Array = np.zeros(-(-nbytes // 8), np.int64)
    place = memory.ctypes.data
    return Bound(_bind(target, args, place), place, memory, offsets, launch)
