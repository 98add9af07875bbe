"""A query on its way into a kernel: float32, one row and head after the other."""

# mypy: allow-untyped-calls
from __future__ import annotations

import torch

from .launch import F32, Array, Launch, kernel, require, tag_of
from .memory import address_of, count_up
from .vector import LANES, load, store


@kernel
def widen_kernel(
    ticket: Array, tasks: int, source: int, row_stride: int, head_stride: int, tag: Array, query: Array
) -> None:
    """One task = one row; strides in bytes."""
    heads, dim = query.shape[1], query.shape[2]
    while True:
        b = count_up(ticket, 0)
        if b >= tasks:
            break
        for h in range(heads):
            place = source + b * row_stride + h * head_stride
            for d in range(0, dim, LANES):
                store(address_of(query[b, h]) + 4 * d, load(tag, place + d * tag.itemsize))
        count_up(ticket, 1)


def widen(source: torch.Tensor, query: Array) -> Launch:
    """Prepare the copy of a query as float32, exactly.

    Args:
        source: `[B, Hq, …, D]` CPU tensor of float32, float16 or bfloat16, the axes between of length 1; its last
            dimension is contiguous, other strides are free.
        query: float32 `[B, Hq, D]`, written; D a multiple of 16.

    Raises:
        ValueError: shapes or strides that the kernel does not cover.
        TypeError: an array or a tensor of another dtype.
    """
    batch, heads, dim = query.shape
    require("query", query, F32, (batch, heads, dim))
    if source.numel() != query.size or (*source.shape[:2], source.shape[-1]) != query.shape:
        raise ValueError(f"source has shape {tuple(source.shape)} and query {query.shape}; they must agree")
    if source.stride(-1) != 1 or dim % LANES:
        raise ValueError(f"the last dimension, of {dim}, must be contiguous and a multiple of {LANES}")
    size = source.element_size()
    args = (source.data_ptr(), source.stride(0) * size, source.stride(1) * size, tag_of(source.dtype), query)
    return Launch(widen_kernel, batch, args, query.nbytes, (source,))
