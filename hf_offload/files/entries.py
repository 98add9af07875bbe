"""Entries of a prefix store on disk: folders of saved caches, each with the ids of its tokens.

    FOLDER/lock                 held while entries are saved and removed
    FOLDER/NAMESPACE/about.json what the caches of a namespace have in common, for readers
    FOLDER/NAMESPACE/ENTRY/     a saved cache, and:
        tokens                  int32, little-endian; their checksum is the entry's name; its time is the last use
        words                   how the text begins, UTF-8, if that is known

Names of namespaces and entries have 32 hexadecimal digits; nothing else in the folder is touched. An entry never
changes. One without cache.safetensors is what a killed process has left.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hf_offload.files.saving import CACHE

try:
    import fcntl
except ImportError:  # Windows: one process at a time
    fcntl = None  # type: ignore[assignment]

_NAME = re.compile("[0-9a-f]{32}")
_PAUSE = 0.05  # seconds
LOCK, TOKENS, WORDS, ABOUT = "lock", "tokens", "words", "about.json"


@dataclass(frozen=True, slots=True)
class Listed:
    """What an entry takes.

    Args:
        path: the folder.
        own, shared: bytes of the files that it alone names, and of those that other entries name, too.
        tokens: number of tokens; 0 for what a killed process has left.
        used: time of the last use, seconds since 1970.
        words: how the text begins.
        about: what the caches of its namespace have in common.
    """

    path: Path
    own: int
    shared: int
    tokens: int
    used: float
    words: str
    about: dict[str, Any]


def namespace_of(folder: Path, identity: dict[str, Any], about: dict[str, Any]) -> Path:
    """The folder of the caches that are alike in all that `identity` (JSON values) says; made if it can be."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:32]
    made = folder / digest
    with contextlib.suppress(OSError):  # it may be read all the same
        made.mkdir(mode=0o700, exist_ok=True)
        if not _about(made):
            (made / ABOUT).write_text(json.dumps(about), encoding="utf-8")
            (made / ABOUT).chmod(0o600)
    return made


def entry_path(namespace: Path, ids: np.ndarray) -> Path:
    """The folder of the entry with these tokens, int32 `[T]`."""
    return namespace / hashlib.sha256(namespace.name.encode() + token_bytes(ids)).hexdigest()[:32]


def token_bytes(ids: np.ndarray) -> bytes:
    """The file `tokens`."""
    return ids.astype("<i4").tobytes()


def entries_in(namespace: Path) -> Iterator[Path]:
    """The folders of entries; none if the folder cannot be read."""
    yield from (path for path in _inside(namespace) if (path / CACHE).exists())


def _inside(*folders: Path, ours: bool = True) -> list[Path]:
    """What is in folders that can be read; `ours`: only with names as namespaces and entries have them."""
    paths = []
    for folder in folders:
        with contextlib.suppress(OSError):
            paths += sorted(path for path in folder.iterdir() if not ours or _NAME.fullmatch(path.name))
    return paths


def namespaces_in(folder: Path) -> list[Path]:
    """The folders of namespaces."""
    return [path for path in _inside(folder) if (path / ABOUT).exists()]


def check_folder(folder: Path) -> None:
    """Check that a folder is of a store, empty, or not there.

    Raises:
        ValueError: it holds something else.
    """
    if not (folder / LOCK).exists() and _inside(folder, ours=False):
        raise ValueError(f"{folder} is there and is no PrefixStore; name a folder of its own for the store")


def read_tokens(path: Path) -> np.ndarray | None:
    """The tokens of an entry, int32 `[T]`; None if they are not there or were altered.

    Raises:
        OSError: they cannot be read.
    """
    try:
        data = (path / TOKENS).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    ids = np.frombuffer(data[: len(data) // 4 * 4], "<i4").astype(np.int32)
    return ids if entry_path(path.parent, ids) == path else None


def touch(path: Path) -> None:
    """Note that an entry was used now, where the folder can be written."""
    with contextlib.suppress(OSError):
        os.utime(path / TOKENS)


def last_use(path: Path) -> float:
    """The time of an entry's last use, seconds since 1970; 0: it is gone."""
    with contextlib.suppress(OSError):
        return (path / TOKENS).stat().st_mtime
    return 0.0


@contextlib.contextmanager
def locked(folder: Path, patience: float = 0.0) -> Iterator[bool]:
    """Wait up to `patience` seconds for the folder's lock; return whether it is held. It ends with the process."""
    end = time.monotonic() + patience
    with open(folder / LOCK, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        while not (held := _lock(file)) and time.monotonic() < end:
            time.sleep(_PAUSE)
        try:
            yield held
        finally:
            if held and fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_UN)  # forked processes have the file, too


def _lock(file: BinaryIO) -> bool:
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove(path: Path) -> None:
    """Remove an entry, which ends with its cache.safetensors; loaded caches keep their mapped files."""
    (path / CACHE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def clean(folder: Path) -> None:
    """Remove what killed processes have left; the lock is held."""
    for path in _inside(*namespaces_in(folder)):
        if path.is_dir() and not (path / CACHE).exists():
            shutil.rmtree(path, ignore_errors=True)


def list_entries(folder: Path) -> list[Listed]:
    """All entries and what was left behind, the least recently used one first; what vanishes meanwhile is left out."""
    files: dict[Path, dict[int, int]] = {}  # inode: bytes
    for path in _inside(*namespaces_in(folder)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            files[path] = {stat.st_ino: stat.st_size for stat in (file.stat() for file in path.iterdir())}
    names = Counter(inode for inodes in files.values() for inode in inodes)
    entries = []
    for path, inodes in files.items():
        own = sum(size for inode, size in inodes.items() if names[inode] == 1)
        tokens = 0
        with contextlib.suppress(OSError):
            tokens = (path / TOKENS).stat().st_size // 4 if (path / CACHE).exists() else 0
        shared, words = sum(inodes.values()) - own, _text(path / WORDS)
        entries.append(Listed(path, own, shared, tokens, last_use(path), words, _about(path.parent)))
    return sorted(entries, key=lambda entry: entry.used)


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def _about(namespace: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        about = json.loads(_text(namespace / ABOUT))
        return about if isinstance(about, dict) else {}
    return {}


def used_bytes(*namespaces: Path) -> int:
    """Bytes of all files of the entries of namespaces, each file counted once."""
    sizes = {}
    for path in _inside(*_inside(*namespaces), ours=False):
        with contextlib.suppress(FileNotFoundError):
            stat = path.stat()
            sizes[stat.st_ino] = stat.st_size
    return sum(sizes.values())


def evict(folder: Path, most: int, keep: Collection[Path], drop: Collection[Path] = ()) -> list[Path]:
    """Remove entries and, while the others exceed `most` bytes, those least recently used; the lock is held.

    Args:
        folder: the store's folder.
        most: bytes.
        keep: entries that stay; drop: entries that are removed first.

    Returns:
        What was removed.
    """
    removed = list(drop)
    for path in drop:
        remove(path)
    for entry in list_entries(folder) if used_bytes(*namespaces_in(folder)) > most else ():
        if entry.path not in keep:
            remove(entry.path)
            removed.append(entry.path)
        if used_bytes(*namespaces_in(folder)) <= most:
            break
    return removed
