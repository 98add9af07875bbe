"""Paged attention of one decode step: attention over blocks of KV in slots, split along the tokens (split-K).

A listing says what is attended: slots and blocks `[B, Hkv, C]`, counts `[B, Hkv]`. Its checks, its torch forms and its
kernels serve other operations over a listing too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import no_type_check

import torch

from hf_offload.scores import Scores, attend_tokens

from .backend import FLOATS, ON_TRITON, constexpr, jit, next_power_of_2, require, tl

_PROGRAMS = 264  # two for each multiprocessor of a large GPU
_SPLIT_TOKENS = 128  # less than this does not pay for another partial
_MAX_SPLITS = 64
_TILE_CHANNELS = 8192  # tokens times D: 16 KiB of 16-bit keys; two buffers for K and V each then take 64 KiB
MOST_HEADS = 16
"""Query heads of a KV head in one launch: a kernel holds them all in registers."""


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    blocks: torch.Tensor,
    counts: torch.Tensor,
    limits: torch.Tensor,
    valid: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend one query token to blocks in slots, in S shares that `merge` joins.

    S depends on shapes alone. The shares are disjoint. Together they attend every listed token that is below the
    length and valid.

    Args:
        query: `[B, Hq, D]`, fp32 or the pool's dtype; rounded to the latter by the kernel.
        pool: `[B, Hkv, R, 2 (K, V), block_size, D]`, fp32, fp16 or bf16; what is not attended may be anything.
        slots: `[B, Hkv, C]` int32, where the blocks lie; anything from the count on.
        blocks: `[B, Hkv, C]` int32, which logical blocks they are; anything from the count on.
        counts: `[B, Hkv]` int32, how many are listed.
        limits: `[2]` int32, (length: tokens of every row, this step's included; sealed blocks: unused here).
        valid: `[B, T]` uint8, 0 = the token is padding, T at least the length; None if there is no padding.
        scale: softmax scale.
        softcap: bound of the scores (`cap·tanh(score / cap)`), or None.

    Returns:
        out `[B, Hq, S, D]` fp32 and lse `[B, Hq, S]` fp32 (natural log); 0 and −inf where a share attends nothing.

    Raises:
        TypeError: a tensor of another dtype.
        ValueError: shapes, devices or sizes that do not fit together.
    """
    _, heads, group = check_listing(query, pool, slots, blocks, counts, limits, valid, softcap)
    if query.device.type not in ON_TRITON:
        return _by_torch(query, pool, slots, blocks, counts, limits, valid, scale, softcap)
    listing = (pool, slots, blocks, counts, limits, valid, scale, softcap)
    if group <= MOST_HEADS:
        return _launch(query, *listing)
    outs, lses = zip(*(_launch(part, *listing) for part in split_heads(query, heads)), strict=True)
    return regroup_heads(outs, heads), regroup_heads(lses, heads)


def _launch(
    query: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, blocks: torch.Tensor, counts: torch.Tensor,
    limits: torch.Tensor, valid: torch.Tensor | None, scale: float, softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    batch, heads, _, _, size, dim = pool.shape
    width = slots.shape[2]
    splits = count_splits(batch * heads, width * size)
    out = torch.empty(batch, query.shape[1], splits, dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(batch, query.shape[1], splits, dtype=torch.float32, device=query.device)
    paged_attention_kernel[(batch * heads, splits)](
        query, pool, slots, blocks, counts, limits, valid, out, lse, scale,
        1.0 if softcap is None else softcap,
        pool.shape[2], width, 0 if valid is None else valid.shape[1],
        CAPPED=softcap is not None, **tile_sizes(query, pool), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, lse


def count_splits(lines: int, tokens: int) -> int:
    """Into how many shares to cut `tokens` tokens of each of `lines` (row, KV head) pairs, so that a GPU is busy."""
    return max(1, min(-(-_PROGRAMS // lines), tokens // _SPLIT_TOKENS, _MAX_SPLITS))


def tile_sizes(query: torch.Tensor, pool: torch.Tensor) -> dict[str, int]:
    """The compile-time sizes of kernels that read a listing tile by tile."""
    heads, size, dim = pool.shape[1], pool.shape[4], pool.shape[5]
    padded = max(16, next_power_of_2(dim))
    # A product of fp32 matrices is unrolled into single multiplications: longer tiles run out of registers.
    tile = 16 if pool.dtype == torch.float32 else max(16, min(64, _TILE_CHANNELS // padded))
    return {
        "HEADS": heads, "GROUP": query.shape[1] // heads, "ROWS": 16,
        "D": dim, "D_PAD": padded, "SIZE": size, "TILE": tile,
    }  # fmt: skip


def check_listing(
    query: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    blocks: torch.Tensor,
    counts: torch.Tensor,
    limits: torch.Tensor,
    valid: torch.Tensor | None,
    softcap: float | None,
) -> tuple[int, int, int]:
    """Raise unless a query, a pool and a listing of its blocks fit together; see `paged_attention`.

    Returns:
        B, Hkv and G.
    """
    if pool.ndim != 6 or pool.shape[3] != 2:
        raise ValueError(f"pool has shape {tuple(pool.shape)}; expected [B, Hkv, R, 2, block_size, D]")
    batch, heads, _, _, size, dim = pool.shape
    if query.ndim != 3 or query.shape[0] != batch or query.shape[2] != dim or query.shape[1] % heads:
        raise ValueError(f"query {tuple(query.shape)} does not fit a pool {tuple(pool.shape)}")
    group = query.shape[1] // heads
    if size < 8 or size & (size - 1):
        raise ValueError(f"block_size {size} is not a power of two of at least 8")
    require(
        query.device,
        pool=(pool, FLOATS, pool.shape),
        query=(query, (torch.float32, pool.dtype), query.shape),
        slots=(slots, (torch.int32,), (batch, heads, slots.shape[-1])),
        blocks=(blocks, (torch.int32,), slots.shape),
        counts=(counts, (torch.int32,), (batch, heads)),
        limits=(limits, (torch.int32,), (2,)),
    )
    if valid is not None:
        require(query.device, valid=(valid, (torch.uint8,), (batch, valid.shape[-1])))
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap {softcap} is not positive; pass None for no softcap")
    return batch, heads, group


def split_heads(tensor: torch.Tensor, kv_heads: int) -> list[torch.Tensor]:
    """Cut `[B, Hq, …]` into contiguous parts `[B, Hkv · m, …]`, m at most `MOST_HEADS` query heads of each KV head."""
    grouped = tensor.reshape(len(tensor), kv_heads, -1, *tensor.shape[2:])
    return [part.flatten(1, 2).contiguous() for part in torch.split(grouped, MOST_HEADS, 2)]


def regroup_heads(parts: Sequence[torch.Tensor], kv_heads: int) -> torch.Tensor:
    """Put together again what `split_heads` has cut, and something was computed of."""
    grouped = [part.reshape(len(part), kv_heads, -1, *part.shape[2:]) for part in parts]
    return torch.cat(grouped, 2).flatten(1, 2)


def _by_torch(
    query: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, blocks: torch.Tensor, counts: torch.Tensor,
    limits: torch.Tensor, valid: torch.Tensor | None, scale: float, softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _, seen = seen_tokens(blocks, counts, limits, valid, pool.shape[4])
    tokens = gather_slots(pool, slots, seen)
    k, v = tokens[:, :, :, 0].flatten(2, 3), tokens[:, :, :, 1].flatten(2, 3)
    out, lse, _ = attend_tokens(query.float(), k, v, seen.flatten(2), Scores(scale, softcap))
    return out.unsqueeze(2), lse.unsqueeze(2)


def seen_tokens(
    blocks: torch.Tensor, counts: torch.Tensor, limits: torch.Tensor, valid: torch.Tensor | None, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position of each listed token and whether it is below the length and valid, `[B, Hkv, C, block_size]` each."""
    batch, _, width = blocks.shape
    most = (limits[0] + size - 1) // size
    listed = (torch.arange(width, device=blocks.device) < counts.clamp(max=most).unsqueeze(-1)) & (blocks >= 0)
    numbers = blocks.masked_fill(~listed, 0).long()
    position = numbers.unsqueeze(-1) * size + torch.arange(size, device=blocks.device)
    seen = listed.unsqueeze(-1) & (position < limits[0])
    if valid is not None:
        rows = torch.arange(batch, device=blocks.device).view(-1, 1, 1, 1)
        seen &= valid[rows, position.clamp(max=valid.shape[1] - 1)] != 0
    return position, seen


def gather_slots(pool: torch.Tensor, slots: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Tokens fp32 `[B, Hkv, C, 2, block_size, D]` in slots; 0 where `seen` `[B, Hkv, C, block_size]` is False."""
    batch, heads, slots_there = pool.shape[:3]
    line = torch.arange(batch * heads, device=pool.device).view(batch, heads, 1) * slots_there
    listed = line + slots.masked_fill(~seen.any(-1), 0)
    return pool.flatten(0, 2)[listed].float().masked_fill(~seen[:, :, :, None, :, None], 0.0)


LOG2E = constexpr(1.4426950408889634)
LN2 = constexpr(0.6931471805599453)


@jit(do_not_specialize=["slots_there", "width", "tokens"])
@no_type_check
def paged_attention_kernel(
    query,  # [B, Hq, D]
    pool,  # [B, Hkv, R, 2 (K, V), SIZE, D]
    slots,  # [B, Hkv, C]
    blocks,  # [B, Hkv, C]
    counts,  # [B, Hkv]
    limits,  # [2]
    valid,  # [B, T] or None
    out,  # [B, Hq, S, D]
    lse,  # [B, Hq, S]
    scale,
    softcap,
    slots_there,  # R
    width,  # C
    tokens,  # T
    HEADS: tl.constexpr,  # Hkv
    GROUP: tl.constexpr,  # G
    ROWS: tl.constexpr,  # G padded for tl.dot
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """One program = one split of one (row, KV head): a share of the tiles that are there, not of the capacity."""
    line, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    length = tl.load(limits)
    count = tl.minimum(tl.load(counts + line), tl.cdiv(length, SIZE))
    tiles = tl.cdiv(count * SIZE, TILE)
    share = tl.cdiv(tiles, splits)
    first = split * share
    last = tl.minimum(first + share, tiles)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, D_PAD)
    heads = line * GROUP + row  # counted over the whole batch
    real = (row < GROUP)[:, None] & (dim < D)[None, :]
    q = tl.load(query + heads[:, None] * D + dim[None, :], mask=real, other=0.0).to(pool.dtype.element_ty)
    home = pool + line.to(tl.int64) * slots_there * (2 * SIZE * D)
    slots += line * width
    blocks += line * width
    if valid is not None:
        valid += (line // HEADS).to(tl.int64) * tokens

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    token = first * TILE + tl.arange(0, TILE)
    # Looked up one tile ahead: with a look-up in the same turn the pipeliner keeps only one buffer for K and V.
    next_slot, next_seen = find_tokens(slots, blocks, valid, token, count, length, SIZE)
    for _ in range(first, last):
        slot, seen = next_slot, next_seen
        offset = slot.to(tl.int64) * (2 * SIZE * D) + (token % SIZE) * D
        token += TILE
        next_slot, next_seen = find_tokens(slots, blocks, valid, token, count, length, SIZE)
        where = home + offset[:, None] + dim[None, :]
        mask = seen[:, None] & (dim < D)[None, :]  # V too: a weight of 0 does not silence a NaN
        k = tl.load(where, mask=mask, other=0.0)
        score = dot(q, tl.trans(k), None) * scale
        if CAPPED:
            score = apply_softcap(score, softcap)
        score = tl.where(seen[None, :], score * LOG2E, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(peak - base)
        weight = tl.exp2(score - base[:, None])
        v = tl.load(where + SIZE * D, mask=mask, other=0.0)
        acc = dot(weight.to(v.dtype), v, acc * fade[:, None])
        total = total * fade + tl.sum(weight, 1)
        peak = higher

    some = total > 0.0
    total = tl.where(some, total, 1.0)
    acc = acc / total[:, None]
    entry = (heads * splits + split).to(tl.int64)
    tl.store(out + entry[:, None] * D + dim[None, :], acc, mask=real)
    tl.store(lse + entry, tl.where(some, (peak + tl.log2(total)) * LN2, float("-inf")), mask=row < GROUP)


@jit
@no_type_check
def find_tokens(slots, blocks, valid, token, count, length, SIZE: tl.constexpr):
    """Slot of each token of a tile, and whether it is attended.

    `token` counts through the listed blocks of one (row, KV head). Entries from `count` on are never read; a negative
    one is no block.
    """
    entry = token // SIZE
    listed = entry < count
    slot = tl.load(slots + entry, mask=listed, other=0)
    block = tl.load(blocks + entry, mask=listed, other=-1)
    position = block * SIZE + token % SIZE
    seen = listed & (block >= 0) & (position < length)
    if valid is not None:
        seen = seen & (tl.load(valid + position, mask=seen, other=0) != 0)
    return slot, seen


@jit
@no_type_check
def dot(a, b, acc):
    """Product of matrices; 16-bit ones on tensor cores, fp32 ones without rounding to tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@jit
@no_type_check
def apply_softcap(score, softcap):
    """softcap·tanh(score / softcap), written so that no exponential overflows to NaN."""
    return softcap - 2.0 * softcap / (tl.exp2(score * (2.0 * LOG2E / softcap)) + 1.0)
