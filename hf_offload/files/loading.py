"""Loading of saved caches: every number and tensor is checked before use; blocks are mapped or read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import nn

from hf_offload.blocks.last_queries import LastQueries
from hf_offload.blocks.memory import host_empty, host_mapped, memory_for
from hf_offload.cache.conversion import device_of
from hf_offload.cache.layer import HybridLayer, open_layer
from hf_offload.cache.stock_layers import check, first_token, unpack
from hf_offload.fields import Field, check_tensors
from hf_offload.files.saved_fields import (
    check_about,
    check_numbers,
    check_resident,
    digest_fields,
    layer_fields,
    sizes_of,
)
from hf_offload.files.saving import BLOCKS, CACHE, DIGESTS, FORMAT, SUMS, layout, left_behind, record_sums
from hf_offload.knobs import MOST, Moved, shown
from hf_offload.scores import Scores

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8}
_MEMORY = "a saved cache", 'a shorter context, fewer rows or host_dtype="int8" when it is saved need less'
_SUMS_BYTES = 1024  # larger than any valid file
_UNSOUND = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
"""The exceptions that reading a damaged or forged file may raise."""
RUNNING = {
    "tier", "resident", "device_budget", "prefill_tile", "cuda_graph", "threads", "timeout", "check_every", "progress",
}  # fmt: skip
"""Knobs that may be given on loading: they change how a cache runs, not what it holds."""


@dataclass(slots=True)
class _Blocks:
    """The file of the blocks.

    Args:
        start: offset of the data in bytes.
        size: bytes of the file.
        entries: tensors by name, as in the header.
        mapped: the mapped file, or None if it is not mapped yet.
    """

    start: int
    size: int
    entries: dict[str, dict[str, Any]]
    mapped: torch.Tensor | None = None


class SavedCache:
    """A folder written by `saving.save_cache`; all but the blocks is read, and checked as far as that needs no model.

    Args:
        folder: the folder.

    Raises:
        ValueError: it is not a saved cache, has another format, or a file was cut short, altered or forged.
        MemoryError: the host has no memory left for it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with memory_for(*_MEMORY):
            self._open()

    def _open(self) -> None:
        with self._file(SUMS) as file:
            sums = file.read(_SUMS_BYTES)
        with self._file(DIGESTS) as file:
            self._compare(DIGESTS, hashlib.file_digest(file, "sha256").hexdigest(), sums)
        with self._file(CACHE) as file:
            data = file.read()
        self._compare(CACHE, hashlib.sha256(data).hexdigest(), sums)
        with self.sound():
            self._tensors = load(data)
            length = int.from_bytes(data[:8], "little")
            self.about: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["about"])
            saved_format = self.about["format"]
        if saved_format != FORMAT:
            raise ValueError(
                f"{self.folder} was saved in format {shown(saved_format)}, this version reads format {FORMAT}; run the "
                "prompt again and save its cache anew"
            )
        with self.sound():
            check_about(self.about)
            padding = {name: part for name, part in self._tensors.items() if name == "padding"}
            check_tensors("", padding, {"padding": Field(torch.uint8, (range(MOST), range(MOST)), 0, 1)})
            rows, tokens = padding["padding"].shape
            if (rows == 0) != (tokens == 0):
                raise ValueError(f"padding has shape [{rows}, {tokens}]; no rows have no tokens")

    @contextmanager
    def sound(self, name: str = CACHE) -> Iterator[None]:
        """Turn any error over a file's contents into a ValueError that names the file and the remedy."""
        try:
            yield
        except Moved as error:
            raise ValueError(f"{self.folder}: {error}") from error
        except (*_UNSOUND, SafetensorError) as error:
            what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{self.folder / name} has invalid contents ({what}): it was damaged or forged; run the "
                "prompt again and save its cache anew"
            ) from error

    @contextmanager
    def _file(self, name: str) -> Iterator[BufferedReader]:
        """Open a regular file of the folder; a pipe or device, which might never end, is refused."""
        try:
            if not stat.S_ISREG((self.folder / name).stat().st_mode):
                raise ValueError(f"{self.folder} is no saved cache: {name} is no file")
            with (self.folder / name).open("rb") as file:
                yield file
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise  # `memory_for` says what it was for
            old = left_behind(self.folder)
            hint = "" if old is None else f"; a save was killed when it replaced {old}: load that, or rename it"
            raise ValueError(f"{self.folder} is no saved cache, or not all of one: {error}{hint}") from error

    def _compare(self, name: str, digest: str, sums: bytes) -> None:
        if f"{digest}  {name}\n".encode() not in sums.splitlines(keepends=True):
            raise self._altered(name)

    def _altered(self, name: str, what: str = "it was cut short or altered") -> ValueError:
        return ValueError(
            f"{self.folder / name} is not what was saved: {what}; run the prompt again and save its cache anew"
        )

    def restore(
        self,
        layers: list[Any],
        stock: list[Any],
        modules: Sequence[nn.Module],
        examples: Sequence[Any],
        images: Container[int],
        *,
        place: bool,
        verify: bool,
    ) -> None:
        """Fill the empty layers of a new cache.

        Args:
            layers: the cache's layers; those that were saved as stock layers are replaced.
            stock: Transformers' own layers in their place, empty.
            modules: the model's decoder layers.
            examples: layers of a cache of one token, if any layer was saved as a stock layer.
            images: indices of the layers that hold an image's tokens.
            place: whether to restore the resident sets.
            verify: whether to compare the blocks with their checksums.

        Raises:
            ValueError: a file was altered or forged, or layers are of another kind in this model.
            MemoryError: the host has no memory left for them.
        """
        if len(layers) != len(self.about["layers"]):
            raise ValueError(f"{self.folder} has {len(self.about['layers'])} layers, this model has {len(layers)}")
        blocks: _Blocks | None = None
        for index, (layer, told) in enumerate(zip(layers, self.about["layers"], strict=True)):
            device, prefix = device_of(modules[index]), f"layers.{index}."
            tensors = {n.removeprefix(prefix): part for n, part in self._tensors.items() if n.startswith(prefix)}
            kind = told.get("stock", HybridLayer.__name__)
            if kind not in (type(layer).__name__, type(stock[index]).__name__):
                raise ValueError(
                    f"layer {index} of {self.folder} is a {shown(kind)}, in this model a {type(layer).__name__}"
                )
            if "stock" in told:
                with self.sound():
                    found = layers[index] = unpack(stock[index], told["state"], tensors, device)
                    (rows, tokens), image = self._tensors["padding"].shape, index in images
                    like = first_token(found) if image and found.is_initialized else examples[index]
                    check(prefix[:-1], found, (stock[index], like), rows, None if image else tokens or None)
            elif told:
                settings = layer.settings
                if blocks is None:
                    settings.padding.copy_from(self._tensors["padding"].numpy(), dense=self.about["dense"])
                    blocks = self._blocks(settings.block_size)
                with self.sound():
                    check_numbers(prefix, told, settings)
                    sizes = sizes_of(told, tensors.get("table"), settings.block_size, modules[index])
                    check_tensors(prefix, tensors, layer_fields(told, sizes, tensors, settings))
                layer.revision = settings.padding.revision
                residence = settings.residence
                asks = residence is not None and residence.decides(device)  # what fits this device
                layer.slots = tensors["block_of"].shape[2] if place and not asks and "block_of" in tensors else None
                open_layer(layer, told["batch"], told["heads"], told["dim"], sizes.dtype, device, told["length"])
                self._fill(layer, told, tensors, blocks, verify)

    def _blocks(self, block_size: int) -> _Blocks:
        """Check size and header of the file of the blocks.

        The data need no check: any bytes are keys and values.
        """
        header, entries = layout(self.about["layers"], block_size, self.about["knobs"]["host_dtype"])
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        with self._file(BLOCKS) as file:
            size = os.fstat(file.fileno()).st_size
            if size != len(header) + end or file.read(len(header)) != header:
                raise self._altered(BLOCKS)
        return _Blocks(len(header), size, entries)

    def _fill(
        self, layer: HybridLayer, told: dict[str, Any], tensors: dict[str, torch.Tensor], blocks: _Blocks, verify: bool
    ) -> None:
        store = layer.store
        assert store is not None
        table = tensors["table"].numpy()
        store.length, store.reserved = told["length"], -(-told["length"] // store.block_size)
        plain, packed = (self._slabs(kind, layer, blocks) for kind in ("blocks", "packed"))
        store.pool.adopt(plain, packed, table[:, : store.reserved])
        if verify:
            sums = record_sums(store.pool.block_ptr, store.pool, store.num_kv_heads)
            if not np.array_equal(sums, tensors["sums"].numpy()):
                raise self._altered(BLOCKS, f"a block of layer {layer.index} was altered")
        store.table = table.copy()
        store.sealed, store.packed_blocks = told["sealed"], told["packed"]
        store.reserve_digests()
        store.revision += 1
        self._fill_digests(layer, told)
        layer.scores = None if told["scores"] is None else Scores(**told["scores"])
        if "queries" in tensors:
            layer.last_queries = LastQueries(tensors["queries"].to(layer.device), told["queries_end"])
        state = {name.removeprefix("state."): part for name, part in tensors.items() if name.startswith("state.")}
        layer.state.load(layer, state)
        if layer.resident is not None and layer.slots is not None and told["placed"]:
            with self.sound():
                check_resident(layer, tensors["block_of"])
            with layer.mirror.current():
                layer.resident.reload(tensors["block_of"], tensors["worth"], tensors["known"])
            layer.state.placed(layer)
            layer.unplaced = False

    def _fill_digests(self, layer: HybridLayer, told: dict[str, Any]) -> None:
        store, prefix = layer.store, f"layers.{layer.index}."
        assert store is not None
        digests = store.digests
        with memory_for(*_MEMORY), self.sound(DIGESTS), safe_open(self.folder / DIGESTS, "pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            found = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
            check_tensors(prefix, found, digest_fields(digests, told))
        if digests is None:
            return
        for name, saved in found.items():
            kind, _, mine = name.partition(".")
            if kind == "digest":
                digests.blocks.tensors[mine][: len(saved)] = saved.to(digests.device)
            else:
                setattr(digests, mine, saved.to(digests.device, copy=True))  # a copy: aligned
        digests.frozen = told["frozen"]

    def _slabs(self, kind: str, layer: HybridLayer, blocks: _Blocks) -> list[torch.Tensor]:
        """The blocks of one kind: a view of the mapped file, or, with two memories, read into (pinned) host memory."""
        entry = blocks.entries.get(f"layers.{layer.index}.{kind}")
        if entry is None:
            return []
        start, end = (blocks.start + place for place in entry["data_offsets"])
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if not layer.two_memories:
            if blocks.mapped is None:
                with memory_for(*_MEMORY, blocks.size):
                    blocks.mapped = host_mapped(self.folder / BLOCKS)
            return [blocks.mapped[start:end].view(dtype).view(shape)]
        assert layer.store is not None
        slab = host_empty(shape, dtype, pin=layer.device.type == "cuda")
        with self._file(BLOCKS) as file:
            file.seek(start)
            if file.readinto(slab.view(-1).view(torch.uint8).numpy().data) != slab.nbytes:
                raise self._altered(BLOCKS)
        return [slab]


def merge_knobs(saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Merge the saved knobs of a cache with those given on loading.

    Raises:
        ValueError: a given knob is not in `RUNNING`.
    """
    if fixed := sorted(given.keys() - RUNNING):
        raise ValueError(
            f"{', '.join(fixed)}: a saved cache keeps its own; what can be given is {', '.join(sorted(RUNNING))}"
        )
    if given.keys() & {"resident", "device_budget"}:
        saved = {**saved, "resident": None, "device_budget": None}
    return saved | given
