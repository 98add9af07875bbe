"""Whether an operation runs as a Triton kernel: always on CUDA tensors, on CPU tensors only where a test asks."""

from __future__ import annotations

import os

import torch

try:
    import triton
except ImportError:  # CPU builds of torch, macOS, Windows
    triton = None

FORCED = False
"""Tests set this, with Triton's interpreter on (TRITON_INTERPRET=1), to run the kernels on CPU tensors."""


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
