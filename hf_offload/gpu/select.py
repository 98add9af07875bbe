"""The choice of the blocks to attend, and its split by where they lie; the semantics of `cpu.kernels.block_topk`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .backend import on_triton
from .ranking import best, check_width, padded_width, together
from .require import require

I32 = (torch.int32,)


class Split(NamedTuple):
    """A selection, parted into resident blocks and the others; both keep its order."""

    near: torch.Tensor
    """int32 `[B, Hkv, C]`: blocks that have a slot."""
    near_slots: torch.Tensor
    """int32 `[B, Hkv, C]`: their slots."""
    near_counts: torch.Tensor
    """int32 `[B, Hkv]`."""
    far: torch.Tensor
    """int32 `[B, Hkv, C]`: blocks that have none."""
    far_counts: torch.Tensor
    """int32 `[B, Hkv]`."""


def select_blocks(
    score: torch.Tensor,
    limits: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    *,
    block_size: int,
    recent: int,
    k: int,
    capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose at most `k` logical blocks for each (row, KV head), in ascending order.

    Always chosen, even beyond `k`: the sinks, the newest `recent` sealed blocks from `low` on, and what is not sealed.
    The rest of `k` goes to the best-scoring sealed blocks from `low` on; ties go to the lower block, -inf and NaN are
    never chosen.

    Args:
        score: fp32 `[B, Hkv, N]`, N up to 16384, of the sealed blocks; the rest may be anything.
        limits: int32 `[2]`: tokens of a row (up to N·block_size), sealed blocks.
        low, high: int32 `[B]`, first block of the sinks, and their end.
        block_size: tokens a block.
        recent: newest sealed blocks to keep.
        k: blocks to choose.
        capacity: C, enough for whatever may be chosen: choices beyond it are lost.

    Returns:
        blocks int32 `[B, Hkv, C]` and counts int32 `[B, Hkv]`; entries from a count on mean nothing.

    Raises:
        ValueError: numbers out of range, or shapes, devices or layouts that do not fit.
        TypeError: another dtype.
    """
    batch, heads, width = score.shape
    check_width(width)
    require(
        score.device,
        score=(score, (torch.float32,), (batch, heads, width)),
        limits=(limits, I32, (2,)),
        low=(low, I32, (batch,)),
        high=(high, I32, (batch,)),
    )
    if block_size < 1 or recent < 0 or k < 0:
        raise ValueError(f"block_size {block_size}, recent {recent} and k {k} must be at least 1, 0 and 0")
    if capacity < max(1, min(k, width)):
        raise ValueError(f"capacity {capacity} is too small: up to {max(1, min(k, width))} blocks may be chosen")
    if on_triton(score):
        return _by_kernel(score, limits, low, high, block_size, recent, k, capacity)
    return _by_torch(score, limits, low, high, block_size, recent, k, capacity)


def _by_kernel(
    score: torch.Tensor, limits: torch.Tensor, low: torch.Tensor, high: torch.Tensor, block_size: int, recent: int,
    k: int, capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from . import select_kernels

    batch, heads, width = score.shape
    blocks = torch.empty(batch, heads, capacity, dtype=torch.int32, device=score.device)
    counts = torch.empty(batch, heads, dtype=torch.int32, device=score.device)
    select_kernels.select_kernel[(batch * heads,)](
        score, limits, low, high, blocks, counts, heads, width, block_size, recent, k, capacity, **padded_width(width)
    )  # fmt: skip
    return blocks, counts


def _by_torch(
    score: torch.Tensor, limits: torch.Tensor, low: torch.Tensor, high: torch.Tensor, block_size: int, recent: int,
    k: int, capacity: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    width = score.shape[2]
    num_blocks = ((limits[0] + block_size - 1) // block_size).clamp(max=width)
    sealed = limits[1].minimum(num_blocks)
    low = low.clamp(min=0).minimum(num_blocks)[:, None, None]
    high = high[:, None, None].maximum(low).minimum(num_blocks)
    late = (sealed - recent).maximum(low).minimum(sealed)
    n = torch.arange(width, dtype=torch.int32, device=score.device)
    always = ((n >= low) & (n < high.minimum(late))) | ((n >= late) & (n < num_blocks))
    others = torch.where((n >= high) & (n < late), score, -torch.inf)
    chosen = always | best(others, (k - always.sum(-1)).expand(score.shape[:2]), max(k, 1))
    blocks = together(n.expand(score.shape), chosen, capacity)
    return blocks, chosen.sum(-1).clamp(max=capacity).int()


def split_blocks(blocks: torch.Tensor, counts: torch.Tensor, slot_of: torch.Tensor) -> Split:
    """Part a selection into the blocks that have a slot and those that have none.

    Args:
        blocks: int32 `[B, Hkv, C]` logical blocks; entries from the count on may be anything.
        counts: int32 `[B, Hkv]`.
        slot_of: int32 `[B, Hkv, N]`, the slot of each block, negative = none.

    Raises:
        ValueError: shapes, devices or layouts that do not fit.
        TypeError: another dtype.
    """
    batch, heads, capacity = blocks.shape
    require(
        blocks.device,
        blocks=(blocks, I32, (batch, heads, capacity)),
        counts=(counts, I32, (batch, heads)),
        slot_of=(slot_of, I32, (batch, heads, slot_of.shape[-1])),
    )
    if on_triton(blocks):
        return _split_by_kernel(blocks, counts, slot_of)
    return _split_by_torch(blocks, counts, slot_of)


def _split_by_kernel(blocks: torch.Tensor, counts: torch.Tensor, slot_of: torch.Tensor) -> Split:
    from . import select_kernels

    split = Split(*(torch.empty_like(x) for x in (blocks, blocks, counts, blocks, counts)))
    chunk = min(max(1 << (blocks.shape[2] - 1).bit_length(), 128), 1024)
    select_kernels.split_kernel[(counts.numel(),)](
        blocks, counts, slot_of, *split, blocks.shape[2], slot_of.shape[2], CHUNK=chunk, num_warps=4
    )
    return split


def _split_by_torch(blocks: torch.Tensor, counts: torch.Tensor, slot_of: torch.Tensor) -> Split:
    capacity = blocks.shape[2]
    meant = torch.arange(capacity, device=blocks.device) < counts[..., None]
    slots = slot_of.gather(2, torch.where(meant, blocks, 0).long())
    here, there = meant & (slots >= 0), meant & (slots < 0)
    return Split(
        together(blocks, here, capacity),
        together(slots, here, capacity),
        here.sum(-1, dtype=torch.int32),
        together(blocks, there, capacity),
        there.sum(-1, dtype=torch.int32),
    )
