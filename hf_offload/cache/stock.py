"""Layers of Transformers' own inside a `HybridCache` (sliding windows, linear attention): copied and moved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch


def copy_layer(layer: Any, device: torch.device | None = None) -> Any:
    """A layer that shares no memory with `layer`, on a device (None: where it is)."""
    made = copy.copy(layer)
    made.__dict__ = {
        name: convert(value, lambda x: x.detach().to(device or x.device, copy=True), device)
        for name, value in vars(layer).items()
    }
    return made


def convert(value: Any, tensor: Callable[[torch.Tensor], Any], device: torch.device | None = None) -> Any:
    """An attribute of a layer, with what `tensor` makes of every tensor in it, and `device` in place of devices."""
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, torch.device):
        return device or value
    if isinstance(value, dict):
        return {key: convert(part, tensor, device) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(convert(part, tensor, device) for part in value)
    return value


def pack(layer: Any) -> tuple[str, dict[str, Any], dict[str, torch.Tensor]]:
    """A layer as the name of its class, its attributes for `json`, and the tensors that these name.

    Raises:
        TypeError: an attribute is of a kind that is not known here.
    """
    tensors: dict[str, torch.Tensor] = {}

    def describe(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.Tensor):
            tensors[f"stock.{len(tensors)}"] = value.detach().cpu().contiguous().clone()
            return {"tensor": f"stock.{len(tensors) - 1}"}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": None}
        if isinstance(value, dict):
            return {"dict": [[describe(key), describe(part)] for key, part in value.items()]}
        if isinstance(value, list | tuple):
            return {type(value).__name__: [describe(part) for part in value]}
        raise TypeError(f"{type(layer).__name__} holds a {type(value).__name__}, which cannot be saved")

    state = {name: describe(value) for name, value in vars(layer).items()}
    return type(layer).__name__, state, tensors


def unpack(layer: Any, state: dict[str, Any], tensors: dict[str, torch.Tensor], device: torch.device) -> Any:
    """An empty layer of the same class with the attributes that `pack` has described, and tensors on a device."""

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "tensor":
            return tensors[content].to(device)
        if kind == "dtype":
            return getattr(torch, content)
        if kind == "device":
            return device
        if kind == "dict":
            return {read(key): read(part) for key, part in content}
        return {"list": list, "tuple": tuple}[kind](read(part) for part in content)

    vars(layer).update({name: read(value) for name, value in state.items()})
    return layer
