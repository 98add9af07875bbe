"""Disk cache of compiled kernels: one file for each function, signature, CPU and state of the sources."""

# mypy: allow-untyped-calls
from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import os
import pickle
import sys
import sysconfig
import uuid
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from numba.core import types
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

from .free_memory import check_free

LOAD_BYTES, COMPILE_BYTES = 64 << 20, 256 << 20
"""Free memory required before a kernel is loaded or compiled, more than that takes: LLVM aborts when it runs out."""

_HERE = Path(__file__).parent
_PACKAGE = __name__.partition(".")[0]
_VERSIONS = version("numba"), version("llvmlite")


class KernelCache(FunctionCache):
    """Numba's disk cache without its index, which processes that write at the same time would have to lock.

    A file's name contains a digest of what its code depends on: the signature, the CPU, versions, what the function's
    closure holds, and the sources of `cpu/`, of the function's module and of the modules that this one imports,
    installed ones apart; the sources as they were when the function was defined. A file is written beside and then
    renamed, and holds its own checksum: whatever else lies in its place is compiled again.

    What is compiled for a user's own NamedTuple stays in the process: a later one may not have its module, or another.

    Args:
        function: the function. If there is no folder for its code, a warning says so.
        for_python: whether its code can be called from Python; what cannot is kept apart.
    """

    def __init__(self, function: Callable[..., Any], *, for_python: bool) -> None:
        self._for_python = for_python
        self._folder: Path | None = None
        self._sources: str | None = None
        try:
            super().__init__(function)
        except RuntimeError as error:
            self._cache_path = None
            _warn(str(error).partition("no locator")[2] or str(error))
            return
        self._folder = Path(self._cache_path)
        self._stamp = repr(self._impl.locator.get_source_stamp())
        note_source(function)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code compiled for a signature, or None.

        Raises:
            MemoryError: too little memory is left to load the code, or to compile it if it is not cached.
        """
        check_free(LOAD_BYTES, f"the kernel {self._py_func.__name__}")
        target_context.refresh()
        kept = None if self._folder is None else _read(self._folder / self._name_of(sig, target_context.codegen()))
        if kept is None:
            check_free(COMPILE_BYTES, f"compiling the kernel {self._py_func.__name__}")
            return None
        return self._impl.rebuild(target_context, kept)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the code compiled for a signature; warn if its file cannot be written.

        Linked functions have no code of their own: what they need to raise errors is set in the caller's, as on load.
        """
        for environment in data._find_referenced_environments():
            data.codegen.set_env(environment.env_name, environment)
        if self._folder is None or any(map(_is_foreign, _arguments(sig))) or not self._impl.check_cachable(data):
            return
        try:
            self._impl.locator.ensure_cache_path()
            self._delete(but=self._stem)
            _write(self._folder / self._name_of(sig, data.codegen), dumps(self._impl.reduce(data)))
        except OSError as error:
            _warn(str(error))

    def flush(self) -> None:
        """Delete what is kept of this function."""
        if self._folder is not None:
            self._delete()

    def _delete(self, but: str | None = None) -> None:
        """Delete the function's files, but those that begin so."""
        for file in self.files():
            if but is None or not file.name.startswith(but):
                with contextlib.suppress(OSError):
                    file.unlink()

    def files(self) -> list[Path]:
        """What is kept of this function, for other states of the sources, too."""
        assert self._folder is not None
        base = f"{self._impl.filename_base}."
        return [file for file in self._folder.glob("*.nb?") if file.name.startswith(base)]

    @property
    def _stem(self) -> str:
        """Begin of the names of files with the code of `cpu/` and of the function's module as they are."""
        return f"{self._impl.filename_base}.{hashlib.sha256(_OWN + self._stamp.encode()).hexdigest()[:16]}."

    def _name_of(self, sig: Any, codegen: Any) -> str:
        if self._sources is None:
            self._sources = _sources_of(self._py_func)
        arguments = [_described(kind) for kind in _arguments(sig)]
        code = self._py_func.__code__.co_code, self._for_python
        key = repr((arguments, codegen.magic_tuple(), _VERSIONS, self._sources, code))
        return f"{self._stem}{hashlib.sha256(key.encode()).hexdigest()[:32]}.nbc"


def _warn(why: str) -> None:
    warnings.warn(
        f"compiled kernels are not kept on disk, so that every process compiles them: {why}; set NUMBA_CACHE_DIR to a "
        "folder that can be written",
        RuntimeWarning,
        stacklevel=3,
    )


def _read(path: Path) -> Any:
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


_OWN = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(_HERE.rglob("*.py")) if file.is_file())).digest()
"""SHA-256 of the sources of `cpu/`, from which all kernels may import."""
_stamps: dict[Path, str] = {}
"""Digests of files with compiled functions, of the time when these were defined."""
_INSTALLED = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))


def note_source(function: Callable[..., Any]) -> None:
    """Note the state of a function's file: kernels that use the function are compiled from it as it is now."""
    file = Path(function.__code__.co_filename)
    if file.is_file():
        _stamps[file] = hashlib.sha256(file.read_bytes()).hexdigest()


def _sources_of(function: Any) -> str:
    """Digest of the files that a function outside `cpu/` may use, and of what its closure holds."""
    files: set[Path] = set()
    cells: list[bytes] = []
    _collect(function, files, cells)
    stamps = [_stamps.get(file) or hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)]
    return hashlib.sha256(repr((_OWN, stamps, cells)).encode()).hexdigest()


def _collect(function: Any, files: set[Path], cells: list[bytes]) -> None:
    """Add the file of a function and those that it imports from, and what its closure holds."""
    file = Path(function.__code__.co_filename)
    if file.is_file():
        _add(file, function.__module__, files)
    for cell in function.__closure__ or ():
        value = cell.cell_contents
        inner = getattr(value, "py_func", None)
        if inner is not None and Path(inner.__code__.co_filename).is_file():
            _collect(inner, files, cells)
            cells.append(inner.__qualname__.encode())
        else:
            cells.append(dumps(value))


def _add(file: Path, name: str, files: set[Path]) -> None:
    """Add a module's file, and the files of what it imports: its own package's, and others that are not installed."""
    if file in files or file.is_relative_to(_HERE):
        return
    files.add(file)
    if name == _PACKAGE:  # its modules import what they compile by themselves
        return
    for other in _imports_of(file, name):
        path = getattr(sys.modules.get(other), "__file__", None) or ""
        own = other.partition(".")[0] == name.partition(".")[0]
        if path.endswith(".py") and (own or not path.startswith(_INSTALLED)):
            _add(Path(path), other, files)


@functools.cache
def _imports_of(file: Path, name: str) -> list[str]:
    """Names of all modules that a file may import; of some that are none, too."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # a notebook, or a page
        return []
    package = getattr(sys.modules.get(name), "__package__", None) or ""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            lead = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join((*lead, node.module) if node.module else lead)
            names += (module, *(f"{module}.{alias.name}" for alias in node.names))
    return names
