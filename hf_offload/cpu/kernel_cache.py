"""Disk cache of compiled kernels: one file for each function, signature, CPU and state of the sources."""

# mypy: allow-untyped-calls
from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import uuid
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import numpy as np
from numba.core import types
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

from .room import have_room

LOAD_BYTES, COMPILE_BYTES = 64 << 20, 256 << 20
"""Free memory required before a kernel is loaded or compiled, more than that takes: LLVM aborts when it runs out."""

_HERE = Path(__file__).parent
_PACKAGE = __name__.partition(".")[0]
_VERSIONS = version("numba"), version("llvmlite")


class KernelCache(FunctionCache):
    """Numba's disk cache without its index, which processes that write at the same time would have to lock.

    A file's name contains a digest of all that its code depends on: the signature, the CPU, versions, the sources of
    `cpu/`, and those of every other function that the kernel may call. A file is written beside and then renamed, and
    holds its own checksum: whatever else is found in its place is compiled again.

    What is compiled for a user's own NamedTuple stays in the process: a later one may not have its module, or another.
    """

    _sources: tuple[str, list[str]] | None = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code compiled for a signature, or None.

        Raises:
            MemoryError: too little memory is left to load the code, or to compile it if it is not cached.
        """
        have_room(LOAD_BYTES, f"the kernel {self._py_func.__name__}")
        target_context.refresh()
        found = self._read(self._path(sig, target_context.codegen()))
        if found is None:
            have_room(COMPILE_BYTES, f"compiling the kernel {self._py_func.__name__}")
            return None
        return self._impl.rebuild(target_context, found)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the code compiled for a signature; warn if its file cannot be written."""
        if any(map(_is_foreign, _arguments(sig))) or not self._impl.check_cachable(data):
            return
        path = self._path(sig, data.codegen)
        try:
            self._impl.locator.ensure_cache_path()
            for old in self._files():
                if not old.name.startswith(self._stem()):
                    old.unlink(missing_ok=True)
            _write(path, dumps(self._impl.reduce(data)))
        except OSError as error:
            warnings.warn(
                f"compiled kernels are not kept: {error}; every process compiles them again until {path.parent} can be "
                "written, or NUMBA_CACHE_DIR names a folder that can",
                RuntimeWarning,
                stacklevel=2,
            )

    def flush(self) -> None:
        """Delete what is kept of this function."""
        for file in self._files():
            file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        """The function's files, those of other states of the sources included."""
        base = f"{self._impl.filename_base}."
        return [file for file in Path(self._cache_path).glob("*.nb?") if file.name.startswith(base)]

    def _depends_on(self) -> tuple[str, list[str]]:
        if self._sources is None:
            self._sources = _sources_of(self._py_func)
        return self._sources

    def _stem(self) -> str:
        """Begin of the names of the function's files for the sources as they are."""
        return f"{self._impl.filename_base}.{self._depends_on()[0][:16]}."

    def _path(self, sig: Any, codegen: Any) -> Path:
        arguments = [_described(kind) for kind in _arguments(sig)]
        key = repr((arguments, codegen.magic_tuple(), _VERSIONS, self._depends_on()))
        return Path(self._cache_path) / f"{self._stem()}{hashlib.sha256(key.encode()).hexdigest()[:32]}.nbc"

    def _read(self, path: Path) -> Any:
        """The contents of a file; None where it is missing, damaged, or names what is gone."""
        try:
            content = path.read_bytes()
            if content[:32] == hashlib.sha256(content[32:]).digest():
                return pickle.loads(content[32:])
        except (OSError, ImportError, AttributeError):
            pass
        return None


def _write(path: Path, content: bytes) -> None:
    """Write a file and its checksum, as a whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    beside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:16]}")
    try:
        beside.write_bytes(hashlib.sha256(content).digest() + content)
        os.replace(beside, path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


# --- signatures -------------------------------------------------------------------------------------------------------


def _arguments(sig: Any) -> Any:
    """Numba types of the arguments of a signature, or of a tuple of types."""
    return getattr(sig, "args", sig)


def _is_named(kind: Any) -> bool:
    return isinstance(kind, types.NamedTuple | types.NamedUniTuple)


def _is_foreign(kind: Any) -> bool:
    """Whether a type is or holds a NamedTuple from outside the package, whose module may bring functions."""
    if _is_named(kind) and kind.instance_class.__module__.partition(".")[0] != _PACKAGE:
        return True
    return isinstance(kind, types.BaseTuple) and any(map(_is_foreign, cast(Any, kind)))


def _described(kind: Any) -> Any:
    """All of a type that compiled code depends on: of a NamedTuple the names of the fields, too."""
    if not isinstance(kind, types.BaseTuple):
        return repr(kind)
    named = cast(Any, kind).instance_class if _is_named(kind) else None
    name = named and (named.__module__, named.__qualname__, named._fields)
    return type(kind).__name__, name, [_described(part) for part in cast(Any, kind)]


# --- sources ----------------------------------------------------------------------------------------------------------


def _digest_of(files: list[Path]) -> bytes:
    """SHA-256 of files."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


_OWN = _digest_of(sorted(file for file in _HERE.rglob("*.py") if file.is_file()))
"""SHA-256 of the sources of `cpu/`, from which all kernels may import."""


def _sources_of(function: Callable[..., Any]) -> tuple[str, list[str]]:
    """What a function's compiled form depends on: a digest of `cpu/` and the files of what it calls; constants."""
    files: set[Path] = set()
    constants: set[str] = set()
    _collect(function, files, constants, set())
    return hashlib.sha256(_OWN + _digest_of(sorted(files))).hexdigest(), sorted(constants)


def _collect(function: Any, files: set[Path], constants: set[str], seen: set[Any]) -> None:
    """Add the files outside `cpu/` of a function and of all that it calls, and the constants that these name."""
    code = function.__code__
    file = Path(code.co_filename)
    if function in seen or file.is_relative_to(_HERE):
        return
    seen.add(function)
    if file.is_file():
        files.add(file)
    else:  # typed in a shell
        constants.add(repr((code.co_code, [value for value in code.co_consts if _is_constant(value)])))
    for name, value in _named_by(function):
        called = getattr(value, "py_func", None) or getattr(value, "_defn", None)
        if isinstance(called, FunctionType):
            _collect(called, files, constants, seen)
        elif _is_constant(value):
            constants.add(f"{name}={value!r}")


def _is_constant(value: Any) -> bool:
    """Whether code is compiled for a value, which another process writes alike."""
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return isinstance(value, bool | int | float | complex | str | np.generic)


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Names and values of what a function's code names in its module, in modules that it names, and in its closure."""
    names = set(_names_in(function.__code__))
    found = {name: function.__globals__[name] for name in names & function.__globals__.keys()}
    modules = [vars(value) for value in found.values() if isinstance(value, ModuleType)]
    inside = (item for module in modules for item in module.items() if item[0] in names)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return chain(found.items(), inside, ((name, cell.cell_contents) for name, cell in cells))


def _names_in(code: CodeType) -> Iterator[str]:
    """Names in a function's code and in that of functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)
