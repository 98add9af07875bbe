"""Tensors of the simulated device."""

from __future__ import annotations

import math
from typing import Any

import torch

from .streams import DEVICE, Stream


class OnDevice(torch.Tensor):
    """A tensor that says it is on the device; its numbers are in `inner`, once the device has done what it was told."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE,
        )  # fmt: skip
        made.inner = inner
        return made

    def __repr__(self, *args: Any) -> str:
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: Any) -> Any:
        with torch.no_grad():
            made = self.clone()
        copied = torch.nn.Parameter(made, self.requires_grad) if isinstance(self, torch.nn.Parameter) else made
        return memo.setdefault(id(self), copied)

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def record_stream(self, stream: Any) -> None:
        assert isinstance(stream, Stream)  # what is let go is not used again

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from .operators import Pretending

        with Pretending():
            return func(*args, **(kwargs or {}))


def bare(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, OnDevice) else leaf


def dressed(leaf: Any) -> Any:
    return OnDevice(leaf) if isinstance(leaf, torch.Tensor) else leaf


def room(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """Memory on the device, full of what nobody should read."""
    with torch.inference_mode(False), torch.no_grad():
        made = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        return made.fill_(math.nan) if dtype.is_floating_point else made
