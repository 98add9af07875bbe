"""The truth about kernels that weigh single tokens, as in `reference.py`: plain torch in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def move_averages(
    average: Tensor, scores: Tensor, lse: Tensor, first: int, length: int, *, alpha: float, valid: Tensor | None
) -> Tensor:
    """Return the averages [B, Hq, T], float64, as `average.move_averages` leaves them."""
    new = average.double().clone()
    total = lse.double()[..., None]
    weights = torch.where(total == -math.inf, 0.0, torch.exp(scores.double()[..., : length - first] - total))
    moved = (1 - alpha) * new[..., first:length] + alpha * weights
    if valid is not None:
        moved = torch.where(valid[:, None, first:length] == 0, 0.0, moved)
    new[..., first:length] = moved
    return new
