"""How a model makes scores of queries and keys."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Scores(NamedTuple):
    """`scale · q·k`, in some models (Gemma 2) bent to `softcap · tanh(scale · q·k / softcap)`.

    Args:
        scale: usually D ** -0.5.
        softcap: bound of the scores, or None.
    """

    scale: float
    softcap: float | None = None

    def of(self, products: torch.Tensor) -> torch.Tensor:
        """The scores of products q·k."""
        found = products * self.scale
        return found if self.softcap is None else torch.tanh(found / self.softcap) * self.softcap
