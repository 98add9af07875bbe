"""Top-k selection of blocks by score, and its split into resident and host blocks; as `cpu.kernels.block_topk`."""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch

from .backend import ON_TRITON, constexpr, jit, next_power_of_2, require, tl

I32 = (torch.int32,)
MOST_BLOCKS = 16384
"""Blocks of a row that a kernel ranks: it holds them all in registers."""


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
    if not 1 <= width <= MOST_BLOCKS:
        raise ValueError(f"{width} blocks a row are not within 1..{MOST_BLOCKS}; use a larger block_size")
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
    if score.device.type not in ON_TRITON:
        return _select_by_torch(score, limits, low, high, block_size, recent, k, capacity)
    blocks = torch.empty(batch, heads, capacity, dtype=torch.int32, device=score.device)
    counts = torch.empty(batch, heads, dtype=torch.int32, device=score.device)
    select_kernel[(batch * heads,)](
        score, limits, low, high, blocks, counts, heads, width, block_size, recent, k, capacity, **padded_width(width)
    )  # fmt: skip
    return blocks, counts


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
    if blocks.device.type not in ON_TRITON:
        return _split_by_torch(blocks, counts, slot_of)
    split = Split(*(torch.empty_like(x) for x in (blocks, blocks, counts, blocks, counts)))
    chunk = min(max(next_power_of_2(capacity), 128), 1024)
    split_kernel[(counts.numel(),)](
        blocks, counts, slot_of, *split, capacity, slot_of.shape[2], CHUNK=chunk, num_warps=4
    )
    return split


def choose_runs(
    masses: torch.Tensor, wanted: list[int], *, span: int, sums: bool, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let each query head take its best runs of `span` blocks; the union, ascending. Nothing waits for the device.

    Blocks are cut into runs from the first on. Of equal runs the first is taken; runs without valid tokens never are.

    Args:
        masses: fp32 `[G, n]`, log masses of the blocks; −inf for those without valid tokens.
        wanted: runs that each of the G heads takes.
        span: blocks a run.
        sums: a run's mass is the sum of its blocks'; otherwise its score is their largest.
        capacity: blocks that are returned at most; what is behind it is left out.

    Returns:
        blocks int32 `[capacity]`, of which `count` int32 `[]` are meant.

    Raises:
        ValueError: not as many numbers of runs as heads, or a span of no blocks.
        TypeError: another dtype.
    """
    heads, blocks = masses.shape
    require(masses.device, masses=(masses, (torch.float32,), (heads, blocks)))
    if len(wanted) != heads or span < 1:
        raise ValueError(f"{len(wanted)} numbers of runs of {span} blocks for {heads} heads; one for each is needed")
    joined = torch.nn.functional.pad(masses, (0, -blocks % span), value=-torch.inf).view(heads, -1, span)
    score = joined.logsumexp(-1) if sums and span > 1 else joined.amax(-1)
    order = score.argsort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order)
    ranks = torch.arange(order.shape[1], device=masses.device)
    rank.scatter_(1, order, ranks.expand_as(order))
    best = torch.stack([line < runs for line, runs in zip(rank, wanted, strict=True)])  # a tensor of them would be sent
    taken = (best & (score > -torch.inf)).any(0)
    marks = taken.repeat_interleave(span)[:blocks]
    chosen = torch.sort(marks, descending=True, stable=True).indices[:capacity]
    return chosen.int(), marks.sum().clamp(max=capacity).int()


def spare_width(blocks: int) -> int:
    """A quarter more blocks, for a table that grows; but no more than can be ranked, as long as they can."""
    wide = blocks * 5 // 4
    return min(wide, MOST_BLOCKS) if blocks < MOST_BLOCKS else wide


def padded_width(blocks: int) -> dict[str, int]:
    """Compile-time sizes and warps of a kernel that holds all blocks in registers."""
    width = next_power_of_2(blocks)
    warps = min(max(width // 1024, 4), 16)
    return {"WIDTH": width, "CHUNK": min(width, 128 * warps), "num_warps": warps}


def _select_by_torch(
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


def _split_by_torch(blocks: torch.Tensor, counts: torch.Tensor, slot_of: torch.Tensor) -> Split:
    capacity = blocks.shape[2]
    meant = torch.arange(capacity, device=blocks.device) < counts[..., None]
    slots = slot_of.gather(2, torch.where(meant, blocks, 0).long())
    resident, absent = meant & (slots >= 0), meant & (slots < 0)
    near, near_slots = together(torch.stack((blocks, slots)), torch.stack((resident, resident)), capacity)
    return Split(
        near,
        near_slots,
        resident.sum(-1, dtype=torch.int32),
        together(blocks, absent, capacity),
        absent.sum(-1, dtype=torch.int32),
    )


def best(worth: torch.Tensor, want: torch.Tensor, most: int) -> torch.Tensor:
    """Mark the `want` largest entries of each row; ties go to the lower index, -inf and NaN are never marked.

    Args:
        worth: fp32 `[..., N]`.
        want: integers `[...]`, at most `most`.
        most: bound of `want`, above 0.

    Returns:
        bool `[..., N]`.
    """
    worth = torch.where(worth > -torch.inf, worth, -torch.inf)  # NaN
    want = want.clamp(min=0)[..., None]
    least = worth.topk(min(most, worth.shape[-1]), -1).values
    bound = least.gather(-1, (want - 1).clamp(0, least.shape[-1] - 1))
    above, ties = worth > bound, (worth == bound) & (bound > -torch.inf)
    left = want - above.sum(-1, keepdim=True)
    return (want > 0) & (above | (ties & (ties.cumsum(-1) <= left)))


def together(entries: torch.Tensor, keep: torch.Tensor, width: int) -> torch.Tensor:
    """Bring the kept entries of each row to its front, in order; what lies behind them means nothing.

    Args:
        entries: `[..., n]`.
        keep: bool `[..., n]`; what does not fit into `width` is dropped.
        width: entries of a row of the result.

    Returns:
        `[..., width]`.
    """
    rank = torch.where(keep, keep.cumsum(-1) - 1, width).clamp(max=width)
    front = entries.new_zeros(*entries.shape[:-1], width + 1)  # the last rank is for what is not kept
    return front.scatter_(-1, rank, entries)[..., :width].contiguous()


NEVER = constexpr(-(2**31))
"""The key of -inf and NaN, below the key of every other float."""


@jit(do_not_specialize=["block_size", "recent", "k"])
@no_type_check
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
        rank = count + tl.cumsum(chosen, 0) - chosen
        tl.store(blocks_ptr + line * capacity + rank, n, mask=(chosen != 0) & (rank < capacity))
        count += tl.sum(chosen, 0)
    tl.store(counts_ptr + line, tl.minimum(count, capacity))


@jit
@no_type_check
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
        rank = near + tl.cumsum(here, 0) - here
        tl.store(near_ptr + to + rank, block, mask=slot >= 0)
        tl.store(near_slots_ptr + to + rank, slot, mask=slot >= 0)
        tl.store(far_ptr + to + i - rank, block, mask=meant & (slot < 0))
        near += tl.sum(here, 0)
    tl.store(near_counts_ptr + line, near)
    tl.store(far_counts_ptr + line, count - near)


@jit
@no_type_check
def ordered(x):
    """Integers in the order of the floats x; both zeros are equal."""
    bits = tl.where(x == 0.0, 0, x.to(tl.int32, bitcast=True))
    return tl.where(x > float("-inf"), bits ^ ((bits >> 31) & 0x7FFFFFFF), NEVER)


@jit
@no_type_check
def keys_between(worth_ptr, n, first, end):
    """Keys of the blocks n of a row that are from `first` on and before `end`; NEVER for the others."""
    return ordered(tl.load(worth_ptr + n, mask=(n >= first) & (n < end), other=float("-inf")))


@jit
@no_type_check
def bound_of_best(keys, n, want):
    """Where the `want` largest keys of a row end: see `is_best`. Ties go to the lower n.

    Args:
        keys: int32 [N], see `ordered`; NEVER does not count.
        n: [N], 0, 1, 2, ...
        want: scalar; nothing is wanted below 1.

    Returns:
        The bound, and the end of those that equal it.
    """
    usable = tl.sum((keys != NEVER).to(tl.int32), 0)
    # The bound is the largest key that at least `want` keys reach. Ends early where exactly that many do.
    above = tl.max(keys, 0).to(tl.int64)
    below = tl.min(tl.where(keys == NEVER, 0x7FFFFFFF, keys), 0).to(tl.int64)
    below = tl.where((want > 0) & (usable > want), below, above)
    while below < above:
        middle = (below + above + 1) >> 1
        count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
        below = tl.where(count >= want, middle, below)
        above = tl.where(count > want, above, tl.where(count == want, middle, middle - 1))
    bound = tl.where(usable <= want, NEVER, below.to(tl.int32))
    bound = tl.where(want > 0, bound, 0x7FFFFFFF)  # above the key of every float
    # The end of the ties is the lowest number with enough of them before it.
    tied = (keys == bound) & (keys != NEVER)
    left = want - tl.sum((keys > bound).to(tl.int32), 0)
    ties = tl.sum(tied.to(tl.int32), 0)
    end = tl.where(ties > 0, tl.max(n, 0) + 1, 0)
    first = tl.where(ties > left, 0, end)
    while first < end:
        half = (first + end) >> 1
        before = tl.sum((tied & (n < half)).to(tl.int32), 0)
        first = tl.where(before >= left, first, half + 1)
        end = tl.where(before >= left, half, end)
    return bound, end


@jit
@no_type_check
def is_best(keys, n, bound, end):
    """Which keys of the entries n are among the best, after `bound_of_best`."""
    return (keys > bound) | ((keys == bound) & (n < end))
