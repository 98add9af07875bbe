"""Decode attention over blocks that lie in slots, as partials over shares of them."""

from __future__ import annotations

import torch

from .backend import on_triton
from .groups import MOST_HEADS, regroup_heads, split_heads
from .listing import check_listing, gather_slots, scores_by_torch, seen_tokens, tile_sizes

_PROGRAMS = 264  # two for each multiprocessor of a large GPU
_SPLIT_TOKENS = 128  # less than this does not pay for another partial
_MAX_SPLITS = 64


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    blocks: torch.Tensor,
    counts: torch.Tensor,
    limits: torch.Tensor,
    valid: torch.Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend one query token to blocks in slots, in S shares that `merge` joins.

    S depends on shapes alone. The shares are disjoint. Together they attend every listed token that is below the
    length, valid, and within the window.

    Args:
        query: `[B, Hq, D]`, fp32 or the pool's dtype; rounded to the latter by the kernel.
        pool: `[B, Hkv, R, 2 (K, V), block_size, D]`, fp32, fp16 or bf16; what is not attended may be anything.
        slots: `[B, Hkv, C]` int32, where the blocks lie; anything from the count on.
        blocks: `[B, Hkv, C]` int32, which logical blocks they are; anything from the count on.
        counts: `[B, Hkv]` int32, how many are listed.
        limits: `[2]` int32, (length: tokens of every row, this step's included; sealed blocks: unused here).
        valid: `[B, T]` uint8, 0 = the token is padding, T at least the length; None if there is no padding.
        scale: softmax scale.
        softcap: bound of the scores (`cap·tanh(score / cap)`), or None.
        window: attend only the last `window` positions, or None for all.

    Returns:
        out `[B, Hq, S, D]` fp32 and lse `[B, Hq, S]` fp32 (natural log); 0 and −inf where a share attends nothing.

    Raises:
        TypeError: a tensor of another dtype.
        ValueError: shapes, devices or sizes that do not fit together.
    """
    _, heads, group = check_listing(query, pool, slots, blocks, counts, limits, valid, softcap)
    if window is not None and window < 1:
        raise ValueError(f"window {window} is not positive; pass None to attend all positions")
    if not on_triton(query):
        return _by_torch(query, pool, slots, blocks, counts, limits, valid, scale, softcap, window)
    listing = (pool, slots, blocks, counts, limits, valid, scale, softcap, window)
    if group <= MOST_HEADS:
        return _launch(query, *listing)
    outs, lses = zip(*(_launch(part, *listing) for part in split_heads(query, heads)), strict=True)
    return regroup_heads(outs, heads), regroup_heads(lses, heads)


def _launch(
    query: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, blocks: torch.Tensor, counts: torch.Tensor,
    limits: torch.Tensor, valid: torch.Tensor | None, scale: float, softcap: float | None, window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from . import paged_kernels

    batch, heads, _, _, size, dim = pool.shape
    width = slots.shape[2]
    splits = count_splits(batch * heads, width * size)
    out = torch.empty(batch, query.shape[1], splits, dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(batch, query.shape[1], splits, dtype=torch.float32, device=query.device)
    paged_kernels.attend_split[(batch * heads, splits)](
        query, pool, slots, blocks, counts, limits, valid, out, lse, scale,
        1.0 if softcap is None else softcap,
        pool.shape[2], width, 0 if valid is None else valid.shape[1],
        2**31 - 1 if window is None else window,
        CAPPED=softcap is not None, **tile_sizes(query, pool), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out, lse


def count_splits(lines: int, tokens: int) -> int:
    """Into how many shares to cut `tokens` tokens of each of `lines` (row, KV head) pairs, so that a GPU is busy."""
    return max(1, min(-(-_PROGRAMS // lines), tokens // _SPLIT_TOKENS, _MAX_SPLITS))


def _by_torch(
    query: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, blocks: torch.Tensor, counts: torch.Tensor,
    limits: torch.Tensor, valid: torch.Tensor | None, scale: float, softcap: float | None, window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    position, seen = seen_tokens(blocks, counts, limits, valid, pool.shape[4])
    if window is not None:
        seen &= position >= limits[0] - window
    tokens = gather_slots(pool, slots, seen)
    k, v = tokens[:, :, :, 0].flatten(2, 3), tokens[:, :, :, 1].flatten(2, 3)
    scores = scores_by_torch(query, k, seen.flatten(2), scale, softcap)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
    shape = (query.shape[0], query.shape[1], 1)
    return (weights @ v).view(*shape, query.shape[2]), lse.view(shape)
