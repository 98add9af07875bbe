# mypy: ignore-errors
"""Triton kernel of attention over blocks in slots."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def find_tokens(slots, blocks, valid, token, count, length, window, SIZE: tl.constexpr):
    """Slot of each token of a tile, and whether it is attended.

    `token` counts through the listed blocks of one (row, KV head). Entries from `count` on are never read.
    """
    entry = token // SIZE
    listed = entry < count
    slot = tl.load(slots + entry, mask=listed, other=0)
    position = tl.load(blocks + entry, mask=listed, other=0) * SIZE + token % SIZE
    seen = listed & (position < length) & (position >= length - window)
    if valid is not None:
        seen = seen & (tl.load(valid + position, mask=seen, other=0) != 0)
    return slot, seen


@triton.jit
def dot(a, b, acc):
    """Product of matrices; 16-bit ones on tensor cores, fp32 ones without rounding to tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def bend(score, softcap):
    """softcap·tanh(score / softcap), written so that no exponential overflows to NaN."""
    return softcap - 2.0 * softcap / (tl.exp2(score * (2.0 * LOG2E / softcap)) + 1.0)


@triton.jit(do_not_specialize=["slots_there", "width", "tokens", "window"])
def attend_split(
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
    window,
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
    length, count = tl.load(limits), tl.load(counts + line)
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
    next_slot, next_seen = find_tokens(slots, blocks, valid, token, count, length, window, SIZE)
    for _ in range(first, last):
        slot, seen = next_slot, next_seen
        place = slot.to(tl.int64) * (2 * SIZE * D) + (token % SIZE) * D
        token += TILE
        next_slot, next_seen = find_tokens(slots, blocks, valid, token, count, length, window, SIZE)
        where = home + place[:, None] + dim[None, :]
        mask = seen[:, None] & (dim < D)[None, :]  # V too: a weight of 0 does not silence a NaN
        k = tl.load(where, mask=mask, other=0.0)
        score = dot(q, tl.trans(k), None) * scale
        if CAPPED:
            score = bend(score, softcap)
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
    place = (heads * splits + split).to(tl.int64)
    tl.store(out + place[:, None] * D + dim[None, :], acc, mask=real)
    tl.store(lse + place, tl.where(some, (peak + tl.log2(total)) * LN2, float("-inf")), mask=row < GROUP)
