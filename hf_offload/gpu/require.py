"""The check of a tensor argument, shared by the operations of this folder."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def require(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise unless `tensor` is contiguous, on this device, of this shape and of one of these dtypes.

    Raises:
        TypeError: another dtype.
        ValueError: another shape or device, or a memory layout that kernels cannot address.
    """
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected {' or '.join(map(str, dtypes))}")
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
    if tensor.device != device:
        raise ValueError(f"{name} lies on {tensor.device}; expected {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous; its strides are {tensor.stride()}")
