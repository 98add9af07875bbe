"""Attention with its log-sum-exp as torch computes it on a GPU."""

from __future__ import annotations

import math
from typing import Any

import torch

from .streams import current_stream
from .tensor import OnDevice, bare, room


def _dense(query: Any, key: Any, value: Any, bias: Any, causal: bool, scale: float | None) -> tuple[Any, Any]:
    scores = query.float() @ key.float().transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    out = torch.nan_to_num((scores - lse[..., None]).exp()) @ value.float()
    return out.to(query.dtype), lse


def _attend(
    query: Any, key: Any, value: Any, bias: Any, causal: bool, scale: float | None, padded: int
) -> tuple[Any, Any]:
    inner = [bare(tensor) for tensor in (query, key, value, bias)]
    batch, heads, length, _ = query.shape
    whole = -(-length // padded) * padded
    dim = value.shape[-1]
    out = room((batch, heads, length, dim), (heads * length * dim, length * dim, dim, 1), query.dtype)
    lse = room((batch, heads, whole), (heads * whole, whole, 1), torch.float32)

    def compute() -> None:
        results = _dense(*inner, causal, scale)
        out.copy_(results[0])
        lse[:, :, :length].copy_(results[1])

    current_stream().give(compute)
    return OnDevice(out), OnDevice(lse)


def flash(
    query: Any, key: Any, value: Any, dropout: float = 0.0, causal: bool = False, debug: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only supports fp16 and bf16")
    if causal and query.shape[2] != key.shape[2]:
        raise RuntimeError("causal with other keys than queries")
    return (*_attend(query, key, value, None, causal, scale, 1), None, None, 0, 0, None, None, None)


def efficient(
    query: Any, key: Any, value: Any, bias: Any, want_lse: bool, dropout: float = 0.0, causal: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    if bias is not None and (bias.stride(-2) % 16 or bias.stride(-1) != 1):
        raise RuntimeError("attn_bias is not correctly aligned")
    if bias is not None and bias.shape != (*query.shape[:3], key.shape[2]):
        raise RuntimeError("Invalid shape for attention bias")
    return (*_attend(query, key, value, bias, causal, scale, 32), None, None)
