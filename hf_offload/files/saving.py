"""Saving of a cache to a folder of safetensors files.

    blocks.safetensors    K and V in the layout of the pool, so that the file can be mapped as a slab
    digests.safetensors   the digests of the blocks
    cache.safetensors     tables, checksums of the blocks' records, padding, resident sets, policy states; and in its
                          metadata, under "about", a JSON text: policy, knobs, sizes, the model's fingerprint;
                          `saved_fields.py` has the bounds of each
    SHA256SUMS            of digests.safetensors and cache.safetensors

The folder is written as `.NAME.….saving` beside its final place, synced, and exchanged in one step with an earlier
saved cache, which is then removed. A killed process or a power cut leaves one of the two, whole, under the name. Where
the system cannot exchange folders the earlier one is renamed to `.NAME.….before` first; `load` says so if that is all
that is left.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors.torch import save

from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.host_format import FORMATS
from hf_offload.blocks.host_pool import HostPool
from hf_offload.blocks.padding import Padding
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.stock_layers import pack
from hf_offload.cpu.kernels.checksum import checksum_records
from hf_offload.files.saved_fields import check_state

FORMAT = 8
"""Version of the format; incremented when caches saved before can no longer be read."""
BLOCKS, DIGESTS, CACHE, SUMS = "blocks.safetensors", "digests.safetensors", "cache.safetensors", "SHA256SUMS"
ALIGNMENT = 4096  # bytes, of the data in the file of the blocks
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.uint8: "U8"}
_RUN = 1 << 24  # most bytes of one write
_BEFORE = ".before"
_HERE, _SWAP = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def save_cache(folder: Path, layers: list[Any], padding: Padding, about: dict[str, Any]) -> None:
    """Write a cache that has no work in flight; an earlier saved cache in the folder is replaced.

    Args:
        folder: the target.
        layers: the cache's layers.
        padding: validity of its tokens.
        about: the JSON description of the cache (policy, knobs, fingerprint).

    Raises:
        ValueError: the name has a NUL or is not UTF-8, is a circular link, or the folder holds anything but a saved
            cache; a policy's `state_fields` do not allow what its state holds.
        OSError: the disk is full, or the folder cannot be written; nothing is left behind.
        TypeError: a stock layer holds an object that cannot be saved.
    """
    if sys.byteorder != "little":
        raise ValueError("caches can be saved on little-endian machines only")
    name = str(folder)
    if "\0" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"{name!r} has a NUL or bytes that are no UTF-8; name another folder")
    try:
        folder = folder.resolve()  # a link is kept: its target is written, whether it exists or not
        circular = folder.is_symlink()
    except RuntimeError:  # Python before 3.13
        circular = True
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise _named(error, folder) from error
        circular = True
    if circular:
        raise ValueError(f"{folder} is a link that leads back to itself; name another folder")
    made = folder.parent / f"{_beside(folder)}.{secrets.token_hex(8)}.saving"
    try:
        if folder.exists() and not _replaceable(folder):
            raise ValueError(f"{folder} is there and is no saved cache; name a folder of its own for the cache")
        new = [parent for parent in folder.parents if not parent.exists()]
        folder.parent.mkdir(parents=True, exist_ok=True)
        for parent in new:
            _sync_folder(parent.parent)
        made.mkdir()
        _write(made, layers, padding, about)
        _sync_folder(made)
        _clean_up(folder, _replace(folder, made))
    except OSError as error:
        raise _named(error, folder) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)  # of a save that failed; or the cache before, of one interrupted


def _named(error: OSError, folder: Path) -> OSError:
    """The same error with the folder and the remedy."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free space on its disk or save elsewhere" if full else "name a folder that can be written"
    return OSError(
        error.errno,
        f"the cache was not saved ({error.strerror or error}); {remedy}; what was there before is unchanged",
        str(folder),
    )


def _clean_up(folder: Path, old: Path | None) -> None:
    """After a save: sync the folder above, and remove the cache from before; what fails is a warning."""
    try:
        _sync_folder(folder.parent)
    except OSError as error:
        warnings.warn(f"the cache is saved, but the system does not say that it is on the disk ({error})", stacklevel=3)
    try:
        if old is not None:
            shutil.rmtree(old)  # caches that were loaded from it keep their mapped file
    except OSError as error:
        warnings.warn(
            f"the cache is saved, but {old}, which holds the one before it, cannot be removed ({error}); remove it",
            stacklevel=3,
        )


def _beside(folder: Path) -> str:
    """How names begin of what a save puts beside a folder; a name has at most 255 bytes."""
    return "." + os.fsdecode(os.fsencode(folder.name)[:200])


def left_behind(folder: Path) -> Path | None:
    """The saved cache from before a save that was killed between its two renames, if the folder is gone; else None."""
    try:
        folder = folder.resolve()
        names = [] if folder.exists() else sorted(os.listdir(folder.parent))
    except OSError:
        return None
    ours = re.compile(re.escape(_beside(folder)) + rf"\.[0-9a-f]{{16}}{re.escape(_BEFORE)}")
    found = [name for name in names if ours.fullmatch(name)]
    return folder.parent / found[-1] if found else None


def _replace(folder: Path, made: Path) -> Path | None:
    """Give a folder's name to another one; return what had it before, under another name, or None."""
    if not folder.exists():
        made.rename(folder)
        return None
    if _exchange(made, folder):
        return made
    old = made.with_suffix(_BEFORE)
    try:
        folder.rename(old)
        made.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    return old


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; False where the system or the file system cannot.

    Raises:
        OSError: it can, but not these.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _SWAP) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _sync_folder(folder: Path) -> None:
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


def _write(folder: Path, layers: list[Any], padding: Padding, about: dict[str, Any]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    digests: dict[str, torch.Tensor] = {}
    stores: dict[int, tuple[BlockStore, np.ndarray]] = {}
    described = []
    for index, layer in enumerate(layers):
        prefix = f"layers.{index}."
        if not isinstance(layer, HybridLayer):
            kind, state, found = pack(layer)
            described.append({"stock": kind, "state": state})
            tensors |= {prefix + name: tensor for name, tensor in found.items()}
        elif not layer.past:
            described.append({})
        else:
            layer.write_back()
            assert layer.store is not None
            layer.store.settle()
            ids = _blocks(layer.store)
            stores[index] = layer.store, ids
            described.append(_describe(layer, ids))
            tensors |= {prefix + name: tensor for name, tensor in _tensors(layer, ids).items()}
            digests |= {prefix + name: tensor for name, tensor in _digests(layer.store, ids).items()}
    tensors["padding"] = torch.from_numpy(padding.valid[:, : padding.seen].copy())
    with (folder / BLOCKS).open("wb") as file:
        block_size = padding.block_size
        file.write(layout(described, block_size, about["knobs"]["host_dtype"])[0])
        for index, (store, ids) in stores.items():
            tensors[f"layers.{index}.sums"] = torch.from_numpy(_write_blocks(file, store, ids))
        _sync(file)
    about = {**about, "format": FORMAT, "layers": described, "dense": padding.dense}
    sums = {}
    for name, data in (
        (DIGESTS, save(digests)),
        (CACHE, save(tensors, {"about": json.dumps(about)})),
    ):
        sums[name] = hashlib.sha256(data).hexdigest()
        _write_file(folder / name, data)
    _write_file(folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in sums.items()).encode())


def _replaceable(folder: Path) -> bool:
    """Whether a folder is empty or holds a saved cache and nothing else, and is not the current one."""
    if not folder.is_dir() or folder.samefile(os.curdir):
        return False
    found = {file.name for file in folder.iterdir()}
    return not found or (SUMS in found and found <= {BLOCKS, DIGESTS, CACHE, SUMS})


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())  # the folder must not be renamed before its files are on disk


def _blocks(store: BlockStore) -> np.ndarray:
    """The physical blocks of a store in the order of the file: unpacked, then packed, each row by row."""
    used = store.table[:, : store.num_blocks]
    ids, first = np.unique(used, return_index=True)
    found: np.ndarray = ids[np.lexsort((first, store.pool.block_ptr[ids] & 1))]
    return found


def _describe(layer: HybridLayer, ids: np.ndarray) -> dict[str, Any]:
    store = layer.store
    assert store is not None
    packed = int((store.pool.block_ptr[ids] & 1).sum())
    return {
        "batch": store.batch, "heads": store.num_kv_heads, "dim": store.head_dim,
        "dtype": str(store.dtype).removeprefix("torch."), "length": store.length, "sealed": store.sealed,
        "packed": store.packed_blocks, "frozen": store.digests is not None and store.digests.frozen,
        "blocks": [len(ids) - packed, packed], "scores": None if layer.scores is None else layer.scores._asdict(),
        "placed": not layer.unplaced and layer.is_least,
        "queries_end": 0 if layer.last_queries is None else layer.last_queries.end,
    }  # fmt: skip


def _tensors(layer: HybridLayer, ids: np.ndarray) -> dict[str, torch.Tensor]:
    store = layer.store
    assert store is not None
    numbers = np.zeros(store.pool.num_blocks, np.int32)
    numbers[ids] = np.arange(len(ids))
    # The full width: rounding on a device may depend on it.
    table = np.zeros_like(store.table)
    table[:, : store.num_blocks] = numbers[store.table[:, : store.num_blocks]]
    found = {"table": torch.from_numpy(table)}
    if layer.last_queries is not None:
        found["queries"] = layer.last_queries.values
    check_state(layer)
    found |= {f"state.{name}": tensor for name, tensor in layer.state.tensors().items()}
    if layer.resident is not None and layer.is_least:
        resident = layer.resident
        found |= {"block_of": resident.block_of, "worth": resident.worth, "known": resident.known}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}


def _digests(store: BlockStore, ids: np.ndarray) -> dict[str, torch.Tensor]:
    digests, found = store.digests, {}
    if digests is None:
        return {}
    index = torch.from_numpy(ids.astype(np.int64))
    empty = torch.from_numpy(~np.isin(ids, store.table[:, : store.sealed]))  # these have no digest
    for name, tensor in digests.blocks.tensors.items() if store.sealed and digests.frozen else ():
        found[f"digest.{name}"] = tensor[index.to(digests.device)].cpu()
        found[f"digest.{name}"][empty] = 0
    for name in digests.statistics if digests.frozen else ():
        found[f"statistics.{name}"] = getattr(digests, name).cpu()
    return found


def layout(
    described: list[dict[str, Any]], block_size: int, host_dtype: str | None
) -> tuple[bytes, dict[str, dict[str, Any]]]:
    """The header of the file of the blocks as bytes, and its entries: dtype, shape and offsets by name.

    Args:
        described: the description of each layer (`_describe`).
        block_size: tokens in a block.
        host_dtype: format of older blocks.
    """
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for index, told in enumerate(described):
        if "blocks" not in told:
            continue
        heads, dim, dtype = told["heads"], told["dim"], getattr(torch, told["dtype"])
        shapes = {
            "blocks": (dtype, [heads, 2, block_size, dim]),
            "packed": (torch.uint8, [heads, FORMATS[host_dtype](dtype, dim, block_size).record_bytes]),
        }
        for (kind, (dtype, shape)), count in zip(shapes.items(), told["blocks"], strict=True):
            if count:
                start, end = end, end + count * math.prod(shape) * dtype.itemsize
                entries[f"layers.{index}.{kind}"] = {
                    "dtype": _NAMES[dtype], "shape": [count, *shape], "data_offsets": [start, end],
                }  # fmt: skip
    header = json.dumps(entries).encode()
    header += b" " * (-(len(header) + 8) % ALIGNMENT)
    return len(header).to_bytes(8, "little") + header, entries


def _write_blocks(file: BinaryIO, store: BlockStore, ids: np.ndarray) -> np.ndarray:
    """Write the blocks of a layer, unpacked ones first; return the checksums of their records, int64 `[n, Hkv]`."""
    pool, heads = store.pool, np.arange(store.num_kv_heads)
    addresses = pool.block_ptr[ids].copy()
    tails = _tails(store, ids)
    for place, tail in tails.items():
        addresses[place] = tail.ctypes.data
    packed = (addresses & 1).astype(bool)
    for part, record in ((addresses[~packed], pool.record_bytes), (addresses[packed] - 1, pool.packed_record_bytes)):
        nbytes = record * len(heads)
        for start, stop in _runs(part, nbytes):
            run = (ctypes.c_char * ((stop - start) * nbytes)).from_address(int(part[start]))
            file.write(memoryview(run))
    return record_sums(addresses, pool, len(heads))


def record_sums(addresses: np.ndarray, pool: HostPool, heads: int) -> np.ndarray:
    """Checksums int64 `[n, heads]` of the records of blocks; addresses are marked as in `HostPool.block_ptr`."""
    sums = np.zeros((len(addresses), heads), np.int64)
    for kind, record in ((0, pool.record_bytes), (1, pool.packed_record_bytes)):
        mine = (addresses & 1) == kind
        records = (addresses[mine, None] - kind + record * np.arange(heads)).ravel()
        part = np.zeros(len(records), np.int64)
        checksum_records(records, record, part).run("checksums")
        sums[mine] = part.reshape(-1, heads)
    return sums


def _tails(store: BlockStore, ids: np.ndarray) -> dict[int, np.ndarray]:
    """Copies of the blocks that are not full, by their index in `ids`, with 0 after the last token."""
    filled = store.length % store.block_size
    found = {}
    for place in np.flatnonzero(np.isin(ids, store.table[:, store.num_blocks - 1])) if filled else ():
        address = int(store.pool.block_ptr[ids[place]])
        raw = np.frombuffer(memoryview((ctypes.c_char * store.pool.block_bytes).from_address(address)), np.uint8)
        copy = raw.reshape(2 * store.num_kv_heads, store.block_size, -1).copy()
        copy[:, filled:] = 0
        found[int(place)] = copy
    return found


def _runs(addresses: np.ndarray, nbytes: int) -> Iterator[tuple[int, int]]:
    """Runs of blocks that are contiguous in memory, at most `_RUN` bytes each: index of the first and end."""
    start = 0
    for place in range(1, len(addresses) + 1):
        apart = place == len(addresses) or addresses[place] != addresses[place - 1] + nbytes
        if apart or (place - start) * nbytes >= _RUN:
            yield start, place
            start = place
