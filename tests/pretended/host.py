"""Host memory, pinned and not, and copies between host and simulated device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .streams import current_stream, wait_here
from .tensor import OnDevice, bare, room

_PINNED: set[int] = set()
"""Where the storages begin that are pinned."""


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    if storage.nbytes():
        start = storage.data_ptr()
        _PINNED.add(start)
        weakref.finalize(storage, _PINNED.discard, start)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, OnDevice) or not tensor.untyped_storage().nbytes():
        return False
    return tensor.untyped_storage().data_ptr() in _PINNED


def on_host(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    if name in ("is_pinned", "_is_pinned"):
        return is_pinned(args[0])
    if name in ("pin_memory", "_pin_memory"):
        return _pin(args[0].clone())
    if kwargs.get("pin_memory"):
        return _pin(func(*args, **{**kwargs, "pin_memory": False}))
    return func(*args, **kwargs)


def _copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """`to.copy_(source)`, at least one of which is on the device."""
    there, here = bare(to), bare(source)
    host = [leaf for leaf in (to, source) if not isinstance(leaf, OnDevice)]
    stream = current_stream()
    if not host or (non_blocking and is_pinned(host[0])):
        stream.give(lambda: there.copy_(here))
        return
    if host[0] is source and source.ndim == 0 and to.ndim > 0:  # a number
        number = source.clone()
        stream.give(lambda: there.copy_(number))
        return
    wait_here("a copy of pageable memory" if not is_pinned(host[0]) else "a copy that blocks")
    with _disable_current_modes(), torch.inference_mode():
        there.copy_(here)


def copy_(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _copy(to, source, non_blocking)
    return to


def to_copy(
    tensor: torch.Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: Any = None,
) -> torch.Tensor:  # fmt: skip
    onto = tensor.device if device is None else torch.device(device)
    inner = bare(tensor)
    with _disable_current_modes():
        like = torch.empty_like(inner, dtype=dtype or inner.dtype, memory_format=memory_format)
        like = room(like.shape, like.stride(), like.dtype)
    if onto.type == "cuda":
        made: torch.Tensor = OnDevice(like)
    else:
        made = _pin(like) if non_blocking else like
    _copy(made, tensor, non_blocking)
    return made


def item(tensor: torch.Tensor) -> Any:
    wait_here("a value of a tensor")
    return bare(tensor).item()
