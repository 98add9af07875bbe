"""Query heads of a KV head in launches of at most `MOST_HEADS`: a kernel holds all those of a launch in registers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

MOST_HEADS = 16


def split_heads(tensor: torch.Tensor, kv_heads: int) -> list[torch.Tensor]:
    """Cut `[B, Hq, …]` into contiguous parts `[B, Hkv · m, …]`, m at most `MOST_HEADS` query heads of each KV head."""
    grouped = tensor.reshape(len(tensor), kv_heads, -1, *tensor.shape[2:])
    return [part.flatten(1, 2).contiguous() for part in torch.split(grouped, MOST_HEADS, 2)]


def regroup_heads(parts: Sequence[torch.Tensor], kv_heads: int) -> torch.Tensor:
    """Put together again what `split_heads` has cut, and something was computed of."""
    grouped = [part.reshape(len(part), kv_heads, -1, *part.shape[2:]) for part in parts]
    return torch.cat(grouped, 2).flatten(1, 2)
