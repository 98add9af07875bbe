"""Saving of a cache to a folder of safetensors files.

    segment-….safetensors   full blocks and their digests (`segments.py`); other saved caches may share the file
    tail-….safetensors      blocks that may still change
    cache.safetensors       tables, padding, resident sets, policy states; and in its metadata, under "about", a JSON
                            text: names of the segments, policy, knobs, sizes, the model's fingerprint
                            (`saved_fields.py` has the bounds of each); a checksum of all this (`tensor_file.py`)

Segments are named by their checksum and never change. The last step of a save gives cache.safetensors its name, in
place of an earlier one: a killed process or a power cut leaves one of the two saved caches, whole. The files of the
other one are removed then, or by the next save.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.padding import Padding
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.stock_layers import pack
from hf_offload.files import tensor_file
from hf_offload.files.saved_fields import check_state
from hf_offload.files.segments import NAME, Segment, write_segments

FORMAT = 9
"""Version of the format; incremented when caches saved before can no longer be read."""
CACHE = "cache.safetensors"
_UNFINISHED = re.compile(rf"(segment|tail|cache)-{tensor_file.UNFINISHED}")
_OLD = {"blocks.safetensors", "digests.safetensors", "SHA256SUMS"}  # of formats before 9


def save_cache(
    folder: Path,
    layers: list[Any],
    padding: Padding,
    about: dict[str, Any],
    *,
    parent: Sequence[Segment] = (),
    more: Mapping[str, bytes] | None = None,
) -> list[Segment]:
    """Write a cache that has no work in flight; an earlier saved cache in the folder is replaced.

    Args:
        folder: the target.
        layers: the cache's layers.
        padding: validity of its tokens.
        about: the JSON description of the cache (policy, knobs, fingerprint).
        parent: the segments of a saved cache of which this one is a fork, and which is unchanged since: those of which
            half is used are linked.
        more: contents of further files by name; with them, the folder and its files are the user's alone.

    Returns:
        The segments.

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
    folder = Path(os.path.realpath(folder))  # a link is kept: its target is written, whether it exists or not
    if os.path.islink(folder):
        raise ValueError(f"{folder} is a link that leads back to itself; name another folder")
    try:
        exists = folder.exists()
        before = set(os.listdir(folder)) if folder.is_dir() else set()
        if exists and not _replaceable(folder, before - {*(more or ())}):
            raise ValueError(f"{folder} is there and is no saved cache; name a folder of its own for the cache")
        new = [above for above in (folder, *folder.parents) if not above.exists()]
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o777 if more is None else 0o700, exist_ok=True)
        try:
            segments = _write(folder, layers, padding, about, parent, more)
        except BaseException:
            with suppress(OSError):
                for name in {*os.listdir(folder)} - before:
                    (folder / name).unlink()
                if not exists:
                    folder.rmdir()
            raise
        for above in (folder, *(path.parent for path in new)):
            tensor_file.sync_folder(above)
    except OSError as error:
        raise _named(error, folder) from error
    for name in before - {CACHE, *(more or ()), *(segment.path.name for segment in segments)}:
        try:
            (folder / name).unlink()  # caches that were loaded from it keep their mapped file
        except OSError as error:
            warnings.warn(f"the cache is saved, but {folder / name} is of no use and stays ({error})", stacklevel=2)
    return segments


def _named(error: OSError, folder: Path) -> OSError:
    """The same error with the folder and the remedy."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free space on its disk or save elsewhere" if full else "name a folder that can be written"
    return OSError(
        error.errno,
        f"the cache was not saved ({error.strerror or error}); {remedy}; what was there before is unchanged",
        str(folder),
    )


def _write(
    folder: Path, layers: list[Any], padding: Padding, about: dict[str, Any], parent: Sequence[Segment],
    more: Mapping[str, bytes] | None,
) -> list[Segment]:  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    stores: dict[int, BlockStore] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, HybridLayer) and layer.past:
            layer.write_back()
            assert layer.store is not None
            layer.store.wait()
            stores[index] = layer.store
    sealed = not any(store.awaits_digests for store in stores.values())
    segments = write_segments(folder, stores, parent, sealed=sealed)
    described: list[dict[str, Any]] = []
    for index, layer in enumerate(layers):
        prefix = f"layers.{index}."
        if index in stores:
            ids = np.concatenate([part.blocks[index] for part in segments if index in part.blocks])
            described.append(_describe(layer))
            check_state(layer, described[-1])
            tensors |= {prefix + name: tensor for name, tensor in _tensors(layer, ids).items()}
        elif isinstance(layer, HybridLayer):
            described.append({})
        else:
            kind, state, packed = pack(layer)
            described.append({"stock": kind, "state": state})
            tensors |= {prefix + name: tensor for name, tensor in packed.items()}
    tensors["padding"] = torch.from_numpy(padding.valid[:, : padding.seen].copy())
    names = [segment.path.name for segment in segments]
    about = {**about, "format": FORMAT, "segments": names, "layers": described, "dense": padding.dense}
    for name, data in (more or {}).items():
        tensor_file.write(folder / name, data)
    for path in folder.iterdir() if more is not None else ():
        path.chmod(0o600)
    data = tensor_file.pack(json.dumps(about), tensors)
    tensor_file.replace(folder / CACHE, data, mode=None if more is None else 0o600)
    return segments


def _replaceable(folder: Path, names: set[str]) -> bool:
    """Whether a folder with these files is empty or of a saved cache, and is not the current one."""
    if not folder.is_dir() or folder.samefile(os.curdir):
        return False
    ours = {name for name in names if NAME.fullmatch(name) or _UNFINISHED.fullmatch(name)}
    return names <= {CACHE, *ours, *(_OLD if CACHE in names else ())}


def _describe(layer: HybridLayer) -> dict[str, Any]:
    store = layer.store
    assert store is not None
    return {
        "batch": store.batch, "heads": store.num_kv_heads, "dim": store.head_dim,
        "dtype": str(store.dtype).removeprefix("torch."), "length": store.length, "sealed": store.sealed,
        "packed": store.packed_blocks, "frozen": store.digests is not None and store.digests.frozen,
        "scores": None if layer.scores is None else layer.scores._asdict(),
        "placed": not layer.unplaced and layer.is_least,
        "queries_end": 0 if layer.last_queries is None else layer.last_queries.end,
    }  # fmt: skip


def _tensors(layer: HybridLayer, ids: np.ndarray) -> dict[str, torch.Tensor]:
    store = layer.store
    assert store is not None
    numbers = np.zeros(store.pool.num_blocks, np.int32)
    held = np.flatnonzero(ids >= 0)
    numbers[ids[held]] = held
    # The full width: rounding on a device may depend on it.
    table = np.zeros_like(store.table)
    table[:, : store.num_blocks] = numbers[store.table[:, : store.num_blocks]]
    tensors = {"table": torch.from_numpy(table)}
    if store.digests is not None and store.digests.frozen:
        tensors |= {f"statistics.{name}": getattr(store.digests, name) for name in store.digests.statistics}
    if layer.last_queries is not None:
        tensors["queries"] = layer.last_queries.values
    tensors |= {f"state.{name}": tensor for name, tensor in layer.state.tensors().items()}
    if layer.resident is not None and layer.is_least:
        resident = layer.resident
        tensors |= {"block_of": resident.block_of, "worth": resident.worth, "known": resident.scored}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
