"""Budgets that heads need: the least share of the host's tokens within a deviation (Fluxion, section 5.2, Eq. 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_offload.blocks.digests import DIGESTS
from hf_offload.policies.fluxion.block_attention import BLOCK, Partial, in_runs, join_blocks

GRANULARITIES = (1, 16, 32, 64, 128)
"""Tokens of a block, by which budgets are computed; 1 in training only."""
_FIRST, _MOST = 64, 1024  # entries of a ranking per pass: the first pass, and at most


def join_scores(scores: torch.Tensor, run: int, digest: str) -> torch.Tensor:
    """Scores of `run` consecutive blocks each, from those of blocks of 16.

    Quest's upper bound of a run is the largest bound of its blocks; log masses are added.

    Args:
        scores: `[…, n]`, log masses by the digest; −inf for blocks without tokens.
        run: blocks to join.
        digest: its name.

    Returns:
        `[…, ⌈n / run⌉]`.
    """
    runs = in_runs(scores, run, -torch.inf)
    return runs.logsumexp(-1) if DIGESTS[digest].sums else runs.amax(-1)


def largest_norm(out: torch.Tensor) -> torch.Tensor:
    """The largest ‖O_h‖₂ among the heads of `[B, Hq, D]`, for each of them: `[B, Hq]`."""
    norms: torch.Tensor = torch.linalg.vector_norm(out, dim=-1)
    return norms.amax(-1, keepdim=True).expand_as(norms)


def deviation_limit(full: torch.Tensor, taus: Sequence[float]) -> torch.Tensor:
    """τ · max over heads of ‖o_h‖₂ (Eq. 2), `[B, Hq, taus]`, from the full outputs `[B, Hq, D]`."""
    return largest_norm(full)[..., None] * torch.tensor(taus, dtype=full.dtype, device=full.device)


def needed_at_blocks(
    kept: Partial, blocks: Partial, scores: torch.Tensor, valid: torch.Tensor, full: torch.Tensor, limit: torch.Tensor,
    *, digest: str,
) -> torch.Tensor:  # fmt: skip
    """The least budget of every head at the granularities that are chosen online.

    Blocks are taken in the order of the scores by which they are chosen online.

    Args:
        kept: out `[B, Hq, D]` and lse `[B, Hq]` of sinks and local tokens, which are always attended.
        blocks: `attend_blocks` of the query and the tokens in between.
        scores: `[B, Hq, n]`, of these blocks of 16 by their digests.
        valid: `[B, T]` bool, of their tokens.
        full: `[B, Hq, D]`, attention over everything.
        limit: `[B, Hq, taus]`, accepted deviations.
        digest: the digest of `scores`.

    Returns:
        `[B, Hq, granularities − 1, taus]`, shares of the host's tokens.
    """
    sizes, shares = in_runs(valid.float(), BLOCK).sum(-1), []
    for granularity in GRANULARITIES[1:]:
        run = granularity // BLOCK
        out, lse = join_blocks(blocks, run)
        owner = torch.arange(lse.shape[0] * lse.shape[1], device=lse.device)
        joined, tokens = join_scores(scores, run, digest), in_runs(sizes, run).sum(-1)[:, None].expand(lse.shape)
        shares.append(needed_share(kept, out.flatten(0, 1), owner, lse, joined, tokens, full, limit))
    return torch.stack(shares, 2)


def needed_share(
    kept: Partial,
    values: torch.Tensor,
    owner: torch.Tensor,
    lse: torch.Tensor,
    scores: torch.Tensor,
    sizes: torch.Tensor,
    full: torch.Tensor,
    limit: torch.Tensor,
) -> torch.Tensor:
    """The share of tokens in the shortest prefix of the ranking whose output is within the limit, `[B, Hq, taus]`.

    Passes go through longer and longer pieces of the ranking, only for the heads that are not within the limit yet.

    Args:
        kept: out `[B, Hq, D]`, lse `[B, Hq]`.
        values: `[owners, n, D]`; owner: `[B · Hq]`, the index of a head's values.
        lse, scores, sizes: `[B, Hq, n]`: weight, rank and tokens of each entry.
        full: `[B, Hq, D]`; limit: `[B, Hq, taus]`.
    """
    shape, count = limit.shape, lse.shape[-1]
    lse, scores, sizes, full, limit = (x.flatten(0, 1) for x in (lse, scores, sizes, full, limit))
    out, base = kept[0].flatten(0, 1), kept[1].flatten()
    top = torch.cat((base[:, None], lse), 1).amax(1)
    weight, mass = (lse - top[:, None]).exp(), (base - top).exp()
    moment, tokens, total = out * mass[:, None], torch.zeros_like(mass), sizes.sum(1).clamp(min=1)
    shares = torch.full_like(limit, torch.inf)
    shares.masked_fill_(torch.linalg.vector_norm(out - full, dim=-1)[:, None] <= limit, 0.0)
    order = scores.argsort(dim=1, descending=True, stable=True)
    start, width = 0, _FIRST
    while start < count:
        rows = (shares == torch.inf).any(1).nonzero()[:, 0]
        if not len(rows):
            break
        index = order[rows, start : start + width]
        weights = weight[rows].gather(1, index)
        moments = moment[rows, None] + (weights[..., None] * values[owner[rows, None], index]).cumsum(1)
        masses = mass[rows, None] + weights.cumsum(1)
        taken = tokens[rows, None] + sizes[rows].gather(1, index).cumsum(1)
        error = torch.linalg.vector_norm(moments / masses[..., None] - full[rows, None], dim=-1)
        near = error[..., None] <= limit[rows, None]
        first = torch.where(near, (taken / total[rows, None])[..., None], torch.inf).amin(1)
        shares[rows] = torch.where(shares[rows] == torch.inf, first, shares[rows])
        moment[rows], mass[rows], tokens[rows] = moments[:, -1], masses[:, -1], taken[:, -1]
        start, width = start + width, min(2 * width, _MOST)
    return shares.clamp(max=1.0).view(shape)  # rounding may keep even the whole ranking from its limit
