"""Tables of the fields of a saved cache: bounds of every number; dtype, shape and range of every tensor."""

from __future__ import annotations

from collections.abc import Collection, Container
from typing import Any

import torch
from torch import nn

from hf_offload.blocks.block_store import TABLE_STEP
from hf_offload.blocks.digests import DIGESTS, DigestStore
from hf_offload.blocks.host_format import FORMATS
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.memory_budget import MOST_BLOCKS
from hf_offload.cache.settings import Settings
from hf_offload.fields import Field, LayerSizes, check_tensors, prefixed
from hf_offload.files.segments import NAME
from hf_offload.knobs import MOST, check_count, check_flag, check_number, shown
from hf_offload.scores import Scores

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
RESIDENT = ("block_of", "worth", "known")
"""Tensors of a layer's resident set."""
_SLOTS = range(1, MOST_BLOCKS + 1)
_KNOBS = ("tier", "block_size", "resident", "device_budget", "host_dtype", "prefill_tile", "cuda_graph")


def check_about(about: Any) -> None:
    """Check the JSON description of a saved cache, except for its layers and the policy's knobs.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: a field is missing or of another kind.
    """
    for name in about["segments"]:
        if not NAME.fullmatch(name):
            raise ValueError(f"{shown(name)} is no name of a segment")
    if about["knobs"].keys() != {*_KNOBS}:
        raise ValueError("knobs are missing or unexpected")
    for name, value in about["knobs"].items():
        if not isinstance(value, str | int | float | None):
            raise ValueError(f"{name}={shown(value)} is not a value of a knob")
    if not all(isinstance(described, dict) for described in about["layers"]):
        raise ValueError("a layer has no description")
    for pair in about["donors"]:
        for layer, _ in zip(pair, range(2), strict=True):
            check_count("donors", layer, what="a layer", least=0, most=len(about["layers"]) - 1)
    check_flag("dense", about["dense"])


def check_layer(where: str, described: dict[str, Any], settings: Settings) -> None:
    """Check the description of a layer against the cache, whose padding is loaded.

    Args:
        where: the layer's name, with its separator.
        described: the description.
        settings: the cache's settings.

    Raises:
        ValueError, TypeError, KeyError: a value is missing, out of range, or does not agree with the others.
    """
    rows, tokens = len(settings.padding.valid), settings.padding.seen
    full = tokens // settings.block_size
    allowed: dict[str, Container[Any]] = {
        "batch": {rows} - {0}, "heads": range(1, MOST), "dim": range(16, 257, 16), "dtype": DTYPES,
        "length": {tokens} - {0}, "sealed": {full}, "queries_end": range(tokens + 1), "frozen": {False, True},
        "packed": range(full + 1) if FORMATS[settings.host_dtype].packs else {0}, "placed": {False, True},
    }  # fmt: skip
    for name, good in allowed.items():
        if type(described[name]) not in (int, bool, str) or described[name] not in good:
            raise ValueError(f"{where}{name}={shown(described[name])} does not agree with the others ({shown(good)})")
    for name, value in ({} if described["scores"] is None else Scores(**described["scores"])._asdict()).items():
        if value is not None or name == "scale":
            check_number(where + name, value, "a factor", above=0, most=1e9)


def query_heads_of(module: nn.Module, heads: int) -> Collection[int]:
    """The possible numbers of query heads of a decoder layer, by its number of KV heads."""
    parts: list[Any] = [part for part in module.modules() if hasattr(part, "num_key_value_groups")]
    if not parts and heads == 1:  # multi-query attention may not name its number of query heads
        return range(1, MOST)
    return (heads * parts[0].num_key_value_groups if parts else heads,)


def sizes_of(
    described: dict[str, Any], table: torch.Tensor | None, block_size: int, query_heads: Collection[int]
) -> LayerSizes:
    """The sizes that determine the shapes of a layer's tensors.

    Args:
        described: the layer's description.
        table: its block table, not checked yet.
        block_size: tokens in a block.
        query_heads: the possible numbers of query heads.
    """
    width = table.shape[1] if table is not None and table.ndim == 2 else 0
    return LayerSizes(
        described["batch"], described["heads"], query_heads, described["dim"], block_size, DTYPES[described["dtype"]],
        described["length"], width, described["placed"], _SLOTS,
    )  # fmt: skip


def layer_fields(
    described: dict[str, Any], sizes: LayerSizes, tensors: dict[str, torch.Tensor], settings: Settings, physical: int
) -> dict[str, Field]:
    """The expected tensors of a layer.

    Args:
        described: the layer's description, checked.
        sizes: the sizes that determine shapes.
        tensors: the tensors in the file; some belong together and may all be missing.
        settings: the cache's settings.
        physical: number of physical blocks.

    Raises:
        ValueError: a number on which shapes depend is wrong.
    """
    policy, size = settings.policy, settings.block_size
    blocks = -(-sizes.tokens // size)
    widths = range(-(-blocks // TABLE_STEP) * TABLE_STEP, MOST, TABLE_STEP)
    fields = {"table": Field(torch.int32, (sizes.rows, widths), 0, physical - 1)}
    if (digests := _digests(described, settings)) is not None and described["frozen"]:
        shapes = digests.statistics.items()
        fields |= {f"statistics.{name}": Field(torch.float32, (sizes.rows, *shape)) for name, shape in shapes}
    if described["queries_end"]:
        window = range(1, min(described["queries_end"], policy.requirements.query_window) + 1)
        fields["queries"] = Field(torch.float32, (sizes.rows, sizes.query_heads, window, sizes.head_dim))
    if "block_of" in tensors:
        fields |= {
            "block_of": Field(torch.int32, (*sizes.lines, _SLOTS), -1, blocks + 1),
            "worth": Field(torch.float32, (*sizes.lines, range(sizes.width + 1))),
            "known": Field(torch.int32, (1,), 0, sizes.full_blocks),
        }
        held = tensors["block_of"].shape[-1:]
        sizes = sizes._replace(slots=range(held[0], held[0] + 1) if sizes.placed and held else _SLOTS)
    if any(name.startswith("state.") for name in tensors):
        fields |= prefixed("state.", policy.state_fields(sizes))
    return fields


def check_state(layer: HybridLayer, described: dict[str, Any]) -> None:
    """Check that a policy's own fields allow what its state of a layer gives to a file.

    Args:
        layer: the layer.
        described: its description.

    Raises:
        ValueError: they do not, so that the file could not be loaded.
    """
    store, tensors = layer.store, layer.state.tensors()
    assert store is not None
    sizes = sizes_of(described, torch.from_numpy(store.table), store.block_size, range(1, MOST))
    try:
        check_tensors("", tensors, layer.policy.state_fields(sizes) if tensors else {})
    except ValueError as error:
        name = type(layer.policy).__name__
        raise ValueError(
            f"what {name} remembers of layer {layer.index} could not be loaded: {error}; {name}.state_fields must "
            f"describe what {type(layer.state).__name__}.tensors gives"
        ) from None


def segment_fields(described: dict[str, Any], tensors: dict[str, torch.Tensor], settings: Settings) -> dict[str, Field]:
    """The expected tensors of a layer in a segment.

    Args:
        described: the layer's description, each number within its own bounds.
        tensors: the tensors in the segment, without the layer's prefix.
        settings: the cache's settings.
    """
    heads, dim, size, dtype = described["heads"], described["dim"], settings.block_size, DTYPES[described["dtype"]]
    record = FORMATS[settings.host_dtype](dtype, dim, size).record_bytes
    fields = {
        "blocks": Field(dtype, (range(1, MOST), heads, 2, size, dim)),
        "packed": Field(torch.uint8, (range(1, MOST if record else 1), heads, record)),
    }
    fields = {kind: field for kind, field in fields.items() if kind in tensors}
    digests, blocks = _digests(described, settings), sum(tensors[kind].shape[0] for kind in fields)
    if blocks and digests is not None and described["frozen"] and described["sealed"]:
        fields |= {f"digest.{n}": Field(dtype, (blocks, *row)) for n, (row, dtype) in digests.tensors().items()}
    return fields


def _digests(described: dict[str, Any], settings: Settings) -> DigestStore | None:
    """An empty store of digests like the layer's.

    Raises:
        ValueError: `frozen` does not agree with the kind of digest.
    """
    name = settings.policy.requirements.digest
    made = (
        DIGESTS[name](described["heads"], described["dim"], settings.block_size, torch.device("cpu")) if name else None
    )
    least, most = (False, False) if made is None else (made.frozen, True)
    if not least <= described["frozen"] <= most:
        raise ValueError(f"frozen={described['frozen']} does not agree with the policy's digest")
    return made


def check_resident(layer: HybridLayer, block_of: torch.Tensor) -> None:
    """Check that a resident set `[B, Hkv, R]` holds no block twice, and every block that must be resident.

    Args:
        layer: the layer, with its tokens.
        block_of: the block of each slot, -1 or within the table.

    Raises:
        ValueError: it does not.
    """
    store, policy = layer.store, layer.policy
    assert store is not None
    newest = store.length // store.block_size  # the block that the next token is written into
    needed = policy.must_be_resident(layer, newest + 1)
    begins = torch.from_numpy(store.padding.sinks(0)[0])[:, None]  # blocks of padding before it may give up their slots
    needed &= torch.arange(newest + 1, device="cpu") >= begins
    needed[:, newest] = True
    held = torch.zeros(store.batch, store.num_kv_heads, store.num_blocks + 3, dtype=torch.int32, device="cpu")
    held.scatter_add_(2, block_of.long() + 1, torch.ones_like(block_of))  # index 0 counts the free slots
    held = held[:, :, 1:]
    if (held > 1).any() or ((held[:, :, : newest + 1] == 0) & needed[:, None]).any():
        raise ValueError("block_of holds a block twice, or lacks one that is always resident")
