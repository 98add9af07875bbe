"""The sealing of full blocks: their digests from their keys; `blocks.digests` says what digests hold.

Key pairs are packed as means in int4 and half differences in 2 bits. Codes [S, D] (S sub-means of a block) in -7..7 are
stored as nibbles, 8 too large. A little-endian 32-bit word holds 8 consecutive dimensions of one sub-mean, the lowest
in the lowest nibble; words are ordered [D / 8, S], sub-means together. A kernel then has sub-means in its lanes and
walks over dimensions: every lane meets the same query entry, and nothing is ever summed across lanes. Half differences
take two bits: a word holds 16 dimensions, laid out so that the bits 2k and 2k + 1 of its four bytes belong to the
dimensions of the nibbles k % 2 (of four bytes) of the k // 2-th word of codes.

A pair whose keys the packed form misses by far is an outlier (`OUTLIER`). The sign of the differences' scale marks one:
μ ± δ are the same keys as μ ∓ δ. Keys that attract every query are often outliers.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch

from .backend import FLOATS, ON_TRITON, jit, next_power_of_2, require, tl

LEVELS = 7
"""Largest code of a mean."""
STEP = 0.9957
"""Of a uniform quantiser with four levels, in standard deviations of a normal variable."""
LEAST = 1e-12
"""The smallest scale: what it divides by is no zero."""
OFFSET = 8
OUTLIER = 3
"""An outlier's keys are missed by more than this multiple of the mean squared error."""
_TILE = 2048  # elements that a program holds at a time


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
    if k.device.type not in ON_TRITON:
        vectors[ids], bias[ids] = (_bounds if bounds else _mean)(k.float(), valid)
        return
    if blocks:
        seal_vectors_kernel[(blocks, heads)](
            ids, k, valid, vectors, bias, *k.stride()[:3], heads, BOUNDS=bounds, **vector_sizes(tokens, dim),
            num_warps=4,
        )  # fmt: skip


def vector_sizes(tokens: int, dim: int) -> dict[str, Any]:
    """Compile-time sizes of `seal_vectors_kernel`."""
    width = next_power_of_2(dim)
    return {"TOKENS": tokens, "DIM": dim, "WIDTH": width, "TILE": min(tokens, _TILE // width)}


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
    error: torch.Tensor,
) -> None:
    """Summarise blocks by pairs of consecutive keys μ ± δ, as `gpu.digest_scores.score_submeans` reads them.

    Args:
        ids, k, valid: as in `seal_vectors`; T is twice a power of two, D a multiple of 16.
        codes: uint8 `[P, Hkv, S·D/2]`, written; S = T/2.
        levels: int32 `[P, Hkv, D/16, S]`, written.
        sizes: int32 `[P, Hkv, S]`, written: the code scale above the level scale, whose sign marks an outlier.
        bias: fp32 `[P, S]`, written: log of the tokens of a pair that count.
        center, sigma: fp32 `[n, Hkv, D]`, what means are taken from and channels divided by.
        error: fp32 `[n, Hkv]`, mean squared error of such pairs (`errors_of`).

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
        center=(center, (torch.float32,), (blocks, heads, dim)),
        sigma=(sigma, (torch.float32,), (blocks, heads, dim)),
        error=(error, (torch.float32,), (blocks, heads)),
    )
    if k.device.type not in ON_TRITON:
        codes[ids], levels[ids], sizes[ids], bias[ids] = _submeans_by_torch(k, valid, center, sigma, error)
        return
    if blocks:
        constants = submean_sizes(tokens, dim)
        seal_submeans_kernel[(blocks, heads, pairs // constants["TILE"])](
            ids, k, valid, codes.view(torch.int32), levels, sizes, bias, center, sigma, error, *k.stride()[:3], heads,
            **constants, num_warps=4,
        )  # fmt: skip


def submean_sizes(tokens: int, dim: int) -> dict[str, Any]:
    """Compile-time sizes of `seal_submeans_kernel`."""
    width = next_power_of_2(dim)
    return {
        "PAIRS": tokens // 2, "DIM": dim, "WIDTH": width, "TILE": min(tokens // 2, _TILE // 2 // width),
        "MOST": LEVELS, "STEP": STEP, "LEAST": LEAST, "OUTLIER": OUTLIER,
    }  # fmt: skip


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


def _mean(k: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = valid.sum(-1)
    mean = k.masked_fill(~valid[:, None, :, None], 0).sum(2) / count.clamp(min=1)[:, None, None]
    return mean, count.float().log()


def _bounds(k: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    drop = ~valid[:, None, :, None]
    high, low = k.masked_fill(drop, -torch.inf).amax(2), k.masked_fill(drop, torch.inf).amin(2)
    return torch.cat([high, low], -1), valid.any(-1).float().log()  # 0 or −inf


def _submeans_by_torch(
    k: torch.Tensor, valid: torch.Tensor, center: torch.Tensor, sigma: torch.Tensor, error: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    means, half, count = pairs_of(k, valid)
    codes, levels, scales, sizes, missed = _quantised(means, half, center, sigma)
    outlier = (missed > OUTLIER * error[..., None]) & (count > 0)[:, None]
    sizes = torch.where(outlier, -sizes, sizes)
    return pack_codes(codes), pack_levels(levels), pack_halves(scales, sizes), count.float().log()


def errors_of(means: torch.Tensor, half: torch.Tensor, center: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Mean squared errors `[n, Hkv, S]` of the two keys of packed pairs, from `pairs_of`; channels over sigma.

    Args:
        means, half: `[n, Hkv, S, D]`; center, sigma: `[n, Hkv, D]`.
    """
    return _quantised(means, half, center, sigma)[-1]


def _quantised(
    means: torch.Tensor, half: torch.Tensor, center: torch.Tensor, sigma: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Codes, levels, their scales, and the mean squared error of the two keys."""
    standard, half = (means - center[:, :, None]) / sigma[:, :, None], half / sigma[:, :, None]
    scales = (standard.abs().amax(-1) / LEVELS).clamp(min=LEAST).bfloat16().float()
    codes = (standard / scales[..., None] + 0.5).floor().clamp(-LEVELS, LEVELS).to(torch.int8)
    sizes = (STEP * half.square().mean(-1).sqrt()).bfloat16().float()
    levels = (half / sizes.clamp(min=LEAST)[..., None]).floor().clamp(-2, 1).to(torch.int8) + 2
    of_mean, of_half = standard - scales[..., None] * codes, half - sizes[..., None] * (levels.float() - 1.5)
    return codes, levels, scales, sizes, (of_mean.square() + of_half.square()).mean(-1)


def pairs_of(k: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Means and half differences `[n, Hkv, S, D]` and token counts `[n, S]` of key pairs in `[n, Hkv, T, D]`."""
    count = valid.view(*valid.shape[:-1], -1, 2).sum(-1)
    kept = k.float().masked_fill(~valid[:, None, :, None], 0)
    first, second = kept.view(*k.shape[:2], -1, 2, k.shape[3]).unbind(3)
    half = ((first - second) / 2).masked_fill((count < 2)[:, None, :, None], 0)
    return (first + second) / count.clamp(min=1)[:, None, :, None], half, count


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack int4 codes.

    Args:
        codes: int8 [..., S, D], values -7..7 (not checked), D a multiple of 8.

    Returns:
        uint8 [..., S * D / 2].

    Raises:
        ValueError: D is not a multiple of 8.
    """
    *outer, count, dim = codes.shape
    if dim % 8:
        raise ValueError(f"D {dim} is not a multiple of 8")
    nibbles = (codes + OFFSET).view(torch.uint8).reshape(*outer, count, dim // 8, 4, 2)
    octets = nibbles[..., 0] | (nibbles[..., 1] << 4)
    return octets.transpose(-3, -2).reshape(*outer, count * dim // 2)


def pack_levels(levels: torch.Tensor) -> torch.Tensor:
    """Pack 2-bit levels.

    Args:
        levels: integers 0..3 (not checked), [..., S, D], D a multiple of 16.

    Returns:
        int32 [..., D / 16, S].

    Raises:
        ValueError: D is not a multiple of 16.
    """
    *outer, count, dim = levels.shape
    if dim % 16:
        raise ValueError(f"D {dim} is not a multiple of 16")
    parts = levels.long().view(*outer, count, dim // 16, 2, 4, 2) << level_shifts(levels.device)
    packed = parts.sum((-3, -2, -1))
    return (packed - ((packed >> 31) << 32)).to(torch.int32).transpose(-2, -1).contiguous()


def level_shifts(device: torch.device) -> torch.Tensor:
    """The lowest bit of each of 16 dimensions in a word, `[2 (group of 8), 4, 2]`."""
    group, octet, odd = torch.meshgrid(*(torch.arange(n, device=device) for n in (2, 4, 2)), indexing="ij")
    return 8 * octet + 4 * group + 2 * odd


def pack_halves(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Two float32 tensors of one shape as the halves of int32 words, rounded to bfloat16."""
    return torch.stack((low.bfloat16(), high.bfloat16()), -1).view(torch.int32).squeeze(-1)


@jit
@no_type_check
def seal_vectors_kernel(
    ids_ptr,  # [n]
    k_ptr,  # [n, Hkv, T, D], strides given
    valid_ptr,  # [n, T] bool: a pointer to int1, which Triton loads byte by byte
    vectors_ptr,  # [P, Hkv, W]
    bias_ptr,  # [P]
    block_stride,
    head_stride,
    token_stride,
    heads,
    BOUNDS: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # DIM, padded to a power of two
    TILE: tl.constexpr,  # tokens at a time
):
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, t = tl.arange(0, WIDTH), tl.arange(0, TILE)
    k_ptr += block * block_stride + head * head_stride
    valid_ptr += block * TOKENS
    count = tl.zeros([TILE], tl.int32)
    if BOUNDS:
        high = tl.full([WIDTH], float("-inf"), tl.float32)
        low = tl.full([WIDTH], float("inf"), tl.float32)
    else:
        total = tl.zeros([WIDTH], tl.float32)
    for start in range(0, TOKENS, TILE):
        counts = tl.load(valid_ptr + start + t) != 0
        where = k_ptr + (start + t).to(tl.int64)[:, None] * token_stride + d[None, :]
        mask = counts[:, None] & (d < DIM)[None, :]
        count += counts.to(tl.int32)
        keys = tl.load(where, mask=mask, other=0.0).to(tl.float32)
        if BOUNDS:
            high = tl.maximum(high, tl.max(tl.where(mask, keys, float("-inf")), 0))
            low = tl.minimum(low, tl.min(tl.where(mask, keys, float("inf")), 0))
        else:
            total += tl.sum(keys, 0)
    number = tl.sum(count, 0)
    physical = tl.load(ids_ptr + block)
    if BOUNDS:
        vectors_ptr += (physical * heads + head) * (2 * DIM)
        tl.store(vectors_ptr + d, high, mask=d < DIM)
        tl.store(vectors_ptr + DIM + d, low, mask=d < DIM)
        bias = tl.where(number > 0, 0.0, float("-inf"))
    else:
        vectors_ptr += (physical * heads + head) * DIM
        tl.store(vectors_ptr + d, total / tl.maximum(number, 1).to(tl.float32), mask=d < DIM)
        bias = tl.where(number > 0, tl.log(tl.maximum(number, 1).to(tl.float32)), float("-inf"))
    if head == 0:
        tl.store(bias_ptr + physical, bias)


@jit
@no_type_check
def seal_submeans_kernel(
    ids_ptr,  # [n]
    k_ptr,  # [n, Hkv, T, D], strides given
    valid_ptr,  # [n, T] bool: a pointer to int1, which Triton loads byte by byte
    codes_ptr,  # [P, Hkv, D / 8, S] int32: eight dimensions of four bits, the lowest first, 8 too large
    levels_ptr,  # [P, Hkv, D / 16, S] int32: bits 8i + 4j + 2k are dimension 8j + 2i + k, 2 too large
    sizes_ptr,  # [P, Hkv, S] int32: scale of the codes, scale of the levels, both bfloat16; its sign marks outliers
    bias_ptr,  # [P, S]
    center_ptr,  # [n, Hkv, D]
    sigma_ptr,  # [n, Hkv, D]
    error_ptr,  # [n, Hkv]
    block_stride,
    head_stride,
    token_stride,
    heads,
    PAIRS: tl.constexpr,  # S
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # DIM, padded to a power of two
    TILE: tl.constexpr,  # pairs of a program
    MOST: tl.constexpr,  # largest code
    STEP: tl.constexpr,
    LEAST: tl.constexpr,
    OUTLIER: tl.constexpr,
):
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, j = tl.arange(0, WIDTH), tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = d < DIM
    k_ptr += block * block_stride + head * head_stride + (2 * j).to(tl.int64)[:, None] * token_stride + d[None, :]
    valid_ptr += block * (2 * PAIRS) + 2 * j
    one, two = tl.load(valid_ptr) != 0, tl.load(valid_ptr + 1) != 0
    count = one.to(tl.int32) + two.to(tl.int32)
    first = tl.load(k_ptr, mask=one[:, None] & inside[None, :], other=0.0).to(tl.float32)
    second = tl.load(k_ptr + token_stride, mask=two[:, None] & inside[None, :], other=0.0).to(tl.float32)
    line = block * heads + head
    center = tl.load(center_ptr + line * DIM + d, mask=inside, other=0.0)
    sigma = tl.load(sigma_ptr + line * DIM + d, mask=inside, other=1.0)

    mean = (first + second) / tl.maximum(count, 1).to(tl.float32)[:, None]
    standard = tl.where(inside[None, :], (mean - center[None, :]) / sigma[None, :], 0.0)
    scale = rounded(tl.maximum(tl.max(tl.abs(standard), 1) / MOST, LEAST))
    code = tl.floor(standard / scale.to(tl.float32, bitcast=True)[:, None] + 0.5)
    code = tl.minimum(tl.maximum(code, -MOST), MOST)
    missed = standard - code * scale.to(tl.float32, bitcast=True)[:, None]
    error = tl.sum(missed * missed, 1)
    code = code.to(tl.int32) + 8

    half = tl.where((count == 2)[:, None], (first - second) * 0.5 / sigma[None, :], 0.0)
    size = rounded(STEP * tl.sqrt(tl.sum(half * half, 1) / DIM))
    level = tl.floor(half / tl.maximum(size.to(tl.float32, bitcast=True), LEAST)[:, None])
    level = tl.minimum(tl.maximum(level, -2.0), 1.0)
    missed = tl.where(inside[None, :], half - (level + 0.5) * size.to(tl.float32, bitcast=True)[:, None], 0.0)
    error += tl.sum(missed * missed, 1)
    sign = tl.where((error > OUTLIER * DIM * tl.load(error_ptr + line)) & (count > 0), 0x8000, 0)
    level = level.to(tl.int32) + 2

    physical = tl.load(ids_ptr + block)
    record = (physical * heads + head) * PAIRS
    eight, sixteen = tl.arange(0, 8), tl.arange(0, 16)
    word = tl.arange(0, WIDTH // 8)
    packed = tl.sum(tl.reshape(code, (TILE, WIDTH // 8, 8)).to(tl.int64) << (4 * eight)[None, None, :], 2)
    where = codes_ptr + record * (DIM // 8) + word[None, :] * PAIRS + j[:, None]
    tl.store(where, packed.to(tl.int32), mask=(word < DIM // 8)[None, :])
    word = tl.arange(0, WIDTH // 16)
    shift = sixteen % 8 // 2 * 8 + sixteen // 8 * 4 + sixteen % 2 * 2
    packed = tl.sum(tl.reshape(level, (TILE, WIDTH // 16, 16)).to(tl.int64) << shift[None, None, :], 2)
    where = levels_ptr + record * (DIM // 16) + word[None, :] * PAIRS + j[:, None]
    tl.store(where, packed.to(tl.int32), mask=(word < DIM // 16)[None, :])
    tl.store(sizes_ptr + record + j, scale | sign | (size >> 16))
    if head == 0:
        bias = tl.where(count > 0, tl.log(tl.maximum(count, 1).to(tl.float32)), float("-inf"))
        tl.store(bias_ptr + physical * PAIRS + j, bias)


@jit
@no_type_check
def rounded(x):
    """Numbers of at least 0 as bfloat16 in the upper halves of int32 words, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
