"""The query of a plain decoder layer in one launch: RMS norm, projection, maybe a norm of each head, rotary positions.

All of it is summed in float32, which is nearer to the weights than a model in bfloat16 that rounds after each operator.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from .launch import F32, TAGS, Array, Launch, kernel, new_ticket, require
from .memory import address_of, count_up, hold
from .vector import LANES, fma, lane_sum, load, load_f32, splat, store

_AT_ONCE = 4  # rows of weights: their loads are under way together


class Layer(NamedTuple):
    """The weights of a layer that make a query, CPU tensors of one dtype, float32 or bfloat16, contiguous.

    Args:
        norm: `[W]`; eps: what is added to its mean.
        weight: `[Hq · D, W]`, of the projection; bias: `[Hq · D]` or None.
        head_norm: `[D]` or None; head_eps: what is added to its mean.
    """

    norm: torch.Tensor
    eps: float
    weight: torch.Tensor
    bias: torch.Tensor | None
    head_norm: torch.Tensor | None
    head_eps: float


@kernel
def project_kernel(
    ticket: Array, tasks: int, tag: Any, hidden: int, cos: int, sin: int, tables: int, norm: int, eps: float,
    weight: int, bias: int, head_norm: int, head_eps: float, width: int, query: Array,
) -> None:  # fmt: skip
    """One task = one query head of all rows; addresses, of which 0 stands for what is not there."""
    batch, dim, size = query.shape[0], query.shape[2], tag.itemsize
    half = dim // 2
    normed, head = np.empty((batch, width), np.float32), np.empty(dim, np.float32)
    cosines, sines = np.empty((tables, dim), np.float32), np.empty((tables, dim), np.float32)
    ready = False
    while True:
        h = count_up(ticket, 0)
        if h >= tasks:
            break
        if not ready:
            for b in range(batch):
                total, source = splat(np.float32(0.0)), hidden + b * width * size
                for i in range(0, width, LANES):
                    x = load(tag, source + i * size)
                    total = fma(x, x, total)
                factor = splat(np.float32(1.0 / math.sqrt(lane_sum(total) / np.float32(width) + eps)))
                for i in range(0, width, LANES):
                    scaled = load(tag, source + i * size) * factor
                    store(address_of(normed[b]) + 4 * i, scaled * load(tag, norm + i * size))
            for b in range(tables):
                for d in range(0, dim, LANES):
                    store(address_of(cosines[b]) + 4 * d, load(tag, cos + (b * dim + d) * size))
                    store(address_of(sines[b]) + 4 * d, load(tag, sin + (b * dim + d) * size))
            ready = True
        for b in range(batch):
            source = address_of(normed[b])
            for d in range(0, dim, _AT_ONCE):
                place = weight + (h * dim + d) * width * size
                one = two = three = four = splat(np.float32(0.0))
                for i in range(0, width, LANES):
                    x, at = load_f32(source + 4 * i), place + i * size
                    one = fma(x, load(tag, at), one)
                    two = fma(x, load(tag, at + width * size), two)
                    three = fma(x, load(tag, at + 2 * width * size), three)
                    four = fma(x, load(tag, at + 3 * width * size), four)
                head[d], head[d + 1], head[d + 2], head[d + 3] = (
                    lane_sum(one), lane_sum(two), lane_sum(three), lane_sum(four),
                )  # fmt: skip
            place = address_of(head)
            if bias != 0:
                for d in range(0, dim, LANES):
                    store(place + 4 * d, load_f32(place + 4 * d) + load(tag, bias + (h * dim + d) * size))
            if head_norm != 0:
                square = np.float32(0.0)
                for d in range(dim):
                    square += head[d] * head[d]
                factor = splat(np.float32(1.0 / math.sqrt(square / np.float32(dim) + head_eps)))
                for d in range(0, dim, LANES):
                    scaled = load_f32(place + 4 * d) * factor
                    store(place + 4 * d, scaled * load(tag, head_norm + d * size))
            row = b if tables > 1 else 0
            for d in range(half):
                x, y = head[d], head[half + d]
                query[b, h, d] = x * cosines[row, d] - y * sines[row, d]
                query[b, h, half + d] = y * cosines[row, half + d] + x * sines[row, half + d]
        count_up(ticket, 1)
    hold(normed)
    hold(head)
    hold(cosines)
    hold(sines)


def project(layer: Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, query: Array) -> Launch:
    """Prepare the query of one token a row.

    Args:
        layer: the weights.
        hidden: `[B, 1, W]` of their dtype, contiguous; W a multiple of 16.
        cos, sin: `[1 or B, 1, D]` of their dtype, contiguous: q · cos + (−q₂, q₁) · sin, q₁ and q₂ a head's halves.
        query: float32 `[B, Hq, D]`, written; D a multiple of 16.

    Raises:
        ValueError: shapes that contradict each other or that the kernel does not cover.
        TypeError: an array or a tensor of another dtype.
    """
    batch, heads, dim = query.shape
    width, tables = hidden.shape[-1], len(cos)
    require("query", query, F32, query.shape)
    if dim % LANES or width % LANES:
        raise ValueError(f"head dimension {dim} or hidden size {width} is not a multiple of {LANES}")
    wanted = {
        "hidden": (hidden, (batch, 1, width)),
        "cos": (cos, (tables, 1, dim)),
        "sin": (sin, (tables, 1, dim)),
        "norm": (layer.norm, (width,)),
        "weight": (layer.weight, (heads * dim, width)),
        "bias": (layer.bias, (heads * dim,)),
        "head_norm": (layer.head_norm, (dim,)),
    }
    if tables not in (1, batch):
        raise ValueError(f"there are {tables} rows of cos for {batch} rows of hidden; use 1 or as many")
    dtype = hidden.dtype
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"hidden has dtype {dtype}; expected torch.float32 or torch.bfloat16")
    for name, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype} and hidden {dtype}; they must agree")
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, or is not contiguous; expected {shape}")
    address = [0 if tensor is None else tensor.data_ptr() for tensor, _ in wanted.values()]
    args = (
        TAGS[dtype], *address[:3], tables, address[3], float(layer.eps), address[4], address[5], address[6],
        float(layer.head_eps), width, query,
    )  # fmt: skip
    cost = layer.weight.numel() * layer.weight.element_size()
    return Launch(project_kernel, heads, args, new_ticket(), cost, (layer, hidden, cos, sin))
