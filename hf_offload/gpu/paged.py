"""Decode attention over resident slots, with torch operations: any device, and the reference of faster kernels."""

from __future__ import annotations

import torch


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    slots: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend one query token to blocks that lie in slots.

    Args:
        query: `[B, Hq, D]`.
        pool: `[B, Hkv, R, 2 (K, V), block_size, D]`.
        slots: `[B, Hkv, C]` int64, which slots are attended; any valid number where the mask is all False.
        mask: `[B, Hkv, C, block_size]` bool, True = the token is attended; what lies under False may be anything.
        scale: softmax scale.
        softcap: bound of the scores (`cap·tanh(score / cap)`), or None.

    Returns:
        out `[B, Hq, D]` fp32 and lse `[B, Hq]` fp32 (natural log); 0 and −inf where nothing is attended.

    Raises:
        ValueError: shapes do not fit together.
    """
    batch, heads, slots_there, _, size, dim = pool.shape
    count = slots.shape[2]
    if query.shape[0] != batch or query.shape[2] != dim or query.shape[1] % heads:
        raise ValueError(f"query {tuple(query.shape)} does not fit a pool {tuple(pool.shape)}")
    if slots.shape[:2] != (batch, heads) or mask.shape != (batch, heads, count, size):
        raise ValueError(
            f"slots {tuple(slots.shape)} and mask {tuple(mask.shape)} do not fit a pool {tuple(pool.shape)}"
        )
    line = torch.arange(batch * heads, device=pool.device).view(batch, heads, 1) * slots_there
    tokens = pool.flatten(0, 2)[line + slots].float()  # [B, Hkv, C, 2, block_size, D]
    tokens = tokens.masked_fill(~mask[:, :, :, None, :, None], 0.0)
    k, v = (tokens[:, :, :, part].reshape(batch, heads, count * size, dim) for part in (0, 1))
    grouped = query.float().view(batch, heads, -1, dim)
    scores = grouped @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask.view(batch, heads, 1, -1), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()
    return (weights @ v).view(batch, -1, dim), lse.view(batch, -1)
