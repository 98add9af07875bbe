"""Code that compiled callers alone use: it is optimised, and becomes machine code, as part of theirs.

By itself Numba optimises each function fully, and compiles it, before it is linked into its callers, where all of that
is done again: two fifths of the time that a kernel takes to compile.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler


class _LinkedCode(JITCodeLibrary):
    """LLVM code of a function, which only `add_linking_library` of its callers reads."""

    def _optimize_final_module(self) -> None:
        """Leave that to the callers."""

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """0: there is no machine code."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        return _NoEnvironment


class _NoEnvironment:
    """In place of the code generator, of which Numba's `get_executable` uses this method alone."""

    @staticmethod
    def set_env(name: str, env: Any) -> None:
        """Nothing: the variable is in the callers' modules (`KernelCache.save_overload`)."""


class LinkedCompiler(Compiler):
    """Numba's compiler for functions that become part of their callers."""

    def __init__(self, typing: Any, target: Any, library: Any, *state: Any) -> None:
        super().__init__(typing, target, library or _LinkedCode(target.codegen(), "linked"), *state)
