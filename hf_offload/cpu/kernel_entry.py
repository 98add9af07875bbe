"""The C function by which threads enter a compiled kernel, and its argument: the kernel's arguments in memory."""

# mypy: allow-untyped-calls
from __future__ import annotations

import struct
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.compiler import Compiler
from numba.core.compiler_machinery import register_pass
from numba.core.lowering import Lower
from numba.core.typed_passes import NativeLowering

from .openmp_team import ENTRY

_FLOAT, _WORD = struct.Struct("d"), struct.Struct("q")


def _layout(context: Any, kinds: tuple[Any, ...]) -> Any:
    """LLVM type of an entry's argument, for a kernel with arguments of these types."""
    return ir.LiteralStructType([context.get_value_type(kind) for kind in kinds])


class _LowerWithEntry(Lower):
    def create_cfunc_wrapper(self) -> None:
        """Emit an `ENTRY` that reads the arguments and calls the kernel, in place of Numba's wrapper."""
        context, fndesc, convention = self.context, self.fndesc, self.context.call_conv
        module = context.create_module("entry")
        kernel = ir.Function(
            module, convention.get_function_type(fndesc.restype, fndesc.argtypes), fndesc.llvm_func_name
        )
        entry = ir.Function(module, ENTRY, fndesc.llvm_cfunc_wrapper_name)
        builder = ir.IRBuilder(entry.append_basic_block())
        argument = builder.bitcast(entry.args[0], _layout(context, fndesc.argtypes).as_pointer())
        index, zero = ir.IntType(32), ir.Constant(ir.IntType(32), 0)
        fields = [builder.gep(argument, [zero, index(i)]) for i in range(len(fndesc.argtypes))]
        args = [builder.load(field) for field in fields]
        # An exception shows as undone tasks. Inlined, a kernel's code would be there twice.
        convention.call_function(builder, kernel, fndesc.restype, fndesc.argtypes, args, attrs=("noinline",))
        builder.ret_void()
        self.library.add_ir_module(module)


@register_pass(mutates_CFG=True, analysis_only=False)
class _LoweringWithEntry(NativeLowering):
    _name = f"lowering_with_entry_{id(_LowerWithEntry)}"  # another one when the package is imported again

    @property
    def lowering_class(self) -> type[Lower]:
        return _LowerWithEntry


class KernelCompiler(Compiler):
    """Numba's compiler for kernels: their code has an entry."""

    def define_pipelines(self) -> list[Any]:
        pipelines: list[Any] = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [(_LoweringWithEntry if p is NativeLowering else p, what) for p, what in pipeline.passes]
        return pipelines


def entry_of(compiled: Any, kinds: tuple[Any, ...]) -> tuple[int, tuple[int, ...], int]:
    """Compile or load a kernel.

    Args:
        compiled: the kernel, of `launch.kernel`.
        kinds: Numba types of its arguments.

    Returns:
        The address of its `ENTRY`; in the entry's argument, in int64 words, the offset of each argument; its size.

    Raises:
        TypeError: the kernel returns something.
    """
    compiled.compile(kinds)
    result, context = compiled.overloads[kinds], compiled.targetctx
    if result.fndesc.restype != types.none:
        raise TypeError(f"{compiled.__name__} returns {result.fndesc.restype}; a kernel writes its results and returns")
    data, layout = context.target_data, _layout(context, kinds)
    offsets = [layout.get_element_offset(data, i) // 8 for i in range(len(kinds))]
    address = result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name)
    return address, tuple(offsets), layout.get_abi_size(data) // 8


def lay_out(value: Any, words: list[int]) -> None:
    """Append the int64 words of an argument, as compiled code reads them.

    An array's memory is borrowed: without an owner (its first two words), no thread counts references to it.

    Raises:
        TypeError: not an array, an int, a float, None or a tuple of such. Bools, and NumPy's numbers but int64 and
            float64, are none of these.
    """
    kind = type(value)
    if kind is np.ndarray or isinstance(value, np.ndarray):  # the type itself is compared more quickly
        words += (0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides)
    elif kind is int:
        words.append(value)
    elif value is None:
        words.append(0)
    elif kind is float or isinstance(value, float):
        words += _WORD.unpack(_FLOAT.pack(value))
    elif isinstance(value, tuple):
        for part in value:
            lay_out(part, words)
    elif isinstance(value, np.int64):
        words.append(int(value))
    else:
        raise TypeError(
            f"a kernel takes arrays, ints, floats, None and tuples of such, not {value!r}; convert it by int() or "
            "float()"
        )
