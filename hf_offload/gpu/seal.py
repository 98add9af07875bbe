"""Digests of full blocks from their keys; what digests hold says `cache.digests`."""

from __future__ import annotations

from typing import Any

import torch

from .backend import on_triton
from .packing import pack_codes, pack_halves, pack_levels
from .require import FLOATS, require

LEVELS = 7
"""Largest code of a mean."""
STEP = 0.9957
"""Of a uniform quantiser with four levels, in standard deviations of a normal variable."""
LEAST = 1e-12
"""The smallest scale: what it divides by is no zero."""
_TILE = 2048  # elements that a program holds at a time, for each of the two keys of a pair
_VECTOR_TILE = 2048


def seal_vectors(
    ids: torch.Tensor, k: torch.Tensor, valid: torch.Tensor, vectors: torch.Tensor, bias: torch.Tensor, *, bounds: bool
) -> None:
    """Summarise blocks by their mean key or by the bounds of their keys.

    Args:
        ids: int64 `[n]`, physical blocks.
        k: `[n, Hkv, T, D]` fp32, fp16 or bf16, their keys; the last dimension contiguous, other strides free.
        valid: bool `[n, T]`, which tokens count; the others' keys may be anything.
        vectors: fp32 `[P, Hkv, W]`, written: the largest and then the smallest key per channel (W = 2·D), or the mean.
        bias: fp32 `[P]`, written: 0 or, for means, log of the tokens that count; −inf where none do.
        bounds: which of the two.

    Raises:
        ValueError: shapes, devices or layouts that do not fit.
        TypeError: another dtype.
    """
    blocks, heads, tokens, dim = _check_keys(ids, k, valid)
    width = 2 * dim if bounds else dim
    require(
        k.device,
        vectors=(vectors, (torch.float32,), (len(vectors), heads, width)),
        bias=(bias, (torch.float32,), (len(vectors),)),
    )
    if not on_triton(k):
        vectors[ids], bias[ids] = (_bounds if bounds else _mean)(k.float(), valid)
        return
    from . import seal_kernels

    if blocks:
        seal_kernels.vectors_kernel[(blocks, heads)](
            ids, k, valid, vectors, bias, *k.stride()[:3], heads, BOUNDS=bounds, **vector_sizes(tokens, dim),
            num_warps=4,
        )  # fmt: skip


def vector_sizes(tokens: int, dim: int) -> dict[str, Any]:
    """Compile-time sizes of `vectors_kernel`."""
    width = _power_of_two(dim)
    return {"TOKENS": tokens, "DIM": dim, "WIDTH": width, "TILE": min(tokens, _VECTOR_TILE // width)}


def _mean(k: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = valid.sum(-1)
    mean = k.masked_fill(~valid[:, None, :, None], 0).sum(2) / count.clamp(min=1)[:, None, None]
    return mean, count.float().log()


def _bounds(k: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    drop = ~valid[:, None, :, None]
    high, low = k.masked_fill(drop, -torch.inf).amax(2), k.masked_fill(drop, torch.inf).amin(2)
    return torch.cat([high, low], -1), torch.where(valid.any(-1), 0.0, -torch.inf)


def seal_submeans(
    ids: torch.Tensor,
    k: torch.Tensor,
    valid: torch.Tensor,
    codes: torch.Tensor,
    levels: torch.Tensor,
    sizes: torch.Tensor,
    bias: torch.Tensor,
    center: torch.Tensor,
    sigma: torch.Tensor,
) -> None:
    """Summarise blocks by pairs of consecutive keys μ ± δ, as `score.score_submeans` reads them.

    Args:
        ids, k, valid: as in `seal_vectors`; T is twice a power of two, D a multiple of 16.
        codes: uint8 `[P, Hkv, S·D/2]`, written; S = T/2.
        levels: int32 `[P, Hkv, D/16, S]`, written.
        sizes: int32 `[P, Hkv, S]`, written.
        bias: fp32 `[P, S]`, written: log of the tokens of a pair that count.
        center, sigma: fp32 `[Hkv, D]`, what means are taken from and channels divided by.

    Raises:
        ValueError: shapes, devices or layouts that do not fit.
        TypeError: another dtype.
    """
    blocks, heads, tokens, dim = _check_keys(ids, k, valid)
    physical, pairs, device = len(codes), tokens // 2, k.device
    if dim % 16 or tokens < 2 or tokens & (tokens - 1):
        raise ValueError(f"D {dim} must be a multiple of 16, and {tokens} tokens a block a power of two")
    require(
        device,
        codes=(codes, (torch.uint8,), (physical, heads, pairs * dim // 2)),
        levels=(levels, (torch.int32,), (physical, heads, dim // 16, pairs)),
        sizes=(sizes, (torch.int32,), (physical, heads, pairs)),
        bias=(bias, (torch.float32,), (physical, pairs)),
        center=(center, (torch.float32,), (heads, dim)),
        sigma=(sigma, (torch.float32,), (heads, dim)),
    )
    if not on_triton(k):
        codes[ids], levels[ids], sizes[ids], bias[ids] = _submeans_by_torch(k, valid, center, sigma)
        return
    from . import seal_kernels

    if blocks:
        constants = submean_sizes(tokens, dim)
        seal_kernels.submeans_kernel[(blocks, heads, pairs // constants["TILE"])](
            ids, k, valid, codes.view(torch.int32), levels, sizes, bias, center, sigma, *k.stride()[:3], heads,
            **constants, num_warps=4,
        )  # fmt: skip


def submean_sizes(tokens: int, dim: int) -> dict[str, Any]:
    """Compile-time sizes of `submeans_kernel`."""
    width = _power_of_two(dim)
    constants = {"MOST": LEVELS, "STEP": STEP, "LEAST": LEAST}
    return {"PAIRS": tokens // 2, "DIM": dim, "WIDTH": width, "TILE": min(tokens // 2, _TILE // width), **constants}


def pairs_of(k: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Means and half differences `[n, Hkv, S, D]` and token counts `[n, S]` of key pairs in `[n, Hkv, T, D]`."""
    count = valid.view(*valid.shape[:-1], -1, 2).sum(-1)
    kept = k.float().masked_fill(~valid[:, None, :, None], 0)
    first, second = kept.view(*k.shape[:2], -1, 2, k.shape[3]).unbind(3)
    half = ((first - second) / 2).masked_fill((count < 2)[:, None, :, None], 0)
    return (first + second) / count.clamp(min=1)[:, None, :, None], half, count


def _submeans_by_torch(
    k: torch.Tensor, valid: torch.Tensor, center: torch.Tensor, sigma: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    means, half, count = pairs_of(k, valid)
    standard, half = (means - center[:, None]) / sigma[:, None], half / sigma[:, None]
    scales = (standard.abs().amax(-1) / LEVELS).clamp(min=LEAST).bfloat16().float()
    codes = (standard / scales[..., None] + 0.5).floor().clamp(-LEVELS, LEVELS).to(torch.int8)
    sizes = (STEP * half.square().mean(-1).sqrt()).bfloat16().float()
    levels = (half / sizes.clamp(min=LEAST)[..., None]).floor().clamp(-2, 1).to(torch.int8) + 2
    return pack_codes(codes), pack_levels(levels), pack_halves(scales, sizes), count.float().log()


def _check_keys(ids: torch.Tensor, k: torch.Tensor, valid: torch.Tensor) -> tuple[int, int, int, int]:
    """Blocks, KV heads, tokens of a block and head dimension."""
    if k.dim() != 4 or k.stride(3) != 1:
        raise ValueError(f"k has shape {tuple(k.shape)}, strides {k.stride()}; expected [n, Hkv, T, D], last stride 1")
    if k.dtype not in FLOATS:
        raise TypeError(f"k has dtype {k.dtype}; expected one of {FLOATS}")
    blocks, heads, tokens, dim = k.shape
    require(
        k.device,
        ids=(ids, (torch.int64,), (blocks,)),
        valid=(valid, (torch.bool,), (blocks, tokens)),
    )
    return blocks, heads, tokens, dim


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()
