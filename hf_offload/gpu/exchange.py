"""Recall on the device: which resident blocks are evicted for which host blocks."""

from __future__ import annotations

from typing import no_type_check

import torch

from .backend import ON_TRITON, constexpr, jit, next_power_of_2, require, tl
from .block_topk import (
    MOST_BLOCKS,
    best,
    bound_of_best,
    is_best,
    keys_between,
    ordered,
    padded_width,
    together,
)

F32, I32 = (torch.float32,), (torch.int32,)
FREE = -1
MOST_EXCHANGED = 1024
"""Slots of a row and KV head that `exchange` sorts."""
SLOT_BITS, SLOT_MASK = constexpr(14), constexpr((1 << 14) - 1)
"""Bits of a slot's number in its rank; a slot holds one of `MOST_BLOCKS` blocks."""


def exchange(
    worth: torch.Tensor,
    scored: torch.Tensor,
    block_of: torch.Tensor,
    slot_of: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    limits: torch.Tensor,
    *,
    recent: int,
    due: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give the slots that may change hands to the blocks that are wanted most (ScoutAttention §3.4).

    Blocks from the end of the sinks up to the newest `recent` sealed ones may come and go; those before the sinks
    (padding) may go; the others stay. Slots are given up in this order: free ones, those of blocks worth least,
    those of blocks newer than any score; the most wanted missing block gets the first. Of equal worth the lower block
    is first, to go and to come. A block that is worth -inf or NaN never comes.

    Args:
        worth: fp32 `[B, Hkv, N]`, N up to 16384, of the first `scored` blocks; the rest may be anything.
        scored: int32 `[1]`.
        block_of: int32 `[B, Hkv, R]`, R up to 1024, the block in each slot, -1 = free; updated.
        slot_of: int32 `[B, Hkv, N]`, the slot of each block, -1 = not resident; updated.
        low, high: int32 `[B]`, first block and end of each row's sinks.
        limits: int32 `[2]`: tokens of a row, sealed blocks.
        recent: newest sealed blocks that stay.
        due: int32 `[1]`, 0 = nothing moves this time; None = it is time.

    Returns:
        The moves: slots and blocks int32 `[B, Hkv, R]`, counts int32 `[B, Hkv]`; entries from a count on mean nothing.

    Raises:
        ValueError: numbers out of range, or shapes, devices or layouts that do not fit.
        TypeError: another dtype.
    """
    _check(worth, scored, block_of, slot_of, low, high, limits, recent, due)
    if block_of.shape[2] > MOST_EXCHANGED:
        raise ValueError(f"{block_of.shape[2]} slots a KV head are more than the {MOST_EXCHANGED} that are sorted")
    if worth.device.type not in ON_TRITON:
        return _by_torch(worth, scored, block_of, slot_of, low, high, limits, recent, due)
    (batch, heads, slots), blocks = block_of.shape, slot_of.shape[2]
    moved_slots, moved_blocks = torch.empty_like(block_of), torch.empty_like(block_of)
    counts = torch.empty(batch, heads, dtype=torch.int32, device=worth.device)
    exchange_kernel[(batch * heads,)](
        worth, scored, block_of, slot_of, low, high, limits, due, moved_slots, moved_blocks, counts, heads, blocks,
        slots, recent, SLOTS=padded_slots(slots), **padded_width(blocks),
    )  # fmt: skip
    return moved_slots, moved_blocks, counts


def open_block(
    worth: torch.Tensor,
    scored: torch.Tensor,
    block_of: torch.Tensor,
    slot_of: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    limits: torch.Tensor,
    *,
    block_size: int,
    recent: int,
) -> None:
    """Give the block that the next token starts a slot: the one that `exchange` would give up first.

    Nothing happens while a block is unfinished, nor where no slot may change hands.

    Args:
        worth, scored, block_of, slot_of, low, high, limits, recent: as for `exchange`; N above length / block_size.
        block_size: tokens a block.

    Raises:
        ValueError: numbers out of range, or shapes, devices or layouts that do not fit.
        TypeError: another dtype.
    """
    _check(worth, scored, block_of, slot_of, low, high, limits, recent)
    if block_size < 1:
        raise ValueError(f"block_size {block_size} must be at least 1")
    if worth.device.type not in ON_TRITON:
        _open_by_torch(worth, scored, block_of, slot_of, low, high, limits, block_size, recent)
        return
    (batch, heads, slots), blocks = block_of.shape, slot_of.shape[2]
    open_block_kernel[(batch * heads,)](
        worth, scored, block_of, slot_of, low, high, limits, heads, blocks, slots, block_size, recent,
        CHUNK=min(padded_slots(slots), MOST_EXCHANGED), num_warps=4,
    )  # fmt: skip


def padded_slots(slots: int) -> int:
    """Compile-time size of what is sorted."""
    return max(next_power_of_2(slots), 16)


def _check(
    worth: torch.Tensor, scored: torch.Tensor, block_of: torch.Tensor, slot_of: torch.Tensor, low: torch.Tensor,
    high: torch.Tensor, limits: torch.Tensor, recent: int, due: torch.Tensor | None = None,
) -> None:  # fmt: skip
    batch, heads, blocks = worth.shape
    slots = block_of.shape[-1]
    if not (1 <= blocks <= MOST_BLOCKS and 1 <= slots <= MOST_BLOCKS):
        raise ValueError(f"{blocks} blocks a row or {slots} slots a KV head are not within 1..{MOST_BLOCKS}")
    require(
        worth.device,
        worth=(worth, F32, (batch, heads, blocks)),
        scored=(scored, I32, (1,)),
        block_of=(block_of, I32, (batch, heads, slots)),
        slot_of=(slot_of, I32, (batch, heads, blocks)),
        low=(low, I32, (batch,)),
        high=(high, I32, (batch,)),
        limits=(limits, I32, (2,)),
        **({} if due is None else {"due": (due, I32, (1,))}),
    )
    if recent < 0:
        raise ValueError(f"recent {recent} must not be negative")


def _by_torch(
    worth: torch.Tensor, scored: torch.Tensor, block_of: torch.Tensor, slot_of: torch.Tensor, low: torch.Tensor,
    high: torch.Tensor, limits: torch.Tensor, recent: int, due: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    slots, n = block_of.shape[2], torch.arange(worth.shape[2], dtype=torch.int32, device=worth.device)
    may = _may_change(block_of, low, high, limits, recent)
    movable = (n >= high[:, None, None]) & (n < limits[1] - recent) & (n < scored)
    wanted = best(torch.where(movable, worth, -torch.inf), may.sum(-1), slots)
    gone = wanted & (slot_of < 0)
    blocks = together(n.expand(worth.shape), gone, slots)
    number = torch.arange(slots, device=worth.device)
    value = torch.where(number < gone.sum(-1, keepdim=True), worth.gather(2, blocks.long()), -torch.inf)
    blocks = blocks.gather(2, value.argsort(dim=-1, descending=True, stable=True))

    kept = (block_of >= 0) & wanted.gather(2, block_of.clamp(min=0).long())
    order, victims = _order_of_slots(worth, scored, block_of), may & ~kept
    moved = together(order, victims.gather(2, order.long()), slots)
    counts = gone.sum(-1).minimum(victims.sum(-1)).int()
    if due is not None:
        counts = counts * (due != 0)
    _assign(block_of, slot_of, moved, blocks, number < counts[..., None])
    return moved, blocks, counts


def _open_by_torch(
    worth: torch.Tensor, scored: torch.Tensor, block_of: torch.Tensor, slot_of: torch.Tensor, low: torch.Tensor,
    high: torch.Tensor, limits: torch.Tensor, block_size: int, recent: int,
) -> None:  # fmt: skip
    may = _may_change(block_of, low, high, limits, recent)
    order = _order_of_slots(worth, scored, block_of)
    slot = together(order, may.gather(2, order.long()), 1)
    block = (limits[0] // block_size).expand(slot.shape)
    _assign(block_of, slot_of, slot, block, may.any(-1, keepdim=True) & (limits[0] % block_size == 0))


def _may_change(
    block_of: torch.Tensor, low: torch.Tensor, high: torch.Tensor, limits: torch.Tensor, recent: int
) -> torch.Tensor:
    """Slots that may be given to another block, bool `[B, Hkv, R]`: free ones, and those of blocks that may go."""
    low, high = low[:, None, None], high[:, None, None]
    return (block_of < 0) | (block_of < low) | ((block_of >= high) & (block_of < limits[1] - recent))


def _order_of_slots(worth: torch.Tensor, scored: torch.Tensor, block_of: torch.Tensor) -> torch.Tensor:
    """All slots, int32 `[B, Hkv, R]`: free ones, then by rising worth, then by block."""
    value = worth.gather(2, block_of.clamp(min=0).long())
    value = torch.where((block_of >= 0) & (value > -torch.inf), value, -torch.inf)
    value = torch.where(block_of >= scored, torch.inf, value)
    by_block = block_of.argsort(dim=-1, stable=True)
    return by_block.gather(2, value.gather(2, by_block).argsort(dim=-1, stable=True)).int()


def _assign(
    block_of: torch.Tensor, slot_of: torch.Tensor, slots: torch.Tensor, blocks: torch.Tensor, meant: torch.Tensor
) -> None:
    """Let slots hold other blocks, `[B, Hkv, n]` both, where that is meant; what they held is resident no more."""
    old = block_of.gather(2, slots.long())
    _put(slot_of, old, torch.full_like(old, FREE), meant & (old >= 0))
    _put(slot_of, blocks, slots, meant)
    _put(block_of, slots, blocks, meant)


def _put(target: torch.Tensor, index: torch.Tensor, entries: torch.Tensor, meant: torch.Tensor) -> None:
    """Write entries into the last axis of `target`, in place, where they are meant."""
    width = target.shape[-1]
    wide = torch.nn.functional.pad(target, (0, 1))  # the last entry is for what is not meant
    target.copy_(wide.scatter_(-1, torch.where(meant, index, width).long(), entries.int())[..., :width])


LAST = constexpr(2**63 - 1)
"""A rank behind every other."""


@jit
@no_type_check
def exchange_kernel(
    worth_ptr,  # [B, Hkv, N]
    scored_ptr,  # [1]
    block_of_ptr,  # [B, Hkv, R]
    slot_of_ptr,  # [B, Hkv, N]
    low_ptr,  # [B]
    high_ptr,  # [B]
    limits_ptr,  # [2]
    due_ptr,  # [1] or None
    moved_slots_ptr,  # [B, Hkv, R]
    moved_blocks_ptr,  # [B, Hkv, R]
    counts_ptr,  # [B, Hkv]
    kv_heads,
    blocks,  # N
    slots,  # R
    recent,
    WIDTH: tl.constexpr,  # N, up to the next power of two
    CHUNK: tl.constexpr,
    SLOTS: tl.constexpr,  # R, up to the next power of two
):
    line = tl.program_id(0).to(tl.int64)
    if due_ptr is not None:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.load(due_ptr) == 0:
            tl.store(counts_ptr + line, 0)
            return
    worth_ptr += line * blocks
    slot_of_ptr += line * blocks
    block_of_ptr += line * slots
    moved_blocks_ptr += line * slots
    newest = tl.load(limits_ptr + 1) - recent
    low = tl.load(low_ptr + line // kv_heads)
    first = tl.maximum(tl.load(high_ptr + line // kv_heads), 0)
    scored = tl.load(scored_ptr)
    last = tl.minimum(tl.minimum(newest, scored), blocks)
    every_slot = tl.arange(0, SLOTS)
    held, held_keys, ranks = look_at_slots(worth_ptr, scored, block_of_ptr, low, first, newest, every_slot, slots)
    room = tl.sum((ranks != LAST).to(tl.int32), 0)

    # The most wanted blocks; those that are missing are compacted in the order of their numbers.
    every = tl.arange(0, WIDTH)
    bound, end = bound_of_best(keys_between(worth_ptr, every, first, last), every, room)
    missing = 0
    for start in range(0, last, CHUNK):
        n = start + tl.arange(0, CHUNK)
        wanted = is_best(keys_between(worth_ptr, n, first, last), n, bound, end)
        gone = (wanted & (tl.load(slot_of_ptr + n, mask=wanted, other=0) < 0)).to(tl.int32)
        tl.store(moved_blocks_ptr + missing + tl.cumsum(gone, 0) - gone, n, mask=gone != 0)
        missing += tl.sum(gone, 0)

    # A resident block that is among the most wanted keeps its slot.
    kept = (held >= first) & (held < last) & is_best(held_keys, held, bound, end)
    ranks = tl.where(kept, LAST, ranks)
    count = tl.minimum(missing, tl.sum((ranks != LAST).to(tl.int32), 0))
    slot = (tl.sort(ranks) & SLOT_MASK).to(tl.int32)

    tl.debug_barrier()  # what is missing has been written by other threads
    i = tl.arange(0, SLOTS)
    block = tl.load(moved_blocks_ptr + i, mask=i < missing, other=0)
    keys = ordered(tl.load(worth_ptr + block, mask=i < missing, other=float("-inf")))
    falling = tl.where(i < missing, ((~keys).to(tl.int64) << 32) | block, LAST)
    block = (tl.sort(falling) & 0x7FFFFFFF).to(tl.int32)
    old = tl.load(block_of_ptr + slot, mask=i < count, other=-1)
    tl.debug_barrier()  # everything has been read that is written now
    tl.store(slot_of_ptr + old, -1, mask=(i < count) & (old >= 0))
    tl.store(slot_of_ptr + block, slot, mask=i < count)
    tl.store(block_of_ptr + slot, block, mask=i < count)
    tl.store(moved_slots_ptr + line * slots + i, slot, mask=i < count)
    tl.store(moved_blocks_ptr + i, block, mask=i < count)
    tl.store(counts_ptr + line, count)


@jit
@no_type_check
def open_block_kernel(
    worth_ptr,  # [B, Hkv, N]
    scored_ptr,  # [1]
    block_of_ptr,  # [B, Hkv, R]
    slot_of_ptr,  # [B, Hkv, N]
    low_ptr,  # [B]
    high_ptr,  # [B]
    limits_ptr,  # [2]
    kv_heads,
    blocks,  # N
    slots,  # R
    block_size,
    recent,
    CHUNK: tl.constexpr,  # slots that are looked at at a time
):
    line = tl.program_id(0).to(tl.int64)
    length = tl.load(limits_ptr)
    if length % block_size != 0:
        return
    block = length // block_size
    worth_ptr += line * blocks
    slot_of_ptr += line * blocks
    block_of_ptr += line * slots
    newest = tl.load(limits_ptr + 1) - recent
    low = tl.load(low_ptr + line // kv_heads)
    first = tl.maximum(tl.load(high_ptr + line // kv_heads), 0)
    scored = tl.load(scored_ptr)
    rank = tl.full((), LAST, tl.int64)
    for start in range(0, slots, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        _, _, ranks = look_at_slots(worth_ptr, scored, block_of_ptr, low, first, newest, slot, slots)
        rank = tl.minimum(rank, tl.min(ranks, 0))
    if rank == LAST:
        return
    slot = (rank & SLOT_MASK).to(tl.int32)
    old = tl.load(block_of_ptr + slot)
    tl.debug_barrier()  # everything has been read that is written now
    if old >= 0:
        tl.store(slot_of_ptr + old, -1)
    tl.store(slot_of_ptr + block, slot)
    tl.store(block_of_ptr + slot, block)


@jit
@no_type_check
def look_at_slots(worth_ptr, scored, block_of_ptr, low, first, newest, slot, slots):
    """What some slots of a row and KV head hold, and in which order they are given up.

    Returns:
        held int32 [n]: the block, -1 = free; keys int32 [n]: its worth, see `ordered`; ranks int64 [n]: free slots
        first, then by rising worth, then by block, the slot itself in the low `SLOT_BITS`; LAST for those that must
        keep their block.
    """
    held = tl.load(block_of_ptr + slot, mask=slot < slots, other=-1)
    # Blocks that are newer than any score are worth most.
    worth = tl.load(worth_ptr + held, mask=(held >= 0) & (held < scored), other=float("inf"))
    keys = ordered(tl.where(held < 0, float("-inf"), worth))
    ranks = (keys.to(tl.int64) << 32) | ((held + 1).to(tl.int64) << SLOT_BITS) | slot
    may = (slot < slots) & ((held < 0) | (held < low) | ((held >= first) & (held < newest)))
    return held, keys, tl.where(may, ranks, LAST)
