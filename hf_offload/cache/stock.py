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
