"""Loading of saved caches: every number and tensor is checked before use; blocks are mapped or read."""

from __future__ import annotations

import errno
import stat
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_offload.blocks.digests import DigestStore
from hf_offload.blocks.last_queries import LastQueries
from hf_offload.blocks.memory import host_empty, memory_for
from hf_offload.cache.conversion import device_of
from hf_offload.cache.layer import HybridLayer, open_layer
from hf_offload.cache.stock_layers import check, unpack
from hf_offload.fields import Field, check_tensors
from hf_offload.files import tensor_file
from hf_offload.files.saved_fields import (
    RESIDENT,
    check_about,
    check_layer,
    check_resident,
    layer_fields,
    query_heads_of,
    segment_fields,
    sizes_of,
)
from hf_offload.files.saving import CACHE, FORMAT
from hf_offload.files.segments import KINDS, Blocks, Segment, checksum, map_segment
from hf_offload.knobs import MOST, Moved, shown
from hf_offload.scores import Scores

_MEMORY = "a saved cache", 'a shorter context, fewer rows or host_dtype="int8" when it is saved need less'
RUNNING = {
    "tier", "resident", "device_budget", "prefill_tile", "cuda_graph", "threads", "timeout", "check_every", "progress",
}  # fmt: skip
"""Knobs that may be given on loading: they change how a cache runs, not what it holds."""


class DamagedError(ValueError):
    """A saved cache is not there, not whole, or not what was saved."""


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
        with self._file(CACHE) as file:
            data = file.read()
        with self.sound():
            self.about, self._tensors, whole = tensor_file.unpack(data)
            if whole is False:
                raise self._altered(CACHE)
            saved_format = self.about["format"]
            if saved_format == FORMAT and whole is None:
                raise self._altered(CACHE)
        if saved_format != FORMAT:
            raise ValueError(
                f"{self.folder} was saved in format {shown(saved_format)}, this version reads format {FORMAT}; run the "
                "prompt again and save its cache again"
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
        except DamagedError:
            raise
        except Moved as error:
            raise ValueError(f"{self.folder}: {error}") from error
        except tensor_file.UNSOUND as error:
            what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise DamagedError(
                f"{self.folder / name} has invalid contents ({what}): it was damaged or forged; run the "
                "prompt again and save its cache again"
            ) from error

    @contextmanager
    def _file(self, name: str) -> Iterator[BufferedReader]:
        """Open a regular file of the folder; a pipe or device, which might never end, is refused."""
        try:
            if not stat.S_ISREG((self.folder / name).stat().st_mode):
                raise DamagedError(f"{self.folder} is no saved cache: {name} is no file")
            with (self.folder / name).open("rb") as file:
                yield file
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise  # `memory_for` says what it was for
            raise DamagedError(f"{self.folder} is no saved cache, or not all of one: {error}") from error

    def _altered(self, name: str) -> ValueError:
        return DamagedError(
            f"{self.folder / name} is not what was saved: it was cut short or altered; run the prompt again and save "
            "its cache again"
        )

    def restore(
        self,
        layers: list[Any],
        stock: list[Any],
        modules: Sequence[nn.Module],
        images: Container[int],
        *,
        restore_resident: bool,
        verify: bool,
    ) -> list[Segment]:
        """Fill the empty layers of a new cache.

        Args:
            layers: the cache's layers; those that were saved as stock layers are replaced.
            stock: Transformers' own layers in their stead, empty.
            modules: the model's decoder layers.
            images: indices of the layers that hold an image's tokens.
            restore_resident: whether to restore the resident sets.
            verify: whether to compare the segments with their checksums.

        Returns:
            The segments, with the physical blocks of the layers' stores.

        Raises:
            ValueError: a file was altered or forged, or layers are of another kind in this model.
            MemoryError: the host has no memory left for them.
        """
        if len(layers) != len(self.about["layers"]):
            raise ValueError(f"{self.folder} has {len(self.about['layers'])} layers, this model has {len(layers)}")
        with memory_for(*_MEMORY):
            mapped = [self._map(name, verify=verify) for name in self.about["segments"]]
        for layer in (layer for layer in layers if isinstance(layer, HybridLayer)):
            layer.settings.padding.copy_from(self._tensors["padding"].numpy(), dense=self.about["dense"])
            break  # all layers have the same
        blocks: list[Blocks] = [{} for _ in mapped]
        sealed = True
        for index, (layer, described) in enumerate(zip(layers, self.about["layers"], strict=True)):
            device, prefix = device_of(modules[index]), f"layers.{index}."
            tensors = _of_layer(self._tensors, prefix)
            if not restore_resident:
                tensors = {name: part for name, part in tensors.items() if name not in RESIDENT}
            kind = described.get("stock", HybridLayer.__name__)
            if kind not in (type(layer).__name__, type(stock[index]).__name__):
                raise ValueError(
                    f"layer {index} of {self.folder} is a {shown(kind)}, in this model a {type(layer).__name__}"
                )
            if "stock" in described:
                with self.sound():
                    stock_layer = layers[index] = unpack(stock[index], described["state"], tensors, device)
                    (rows, tokens), image = self._tensors["padding"].shape, index in images
                    check(prefix[:-1], stock_layer, stock[index], rows, None if image else tokens or None)
            elif described:
                settings, parts = layer.settings, [_of_layer(each, prefix) for each in mapped]
                with self.sound():
                    check_layer(prefix, described, settings)
                for name, part in zip(self.about["segments"], parts, strict=True):
                    with self.sound(name):
                        check_tensors(prefix, part, segment_fields(described, part, settings))
                counts = [sum(len(part[kind]) for kind in KINDS if kind in part) for part in parts]
                with self.sound():
                    query_heads = query_heads_of(modules[index], described["heads"])
                    sizes = sizes_of(described, tensors.get("table"), settings.block_size, query_heads)
                    check_tensors(prefix, tensors, layer_fields(described, sizes, tensors, settings, sum(counts)))
                residence = settings.residence
                asks = residence is not None and residence.decides(device)  # what fits this device
                restored = restore_resident and not asks and "block_of" in tensors
                open_layer(
                    layer, described["batch"], described["heads"], described["dim"], sizes.dtype, device,
                    described["length"], slots=tensors["block_of"].shape[2] if restored else None,
                )  # fmt: skip
                self._fill(layer, described, tensors, parts)
                sealed = sealed and not layer.store.awaits_digests
                for block_ids, stop, count in zip(blocks, np.cumsum(counts), counts, strict=True):
                    block_ids[index] = np.arange(stop - count, stop, dtype=np.int32)
            elif any(_of_layer(each, prefix) for each in mapped):
                with self.sound():
                    raise ValueError(f"{prefix}blocks belong to no tokens")
        names = zip(self.about["segments"], blocks, strict=True)
        return [Segment(self.folder / name, block_ids, sealed) for name, block_ids in names]

    def _map(self, name: str, *, verify: bool) -> dict[str, torch.Tensor]:
        """The tensors of a segment, which share the memory of the mapped file."""
        with self._file(name) as file, self.sound(name):
            tensors, data = map_segment(file)
            if verify and checksum(data) not in name:
                raise self._altered(name)
        return tensors

    def _fill(
        self, layer: HybridLayer, described: dict[str, Any], tensors: dict[str, torch.Tensor],
        parts: list[dict[str, torch.Tensor]],
    ) -> None:  # fmt: skip
        store = layer.store
        assert store is not None
        table = tensors["table"].numpy()
        store.length, store.reserved = described["length"], -(-described["length"] // store.block_size)
        slabs = [part[kind] for part in parts for kind in KINDS if kind in part]
        if layer.two_memories:
            slabs = [_in_memory(slab, pin=layer.device.type == "cuda") for slab in slabs]
        store.pool.adopt(slabs, table[:, : store.reserved])
        with self.sound():
            if store.length % store.block_size and (store.pool.block_ptr[table[:, store.reserved - 1]] & 1).any():
                raise ValueError("the last block is packed")
        store.table = table.copy()
        store.sealed, store.packed_blocks = described["sealed"], described["packed"]
        store.reserve_digests()
        store.revision += 1
        if store.digests is not None:
            _fill_digests(store.digests, described, tensors, parts)
        held = "queries" in tensors
        queries = LastQueries(tensors["queries"].to(layer.device), described["queries_end"]) if held else None
        layer.remember(None if described["scores"] is None else Scores(**described["scores"]), queries)
        layer.state.load(layer, _of_layer(tensors, "state."))
        if layer.resident is not None and layer.slots is not None and described["placed"]:
            with self.sound():
                check_resident(layer, tensors["block_of"])
            with layer.mirror.current():
                layer.resident.reload(tensors["block_of"], tensors["worth"], tensors["known"])
            layer.state.placed(layer)
            layer.note_placed()


def _of_layer(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): part for name, part in tensors.items() if name.startswith(prefix)}


def _in_memory(slab: torch.Tensor, *, pin: bool) -> torch.Tensor:
    """A copy of a part of a mapped file in (pinned) host memory."""
    return host_empty(tuple(slab.shape), slab.dtype, pin=pin).copy_(slab)


def _fill_digests(
    digests: DigestStore,
    described: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    parts: list[dict[str, torch.Tensor]],
) -> None:
    for name in digests.tensors():
        if saved := [part[f"digest.{name}"] for part in parts if f"digest.{name}" in part]:
            whole = torch.cat(saved)
            digests.blocks.tensors[name][: len(whole)] = whole.to(digests.device)
    for name, statistic in _of_layer(tensors, "statistics.").items():
        setattr(digests, name, statistic.to(digests.device, copy=True))  # a copy: aligned
    digests.frozen = described["frozen"]


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
