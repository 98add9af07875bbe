"""Transformers' own layers in a `HybridCache` (sliding windows, linear attention): copies, files and their checks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from hf_offload.fields import Field, check_tensors
from hf_offload.knobs import MOST, check_count, check_flag, shown


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


def check(name: str, layer: Any, examples: Sequence[Any], rows: int, tokens: int | None) -> None:
    """Check a layer that `unpack` returned, by comparison with layers of its class.

    Args:
        name: name of the layer for errors.
        layer: the layer.
        examples: an empty layer, and one with a row of one token; the layer must match one of them.
        rows: rows of the cache, 0: unknown.
        tokens: tokens of each row; None: any number.

    Raises:
        ValueError: an attribute is missing, unknown, or of another type, dtype, shape or value.
    """
    most = MOST if tokens is None else tokens
    recorded = getattr(layer, "record_past", None) is True

    def compare(name: str, value: Any, like: Any) -> None:
        if isinstance(like, torch.Tensor) and isinstance(value, torch.Tensor):
            check_tensors("", {name: value}, {name: Field(like.dtype, _shape(name, like, rows, most, recorded))})
            if like.ndim == 0 and value.item() != like.item():
                raise ValueError(f"{name} is {value.item()}, not {like.item()}")
        elif isinstance(like, dict) and isinstance(value, dict):
            if odd := sorted(map(str, value.keys() ^ like.keys())):
                raise ValueError(f"{name}.{shown(odd[0])} is missing or unexpected")
            for key, part in like.items():
                compare(f"{name}.{key}", value[key], part)
        elif name.endswith(".cumulative_length"):
            check_count(name, value, what="a number of tokens", least=0, most=most)
        elif name.endswith(".record_past"):
            check_flag(name, value)
        elif type(value) is not type(like) or not (isinstance(like, torch.device) or value == like):
            raise ValueError(f"{name} is {shown(value)}, not {shown(like)}")

    wrong: ValueError | None = None
    for example in examples:
        try:
            compare(name, vars(layer), vars(example))
            break
        except ValueError as error:
            wrong = error
    else:
        raise wrong or ValueError(f"{name} matches no layer of this model")
    if isinstance(layer, CacheLayerMixin) and layer.keys is not None and layer.values is not None:
        have, held = layer.get_seq_length(), layer.keys.shape[2]
        seen = layer.get_mask_sizes(1)[0] - 1
        if layer.values.shape[:3] != layer.keys.shape[:3] or tokens not in (None, have):
            raise ValueError(f"{name} has {held} keys and {layer.values.shape[2]} values of {have} tokens")
        if held < seen or (held > seen and not recorded):
            raise ValueError(f"{name} has {held} keys of {have} tokens, not {seen}")


def first_token(layer: Any) -> Any:
    """An attention layer's first row and token, as an example for layers that hold an image's tokens."""
    made = copy.copy(layer)
    made.keys, made.values = layer.keys[:1, :, :1], layer.values[:1, :, :1]
    return made


def _shape(name: str, like: torch.Tensor, rows: int, tokens: int, recorded: bool) -> tuple[int | Container[int], ...]:
    """The allowed shape of a tensor whose example, for one row and token, is `like`."""
    any_row = range(1, MOST) if rows == 0 else (rows,)
    shape: list[int | Container[int]] = [*like.shape]
    if name.endswith((".keys", ".values")) and like.ndim == 4:
        shape[0], shape[2] = any_row, range(tokens + 1)
        return tuple(shape)
    for axis, size in enumerate(like.shape):
        if size == 1:
            shape[axis] = any_row if axis == 0 else range(1, max(rows, tokens) + 1)
        elif recorded and axis == like.ndim - 1:
            shape[axis] = range(size, size + tokens + 1)
    return tuple(shape)
