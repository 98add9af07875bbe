"""What the operations over a listing (slots and blocks `[B, Hkv, C]`, counts `[B, Hkv]`) share."""

from __future__ import annotations

import torch

from hf_offload.scores import Scores

from .require import FLOATS, require

_TILE_CHANNELS = 8192  # tokens times D: 16 KiB of 16-bit keys; two buffers for K and V each then take 64 KiB


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


def seen_tokens(
    blocks: torch.Tensor, counts: torch.Tensor, limits: torch.Tensor, valid: torch.Tensor | None, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position of each listed token and whether it is below the length and valid, `[B, Hkv, C, block_size]` each."""
    batch, _, width = blocks.shape
    listed = torch.arange(width, device=blocks.device) < counts.unsqueeze(-1)
    numbers = blocks.masked_fill(~listed, 0).long()
    position = numbers.unsqueeze(-1) * size + torch.arange(size, device=blocks.device)
    seen = listed.unsqueeze(-1) & (position < limits[0])
    if valid is not None:
        rows = torch.arange(batch, device=blocks.device).view(-1, 1, 1, 1)
        seen &= valid[rows, position.clamp(max=valid.shape[1] - 1)] != 0
    return position, seen


def scores_by_torch(
    query: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """Scores fp32 `[B, Hkv, G, n]` against keys `[B, Hkv, n, D]`; −inf where `seen` `[B, Hkv, n]` is False."""
    batch, heads, _, dim = k.shape
    scores = Scores(scale, softcap).of(query.float().view(batch, heads, -1, dim) @ k.transpose(2, 3))
    return scores.masked_fill(~seen.unsqueeze(2), float("-inf"))


def gather_slots(pool: torch.Tensor, slots: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Tokens fp32 `[B, Hkv, C, 2, block_size, D]` in slots; 0 where `seen` `[B, Hkv, C, block_size]` is False."""
    batch, heads, slots_there = pool.shape[:3]
    line = torch.arange(batch * heads, device=pool.device).view(batch, heads, 1) * slots_there
    listed = line + slots.masked_fill(~seen.any(-1), 0)
    return pool.flatten(0, 2)[listed].float().masked_fill(~seen[:, :, :, None, :, None], 0.0)


def tile_sizes(query: torch.Tensor, pool: torch.Tensor) -> dict[str, int]:
    """The compile-time sizes of kernels that read a listing tile by tile."""
    heads, size, dim = pool.shape[1], pool.shape[4], pool.shape[5]
    padded = max(16, 1 << (dim - 1).bit_length())
    # A product of fp32 matrices is unrolled into single multiplications: longer tiles run out of registers.
    tile = 16 if pool.dtype == torch.float32 else max(16, min(64, _TILE_CHANNELS // padded))
    return {
        "HEADS": heads, "GROUP": query.shape[1] // heads, "ROWS": 16,
        "D": dim, "D_PAD": padded, "SIZE": size, "TILE": tile,
    }  # fmt: skip
