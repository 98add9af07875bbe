"""A safetensors file with a JSON text about its tensors, and a checksum of both in its metadata."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

UNFINISHED = r"[0-9a-f]{16}\.new"
"""What ends the name of a file that is being written."""


UNSOUND = (
    SafetensorError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError,
)  # fmt: skip
"""The exceptions that reading a damaged or forged file may raise."""


class Contents(NamedTuple):
    """What a file holds.

    Args:
        about: what its JSON text says; `{}` if it has none.
        tensors: by name.
        whole: whether its checksum agrees; None: it has none.
    """

    about: Any
    tensors: dict[str, torch.Tensor]
    whole: bool | None


def pack(about: str, tensors: dict[str, torch.Tensor]) -> bytes:
    """The bytes of a file with a JSON text and tensors, which are contiguous and in host memory."""
    return save(tensors, {"about": about, "checksum": _checksum(about, tensors)})


def unpack(data: bytes) -> Contents:
    """Read the bytes of a file.

    Raises:
        UNSOUND: they are none.
    """
    tensors = load(data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata = header.get("__metadata__", {})
    about, checksum = metadata.get("about", "{}"), metadata.get("checksum")
    whole = None if checksum is None else checksum == _checksum(about, tensors)
    return Contents(json.loads(about), tensors, whole)


def _checksum(about: str, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def replace(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a file, with these permissions, in place of an earlier one: a killed process or a power cut leaves one of
    the two, whole."""
    unfinished = path.with_name(f"{path.stem}-{secrets.token_hex(8)}.new")
    try:
        write(unfinished, data)
        if mode is not None:
            unfinished.chmod(mode)
        sync_folder(path.parent)
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write(path: Path, data: bytes) -> None:
    """Write a file to the disk."""
    with path.open("wb") as file:
        file.write(data)
        sync(file)


def sync(file: BinaryIO) -> None:
    """Write a file to the disk: a folder must not be renamed before its files are there."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Write a folder's entries to the disk, where the system can and the folder may be opened."""
    if os.name == "nt":
        return
    try:
        file = os.open(folder, os.O_RDONLY)
    except PermissionError:  # one that may be written, not read
        return
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP):  # of file systems that sync files alone
            raise
    finally:
        os.close(file)
