"""Attention scores of a model: scale and softcap."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Scores(NamedTuple):
    """Parameters of a model's attention scores: `scale · q·k`, or `softcap · tanh(scale · q·k / softcap)` (Gemma 2).

    Args:
        scale: factor of q·k, usually D ** -0.5.
        softcap: bound of the scores; None: no bound.
    """

    scale: float
    softcap: float | None = None

    def of(self, products: torch.Tensor) -> torch.Tensor:
        """Return the scores for products q·k of any shape."""
        found = products * self.scale
        return found if self.softcap is None else torch.tanh(found / self.softcap) * self.softcap
