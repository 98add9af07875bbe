"""Checks of the keys and values that reach a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_offload.gpu.block_topk import MOST_BLOCKS

if TYPE_CHECKING:
    from hf_offload.cache.layer import HybridLayer


def unsuitable(key: torch.Tensor, value: torch.Tensor) -> str | None:
    """Why K and V `[B, Hkv, T, D]` do not fit into blocks, as the end of a sentence; None if they do."""
    if key.shape != value.shape:
        heads = [f"{x.shape[1]} head{'s' * (x.shape[1] > 1)} with {x.shape[3]}" for x in (key, value)]
        return f"it has keys of {heads[0]} channels and values of {heads[1]} (compressed KV?)"
    dim = key.shape[-1]
    if dim % 16 or dim > 256:
        return f"its head_dim {dim} is not a multiple of 16 up to 256"
    return None


def check_arrivals(layer: HybridLayer, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise ValueError unless new K and V `[B, Hkv, T, D]` are like those that a layer holds, and not too many."""
    store, index = layer.store, layer.index
    assert store is not None
    batch, heads, _, dim = key.shape
    if (batch, heads, dim) != (store.batch, store.num_kv_heads, store.head_dim):
        raise ValueError(
            f"layer {index} holds {store.batch} rows, {store.num_kv_heads} KV heads and head_dim {store.head_dim}, but "
            f"{batch}, {heads} and {dim} arrived; call reset() or make a new cache for another batch or model"
        )
    if key.dtype != value.dtype:
        raise ValueError(
            f"layer {index} got {key.dtype} keys and {value.dtype} values; load the model in the dtype that it should "
            "run in"
        )
    if key.dtype != layer.dtype or key.device != layer.device:
        raise ValueError(
            f"layer {index} holds {layer.dtype} from {layer.device}, but {key.dtype} on {key.device} arrived; call "
            "reset() or make a new cache"
        )
    tokens = store.length + key.shape[2]
    if tokens > (MOST_BLOCKS - 2) * store.block_size and layer.has_slots:  # beside the block that comes next
        raise ValueError(
            f"{tokens} tokens a row are more than the {MOST_BLOCKS - 2} blocks of {store.block_size} among which a "
            "device chooses; use a larger block_size"
        )


def unconsumed(layer: int) -> str:
    """The message for K and V that never reached our attention function."""
    return (
        f"the keys and values of layer {layer} did not reach the 'hybrid_sparse' attention function, so its output is "
        "not right; load the model with attn_implementation='hybrid_sparse' (or call model.set_attn_implementation("
        "'hybrid_sparse')), or use DynamicCache if this model family ignores that setting or changes K and V after the "
        "cache"
    )
