"""Log masses of sealed blocks from their digests, which lie on the device; what digests hold says `cache.digests`."""

from __future__ import annotations

import math
from typing import Any

import torch

from hf_offload.scores import Scores

from .backend import on_triton
from .groups import MOST_HEADS, regroup_heads, split_heads
from .require import require

F32, I32 = (torch.float32,), (torch.int32,)
AT_ONCE = 256
"""Blocks of all rows whose digests the torch form reads at a time: unpacked, a digest is larger than its block."""


def score_vectors(
    ready: torch.Tensor, vectors: torch.Tensor, bias: torch.Tensor, table: torch.Tensor, limits: torch.Tensor, *,
    softcap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Score sealed blocks by one dot product each: log mass = ready · vector, below the softcap, + bias.

    Args:
        ready: fp32 `[B, Hq, W]`, the query as the digest wants it, scaled.
        vectors: fp32 `[P, Hkv, W]`, by physical block.
        bias: fp32 `[P]`, -inf for blocks without valid tokens.
        table: int32 `[B, N]`, physical block of each logical one.
        limits: int32 `[2]`: tokens of a row, sealed blocks.
        softcap: bound of the scores, or None.

    Returns:
        fp32 `[B, Hq, N]`; -inf for blocks without valid tokens and for those that are not sealed.

    Raises:
        ValueError: shapes, devices or layouts that do not fit.
        TypeError: another dtype.
    """
    (batch, query_heads, width), (physical, kv_heads, _) = ready.shape, vectors.shape
    device = ready.device
    _check_heads(query_heads, kv_heads)
    require(
        device,
        ready=(ready, F32, (batch, query_heads, width)),
        vectors=(vectors, F32, (physical, kv_heads, width)),
        bias=(bias, F32, (physical,)),
        table=(table, I32, (batch, table.shape[-1])),
        limits=(limits, I32, (2,)),
    )
    if not on_triton(ready):
        return _vectors_by_torch(ready, vectors, bias, table, limits, softcap)
    if query_heads > MOST_HEADS * kv_heads:
        parts = split_heads(ready, kv_heads)
        return regroup_heads(
            [score_vectors(part, vectors, bias, table, limits, softcap=softcap) for part in parts], kv_heads
        )
    from . import score_kernels

    masses = torch.empty(batch, query_heads, table.shape[1], dtype=torch.float32, device=device)
    constants = vector_sizes(query_heads // kv_heads, width)
    score_kernels.vectors_kernel[(-(-table.shape[1] // constants["TILE"]), kv_heads, batch)](
        ready, vectors, bias, table, limits, masses, softcap or 1.0, kv_heads, table.shape[1], **constants,
        CAPPED=softcap is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    return masses


def vector_sizes(group: int, width: int) -> dict[str, Any]:
    """Compile-time sizes of `vectors_kernel`."""
    return {"GROUP": group, "ROWS": _padded(group, 16), "WIDTH": width, "STEP": 32, "TILE": 64}


def _vectors_by_torch(
    ready: torch.Tensor, vectors: torch.Tensor, bias: torch.Tensor, table: torch.Tensor, limits: torch.Tensor,
    softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    sealed, grouped = _sealed(table, limits), ready.view(len(ready), vectors.shape[1], -1, ready.shape[2])
    ids = torch.where(sealed, table, 0).long()
    masses = [
        torch.einsum("bhgw,bnhw->bhgn", grouped, vectors[some])
        for some in torch.split(ids, max(AT_ONCE // len(ids), 1), 1)
    ]
    shift = torch.where(sealed, bias[ids], -torch.inf)[:, None]
    return torch.where(
        shift > -torch.inf, Scores(1.0, softcap).of(torch.cat(masses, -1).flatten(1, 2)) + shift, -torch.inf
    )


def score_submeans(
    query: torch.Tensor,
    codes: torch.Tensor,
    levels: torch.Tensor,
    sizes: torch.Tensor,
    bias: torch.Tensor,
    center: torch.Tensor,
    sigma: torch.Tensor,
    table: torch.Tensor,
    limits: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Score sealed blocks by pairs of keys μ ± δ: log mass = logsumexp(bias + scale·q·μ + log cosh(scale·q·δ)).

    μ = center + sigma · code scale · code, δ = sigma · level scale · (level - 1.5). Codes have 4 bits, levels 2.

    Args:
        query: fp32 `[B, Hq, D]`, D a multiple of 16.
        codes: uint8 `[P, Hkv, S·D/2]`, by physical block; S pairs, a power of two.
        levels: int32 `[P, Hkv, D/16, S]`.
        sizes: int32 `[P, Hkv, S]`, two bfloat16 a word: code scale above level scale.
        bias: fp32 `[P, S]`, log of the tokens in a pair; -inf for none.
        center, sigma: fp32 `[Hkv, D]`.
        table: int32 `[B, N]`, physical block of each logical one.
        limits: int32 `[2]`: tokens of a row, sealed blocks.
        scale: softmax scale; softcap: bound of the scores (`cap·tanh(score / cap)`), or None.

    Returns:
        fp32 `[B, Hq, N]`; -inf for blocks without valid tokens and for those that are not sealed.

    Raises:
        ValueError: shapes, devices or layouts that do not fit.
        TypeError: another dtype.
    """
    (batch, query_heads, dim), (physical, kv_heads, pairs) = query.shape, sizes.shape
    device = query.device
    _check_heads(query_heads, kv_heads)
    if dim % 16 or pairs & (pairs - 1) or not 4 <= pairs <= 64:
        raise ValueError(f"D {dim} must be a multiple of 16, and {pairs} pairs a block a power of two in 4..64")
    require(
        device,
        query=(query, F32, (batch, query_heads, dim)),
        codes=(codes, (torch.uint8,), (physical, kv_heads, pairs * dim // 2)),
        levels=(levels, I32, (physical, kv_heads, dim // 16, pairs)),
        sizes=(sizes, I32, (physical, kv_heads, pairs)),
        bias=(bias, F32, (physical, pairs)),
        center=(center, F32, (kv_heads, dim)),
        sigma=(sigma, F32, (kv_heads, dim)),
        table=(table, I32, (batch, table.shape[-1])),
        limits=(limits, I32, (2,)),
    )
    if not on_triton(query):
        return _submeans_by_torch(query, codes, levels, sizes, bias, center, sigma, table, limits, scale, softcap)
    if query_heads > MOST_HEADS * kv_heads:
        rest = (codes, levels, sizes, bias, center, sigma, table, limits)
        parts = [score_submeans(part, *rest, scale=scale, softcap=softcap) for part in split_heads(query, kv_heads)]
        return regroup_heads(parts, kv_heads)
    from . import score_kernels

    masses = torch.empty(batch, query_heads, table.shape[1], dtype=torch.float32, device=device)
    constants = submean_sizes(query_heads // kv_heads, pairs, dim)
    score_kernels.submeans_kernel[(-(-table.shape[1] // constants["TILE"]), kv_heads, batch)](
        query, codes.view(torch.int32), levels, sizes, bias, center, sigma, table, limits, masses, scale,
        softcap or 1.0, kv_heads, table.shape[1], **constants, CAPPED=softcap is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    return masses


def submean_sizes(group: int, pairs: int, dim: int) -> dict[str, Any]:
    """Compile-time sizes of `submeans_kernel`."""
    padded, tile = 1 << (dim - 1).bit_length(), max(128 // pairs, 1)
    return {
        "GROUP": group, "HALF": _padded(group, 8), "PAIRS": pairs, "DIM": dim, "DIM_PAD": padded,
        "STEP": min(32, padded), "TILE": tile, "COLUMNS": tile * pairs,
    }  # fmt: skip


def _submeans_by_torch(
    query: torch.Tensor, codes: torch.Tensor, levels: torch.Tensor, sizes: torch.Tensor, bias: torch.Tensor,
    center: torch.Tensor, sigma: torch.Tensor, table: torch.Tensor, limits: torch.Tensor, scale: float,
    softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    (batch, _, dim), (physical, kv_heads, pairs) = query.shape, sizes.shape
    sealed, grouped = _sealed(table, limits), query.view(batch, kv_heads, -1, dim)
    weighted, middle = grouped * sigma[:, None], (grouped * center[:, None]).sum(-1)[..., None, None]
    codes = codes.view(physical, kv_heads, dim // 8, pairs, 4)
    levels = levels.view(torch.uint8).view(physical, kv_heads, dim // 16, pairs, 4)

    def product(integers: torch.Tensor, offset: float) -> torch.Tensor:
        """weighted · (integers - offset) [b, h, g, n, s] from integers [b, h, several axes of dimensions, n, s]."""
        count = integers.shape[-2]
        flat = integers.reshape(batch, kv_heads, dim, count * pairs).float()
        return (weighted @ flat - offset * weighted.sum(-1, keepdim=True)).view(batch, kv_heads, -1, count, pairs)

    parts = []
    for some in torch.split(torch.where(sealed, table, 0).long(), max(AT_ONCE // batch, 1), 1):
        octets = codes[some]  # [b, n, h, w, s, i]: byte i of a word holds dimensions 8w + 2i + k
        nibbles = torch.stack((octets & 15, octets >> 4), -1).permute(0, 2, 3, 5, 6, 1, 4)
        octets = levels[some]  # byte i of a word holds dimensions 16w + 8j + 2i + k
        bits = torch.stack([octets >> shift & 3 for shift in (0, 2, 4, 6)], -1)
        bits = bits.view(*octets.shape, 2, 2).permute(0, 2, 3, 6, 5, 7, 1, 4)
        level_scale, code_scale = (
            sizes[some].transpose(1, 2)[:, :, None, ..., None].view(torch.bfloat16).float().unbind(-1)
        )
        mean, swing = scale * code_scale * product(nibbles, 8.0), scale * level_scale * product(bits, 1.5)
        mean = mean + scale * middle
        more, less = (Scores(1.0, softcap).of(key) for key in (mean + swing, mean - swing))
        shift = bias[some][:, None, None]
        score = torch.where(shift > -torch.inf, torch.logaddexp(more, less) - math.log(2) + shift, -torch.inf)
        parts.append(score.logsumexp(-1).flatten(1, 2))
    return torch.where(sealed[:, None], torch.cat(parts, -1), -torch.inf)


def _sealed(table: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Which entries of a table are sealed blocks, bool `[B, N]`."""
    return (torch.arange(table.shape[1], device=table.device) < limits[1]).expand(table.shape)


def _padded(group: int, least: int) -> int:
    """Query heads of a group, padded to a power of two."""
    return max(least, 1 << (group - 1).bit_length())


def _check_heads(query_heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads are not a multiple of {kv_heads} KV heads")
