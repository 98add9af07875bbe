"""HGCA's moving average of attention weights (MAW) of resident tokens, on the device (section 3.2.1, algorithm 1)."""

from __future__ import annotations

from typing import Any, NamedTuple, no_type_check

import torch

from hf_offload.gpu.backend import ON_TRITON, jit, require, tl
from hf_offload.gpu.paged_attention import (
    LOG2E,
    MOST_HEADS,
    apply_softcap,
    check_listing,
    dot,
    find_tokens,
    gather_slots,
    regroup_heads,
    seen_tokens,
    split_heads,
    tile_sizes,
)
from hf_offload.scores import Scores


def update_weights(
    average: torch.Tensor,
    query: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    blocks: torch.Tensor,
    counts: torch.Tensor,
    limits: torch.Tensor,
    valid: torch.Tensor | None,
    lse: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    alpha: float,
    share: float | None = None,
    after: int = 0,
) -> None:
    """Let the average of each attended token's weight take in its weight in this step, in place.

    A ← (1 − r)·A + r·exp(score − lse), r = alpha or, where that is more, 1/n for a token that has been there for n
    steps: until then the average is the mean. With `share` it is a decaying maximum instead:
    A ← max((1 − alpha)·A, share·exp(score − lse)). Tokens of listed slots that are padding or not there yet get 0.
    Slots that are not listed stay as they are. Source: HGCA, section 3.2.1, algorithm 1, line 8.

    Args:
        average: `[B, Hq, R, block_size]` fp32, changed.
        query, pool, slots, blocks, counts, limits, valid: as in `paged_attention`.
        lse: `[B, Hq]` fp32 (natural log) over all that the weights are relative to; finite where a token is attended.
        scale: softmax scale.
        softcap: bound of the scores (`cap·tanh(score / cap)`), or None.
        alpha: share of this step in the average, in (0, 1]; with `share`, what a peak loses in a step.
        share: what a weight counts beside the largest before it, or None.
        after: with `share`, number of a token's first steps whose weights do not count.

    Raises:
        TypeError: a tensor of another dtype.
        ValueError: shapes, devices or numbers that do not fit together.
    """
    batch, heads, group = check_listing(query, pool, slots, blocks, counts, limits, valid, softcap)
    fp32 = (torch.float32,)
    require(
        query.device,
        average=(average, fp32, (batch, heads * group, pool.shape[2], pool.shape[4])),
        lse=(lse, fp32, (batch, heads * group)),
    )
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha {alpha} is not in (0, 1]")
    listing, numbers = (pool, slots, blocks, counts, limits, valid), _Numbers(scale, softcap, alpha, share, after)
    if query.device.type not in ON_TRITON:
        _by_torch(average, query, listing, lse, numbers)
    elif group <= MOST_HEADS:
        _launch(average, query, listing, lse, numbers)
    else:
        parts = [split_heads(tensor, heads) for tensor in (average, query, lse)]
        for some, asked, relative in zip(*parts, strict=True):
            _launch(some, asked, listing, relative, numbers)
        average.copy_(regroup_heads(parts[0], heads))


class _Numbers(NamedTuple):
    """The last arguments of `update_weights`."""

    scale: float
    softcap: float | None
    alpha: float
    share: float | None
    after: int


def _launch(
    average: torch.Tensor, query: torch.Tensor, listing: tuple[Any, ...], lse: torch.Tensor, numbers: _Numbers
) -> None:
    pool, slots, *_, valid = listing
    scale, softcap, alpha, share, after = numbers
    sizes, slots_there, width = tile_sizes(query, pool), pool.shape[2], slots.shape[2]
    grid = pool.shape[0] * pool.shape[1], -(-width * sizes["SIZE"] // sizes["TILE"])
    update_weights_kernel[grid](
        average, query, *listing, lse, scale, 1.0 if softcap is None else softcap, alpha,
        0.0 if share is None else share, after, slots_there, width, 0 if valid is None else valid.shape[1],
        CAPPED=softcap is not None, LARGEST=share is not None, **sizes, num_warps=4,
    )  # fmt: skip


def _by_torch(
    average: torch.Tensor, query: torch.Tensor, listing: tuple[Any, ...], lse: torch.Tensor, numbers: _Numbers
) -> None:
    pool, slots, blocks, counts, limits, valid = listing
    scale, softcap, alpha, share, after = numbers
    batch, heads, slots_there, _, size, _ = pool.shape
    position, seen = seen_tokens(blocks, counts, limits, valid, size)
    age = (limits[0] - position[:, :, None]).clamp(min=1).float()
    rate = (1 / age).clamp(min=alpha) if share is None else (age > after).float() * share
    k = gather_slots(pool, slots, seen)[:, :, :, 0].flatten(2, 3)
    scores = Scores(scale, softcap).of_tokens(query.float(), k, seen.flatten(2))
    weights = (scores - lse.view(batch, heads, -1, 1)).exp().view(batch, heads, -1, slots.shape[2], size)
    row, head, entry = (torch.arange(slots.shape[2], device=slots.device) < counts.unsqueeze(-1)).nonzero().unbind(1)
    slot = slots[row, head, entry].long()
    cells = average.view(batch, heads, -1, slots_there, size)
    before = cells[row, head, :, slot]
    weight, rate = weights[row, head, :, entry], rate[row, head, :, entry]
    moved = before + rate * (weight - before) if share is None else torch.maximum((1 - alpha) * before, rate * weight)
    cells[row, head, :, slot] = moved.masked_fill(~seen[row, head, entry].unsqueeze(1), 0.0)


@jit(do_not_specialize=["after", "slots_there", "width", "tokens"])
@no_type_check
def update_weights_kernel(
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
    slot, seen = find_tokens(slots, blocks, valid, token, count, length, SIZE)
    block = tl.load(blocks + token // SIZE, mask=seen, other=0)
    age = length - (block * SIZE + token % SIZE)  # in steps, this one included
    if LARGEST:
        rate = tl.where(age > after, share, 0.0)
    else:
        rate = tl.maximum(alpha, 1.0 / tl.maximum(age, 1).to(tl.float32))

    peak = tl.load(lse + heads, mask=real, other=0.0)
    q = tl.load(query + heads[:, None] * D + dim[None, :], mask=real[:, None] & inside, other=0.0)
    offset = slot.to(tl.int64) * (2 * SIZE * D) + (token % SIZE) * D
    home = pool + line.to(tl.int64) * slots_there * (2 * SIZE * D)
    k = tl.load(home + offset[:, None] + dim[None, :], mask=seen[:, None] & inside, other=0.0)
    score = dot(q.to(k.dtype), tl.trans(k), None) * scale
    if CAPPED:
        score = apply_softcap(score, softcap)
    weight = tl.exp2((score - peak[:, None]) * LOG2E)

    cell = heads.to(tl.int64)[:, None] * slots_there * SIZE + (slot * SIZE + token % SIZE)[None, :]
    mask = real[:, None] & (token < count * SIZE)[None, :]
    before = tl.load(average + cell, mask=mask, other=0.0)
    if LARGEST:
        moved = tl.maximum(before * (1.0 - alpha), rate[None, :] * weight)
    else:
        moved = before + rate[None, :] * (weight - before)
    tl.store(average + cell, tl.where(seen[None, :], moved, 0.0), mask=mask)
