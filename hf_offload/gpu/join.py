"""One score a (row, KV head, block), of the log masses of the group's query heads; `block_topk` does it on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from .backend import on_triton
from .groups import MOST_HEADS, split_heads
from .require import require

JOINS = ("max", "mean", "raw")
F32 = (torch.float32,)


def join_heads(
    masses: torch.Tensor, tail: torch.Tensor, limits: torch.Tensor, *, kv_heads: int, join: str
) -> torch.Tensor:
    """Join the query heads of each KV head.

    "max" and "mean": each head's softmax over its sealed blocks and the tail, then the largest or the mean of the
    group. "raw": the mean of the log masses.

    Args:
        masses: fp32 `[B, Hq, N]`, log masses; may be anything for blocks that are not sealed.
        tail: fp32 `[B, Hq]`, log mass of the tokens that have no digest; may be -inf.
        limits: int32 `[2]`: tokens of a row, sealed blocks.
        kv_heads: Hkv, a divisor of Hq.
        join: "max", "mean" or "raw".

    Returns:
        fp32 `[B, Hkv, N]`; -inf for blocks that are -inf in every head of the group and for those that are not sealed.

    Raises:
        ValueError: an unknown join, or shapes, devices or layouts that do not fit.
        TypeError: another dtype.
    """
    batch, query_heads, blocks = masses.shape
    if join not in JOINS:
        raise ValueError(f"join {join!r} is not one of {JOINS}")
    if kv_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads are not a multiple of {kv_heads} KV heads")
    require(
        masses.device,
        masses=(masses, F32, (batch, query_heads, blocks)),
        tail=(tail, F32, (batch, query_heads)),
        limits=(limits, (torch.int32,), (2,)),
    )
    if not on_triton(masses):
        return _by_torch(masses, tail, limits, kv_heads, join)
    if query_heads > MOST_HEADS * kv_heads:
        return _in_parts(masses, tail, limits, kv_heads, join)
    from . import join_kernels

    score = torch.empty(batch, kv_heads, blocks, dtype=torch.float32, device=masses.device)
    constants = join_sizes(query_heads // kv_heads)
    join_kernels.join_kernel[(-(-blocks // constants["TILE"]), kv_heads, batch)](
        masses, tail, limits, score, kv_heads, blocks, JOIN=join, **constants, num_warps=4
    )
    return score


def _in_parts(masses: torch.Tensor, tail: torch.Tensor, limits: torch.Tensor, kv_heads: int, join: str) -> torch.Tensor:
    parts = list(zip(split_heads(masses, kv_heads), split_heads(tail, kv_heads), strict=True))
    scores = [join_heads(*part, limits, kv_heads=kv_heads, join=join) for part in parts]
    most = torch.stack(scores).amax(0)
    if join == "max":
        return most
    total = torch.zeros_like(most)
    for score, (some, _) in zip(scores, parts, strict=True):
        # Heads that see nothing of a block do not take it from the others of their group.
        seen = score if join == "raw" else score.masked_fill(score == -torch.inf, 0.0)
        total += seen * (some.shape[1] / masses.shape[1])
    return torch.where(most > -torch.inf, total, -torch.inf)


def join_sizes(group: int) -> dict[str, Any]:
    """Compile-time sizes of `join_kernel`."""
    rows = 1 << (group - 1).bit_length()
    return {"GROUP": group, "ROWS": rows, "TILE": 256, "CHUNK": max(4096 // rows, 256)}


def _by_torch(masses: torch.Tensor, tail: torch.Tensor, limits: torch.Tensor, kv_heads: int, join: str) -> torch.Tensor:
    batch, query_heads, blocks = masses.shape
    sealed = torch.arange(blocks, device=masses.device) < limits[1]
    masses = torch.where(sealed, masses, -torch.inf)
    grouped = (batch, kv_heads, query_heads // kv_heads, blocks)
    if join == "raw":
        return masses.view(grouped).mean(2)
    total = torch.logaddexp(masses.logsumexp(-1), tail)[..., None]
    shares = torch.where(total > -torch.inf, (masses - total).exp(), 0.0).view(grouped)
    score = shares.amax(2) if join == "max" else shares.mean(2)
    return torch.where(masses.view(grouped).amax(2) > -torch.inf, score, -torch.inf)
