"""Transformers' own layers in a `HybridCache` (sliding windows, linear attention): copies, files and their checks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from hf_offload.knobs import MOST, check_count, shown

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def copy_layer(layer: Any, device: torch.device | None = None) -> Any:
    """A deep copy of a layer on a device (None: the same device)."""
    made = copy.copy(layer)
    made.__dict__ = {
        name: convert(value, lambda x: x.detach().to(device or x.device, copy=True), device)
        for name, value in vars(layer).items()
    }
    return made


def convert(value: Any, tensor: Callable[[torch.Tensor], Any], device: torch.device | None = None) -> Any:
    """Map an attribute of a layer: apply `tensor` to every tensor in it, and replace devices by `device`."""
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
    """Describe a layer: the name of its class, its attributes as JSON values, and the tensors that these name.

    Raises:
        TypeError: an attribute has a type that cannot be saved.
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
    """Rebuild a layer from `pack`'s description; `layer` is an empty one of the same class."""

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

    made = copy.copy(layer)
    made.__dict__ = {name: read(value) for name, value in state.items()}
    return made


def check(name: str, layer: Any, fresh: Any, rows: int, tokens: int | None) -> None:
    """Check a layer that `unpack` returned: its attributes are those of an empty layer, or what these become.

    Sizes of heads and states are not checked: torch refuses wrong ones in the next forward.

    Args:
        name: name of the layer for errors.
        layer: the layer; fresh: an empty one of its class.
        rows: rows of the cache, 0: unknown.
        tokens: tokens of each row; None: any number.

    Raises:
        ValueError: an attribute is missing, unknown, or of another type or value.
    """
    most = MOST if tokens is None else tokens

    def compare(name: str, value: Any, like: Any) -> None:
        if isinstance(like, dict) and isinstance(value, dict):
            if odd := sorted(map(str, (value.keys() ^ like.keys()) - {"device", "dtype"})):
                raise ValueError(f"{name}.{shown(odd[0])} is missing or unexpected")
            for key, part in value.items():
                compare(f"{name}.{key}", part, like.get(key))
        elif isinstance(value, torch.Tensor) and like is None:
            if value.ndim < 2 or value.dtype not in _DTYPES or rows not in (0, len(value)):
                raise ValueError(f"{name} is {value.dtype} {list(value.shape)}, not of {rows} rows")
        elif (type(like) is int and like == 0) or (like is None and type(value) is int):
            check_count(name, value, what="a number of tokens", least=0, most=most)
        elif not (
            (like is None and isinstance(value, None | torch.dtype | torch.device))
            or (type(value) is type(like) and (isinstance(like, bool | torch.device) or value == like))
        ):
            raise ValueError(f"{name} is {shown(value)}, not {shown(like)}")

    compare(name, vars(layer), vars(fresh))
    if isinstance(layer, CacheLayerMixin) and layer.is_initialized and (layer.keys is None or layer.values is None):
        raise ValueError(f"{name} has no keys or no values")
