# mypy: ignore-errors
"""Kernel of `join.py`: one program for some blocks of a (row, KV head)."""

import triton
import triton.language as tl


@triton.jit
def join_kernel(
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
