"""Segments: files of KV blocks and their digests, named by their checksum, never changed, shared by hard links.

A segment is a safetensors file. Its tensors are, for layer i: `layers.i.blocks` `[n, Hkv, 2, block_size, D]`,
`layers.i.packed` `[m, Hkv, record]` uint8, and `layers.i.digest.NAME` `[n + m, …]`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.memory import host_mapped
from hf_offload.cpu.kernels.checksum import checksum_records
from hf_offload.cpu.memory import LINE
from hf_offload.files.tensor_file import sync

NAME = re.compile(r"(segment|tail)-[0-9a-f]{32}\.safetensors")
"""File names: segments, and the tail with the blocks that may still change; the digits are the checksum."""
KINDS = "blocks", "packed"
"""Tensors of a layer's blocks, in this order."""
MOST_SEGMENTS = 32
"""A cache with more is saved with its smaller segments joined."""
_ALIGNMENT = 4096  # bytes, of the data in a file
_PIECE = 1 << 18  # bytes
_RUN = 1 << 24  # most bytes of one write
_NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int8: "I8",
    torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.float64: "F64", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

Blocks = dict[int, np.ndarray]
"""Physical blocks by layer, int32 `[n]`, in the order of a file; -1: the block is no longer held."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment of a saved cache that is held in memory unchanged.

    Args:
        path: the file.
        blocks: its blocks.
        sealed: whether the digests of the blocks are in it.
    """

    path: Path
    blocks: Blocks
    sealed: bool

    @property
    def size(self) -> int:
        """Number of blocks, all layers."""
        return sum(map(len, self.blocks.values()))

    def used_by(self, blocks: Blocks) -> int:
        """The number of its blocks that are among others."""
        return sum(int(np.isin(ids, blocks[i]).sum()) if i in blocks else 0 for i, ids in self.blocks.items())


def held_by(segments: Sequence[Segment], stores: Mapping[int, BlockStore]) -> list[Segment]:
    """Segments with those of their blocks that are full in other stores of the same pools."""
    full = {index: store.table[:, : store.length // store.block_size] for index, store in stores.items()}
    return [
        replace(
            part, blocks={i: np.where(np.isin(ids, full[i]), ids, -1) for i, ids in part.blocks.items() if i in full}
        )
        for part in segments
    ]


def write_segments(
    folder: Path, stores: Mapping[int, BlockStore], parent: Sequence[Segment], *, sealed: bool
) -> list[Segment]:
    """Write the blocks of a cache: link the segments of its parent of which half is used, and write what is left.

    Args:
        folder: the new folder.
        stores: the blocks by layer; they have no work in flight.
        parent: segments of a saved cache that is held in memory, of which this cache is a fork.
        sealed: whether blocks have digests.

    Returns:
        The segments in the order in which they number the blocks; the last one may be a tail.
    """
    left = {index: _still(store) for index, store in stores.items()}
    parent = [part for part in parent if part.path.name.startswith("segment")]
    usable = [part for part in parent if part.sealed == sealed and 0 < part.size <= 2 * part.used_by(left)]
    usable.sort(key=lambda part: part.size, reverse=True)
    if len(usable) >= MOST_SEGMENTS:
        usable = usable[: MOST_SEGMENTS // 2]
    segments = []
    for part in usable:
        if path := _link(part.path, folder):
            segments.append(Segment(path, part.blocks, sealed))
            left = {i: np.setdiff1d(ids, part.blocks[i]) if i in part.blocks else ids for i, ids in left.items()}
    tails = {i: np.setdiff1d(store.table[:, : store.num_blocks], _still(store)) for i, store in stores.items()}
    for kind, blocks in (("segment", left), ("tail", tails)):
        if chosen := {index: _ordered(stores[index], ids) for index, ids in blocks.items() if len(ids)}:
            segments.append(Segment(_write(folder, kind, stores, chosen), chosen, sealed))
    return segments


def _still(store: BlockStore) -> np.ndarray:
    """The blocks that stay as they are: full ones, and of these the packed ones where old blocks are packed."""
    ids = np.unique(store.table[:, : store.length // store.block_size])
    return ids[store.pool.block_ptr[ids] & 1 == 1] if store.format.packs else ids


def _ordered(store: BlockStore, ids: np.ndarray) -> np.ndarray:
    """Blocks in the order of a file: unpacked, then packed, each row by row."""
    used, first = np.unique(store.table[:, : store.num_blocks], return_index=True)
    ordered: np.ndarray = ids[np.lexsort((first[np.searchsorted(used, ids)], store.pool.block_ptr[ids] & 1))]
    return ordered


def _link(path: Path, folder: Path) -> Path | None:
    """Give a segment another name in a folder, or copy it where links fail; None if it is gone.

    A segment that was removed with its folder may still be in another one beside it.
    """
    made = folder / path.name
    for source in (path, *folder.parent.glob(f"*/{path.name}")):
        try:
            os.link(source, made)
            return made
        except FileExistsError:
            return made
        except FileNotFoundError:
            continue
        except OSError:
            with source.open("rb") as old, made.open("xb") as new:
                shutil.copyfileobj(old, new, _RUN)
                sync(new)
            return made
    return None


def _write(folder: Path, kind: str, stores: Mapping[int, BlockStore], blocks: Blocks) -> Path:
    unnamed = folder / f"{kind}-{secrets.token_hex(8)}.new"
    with unnamed.open("wb") as file:
        _write_file(file, stores, blocks)
        sync(file)
    return unnamed.replace(folder / f"{kind}-{_checksum_of(unnamed)}.safetensors")


def _checksum_of(path: Path) -> str:
    with path.open("rb") as file:
        return checksum(host_mapped(file))


def _write_file(file: BinaryIO, stores: Mapping[int, BlockStore], blocks: Blocks) -> None:
    entries: dict[str, dict[str, Any]] = {}
    digests, end = list[torch.Tensor](), 0

    def add(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        nonlocal end
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}

    for index, ids in blocks.items():
        pool = stores[index].pool
        packed = int((pool.block_ptr[ids] & 1).sum())
        if packed < len(ids):
            add(f"layers.{index}.blocks", pool.dtype, (len(ids) - packed, *pool.block_shape))
        if packed:
            add(f"layers.{index}.packed", torch.uint8, (packed, pool.block_shape[0], pool.packed_record_bytes))
    for index, ids in blocks.items():
        for name, tensor in _digests(stores[index], ids).items():
            add(f"layers.{index}.digest.{name}", tensor.dtype, tuple(tensor.shape))
            digests.append(tensor.contiguous())
    header = json.dumps(entries).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNMENT)
    file.write(len(header).to_bytes(8, "little") + header)
    for index, ids in blocks.items():
        _write_blocks(file, stores[index], ids)
    for tensor in digests:
        file.write(tensor.view(torch.uint8).numpy().data)


def _digests(store: BlockStore, ids: np.ndarray) -> dict[str, torch.Tensor]:
    digests, rows = store.digests, {}
    if digests is None or not (store.sealed and digests.frozen):
        return {}
    index = torch.from_numpy(ids.astype(np.int64))
    empty = torch.from_numpy(~np.isin(ids, store.table[:, : store.sealed]))  # these have no digest
    for name, tensor in digests.blocks.tensors.items():
        rows[name] = tensor[index.to(digests.device)].cpu()
        rows[name][empty] = 0
    return rows


def _write_blocks(file: BinaryIO, store: BlockStore, ids: np.ndarray) -> None:
    """Write the blocks of a layer; of those that are not full, 0 after the last token."""
    pool, filled = store.pool, store.length % store.block_size
    addresses, tails = pool.block_ptr[ids].copy(), []
    for i in np.flatnonzero(np.isin(ids, store.table[:, store.num_blocks - 1])) if filled else ():
        raw = np.frombuffer(memoryview((ctypes.c_char * pool.block_bytes).from_address(int(addresses[i]))), np.uint8)
        tails.append(raw.reshape(2 * store.num_kv_heads, store.block_size, -1).copy())
        tails[-1][:, filled:] = 0
        addresses[i] = tails[-1].ctypes.data
    packed = addresses & 1 == 1
    packed_bytes = pool.packed_record_bytes * store.num_kv_heads
    for part, nbytes in ((addresses[~packed], pool.block_bytes), (addresses[packed] - 1, packed_bytes)):
        for start, stop in _runs(part, nbytes):
            run = (ctypes.c_char * ((stop - start) * nbytes)).from_address(int(part[start]))
            file.write(memoryview(run))


def _runs(addresses: np.ndarray, nbytes: int) -> Iterator[tuple[int, int]]:
    """Runs of blocks that are contiguous in memory, at most `_RUN` bytes each: index of the first and end."""
    start = 0
    for i in range(1, len(addresses) + 1):
        apart = i == len(addresses) or addresses[i] != addresses[i - 1] + nbytes
        if apart or (i - start) * nbytes >= _RUN:
            yield start, i
            start = i


def checksum(data: torch.Tensor) -> str:
    """128 bits of a mapped file, uint8 `[n]`: 64 of each piece, hashed; computed at memory bandwidth."""
    whole = len(data) // _PIECE * _PIECE
    addresses = data.data_ptr() + np.arange(0, whole, _PIECE, dtype=np.int64)
    sums = np.zeros(len(addresses), np.int64)
    checksum_records(addresses, _PIECE, sums).run("checksums")
    return hashlib.sha256(sums.tobytes() + data[whole:].numpy().tobytes()).hexdigest()[:32]


def map_segment(file: BinaryIO) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Map a file privately: its tensors by name, which share the file's memory, and its bytes.

    Any contents are an error or valid tensors.

    Raises:
        OSError: the file cannot be mapped.
        ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError: it is no segment.
    """
    data = host_mapped(file)
    start = 8 + int.from_bytes(data[:8].numpy().tobytes(), "little")
    if not 8 < start <= len(data):
        raise ValueError("the header exceeds the file")
    tensors = {}
    for name, entry in json.loads(data[8:start].numpy().tobytes()).items():
        dtype, shape, (first, stop) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(type(count) is int and count >= 0 for count in (*shape, first, stop)) or start + stop > len(data):
            raise ValueError(f"{name[:50]} exceeds the file")
        aligned = (start + first) % (LINE if name.endswith(KINDS) else dtype.itemsize) == 0
        if stop - first != math.prod(shape) * dtype.itemsize or not aligned:
            raise ValueError(f"{name[:50]} has other bytes than its shape")
        tensors[name] = data[start + first : start + stop].view(dtype).view(shape)
    return tensors, data
