# mypy: ignore-errors
"""Triton kernel of the moving average of attention weights, or of their fading peak."""

import triton
import triton.language as tl

from hf_offload.gpu.paged_kernels import LOG2E, bend, dot, find_tokens


@triton.jit(do_not_specialize=["after", "slots_there", "width", "tokens"])
def average_tile(
    average,  # [B, Hq, R, SIZE]
    query,  # [B, Hq, D]
    pool,  # [B, Hkv, R, 2 (K, V), SIZE, D]
    slots,  # [B, Hkv, C]
    blocks,  # [B, Hkv, C]
    counts,  # [B, Hkv]
    limits,  # [2]
    valid,  # [B, T] or None
    lse,  # [B, Hq]
    scale,
    softcap,
    alpha,
    share,
    after,
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
    LARGEST: tl.constexpr,
):
    """One program = one tile of the listed tokens of one (row, KV head)."""
    line, tile = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + line)
    if tile * TILE >= count * SIZE:
        return
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, D_PAD)
    heads = line * GROUP + row  # counted over the whole batch
    real = row < GROUP
    inside = (dim < D)[None, :]
    if valid is not None:
        valid += (line // HEADS).to(tl.int64) * tokens
    token = tile * TILE + tl.arange(0, TILE)
    length = tl.load(limits)
    slots += line * width
    blocks += line * width
    slot, seen = find_tokens(slots, blocks, valid, token, count, length, length, SIZE)
    block = tl.load(blocks + token // SIZE, mask=seen, other=0)
    age = length - (block * SIZE + token % SIZE)  # in steps, this one included
    if LARGEST:
        rate = tl.where(age > after, share, 0.0)
    else:
        rate = tl.maximum(alpha, 1.0 / tl.maximum(age, 1).to(tl.float32))

    peak = tl.load(lse + heads, mask=real, other=0.0)
    q = tl.load(query + heads[:, None] * D + dim[None, :], mask=real[:, None] & inside, other=0.0)
    place = slot.to(tl.int64) * (2 * SIZE * D) + (token % SIZE) * D
    home = pool + line.to(tl.int64) * slots_there * (2 * SIZE * D)
    k = tl.load(home + place[:, None] + dim[None, :], mask=seen[:, None] & inside, other=0.0)
    score = dot(q.to(k.dtype), tl.trans(k), None) * scale
    if CAPPED:
        score = bend(score, softcap)
    weight = tl.exp2((score - peak[:, None]) * LOG2E)

    cell = heads.to(tl.int64)[:, None] * slots_there * SIZE + (slot * SIZE + token % SIZE)[None, :]
    mask = real[:, None] & (token < count * SIZE)[None, :]
    before = tl.load(average + cell, mask=mask, other=0.0)
    if LARGEST:
        moved = tl.maximum(before * (1.0 - alpha), rate[None, :] * weight)
    else:
        moved = before + rate[None, :] * (weight - before)
    tl.store(average + cell, tl.where(seen[None, :], moved, 0.0), mask=mask)
