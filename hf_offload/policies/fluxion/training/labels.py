"""Labels of head properties: the least budget within a deviation, and the line through budgets (Fluxion, section 5.2).

Eq. 2 defines budgets, Eq. 1 the line. The budgets of a prompt's anchor, which are features, are found in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_offload.cache.digests import DIGESTS
from hf_offload.policies.fluxion.block_attention import BLOCK, Partial, Tokens, join_blocks, logits

GRANULARITIES = (1, 16, 32, 64, 128)
"""Tokens of a block, by which budgets are found; 1 in training only."""
FITS = ("online", "paper")
"""Which budgets the line of Eq. 1 is fitted to (`fit_line`)."""
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
    short = -scores.shape[-1] % run
    runs = torch.unflatten(torch.nn.functional.pad(scores, (0, short), value=-torch.inf), -1, (-1, run))
    return runs.logsumexp(-1) if DIGESTS[digest].sums else runs.amax(-1)


def deviation_limit(full: torch.Tensor, taus: Sequence[float]) -> torch.Tensor:
    """τ · max over heads of ‖o_h‖₂ (Eq. 2), `[B, Hq, taus]`, from the full outputs `[B, Hq, D]`."""
    largest: torch.Tensor = torch.linalg.vector_norm(full, dim=-1).amax(-1, keepdim=True)
    limits = largest[..., None] * torch.tensor(taus, dtype=full.dtype, device=full.device)
    return limits.expand(*full.shape[:2], -1)


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
        kept: out `[B, Hq, D]` and lse `[B, Hq]` of sinks and local tokens, which are always attended.
        query: `[B, Hq, D]`.
        host: the tokens in between, `[B, Hkv, T, D]`.
        blocks: `attend_blocks` of query and host.
        scores: `[B, Hq, n]`, of the host's blocks of 16 by their digests.
        full: `[B, Hq, D]`, attention over everything.
        limit: `[B, Hq, taus]`, accepted deviations.
        scale: softmax scale.
        digest: the digest of `scores`.

    Returns:
        `[B, Hq, granularities, taus]`, shares of the host's tokens.
    """
    lse = logits(query, host, scale)
    kv_heads, group = host.key.shape[1], lse.shape[1] // host.key.shape[1]
    owner = torch.arange(len(host.valid) * kv_heads, device=lse.device).repeat_interleave(group)
    values = host.value.float().masked_fill(~host.valid[:, None, :, None], 0.0).flatten(0, 1)
    ones = host.valid.float()[:, None].expand(lse.shape)
    found = [_needed(kept, values, owner, lse, lse, ones, full, limit)]
    return torch.stack([*found, *_of_blocks(kept, blocks, scores, host.valid, full, limit, digest)], 2)


def needed_at_blocks(
    kept: Partial, blocks: Partial, scores: torch.Tensor, valid: torch.Tensor, full: torch.Tensor, limit: torch.Tensor,
    *, digest: str,
) -> torch.Tensor:  # fmt: skip
    """`needed_budgets` without that of single tokens: `[B, Hq, granularities − 1, taus]`; valid: `[B, T]`."""
    return torch.stack(_of_blocks(kept, blocks, scores, valid, full, limit, digest), 2)


def _of_blocks(
    kept: Partial, blocks: Partial, scores: torch.Tensor, valid: torch.Tensor, full: torch.Tensor, limit: torch.Tensor,
    digest: str,
) -> list[torch.Tensor]:  # fmt: skip
    sizes = _sums(valid.float(), BLOCK)
    found = []
    for granularity in GRANULARITIES[1:]:
        run = granularity // BLOCK
        out, lse = join_blocks(blocks, run)
        tokens = _sums(sizes, run)
        owner = torch.arange(lse.shape[0] * lse.shape[1], device=lse.device)
        joined = join_scores(scores, run, digest)
        spread = tokens[:, None].expand(lse.shape)
        found.append(_needed(kept, out.flatten(0, 1), owner, lse, joined, spread, full, limit))
    return found


def _sums(x: torch.Tensor, run: int) -> torch.Tensor:
    """Sums of `run` consecutive numbers each, `[B, ⌈n / run⌉]`."""
    return torch.unflatten(torch.nn.functional.pad(x, (0, -x.shape[-1] % run)), -1, (-1, run)).sum(-1)


def _needed(
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
    if fit not in FITS:
        raise ValueError(f"fit={fit!r} is not known; use one of {', '.join(FITS)}")
    steps = torch.tensor(GRANULARITIES, dtype=budgets.dtype, device=budgets.device).log2()
    if fit == "paper":
        first = budgets[..., 0]
        return first, ((budgets - first[..., None]) * steps).sum(-1) / steps.square().sum()
    steps, budgets = steps[1:] - steps[1:].mean(), budgets[..., 1:]
    slope = (budgets * steps).sum(-1) / steps.square().sum()
    middle = torch.tensor(GRANULARITIES[1:], dtype=budgets.dtype, device=budgets.device).log2().mean()
    return budgets.mean(-1) - slope * middle, slope
