"""The choice between an operation's Triton kernel and its torch form, Triton where there is one, checks of tensors."""

from __future__ import annotations

import os
from typing import Any

import torch

try:
    import triton
except ImportError:  # CPU builds of torch, macOS, Windows
    triton = None

tl: Any = None if triton is None else triton.language
"""The language of kernels."""
FORCED = False
"""Tests set this, with Triton's interpreter on (TRITON_INTERPRET=1), to run the kernels on CPU tensors."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def jit(kernel: Any = None, **options: Any) -> Any:
    """`triton.jit`; where there is no Triton, the function itself, which nobody calls then.

    The file of a kernel needs `from __future__ import annotations`: `tl.constexpr` in a signature is a string then.
    """
    if triton is not None:
        return triton.jit(kernel, **options)
    return kernel if kernel is not None else lambda function: function


def constexpr(value: Any) -> Any:
    """A constant of a module as kernels may read it; where there is no Triton, the value itself."""
    return value if tl is None else tl.constexpr(value)


def on_triton(tensor: torch.Tensor) -> bool:
    """Whether operations on this tensor are Triton kernels.

    Raises:
        RuntimeError: it is a CUDA tensor and Triton is not installed.
    """
    if tensor.device.type == "cuda" and triton is None:
        raise RuntimeError("HybridCache computes on the GPU with Triton, which is not installed: pip install triton")
    if FORCED:
        assert os.environ.get("TRITON_INTERPRET") == "1", "CPU tensors need Triton's interpreter"
    return tensor.device.type == "cuda" or FORCED


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


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
