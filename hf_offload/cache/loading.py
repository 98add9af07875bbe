"""A saved cache read again: its small files at once, its blocks when they are wanted."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import nn

from hf_offload.cache import knowledge
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.memory import host_empty, host_mapped, memory_for
from hf_offload.cache.opening import open_layer
from hf_offload.cache.queries import LastQueries
from hf_offload.cache.saving import BLOCKS, CACHE, DIGESTS, FORMAT, SUMS
from hf_offload.cache.stock import unpack
from hf_offload.cache.takeover import device_of
from hf_offload.cache.unchecked import Unchecked, check_blocks
from hf_offload.cache.window import load_averages

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
_MEMORY = "a saved cache", 'a shorter context, fewer rows or host_dtype="int8" when it is saved need less'
RUNNING = {"tier", "resident", "device_budget", "prefill_tile", "cuda_graph", "threads", "timeout", "progress"}
"""Knobs that say how a cache runs, not what it holds."""


class SavedCache:
    """A folder that `saving.save_cache` wrote: everything but the blocks, checked.

    Args:
        folder: of the cache.

    Raises:
        ValueError: it is none, it was saved by another version, or a file was cut short or altered.
        MemoryError: the host has no memory left for it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with memory_for(*_MEMORY):
            self._open(folder)

    def _open(self, folder: Path) -> None:
        sums = self._read(SUMS)
        self._compare(DIGESTS, self._digest_of(DIGESTS), sums)
        data = self._read(CACHE)
        self._compare(CACHE, hashlib.sha256(data).hexdigest(), sums)
        self._tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        self.about: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["about"])
        if self.about["format"] != FORMAT:
            raise ValueError(
                f"{folder} was saved in format {self.about['format']}, this version reads format {FORMAT}; run the "
                "prompt again and save its cache anew"
            )
        self._start, self._entries = self._blocks_header()

    def _read(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise self._missing(error) from error

    def _digest_of(self, name: str) -> str:
        try:
            with (self.folder / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise self._missing(error) from error

    def _compare(self, name: str, digest: str, sums: bytes) -> None:
        if f"{digest}  {name}\n".encode() not in sums.splitlines(keepends=True):
            raise self._altered(name)

    def _missing(self, error: OSError) -> Exception:
        if error.errno == errno.ENOMEM:
            return error  # `memory_for` says what it was for
        return ValueError(f"{self.folder} is no saved cache, or not all of one: {error}")

    def _altered(self, name: str) -> ValueError:
        return ValueError(
            f"{self.folder / name} is not what was saved: it was cut short or altered; run the prompt again and save "
            "its cache anew"
        )

    def _blocks_header(self) -> tuple[int, dict[str, Any]]:
        """Where the blocks' data begin in their file, and what lies where."""
        path = self.folder / BLOCKS
        try:
            with path.open("rb") as file:
                head = file.read(8)
                header = file.read(min(int.from_bytes(head, "little"), self.about["blocks"]["size"]))
            size = path.stat().st_size
        except OSError as error:
            raise self._missing(error) from error
        known = self.about["blocks"]
        if size != known["size"] or hashlib.sha256(header).hexdigest() != known["header"]:
            raise self._altered(BLOCKS)
        return 8 + len(header), json.loads(header)

    def restore(self, layers: list[Any], stock: list[Any], modules: Sequence[nn.Module], *, place: bool) -> None:
        """Fill the empty layers of a new cache.

        Args:
            layers: of the cache; those that were saved as stock layers are replaced.
            stock: the layers that Transformers would have in their place, empty.
            modules: the model's decoder layers.
            place: whether what was resident is to be resident again.

        Raises:
            ValueError: a file was altered, or the layers are of other kinds.
            MemoryError: the host has no memory left for them.
        """
        if len(layers) != len(self.about["layers"]):
            raise ValueError(f"{self.folder} has {len(self.about['layers'])} layers, this model has {len(layers)}")
        mapped: torch.Tensor | None = None
        for index, (layer, told) in enumerate(zip(layers, self.about["layers"], strict=True)):
            device, prefix = device_of(modules[index]), f"layers.{index}."
            tensors = {n.removeprefix(prefix): part for n, part in self._tensors.items() if n.startswith(prefix)}
            kind = told.get("stock", HybridLayer.__name__)
            if kind not in (type(layer).__name__, type(stock[index]).__name__):
                raise ValueError(f"layer {index} of {self.folder} is a {kind}, in this model a {type(layer).__name__}")
            if "stock" in told:
                layers[index] = unpack(stock[index], told["state"], tensors, device)
            elif told:
                padding = layer.settings.padding
                if not padding.seen:
                    padding.copy_from(self._tensors["padding"].numpy(), dense=self.about["dense"])
                layer.revision = padding.revision
                layer.slots = tensors["block_of"].shape[2] if place and "block_of" in tensors else None
                dtype = getattr(torch, told["dtype"])
                open_layer(layer, told["batch"], told["heads"], told["dim"], dtype, device, told["length"])
                if not layer.has_slots and mapped is None and self._entries:
                    with memory_for(*_MEMORY, self.about["blocks"]["size"]):
                        mapped = host_mapped(self.folder / BLOCKS)
                self._fill(layer, told, tensors, mapped)

    def _fill(
        self,
        layer: HybridLayer,
        told: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        mapped: torch.Tensor | None,
    ) -> None:
        store = layer.store
        assert store is not None
        table, sums = tensors["table"].numpy(), tensors["sums"].numpy()
        plain, packed = (self._slabs(kind, layer, mapped) for kind in ("blocks", "packed"))
        store.pool.adopt(plain, packed, table)
        store.pool.unchecked = Unchecked(sums, self.folder / BLOCKS)
        # Room for as many blocks as there was before: what a device computes may be rounded by it.
        store.table = np.zeros((store.batch, told["width"]), np.int32)
        store.table[:, : table.shape[1]] = table
        store.length, store.reserved = told["length"], table.shape[1]
        store.sealed, store.packed_blocks = told["sealed"], told["packed"]
        store.reserve_digests()
        store.revision += 1
        # The block that is written into next is read before it is asked for; with two memories all have been read now.
        check_blocks(store, 0 if layer.has_slots else store.length // store.block_size, store.num_blocks)
        if store.digests is not None:
            with memory_for(*_MEMORY), safe_open(self.folder / DIGESTS, "pt") as file:
                for name in store.digests.tensors() if store.sealed else ():
                    saved = file.get_tensor(f"layers.{layer.index}.digest.{name}")
                    getattr(store.digests, name)[: len(sums)] = saved.to(store.digests.device)
                for name in store.digests.statistics if told["frozen"] else ():
                    saved = file.get_tensor(f"layers.{layer.index}.statistics.{name}")
                    setattr(store.digests, name, saved.to(store.digests.device))
            store.digests.frozen = told["frozen"]
        layer.scale, layer.softcap = told["scale"], told["softcap"]
        if "queries" in tensors:
            layer.last_queries = LastQueries(tensors["queries"].to(layer.device), told["queries_end"])
        state = {name.removeprefix("state."): part for name, part in tensors.items() if name.startswith("state.")}
        layer.policy.unpack_state(layer.state, {name: part.to(layer.device) for name, part in state.items()})
        if layer.salience is not None:
            known = {name.removeprefix("salience."): part for name, part in tensors.items() if "salience." in name}
            knowledge.unpack(layer.salience, known, window=layer.policy.window_tokens(0) is not None)
        if layer.resident is not None and layer.slots is not None and told["placed"]:
            with layer.mirror.current():
                layer.resident.reload(tensors["block_of"], tensors["worth"], tensors["known"])
            load_averages(layer)
            layer.unplaced = False

    def _slabs(self, kind: str, layer: HybridLayer, mapped: torch.Tensor | None) -> list[torch.Tensor]:
        """Blocks of one kind: a part of the mapped file, or read into memory that a GPU can reach."""
        entry = self._entries.get(f"layers.{layer.index}.{kind}")
        if entry is None:
            return []
        start, end = (self._start + place for place in entry["data_offsets"])
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if mapped is not None:
            return [mapped[start:end].view(dtype).view(shape)]
        assert layer.store is not None
        pin, pieces = layer.device.type == "cuda", layer.store.pool.pieces(shape[0], packed=kind == "packed")
        slabs = [host_empty((blocks, *shape[1:]), dtype, pin=pin) for blocks in pieces]
        with (self.folder / BLOCKS).open("rb") as file:
            file.seek(start)
            for slab in slabs:
                if file.readinto(slab.view(-1).view(torch.uint8).numpy().data) != slab.nbytes:
                    raise self._altered(BLOCKS)
        return slabs


def merge_knobs(saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The knobs of a cache that is loaded.

    Raises:
        ValueError: a knob is given on which what was saved depends.
    """
    if fixed := sorted(given.keys() - RUNNING):
        raise ValueError(
            f"{', '.join(fixed)}: a saved cache keeps its own; what can be given is {', '.join(sorted(RUNNING))}"
        )
    if given.keys() & {"resident", "device_budget"}:
        saved = {**saved, "resident": None, "device_budget": None}
    return saved | given
