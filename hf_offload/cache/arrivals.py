"""Errors for keys and values that a layer cannot hold, or that did not reach the attention function."""

from __future__ import annotations

import torch


def unsuitable(key: torch.Tensor, value: torch.Tensor) -> str | None:
    """The reason why K and V `[B, Hkv, T, D]` do not fit into blocks, as the end of a sentence; None if they do."""
    if key.shape != value.shape:
        heads = [f"{x.shape[1]} head{'s' * (x.shape[1] > 1)} with {x.shape[3]}" for x in (key, value)]
        return f"it has keys of {heads[0]} channels and values of {heads[1]} (compressed KV?)"
    dim = key.shape[-1]
    if dim % 16 or dim > 256:
        return f"its head_dim {dim} is not a multiple of 16 up to 256"
    return None


def unconsumed(layer: int) -> str:
    """The error message for K and V that did not reach the `hybrid_sparse` attention function."""
    return (
        f"the keys and values of layer {layer} did not reach the 'hybrid_sparse' attention function, so its output is "
        "not right; load the model with attn_implementation='hybrid_sparse' (or call model.set_attn_implementation("
        "'hybrid_sparse')), or use DynamicCache if this model family ignores that setting or changes K and V after the "
        "cache"
    )
