"""The choice between an operation's Triton kernel and its torch form, Triton where there is one, checks of tensors."""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
except ImportError:  # CPU builds of torch, macOS, Windows
    triton = None

tl: Any = None if triton is None else triton.language
"""The language of kernels."""
ON_TRITON = {"cuda"}
"""Types of the devices where operations are Triton kernels; tests add "cpu", with TRITON_INTERPRET=1."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def jit(kernel: Any = None, **options: Any) -> Any:
    """`triton.jit`; where there is no Triton, the function itself, which is then never called.

    The file of a kernel needs `from __future__ import annotations`: `tl.constexpr` in a signature is a string then.
    """
    if triton is not None:
        return triton.jit(kernel, **options)
    return kernel if kernel is not None else lambda function: function


def constexpr(value: Any) -> Any:
    """A constant of a module as kernels may read it; where there is no Triton, the value itself."""
    return value if tl is None else tl.constexpr(value)


def check_triton(device: torch.device) -> None:
    """Raise unless a device's operations can be computed.

    Raises:
        RuntimeError: it is a CUDA device and Triton is not installed.
    """
    if device.type in ON_TRITON and triton is None:
        raise RuntimeError("HybridCache computes on the GPU with Triton, which is not installed: pip install triton")


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
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {tuple(shape)}")
        if device is not None and tensor.device != device:
            raise ValueError(f"{name} lies on {tensor.device}; expected {device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; its strides are {tensor.stride()}")
