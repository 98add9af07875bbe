"""Conversion of layers between caches: forks, and to and from Transformers' `DynamicCache`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_offload.blocks.block_store import share_blocks
from hf_offload.blocks.padding import Padding
from hf_offload.blocks.sealing import seal
from hf_offload.cache.arrivals import unsuitable
from hf_offload.cache.layer import HybridLayer, open_layer
from hf_offload.cache.residence import Residence
from hf_offload.cache.stock_layers import copy_layer


def take_over(
    layers: list[Any], source: DynamicCache, modules: Sequence[nn.Module], mask: torch.Tensor | None, config: Any
) -> None:
    """Fill the layers of a new `HybridCache` from a `DynamicCache` of the same model.

    Args:
        layers: empty layers of the new cache; stock layers among them are replaced.
        source: the cache to copy; it is not changed and shares no memory with the new one.
        modules: the model's decoder layers, which give device and dtype of each.
        mask: `[B, T]`, 0 where a token is padding; None: no padding.
        config: config of the model's decoder.

    Raises:
        TypeError: the source is not a `DynamicCache`.
        ValueError: its layers, shapes or dtype are not those of this model, or the mask does not fit.
    """
    if not isinstance(source, DynamicCache):
        raise TypeError(f"from_cache takes over a DynamicCache, not a {type(source).__name__}")
    theirs: list[Any] = source.layers
    batch, tokens = _check(layers, theirs, modules, config)
    if mask is not None and mask.shape != (batch, tokens):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, but the cache holds {batch} rows of {tokens} tokens; give "
            "one value for each cached token"
        )
    if mask is not None:
        mask = mask != 0
    for index, (layer, old) in enumerate(zip(layers, theirs, strict=True)):
        device = device_of(modules[index])
        if isinstance(layer, HybridLayer):
            if _holds(old) and unsuitable(old.keys, old.values):
                layers[index] = copy_layer(old, device)
            elif _holds(old):
                layer.settings.padding.observe(mask, batch, tokens)
                _fill(layer, old.keys.detach().to(device), old.values.detach().to(device))
        elif type(old) is type(layer):
            layers[index] = copy_layer(old, device)
        elif _holds(old):  # a cache made without a config keeps all tokens of a sliding layer
            layer.update(old.keys.detach().to(device), old.values.detach().to(device))


def _fill(layer: HybridLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
    layer.lazy_initialization(keys, values)
    assert layer.store is not None
    layer.check_arrivals(keys, values)
    layer.store.append(keys, values)
    seal(layer.store, layer.settings.prefill_tile, keys)
    layer.state.adopted(layer)


def give_back(layer: HybridLayer, made: DynamicLayer) -> None:
    """Fill an empty layer of a `DynamicCache` with a layer's tokens, in the model's dtype and on its device."""
    store = layer.store
    if store is None or not store.length:
        return
    layer.drain()
    keys, values = layer.gather()
    made.lazy_initialization(keys, values)
    made.keys, made.values = keys, values


def device_of(module: nn.Module) -> torch.device:
    """The device on which a decoder layer computes, also where accelerate offloads its weights."""
    devices = [parameter.device for parameter in module.parameters() if parameter.device.type != "meta"]
    for part in () if devices else module.modules():
        device = getattr(getattr(part, "_hf_hook", None), "execution_device", None)
        if device is not None:
            wanted = torch.device(device)
            bare = wanted.type == "cuda" and wanted.index is None  # a tensor's device always has an index
            return torch.device("cuda", torch.cuda.current_device()) if bare else wanted
    return devices[0] if devices else torch.device("cpu")


def _holds(layer: Any) -> bool:
    keys = getattr(layer, "keys", None)
    return isinstance(keys, torch.Tensor) and keys.numel() > 0


def _check(layers: list[Any], theirs: list[Any], modules: Sequence[nn.Module], config: Any) -> tuple[int, int]:
    """Check the layers of a `DynamicCache`; return its rows and tokens.

    Raises:
        ValueError: a layer does not fit the model.
    """
    if len(theirs) != len(layers):
        raise ValueError(f"the cache has {len(theirs)} layers, this model has {len(layers)}: not its cache")
    batch, tokens, first = 0, 0, None
    for index, (layer, old) in enumerate(zip(layers, theirs, strict=True)):
        ours = isinstance(layer, HybridLayer) or getattr(layer, "is_sliding", False)
        if type(old) is not type(layer) and not (ours and type(old) is DynamicLayer):
            kind = "plain full attention" if isinstance(layer, HybridLayer) else type(layer).__name__
            raise ValueError(
                f"layer {index} of the cache is a {type(old).__name__}, but {kind} in this model; take over a "
                "DynamicCache of this model"
            )
        window, wanted = (getattr(x, "sliding_window", None) for x in (old, layer))
        if type(old) is type(layer) and window != wanted:
            raise ValueError(f"layer {index} of the cache has a window of {window} tokens, the model's has {wanted}")
        if not isinstance(layer, HybridLayer):
            continue
        if not _holds(old):
            first = index if first is None else first
            continue
        if old.keys.ndim != 4 or old.keys.ndim != old.values.ndim or old.keys.shape[2] != old.values.shape[2]:
            raise ValueError(
                f"layer {index} of the cache has keys {tuple(old.keys.shape)} and values {tuple(old.values.shape)}; "
                "both must be [rows, KV heads, tokens, head_dim]"
            )
        rows, heads, length, dim = old.keys.shape
        if tokens and (rows, length) != (batch, tokens):
            raise ValueError(
                f"layer {index} of the cache holds {rows} rows of {length} tokens, the layers before it {batch} of "
                f"{tokens}; take over a cache between two forwards"
            )
        batch, tokens = rows, length
        if not unsuitable(old.keys, old.values):
            _check_model(index, heads, dim, old.keys.dtype, modules[index], config)
    if tokens and first is not None and not getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(f"layer {first} of the cache is empty, others hold {tokens} tokens: not a cache of this model")
    for index, old in enumerate(theirs):
        if tokens and getattr(old, "is_sliding", False) and old.get_seq_length() != tokens:
            raise ValueError(f"layer {index} of the cache has seen {old.get_seq_length()} tokens, others {tokens}")
    return batch, tokens


def _check_model(index: int, heads: int, dim: int, dtype: torch.dtype, module: nn.Module, config: Any) -> None:
    layer = config.per_layer_config[index]
    wanted, size = getattr(layer, "num_key_value_heads", None), getattr(layer, "head_dim", None)
    if isinstance(wanted, int) and (heads > wanted or wanted % heads):  # tensor parallelism: a part
        raise ValueError(f"layer {index} of the cache has {heads} KV heads, the model has {wanted}")
    if isinstance(size, int) and dim != size:
        raise ValueError(f"layer {index} of the cache has head_dim {dim}, the model has {size}")
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if dtypes and dtype not in dtypes:
        names = ", ".join(sorted(map(str, dtypes)))
        raise ValueError(
            f"layer {index} of the cache is {dtype}, the model computes in {names}; convert the cache's keys and "
            "values or load the model in their dtype"
        )


def fork_layers(source: list[Any], target: list[Any], padding: Padding, copied: Padding) -> None:
    """Fill the empty layers of a fork from a cache that has no work in flight.

    Host blocks and their digests are shared. Resident sets, policy states, padding and stock layers are copied, so that
    both caches go on as the first would have gone on alone.

    Args:
        source, target: the layers of both caches.
        padding, copied: the validity of tokens of both caches.
    """
    copied.copy_from(padding.valid[:, : padding.seen], dense=padding.dense)
    hybrid = [layer for layer in source if isinstance(layer, HybridLayer)]
    fits = any(layer.settings.residence is not None for layer in hybrid) and Residence.admits(hybrid)
    for index, layer in enumerate(source):
        if isinstance(layer, HybridLayer):
            _fork(layer, target[index], whole=fits or layer.is_least)
        else:
            target[index] = copy_layer(layer)


def _fork(source: HybridLayer, target: HybridLayer, *, whole: bool) -> None:
    """Fill a layer of a fork; without its resident set unless `whole`, which its next step places."""
    target.remember(source.scores, source.last_queries)
    if source.store is None:
        return
    source.snapshots.clear()  # snapshots would restore blocks that are shared from here on
    source.write_back()
    slots = None if source.resident is None else source.resident.slots if whole else 0
    store = source.store
    open_layer(target, store.batch, store.num_kv_heads, store.head_dim, source.dtype, source.device, slots=slots)
    assert target.store is not None
    share_blocks(target.store, source.store)
    if whole and not source.unplaced:
        target.note_placed()
    if target.resident is not None and source.resident is not None and whole:
        target.resident.copy_from(source.resident)
    target.state.share(target, source.state)
