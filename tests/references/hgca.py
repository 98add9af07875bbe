"""References of the kernels of HGCA: plain torch in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from references.cpu import read_tokens


def move_averages(
    average: Tensor, scores: Tensor, lse: Tensor, first: int, length: int, *, alpha: float, share: float | None = None,
    after: int = 0,
) -> Tensor:  # fmt: skip
    """Return the averages [B, Hq, T], float64, as `move_averages` leaves them."""
    new = average.double().clone()
    total = lse.double()[..., None]
    weights = torch.where(total == -math.inf, 0.0, torch.exp(scores.double()[..., : length - first] - total))
    age = torch.arange(length - first, 0, -1, dtype=torch.float64, device="cpu")
    if share is None:
        rate = (1 / age).clamp(min=alpha)
        moved = (1 - rate) * new[..., first:length] + rate * weights
    else:
        moved = torch.maximum((1 - alpha) * new[..., first:length], share * weights * (age > after))
    new[..., first:length] = moved
    return new


def query_scores(
    query: Tensor,
    pool: Tensor,
    table: Tensor,
    valid: Tensor,
    first: int,
    stop: int,
    start: int,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Return the scores [B, Hq, Q, stop - first], float64, of which `query_lse` makes sums; -inf if not seen.

    Args:
        query: [B, Hq, Q, D], query i at position start + i.
        pool, table: as in `references.cpu`; the others as in `query_lse`.
    """
    keys, _ = read_tokens(pool, table, first, stop - first)
    grouped = keys.double().repeat_interleave(query.shape[1] // pool.shape[1], 1)
    scores = query.double() @ grouped.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    positions, at = torch.arange(first, stop, device="cpu"), start + torch.arange(query.shape[2], device="cpu")
    seen = (positions <= at[:, None]) & valid[:, None, first:stop].bool() & valid[:, at, None].bool()
    return torch.where(seen[:, None], scores, -math.inf)


def weigh_tokens(
    scores: Tensor,
    lse: Tensor,
    coefficient: Tensor | None,
    average: Tensor,
    valid: Tensor,
    first: int,
    stop: int,
    start: int,
    skipped: int,
) -> Tensor:
    """Return the joined weights [B, Hq, T], float64, as `weigh_tokens` leaves them.

    Args:
        scores: from `query_scores`; the others as in `weigh_tokens`.
    """
    total = lse.double()[..., None]
    weights = torch.where((scores == -math.inf) | (total == -math.inf), 0.0, torch.exp(scores - total))
    at = start + torch.arange(scores.shape[2], device="cpu")
    weights = torch.where(torch.arange(first, stop, device="cpu") + skipped <= at[:, None], weights, 0.0)
    joined = weights.amax(2) if coefficient is None else torch.einsum("q,bhqt->bht", coefficient.double(), weights)
    new = average.double().clone()
    new[..., first:stop] = torch.where(valid[:, None, first:stop] == 0, 0.0, joined)
    return new
