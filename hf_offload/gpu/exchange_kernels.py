# mypy: ignore-errors
"""Kernels of `exchange.py`: one program for each (row, KV head)."""

import triton
import triton.language as tl

from .ranking_kernels import bound_of_best, is_best, keys_between, ordered

LAST = tl.constexpr(2**63 - 1)
"""A rank behind every other."""


@triton.jit
def look_at_slots(worth_ptr, known, block_of_ptr, low, first, newest, slots, SLOTS: tl.constexpr):
    """What the slots of a row and KV head hold, and in which order they are given up.

    Returns:
        held int32 [SLOTS]: the block, -1 = free; keys int32 [SLOTS]: its worth, see `ordered`; ranks int64 [SLOTS]:
        free slots first, then by rising worth, then by block, the slot itself in the low 12 bits; LAST for those that
        must keep their block.
    """
    slot = tl.arange(0, SLOTS)
    held = tl.load(block_of_ptr + slot, mask=slot < slots, other=-1)
    # Blocks that are newer than any score are worth most.
    worth = tl.load(worth_ptr + held, mask=(held >= 0) & (held < known), other=float("inf"))
    keys = ordered(tl.where(held < 0, float("-inf"), worth))
    ranks = (keys.to(tl.int64) << 32) | ((held + 1).to(tl.int64) << 12) | slot
    may = (slot < slots) & ((held < 0) | (held < low) | ((held >= first) & (held < newest)))
    return held, keys, tl.where(may, ranks, LAST)


@triton.jit
def exchange_kernel(
    worth_ptr,  # [B, Hkv, N]
    known_ptr,  # [1]
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
    known = tl.load(known_ptr)
    last = tl.minimum(tl.minimum(newest, known), blocks)
    held, held_keys, ranks = look_at_slots(worth_ptr, known, block_of_ptr, low, first, newest, slots, SLOTS)
    room = tl.sum((ranks != LAST).to(tl.int32), 0)

    # The most wanted blocks; those that are missing are brought together in the order of their numbers.
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
    slot = (tl.sort(ranks) & 0xFFF).to(tl.int32)

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


@triton.jit
def open_kernel(
    worth_ptr,  # [B, Hkv, N]
    known_ptr,  # [1]
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
    SLOTS: tl.constexpr,  # R, up to the next power of two
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
    _, _, ranks = look_at_slots(worth_ptr, tl.load(known_ptr), block_of_ptr, low, first, newest, slots, SLOTS)
    rank = tl.min(ranks, 0)
    if rank == LAST:
        return
    slot = (rank & 0xFFF).to(tl.int32)
    old = tl.load(block_of_ptr + slot)
    tl.debug_barrier()  # everything has been read that is written now
    if old >= 0:
        tl.store(slot_of_ptr + old, -1)
    tl.store(slot_of_ptr + block, slot)
    tl.store(block_of_ptr + slot, block)
