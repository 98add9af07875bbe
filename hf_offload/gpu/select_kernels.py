# mypy: ignore-errors
"""Kernels of `select.py`: one program for each (row, KV head)."""

import triton
import triton.language as tl

from .ranking_kernels import bound_of_best, is_best, keys_between


@triton.jit(do_not_specialize=["block_size", "recent", "k"])
def select_kernel(
    score_ptr,  # [B, Hkv, N]
    limits_ptr,  # [2]
    low_ptr,  # [B]
    high_ptr,  # [B]
    blocks_ptr,  # [B, Hkv, C]
    counts_ptr,  # [B, Hkv]
    kv_heads,
    width,  # N
    block_size,
    recent,
    k,
    capacity,  # C
    WIDTH: tl.constexpr,  # N, up to the next power of two
    CHUNK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = line // kv_heads
    num_blocks = tl.minimum((tl.load(limits_ptr) + block_size - 1) // block_size, width)
    sealed = tl.minimum(tl.load(limits_ptr + 1), num_blocks)
    low = tl.minimum(tl.maximum(tl.load(low_ptr + row), 0), num_blocks)
    high = tl.minimum(tl.maximum(tl.load(high_ptr + row), low), num_blocks)
    late = tl.minimum(sealed, tl.maximum(low, sealed - recent))
    sinks_end = tl.minimum(high, late)
    score_ptr += line * width
    want = k - tl.maximum(sinks_end - low, 0) - (num_blocks - late)
    every = tl.arange(0, WIDTH)
    bound, end = bound_of_best(keys_between(score_ptr, every, high, late), every, want)
    # The scores are read once more: to keep them all would take more registers than there are.
    count = 0
    for start in range(0, num_blocks, CHUNK):
        n = start + tl.arange(0, CHUNK)
        chosen = is_best(keys_between(score_ptr, n, high, late), n, bound, end)
        always = ((n >= low) & (n < sinks_end)) | ((n >= late) & (n < num_blocks))
        chosen = (chosen | always).to(tl.int32)
        place = count + tl.cumsum(chosen, 0) - chosen
        tl.store(blocks_ptr + line * capacity + place, n, mask=(chosen != 0) & (place < capacity))
        count += tl.sum(chosen, 0)
    tl.store(counts_ptr + line, tl.minimum(count, capacity))


@triton.jit
def split_kernel(
    blocks_ptr,  # [B, Hkv, C]
    counts_ptr,  # [B, Hkv]
    slot_of_ptr,  # [B, Hkv, N]
    near_ptr,  # [B, Hkv, C]
    near_slots_ptr,  # [B, Hkv, C]
    near_counts_ptr,  # [B, Hkv]
    far_ptr,  # [B, Hkv, C]
    far_counts_ptr,  # [B, Hkv]
    capacity,  # C
    width,  # N
    CHUNK: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + line)
    to = line * capacity
    near = 0
    for start in range(0, count, CHUNK):
        i = start + tl.arange(0, CHUNK)
        meant = i < count
        block = tl.load(blocks_ptr + to + i, mask=meant, other=0)
        slot = tl.load(slot_of_ptr + line * width + block, mask=meant, other=-1)
        here = (slot >= 0).to(tl.int32)
        place = near + tl.cumsum(here, 0) - here
        tl.store(near_ptr + to + place, block, mask=slot >= 0)
        tl.store(near_slots_ptr + to + place, slot, mask=slot >= 0)
        tl.store(far_ptr + to + i - place, block, mask=meant & (slot < 0))
        near += tl.sum(here, 0)
    tl.store(near_counts_ptr + line, near)
    tl.store(far_counts_ptr + line, count - near)
