"""Scores of sealed blocks by their digests, and their join over the query heads of a KV head.

`blocks.digests` says what digests hold; `cpu.kernels.digest_scores` and `cpu.kernels.block_topk` are the CPU's.
"""

from __future__ import annotations

import math
from typing import Any, no_type_check

import torch

from hf_offload.scores import Scores

from .backend import ON_TRITON, jit, next_power_of_2, require, tl
from .paged_attention import LN2, MOST_HEADS, apply_softcap, regroup_heads, split_heads

F32, I32 = (torch.float32,), (torch.int32,)
AT_ONCE = 256
"""Blocks of all rows whose digests the torch form reads at a time: unpacked, a digest is larger than its block."""
JOINS = ("max", "mean", "raw")


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
    group, device = _group(query_heads, kv_heads), ready.device
    require(
        device,
        ready=(ready, F32, (batch, query_heads, width)),
        vectors=(vectors, F32, (physical, kv_heads, width)),
        bias=(bias, F32, (physical,)),
        table=(table, I32, (batch, table.shape[-1])),
        limits=(limits, I32, (2,)),
    )
    if ready.device.type not in ON_TRITON:
        return _vectors_by_torch(ready, vectors, bias, table, limits, softcap)
    if group > MOST_HEADS:
        rest = (vectors, bias, table, limits)
        parts = [score_vectors(part, *rest, softcap=softcap) for part in split_heads(ready, kv_heads)]
        return regroup_heads(parts, kv_heads)
    masses = torch.empty(batch, query_heads, table.shape[1], dtype=torch.float32, device=device)
    constants = vector_sizes(group, width)
    score_vectors_kernel[(-(-table.shape[1] // constants["TILE"]), kv_heads, batch)](
        ready, vectors, bias, table, limits, masses, softcap or 1.0, kv_heads, table.shape[1], **constants,
        CAPPED=softcap is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    return masses


def vector_sizes(group: int, width: int) -> dict[str, Any]:
    """Compile-time sizes of `score_vectors_kernel`."""
    return {"GROUP": group, "ROWS": max(next_power_of_2(group), 16), "WIDTH": width, "STEP": 32, "TILE": 64}


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
        sizes: int32 `[P, Hkv, S]`, two bfloat16 a word: code scale above level scale, whose sign does not matter.
        bias: fp32 `[P, S]`, log of the tokens in a pair; -inf for none.
        center, sigma: fp32 `[B, Hkv, D]`.
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
    group, device = _group(query_heads, kv_heads), query.device
    if dim % 16 or pairs & (pairs - 1) or not 4 <= pairs <= 64:
        raise ValueError(f"D {dim} must be a multiple of 16, and {pairs} pairs a block a power of two in 4..64")
    require(
        device,
        query=(query, F32, (batch, query_heads, dim)),
        codes=(codes, (torch.uint8,), (physical, kv_heads, pairs * dim // 2)),
        levels=(levels, I32, (physical, kv_heads, dim // 16, pairs)),
        sizes=(sizes, I32, (physical, kv_heads, pairs)),
        bias=(bias, F32, (physical, pairs)),
        center=(center, F32, (batch, kv_heads, dim)),
        sigma=(sigma, F32, (batch, kv_heads, dim)),
        table=(table, I32, (batch, table.shape[-1])),
        limits=(limits, I32, (2,)),
    )
    if query.device.type not in ON_TRITON:
        return _submeans_by_torch(query, codes, levels, sizes, bias, center, sigma, table, limits, scale, softcap)
    if group > MOST_HEADS:
        rest = (codes, levels, sizes, bias, center, sigma, table, limits)
        parts = [score_submeans(part, *rest, scale=scale, softcap=softcap) for part in split_heads(query, kv_heads)]
        return regroup_heads(parts, kv_heads)
    masses = torch.empty(batch, query_heads, table.shape[1], dtype=torch.float32, device=device)
    constants = submean_sizes(group, pairs, dim)
    score_submeans_kernel[(-(-table.shape[1] // constants["TILE"]), kv_heads, batch)](
        query, codes.view(torch.int32), levels, sizes, bias, center, sigma, table, limits, masses, scale,
        softcap or 1.0, kv_heads, table.shape[1], **constants, CAPPED=softcap is not None, num_warps=4, num_stages=3,
    )  # fmt: skip
    return masses


def submean_sizes(group: int, pairs: int, dim: int) -> dict[str, Any]:
    """Compile-time sizes of `score_submeans_kernel`."""
    padded, tile = next_power_of_2(dim), max(128 // pairs, 1)
    return {
        "GROUP": group, "HALF": max(next_power_of_2(group), 8), "PAIRS": pairs, "DIM": dim, "DIM_PAD": padded,
        "STEP": min(32, padded), "TILE": tile, "COLUMNS": tile * pairs,
    }  # fmt: skip


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
    group = _group(query_heads, kv_heads)
    require(
        masses.device,
        masses=(masses, F32, (batch, query_heads, blocks)),
        tail=(tail, F32, (batch, query_heads)),
        limits=(limits, (torch.int32,), (2,)),
    )
    if masses.device.type not in ON_TRITON:
        return _join_by_torch(masses, tail, limits, kv_heads, join)
    if group > MOST_HEADS:
        return _in_parts(masses, tail, limits, kv_heads, join)
    score = torch.empty(batch, kv_heads, blocks, dtype=torch.float32, device=masses.device)
    constants = join_sizes(group)
    join_heads_kernel[(-(-blocks // constants["TILE"]), kv_heads, batch)](
        masses, tail, limits, score, kv_heads, blocks, JOIN=join, **constants, num_warps=4
    )
    return score


def _group(query_heads: int, kv_heads: int) -> int:
    """How many query heads share a KV head; raise ValueError unless they do so evenly."""
    if kv_heads < 1 or query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads are not a multiple of {kv_heads} KV heads")
    return query_heads // kv_heads


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
    """Compile-time sizes of `join_heads_kernel`."""
    rows = next_power_of_2(group)
    return {"GROUP": group, "ROWS": rows, "TILE": 256, "CHUNK": max(4096 // rows, 256)}


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


def _submeans_by_torch(
    query: torch.Tensor, codes: torch.Tensor, levels: torch.Tensor, sizes: torch.Tensor, bias: torch.Tensor,
    center: torch.Tensor, sigma: torch.Tensor, table: torch.Tensor, limits: torch.Tensor, scale: float,
    softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    (batch, _, dim), (physical, kv_heads, pairs) = query.shape, sizes.shape
    sealed, grouped = _sealed(table, limits), query.view(batch, kv_heads, -1, dim)
    weighted, middle = grouped * sigma[:, :, None], (grouped * center[:, :, None]).sum(-1)[..., None, None]
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
        bits = torch.stack((octets & 3, octets >> 2 & 3, octets >> 4 & 3, octets >> 6), -1)
        bits = bits.view(*octets.shape, 2, 2).permute(0, 2, 3, 6, 5, 7, 1, 4)
        level_scale, code_scale = (
            sizes[some].transpose(1, 2)[:, :, None, ..., None].view(torch.bfloat16).float().unbind(-1)
        )
        mean, swing = scale * code_scale * product(nibbles, 8.0), scale * level_scale * product(bits, 1.5)
        mean = mean + scale * middle
        more, less = Scores(1.0, softcap).of(torch.stack((mean + swing, mean - swing)))
        shift = bias[some][:, None, None]
        score = torch.where(shift > -torch.inf, torch.logaddexp(more, less) - math.log(2) + shift, -torch.inf)
        parts.append(score.logsumexp(-1).flatten(1, 2))
    return torch.where(sealed[:, None], torch.cat(parts, -1), -torch.inf)


def _sealed(table: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Which entries of a table are sealed blocks, bool `[B, N]`."""
    return (torch.arange(table.shape[1], device=table.device) < limits[1]).expand(table.shape)


def _join_by_torch(
    masses: torch.Tensor, tail: torch.Tensor, limits: torch.Tensor, kv_heads: int, join: str
) -> torch.Tensor:
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


@jit
@no_type_check
def score_vectors_kernel(
    ready_ptr,  # [B, Hq, W]
    vectors_ptr,  # [P, Hkv, W]
    bias_ptr,  # [P]
    table_ptr,  # [B, N]
    limits_ptr,  # [2]
    out_ptr,  # [B, Hq, N]
    softcap,
    kv_heads,
    blocks,  # N
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, padded for tl.dot
    WIDTH: tl.constexpr,  # W
    STEP: tl.constexpr,
    TILE: tl.constexpr,  # blocks of a program
    CAPPED: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    sealed = tl.load(limits_ptr + 1)
    first = tl.program_id(0) * TILE
    n, g, w = first + tl.arange(0, TILE), tl.arange(0, ROWS), tl.arange(0, STEP)
    line = (row * kv_heads + head) * GROUP + g
    out_ptr += (line * blocks)[:, None] + n
    meant = (g < GROUP)[:, None] & (n < blocks)
    if first >= sealed:
        tl.store(out_ptr, tl.full((ROWS, TILE), float("-inf"), tl.float32), mask=meant)
        return
    alive = n < tl.minimum(sealed, blocks)
    physical = tl.load(table_ptr + row * blocks + n, mask=alive, other=0).to(tl.int64)
    bias = tl.load(bias_ptr + physical, mask=alive, other=float("-inf"))
    place = (physical * kv_heads + head) * WIDTH
    dots = tl.zeros((ROWS, TILE), tl.float32)
    for start in range(0, WIDTH, STEP):
        inside = start + w < WIDTH
        query = tl.load(ready_ptr + (line * WIDTH)[:, None] + start + w, mask=(g < GROUP)[:, None] & inside, other=0.0)
        vector = tl.load(
            vectors_ptr + place[None, :] + start + w[:, None], mask=alive[None, :] & inside[:, None], other=0.0
        )
        dots = tl.dot(query, vector, dots, input_precision="ieee")
    if CAPPED:
        dots = apply_softcap(dots, softcap)
    mass = tl.where((bias > float("-inf"))[None, :], dots + bias[None, :], float("-inf"))
    tl.store(out_ptr, mass, mask=meant)


@jit
@no_type_check
def score_submeans_kernel(
    query_ptr,  # [B, Hq, D]
    codes_ptr,  # [P, Hkv, D / 8, S] int32: eight dimensions of four bits, the lowest first, 8 too large
    levels_ptr,  # [P, Hkv, D / 16, S] int32: bits 8i + 4j + 2k are dimension 8j + 2i + k, 1.5 too large
    sizes_ptr,  # [P, Hkv, S] int32: scale of the codes, scale of the levels, both bfloat16
    bias_ptr,  # [P, S]
    center_ptr,  # [Hkv, D]
    sigma_ptr,  # [Hkv, D]
    table_ptr,  # [B, N]
    limits_ptr,  # [2]
    out_ptr,  # [B, Hq, N]
    scale,
    softcap,
    kv_heads,
    blocks,  # N
    GROUP: tl.constexpr,
    HALF: tl.constexpr,  # GROUP, padded for tl.dot: twice as many rows are multiplied
    PAIRS: tl.constexpr,  # S
    DIM: tl.constexpr,  # D
    DIM_PAD: tl.constexpr,
    STEP: tl.constexpr,  # dimensions that are unpacked at a time
    TILE: tl.constexpr,  # blocks of a program
    COLUMNS: tl.constexpr,  # TILE * PAIRS
    CAPPED: tl.constexpr,
):
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    sealed = tl.load(limits_ptr + 1)
    first = tl.program_id(0) * TILE
    n, g, j = first + tl.arange(0, TILE), tl.arange(0, HALF), tl.arange(0, PAIRS)
    line = (row * kv_heads + head) * GROUP
    out_ptr += ((line + g) * blocks)[:, None] + n
    meant = (g < GROUP)[:, None] & (n < blocks)
    if first >= sealed:
        tl.store(out_ptr, tl.full((HALF, TILE), float("-inf"), tl.float32), mask=meant)
        return
    alive = n < tl.minimum(sealed, blocks)
    physical = tl.load(table_ptr + row * blocks + n, mask=alive, other=0).to(tl.int64)
    record = (physical * kv_heads + head) * PAIRS

    # Every query head has two rows: what fp16 holds of sigma * query with 1024 as its largest, and what that leaves.
    r = tl.arange(0, 2 * HALF)
    real = (r % HALF < GROUP)[:, None]
    query_ptr += ((line + r % HALF) * DIM)[:, None]
    center_ptr += (row * kv_heads + head) * DIM
    sigma_ptr += (row * kv_heads + head) * DIM
    query = weighted(query_ptr, sigma_ptr, real, 0, DIM, DIM_PAD)
    unit = 1024.0 / tl.maximum(tl.max(tl.abs(query), 1), 1e-30)
    dots = tl.zeros((2 * HALF, COLUMNS), tl.float32)
    swings = tl.zeros((2 * HALF, COLUMNS), tl.float32)
    d = tl.arange(0, 16)
    for start in range(0, DIM, STEP):
        exact = weighted(query_ptr, sigma_ptr, real, start, DIM, STEP) * unit[:, None]
        part = exact.to(tl.float16)
        part = tl.where((r < HALF)[:, None], part, (exact - part.to(tl.float32)).to(tl.float16))

        word = start // 8 + tl.arange(0, STEP // 8)
        codes = tl.load(
            codes_ptr + (record * (DIM // 8))[None, :, None] + (word * PAIRS)[:, None, None] + j,
            mask=alive[None, :, None] & (word < DIM // 8)[:, None, None],
            other=0,
        )
        dots = tl.dot(part, unpack(codes, 4 * tl.arange(0, 8), 4, STEP, COLUMNS), dots)

        word = start // 16 + tl.arange(0, STEP // 16)
        levels = tl.load(
            levels_ptr + (record * (DIM // 16))[None, :, None] + (word * PAIRS)[:, None, None] + j,
            mask=alive[None, :, None] & (word < DIM // 16)[:, None, None],
            other=0,
        )
        swings = tl.dot(part, unpack(levels, d % 8 // 2 * 8 + d // 8 * 4 + d % 2 * 2, 2, STEP, COLUMNS), swings)

    # Both rows of a head have the same facts. The smallest fp16 number is 2 ** -24.
    worth = tl.max(tl.reshape(scale * 16777216.0 / unit, (2, HALF)), 0)[:, None]
    total = tl.max(tl.reshape(scale * tl.sum(query, 1), (2, HALF)), 0)[:, None]
    middle = tl.sum(weighted(query_ptr, center_ptr, real, 0, DIM, DIM_PAD), 1)
    middle = tl.max(tl.reshape(scale * middle, (2, HALF)), 0)[:, None]
    dots = worth * tl.sum(tl.reshape(dots, (2, HALF, COLUMNS)), 0) - 8.0 * total
    swings = worth * tl.sum(tl.reshape(swings, (2, HALF, COLUMNS)), 0) - 1.5 * total

    sizes = tl.load(sizes_ptr + record[:, None] + j, mask=alive[:, None], other=0)
    bias = tl.load(bias_ptr + physical[:, None] * PAIRS + j, mask=alive[:, None], other=float("-inf"))
    sizes, bias = tl.reshape(sizes, (1, COLUMNS)), tl.reshape(bias, (1, COLUMNS))
    code_scale = ((sizes >> 16) << 16).to(tl.float32, bitcast=True)
    level_scale = (sizes << 16).to(tl.float32, bitcast=True)
    mean, swing = code_scale * dots + middle, tl.abs(level_scale * swings)
    if CAPPED:  # of both keys
        more, less = apply_softcap(mean + swing, softcap), apply_softcap(mean - swing, softcap)
        mean, swing = 0.5 * (more + less), 0.5 * (more - less)
    mean = tl.where(bias > float("-inf"), mean + bias, float("-inf"))
    swing = tl.where(bias > float("-inf"), swing, 0.0)
    mean, swing = tl.reshape(mean, (HALF, TILE, PAIRS)), tl.reshape(swing, (HALF, TILE, PAIRS))
    peak = tl.max(mean + swing, 2)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    mean -= peak[:, :, None]
    mass = tl.sum(tl.exp(mean + swing) + tl.exp(mean - swing), 2)  # 2 cosh(swing) of each pair
    mass = tl.where(mass > 0.0, peak + tl.log(mass) - LN2, float("-inf"))
    tl.store(out_ptr, mass, mask=meant)


@jit
@no_type_check
def weighted(query_ptr, weight_ptr, real, start, DIM: tl.constexpr, STEP: tl.constexpr):
    """STEP dimensions of query * weight from `start` on, [ROWS, STEP]; 0 beyond DIM and where a row is not real."""
    d = start + tl.arange(0, STEP)
    query = tl.load(query_ptr + d, mask=real & (d < DIM), other=0.0)
    return query * tl.load(weight_ptr + d, mask=d < DIM, other=0.0)


@jit
@no_type_check
def unpack(words, shifts, BITS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr):
    """Integers of some bits in words [STEP / n, TILE, PAIRS], n to a word, as the fp16 numbers [STEP, COLUMNS] that
    have these bits: subnormal ones, which tensor cores multiply exactly. A conversion would cost more than the rest.
    """
    integers = (words[:, None] >> shifts[None, :, None, None]) & ((1 << BITS) - 1)
    return tl.reshape(integers.to(tl.int16).to(tl.float16, bitcast=True), (STEP, COLUMNS))


@jit
@no_type_check
def join_heads_kernel(
    masses_ptr,  # [B, Hq, N]
    tail_ptr,  # [B, Hq]
    limits_ptr,  # [2]
    score_ptr,  # [B, Hkv, N]
    kv_heads,
    blocks,  # N
    JOIN: tl.constexpr,  # "max", "mean" or "raw"
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, up to the next power of two
    TILE: tl.constexpr,  # blocks of a program
    CHUNK: tl.constexpr,  # blocks that are summed up at a time
):
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    sealed = tl.minimum(tl.load(limits_ptr + 1), blocks)
    first = tl.program_id(0) * TILE
    n, g = first + tl.arange(0, TILE), tl.arange(0, ROWS)
    score_ptr += (row * kv_heads + head) * blocks + n
    if first >= sealed:
        tl.store(score_ptr, tl.full((TILE,), float("-inf"), tl.float32), mask=n < blocks)
        return
    line = (row * kv_heads + head) * GROUP + g
    real = (g < GROUP)[:, None]
    masses_ptr += (line * blocks)[:, None]
    mass = tl.load(masses_ptr + n, mask=real & (n < sealed), other=float("-inf"))
    if JOIN == "raw":
        score = tl.sum(tl.where(real, mass, 0.0), 0) / GROUP
    else:
        # Every program sums up all blocks: they lie in the cache, and to share the sums would take another launch.
        peak = tl.load(tail_ptr + line, mask=g < GROUP, other=float("-inf"))
        total = tl.full((ROWS,), 1.0, tl.float32)  # in units of exp(peak)
        for start in range(0, sealed, CHUNK):
            i = start + tl.arange(0, CHUNK)
            some = tl.load(masses_ptr + i, mask=real & (i < sealed), other=float("-inf"))
            above = tl.maximum(peak, tl.max(some, 1))
            base = tl.where(above > float("-inf"), above, 0.0)
            total = total * tl.exp(peak - base) + tl.sum(tl.exp(some - base[:, None]), 1)
            peak = above
        # A head that gives nothing to any block nor to the tail has shares of 0.
        peak = tl.where(peak > float("-inf"), peak, 0.0)
        shares = tl.exp(mass - peak[:, None]) / tl.where(total > 0.0, total, 1.0)[:, None]
        if JOIN == "max":
            score = tl.max(shares, 0)
        else:
            score = tl.sum(shares, 0) / GROUP
        score = tl.where(tl.max(mass, 0) > float("-inf"), score, float("-inf"))
    tl.store(score_ptr, tl.where(n < sealed, score, float("-inf")), mask=n < blocks)
