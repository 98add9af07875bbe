"""Device and host memory of a cache, computed from a model's config: `hf-offload plan`."""

from __future__ import annotations

import ast
import bisect
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hf_offload.blocks.block_store import BlockStore
from hf_offload.blocks.digests import DIGESTS
from hf_offload.blocks.memory import size_text
from hf_offload.blocks.padding import Padding
from hf_offload.cache.arrivals import unsuitable
from hf_offload.cache.memory_budget import digest_capacity, make_budget, resident_tokens
from hf_offload.cache.residence import blocks_soon, fitting_slots
from hf_offload.cache.settings import AUTO, check_sizes
from hf_offload.fields import LayerSizes
from hf_offload.graph.graph_support import capture_bytes
from hf_offload.hybrid_cache import HybridCache
from hf_offload.knobs import MOST, check_count, shown
from hf_offload.model.model_support import held_layers, stock_layers
from hf_offload.policies.registry import Policy, make_policy
from hf_offload.tools.tables import make_table

DEFAULTS = ("full", "window", "scout", "hgca", "fixed_hybrid", "quest", "h2o", "infinigen")
"""Policies that need no file beside the model."""
MOST_ROWS = 65536
"""The largest batch that is planned."""
CACHE_KNOBS = {
    name
    for name, parameter in inspect.signature(HybridCache.__init__).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
"""Knobs of `HybridCache`, which all policies have."""
MEMORY_KNOBS = ("block_size", "resident", "device_budget", "host_dtype", "prefill_tile")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model's KV cache.

    Args:
        layers: number of layers that a `HybridCache` holds.
        windows: for each other layer, the tokens that it keeps on the device; None: all tokens.
        kv_heads, query_heads, head_dim: heads and head dimension of a layer.
        dtype: dtype of keys and values.
        weights: bytes of the parameters.
        vocabulary: number of tokens that the model knows.
    """

    layers: int
    windows: tuple[int | None, ...]
    kv_heads: int
    query_heads: int
    head_dim: int
    dtype: torch.dtype
    weights: int
    vocabulary: int

    def stock_bytes(self, batch: int, tokens: int) -> int:
        """Bytes of the layers that keep Transformers' own cache."""
        kept = sum(tokens if window is None else min(window - 1, tokens) for window in self.windows)
        return batch * kept * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Memory:
    """Memory of a cache after a prompt in one forward; with one memory `device` is 0.

    Args:
        resident: resident tokens of a row and KV head; 0: all, or one memory.
        resident_bytes: bytes of resident blocks and of the policy's state on the device.
        host_bytes: bytes of all tokens on the host.
        digest_bytes: bytes of the digests of all blocks, on the host if `digests_on_host`.
        salience_bytes: bytes of the policy's state on the host. HGCA's retained copies of tokens, at most `host_bytes`,
            are not included.
        stock_bytes: bytes on the device of layers that keep Transformers' own cache.
        tile_bytes: bytes of the prefill tiles on the device, shared by all layers.
        graph_bytes: bytes on the device of a captured step, roughly; 0 for what is not captured.
    """

    resident: int
    resident_bytes: int
    host_bytes: int
    digest_bytes: int
    digests_on_host: bool
    salience_bytes: int
    stock_bytes: int
    tile_bytes: int
    graph_bytes: int

    @property
    def device(self) -> int:
        """Bytes of device memory, without the prefill tiles and a captured step."""
        return self.resident_bytes + self.stock_bytes + (0 if self.digests_on_host else self.digest_bytes)

    @property
    def host(self) -> int:
        """Bytes of host memory."""
        return self.host_bytes + self.salience_bytes + (self.digest_bytes if self.digests_on_host else 0)


_COUNT = "a count in the model's config"


def _heads(config: Any) -> tuple[int, int, int]:
    """Query heads, KV heads and head size of a layer, by its config; zeros without heads."""
    query_heads = getattr(config, "num_attention_heads", None) or 0
    if not query_heads:
        return 0, 0, 0
    dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    return query_heads, getattr(config, "num_key_value_heads", None) or query_heads, dim


def shape_of(config: PreTrainedConfig, dtype: torch.dtype) -> Shape:
    """Return the sizes of a model's KV cache.

    Args:
        config: the model's config.
        dtype: dtype of weights, keys and values.

    Raises:
        ValueError: the config lacks a size, or the model's keys and values do not fit into blocks.
    """
    text: Any = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) or not hasattr(text, "num_hidden_layers"):
        raise ValueError(f"{config.model_type}: HybridCache serves single stacks of decoder layers; use DynamicCache")
    check_count("num_hidden_layers", text.num_hidden_layers, what=_COUNT)
    layers: list[Any] = [text.per_layer_config[index] for index in range(text.num_hidden_layers)]
    for layer in layers if text.is_heterogeneous else layers[:1]:
        for name in ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim"):
            if getattr(layer, name, None) is not None:
                check_count(name, getattr(layer, name), what=_COUNT)
    stock = stock_layers(text)
    held = held_layers(text, stock)
    windows = tuple(getattr(layer, "sliding_window", None) for layer, ours in zip(stock, held, strict=True) if not ours)
    sizes = {_heads(layer) for layer, ours in zip(layers, held, strict=True) if ours}
    if not sizes or not all(query_heads for query_heads, _, _ in sizes):
        raise ValueError(f"{config.model_type}: no layer is plain full attention; nothing is offloaded")
    if len(sizes) > 1:
        raise ValueError(
            f"{config.model_type}: layers with full attention differ in their heads or head size, which a plan does "
            "not cover; HybridCache serves them: see cache.stats() after a prompt"
        )
    ((query_heads, kv_heads, dim),) = sizes
    key = torch.empty(1, kv_heads, 1, dim, device="meta", dtype=torch.float32)
    reason = "its keys and values are compressed" if hasattr(text, "kv_lora_rank") else unsuitable(key, key)
    if reason:
        raise ValueError(f"{config.model_type}: {reason}; nothing is offloaded")
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # the model's code may raise anything for a senseless number
        raise ValueError(f"{config.model_type}: the config describes no model that can be built ({error})") from error
    weights = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    return Shape(sum(held), windows, kv_heads, query_heads, dim, dtype, weights, text.vocab_size)


def parse_tokens(text: str) -> int:
    """Parse a number of tokens, such as `4096`, `32k` or `32K` (k: 1,024).

    Raises:
        ValueError: not such a number, or not within 1 to 2³¹ - 1.
    """
    number, thousands = (text[:-1], 1024) if text[-1:] in ("k", "K") else (text, 1)
    tokens = int(number) * thousands if number.isdecimal() and len(number) <= len(str(MOST)) else 0
    if not 1 <= tokens <= MOST:
        raise ValueError(
            f"context={shown(text)} is not a number of tokens; use one from 1 to {MOST}, such as 4096 or 32k"
        )
    return tokens


def parse_setting(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a policy with options, such as `scout` or `scout:budget=1024,recall=8`, into name and options.

    Raises:
        ValueError: not of this form, or an option is set twice.
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        knob, equals, value = part.partition("=")
        if not equals or not knob.strip().isidentifier():
            raise ValueError(f"{text!r} is not a policy with options; write it like scout:budget=1024,recall=8")
        if knob.strip() in options:
            raise ValueError(f"{text!r} sets {knob.strip()} twice; leave one of them out")
        try:
            options[knob.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            options[knob.strip()] = value.strip()
    return name.strip(), options


def memory_of(
    shape: Shape, policy: str | Policy, options: dict[str, Any], *, context: int, batch: int,
    two_memories: bool = True, device: int | None = None,
) -> Memory:  # fmt: skip
    """Return the memory of a cache after a prompt in one forward.

    The cache's own functions compute it, so `stats()` reports the same numbers after the prompt. A context that grows
    by decode steps or chunks takes up to a quarter more memory for digests.

    Args:
        shape: sizes of the model's KV cache.
        policy: name of the policy, or an instance.
        options: knobs of the cache (`MEMORY_KNOBS`) and of the policy.
        context: tokens of a row; batch: rows.
        two_memories: whether the cache has device and host memory, or one for both.
        device: bytes of device memory, of which the weights take their part, for `resident="auto"`; None: too little.

    Raises:
        ValueError: an option that is not allowed.
    """
    if others := options.keys() & CACHE_KNOBS - set(MEMORY_KNOBS):
        raise ValueError(f"{', '.join(sorted(others))}: not part of a plan; leave it out")
    memory = {name: options[name] for name in MEMORY_KNOBS if name in options}
    chosen = make_policy(policy, {name: value for name, value in options.items() if name not in memory})
    chosen = chosen.with_defaults(two_memories=two_memories)
    size, tile = memory.get("block_size"), memory.get("prefill_tile", 4096)
    size = chosen.block_size if size is None else size
    check_sizes(size, tile, memory.get("host_dtype"))
    chosen.check(block_size=size, two_memories=two_memories)
    try:
        requirements = chosen.requirements
    except RuntimeError as error:  # the requirements depend on a file that is read for a model
        raise ValueError(
            f"policy {chosen.name!r}: {error}, and a plan knows the config alone; fixed_hybrid:digest=submean takes "
            "what a predictor for that digest takes"
        ) from error
    store = BlockStore(
        batch, shape.kv_heads, shape.head_dim, shape.dtype, block_size=size, device=torch.device("cpu"),
        digest=DIGESTS[requirements.digest] if requirements.digest else None, padding=Padding(size),
        host_dtype=memory.get("host_dtype"), scored_on_host=requirements.scored_on_host,
    )  # fmt: skip
    slots = _slots(shape, chosen, memory, store, context, device) if two_memories else 0
    blocks, old = -(-context // size), len(store.packed_on_arrival(0, context))
    capacity = digest_capacity(batch * old, batch * (blocks - old))
    record, packed = store.pool.record_bytes, store.pool.packed_record_bytes
    lines = batch * shape.kv_heads
    sizes = LayerSizes(
        batch, shape.kv_heads, (shape.query_heads,), shape.head_dim, size, shape.dtype, context, blocks, True,
        range(slots, slots + 1),
    )  # fmt: skip
    state, state_on_host = chosen.state_bytes(sizes, slots)
    captured = two_memories and requirements.capturable and None not in shape.windows and store.format.read_by_device
    return Memory(
        resident=slots * size,
        resident_bytes=shape.layers * (lines * slots * record + state),
        host_bytes=shape.layers * lines * ((blocks - old) * record + old * packed),
        digest_bytes=0 if store.digests is None else shape.layers * capacity * store.digests.block_bytes,
        digests_on_host=requirements.scored_on_host or not two_memories,
        salience_bytes=shape.layers * state_on_host,
        stock_bytes=shape.stock_bytes(batch, context),
        tile_bytes=2 * batch * min(tile, context) * shape.token_bytes if two_memories else 0,
        graph_bytes=capture_bytes(shape.vocabulary, batch, shape.dtype) if captured else 0,
    )


def _slots(
    shape: Shape, policy: Policy, memory: dict[str, Any], store: BlockStore, context: int, device: int | None
) -> int:
    """Return the resident blocks of a row and KV head, with two memories."""
    size, resident = store.block_size, memory.get("resident")
    resident = None if resident == AUTO else resident
    budget = make_budget(memory.get("device_budget"), resident, shape.layers, policy, size, two_memories=True)
    if budget is None or policy.window_tokens(context) != policy.window_tokens(0):  # a share of the context
        least = resident_tokens(resident, policy, size, context) // size
        if device is None or resident is not None or not policy.requirements.holds_all:
            return least
        blocks, slot = blocks_soon(context, size), shape.layers * store.batch * store.num_kv_heads
        digest = 0
        if store.digests is not None and not store.scored_on_host:
            digest = shape.layers * store.batch * store.digests.block_bytes
        free = device - shape.weights - shape.stock_bytes(store.batch, context) - blocks * digest
        return fitting_slots(free, blocks, slot * store.pool.record_bytes, digest, least)
    return budget.slots(store, context)


def most_rows(shape: Shape, setting: tuple[str, dict[str, Any]], context: int, device: int) -> int:
    """Return the largest batch of a context that fits with the weights into `device` bytes; 0: none fits."""

    def fits(batch: int) -> bool:
        try:
            needs = memory_of(shape, *setting, context=context, batch=batch)
        except ValueError:  # the share of a device_budget for each row is too small
            return False
        return shape.weights + needs.device + needs.tile_bytes <= device

    return bisect.bisect_left(range(1, MOST_ROWS + 1), True, key=lambda batch: not fits(batch))


def most_context(config: PreTrainedConfig, dtype: torch.dtype, setting: tuple[str, dict[str, Any]], memory: int) -> int:
    """Return the largest context of one row whose cache fits into `memory` bytes of the host, at most `MOST`.

    A model or a setting that a plan does not cover has no such limit: `MOST`.
    """
    try:
        shape = shape_of(config, dtype)
        memory_of(shape, *setting, context=1, batch=1, two_memories=False)
    except ValueError:
        return MOST

    def fits(context: int) -> bool:
        needs = memory_of(shape, *setting, context=context, batch=1, two_memories=False)
        return needs.host + needs.stock_bytes <= memory

    return bisect.bisect_left(range(1, MOST + 1), True, key=lambda context: not fits(context))


def written(setting: tuple[str, dict[str, Any]]) -> str:
    """Return a setting in the form that `parse_setting` parses."""
    name, options = setting
    return name + (":" if options else "") + ",".join(f"{knob}={value}" for knob, value in options.items())


def plan_table(
    shape: Shape, settings: list[tuple[str, dict[str, Any]]], *, context: int, batch: int, device: int | None
) -> Table:
    """Return the table that `hf-offload plan` prints: Transformers' own cache, then each setting.

    Without device memory it is that of a model on the CPU, where all lies in one memory.

    Args:
        shape: sizes of the model's KV cache.
        settings: policies with options, as `parse_setting` returns them.
        context: tokens of a row; batch: rows.
        device: bytes of device memory, or None.

    Raises:
        ValueError: an option or a number of rows that is not allowed.
    """
    check_count("batch", batch, what="a number of rows", most=MOST_ROWS)
    everything = batch * context * shape.layers * shape.token_bytes + shape.stock_bytes(batch, context)
    kinds = [("DynamicCache", Memory(0, 0, 0, 0, False, 0, everything, 0, 0))]
    for setting in settings:
        memory = memory_of(
            shape, *setting, context=context, batch=batch, two_memories=device is not None, device=device
        )
        kinds.append((written(setting), memory))
    title = f"{batch} rows of {context:,} tokens; weights {size_text(shape.weights)}"
    if device is None:
        return make_table(title, [_row_of_one_memory(shape, *each) for each in kinds])
    most = [max(device - shape.weights, 0) * batch // everything]
    most += [most_rows(shape, setting, context, device) for setting in settings]
    rows = [
        {**_row_of_two_memories(shape, *each, device), "rows that fit": f"{count:,}"}
        for each, count in zip(kinds, most, strict=True)
    ]
    return make_table(title, rows)


def _row_of_one_memory(shape: Shape, name: str, memory: Memory) -> dict[str, str]:
    kv = memory.host_bytes + memory.stock_bytes
    parts = {"keys and values": kv, "digests": memory.digest_bytes, "state": memory.salience_bytes}
    parts["with weights"] = sum(parts.values()) + shape.weights
    return {"cache": name} | {part: size_text(nbytes) for part, nbytes in parts.items()}


def _row_of_two_memories(shape: Shape, name: str, memory: Memory, device: int) -> dict[str, str]:
    total = shape.weights + memory.device + memory.tile_bytes + memory.graph_bytes
    parts = {
        "device: KV": memory.resident_bytes + memory.stock_bytes,
        "digests": 0 if memory.digests_on_host else memory.digest_bytes,
        "tiles": memory.tile_bytes,
        "graph": memory.graph_bytes,
        "with weights": total,
        "host": memory.host,
    }
    row = {"cache": name, "resident tokens": f"{memory.resident:,}" if memory.resident else "all"}
    row |= {part: size_text(nbytes) for part, nbytes in parts.items()}
    return row | {"left": size_text(device - total) if device >= total else "too much"}
