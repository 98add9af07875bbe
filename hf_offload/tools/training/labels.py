"""Labels of head properties: the budgets that a head needs, and the line through them (Fluxion, section 5.2, Eq. 1)."""

from __future__ import annotations

import torch

from hf_offload.knobs import check_choice
from hf_offload.policies.fluxion.block_attention import Partial, Tokens, logits
from hf_offload.policies.fluxion.budgets import GRANULARITIES, needed_at_blocks, needed_share

FITS = ("online", "paper")
"""Which budgets the line of Eq. 1 is fitted to (`fit_line`)."""


def needed_budgets(
    kept: Partial,
    query: torch.Tensor,
    host: Tokens,
    blocks: Partial,
    scores: torch.Tensor,
    full: torch.Tensor,
    limit: torch.Tensor,
    *,
    scale: float,
    digest: str,
) -> torch.Tensor:
    """The least budget of every head at every granularity (§5.2, Eq. 2).

    Blocks are taken in the order of the scores by which they are chosen online, single tokens in that of their own.

    Args:
        kept, blocks, scores, full, limit, digest: as in `needed_at_blocks`.
        query: `[B, Hq, D]`.
        host: the tokens in between, `[B, Hkv, T, D]`.
        scale: softmax scale.

    Returns:
        `[B, Hq, granularities, taus]`, shares of the host's tokens.
    """
    lse = logits(query, host, scale)
    kv_heads, group = host.key.shape[1], lse.shape[1] // host.key.shape[1]
    owner = torch.arange(len(host.valid) * kv_heads, device=lse.device).repeat_interleave(group)
    values = host.value.float().masked_fill(~host.valid[:, None, :, None], 0.0).flatten(0, 1)
    ones = host.valid.float()[:, None].expand(lse.shape)
    single = needed_share(kept, values, owner, lse, lse, ones, full, limit)
    several = needed_at_blocks(kept, blocks, scores, host.valid, full, limit, digest=digest)
    return torch.cat((single[:, :, None], several), 2)


def fit_line(budgets: torch.Tensor, fit: str) -> tuple[torch.Tensor, torch.Tensor]:
    """bgt₀ and k of bgt(blk) = bgt₀ + k · log₂ blk (Eq. 1).

    Args:
        budgets: `[…, granularities]`.
        fit: `"paper"`: bgt₀ is the budget at blk = 1, and k the least-squares slope of a line through it; `"online"`:
            the least-squares line through the budgets at the granularities that are chosen online.

    Returns:
        Both `[…]`.

    Raises:
        ValueError: another fit.
    """
    check_choice("fit", fit, FITS)
    steps = torch.tensor(GRANULARITIES, dtype=budgets.dtype, device=budgets.device).log2()
    if fit == "paper":
        first = budgets[..., 0]
        return first, ((budgets - first[..., None]) * steps).sum(-1) / steps.square().sum()
    steps, budgets = steps[1:] - steps[1:].mean(), budgets[..., 1:]
    slope = (budgets * steps).sum(-1) / steps.square().sum()
    middle = torch.tensor(GRANULARITIES[1:], dtype=budgets.dtype, device=budgets.device).log2().mean()
    return budgets.mean(-1) - slope * middle, slope
