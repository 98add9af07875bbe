"""The check of tensor arguments, shared by the operations of this folder."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

Expected = tuple[torch.Tensor, tuple[torch.dtype, ...], tuple[int, ...]]
"""A tensor, the dtypes that it may have, and its shape."""


def require(device: torch.device | None, **tensors: Expected) -> None:
    """Raise unless tensors are contiguous, on this device (None: anywhere), and of these dtypes and shapes.

    Raises:
        TypeError: another dtype.
        ValueError: another shape or device, or a memory layout that kernels cannot address.
    """
    for name, (tensor, dtypes, shape) in tensors.items():
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} has dtype {tensor.dtype}; expected {' or '.join(map(str, dtypes))}")
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
        if device is not None and tensor.device != device:
            raise ValueError(f"{name} lies on {tensor.device}; expected {device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; its strides are {tensor.stride()}")
