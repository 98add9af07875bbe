"""Attention scores of a model (scale, softcap), and what torch computes of them: the softmax, attention to tokens."""

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
        scores = products * self.scale
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def of_tokens(self, query: torch.Tensor, key: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Return the scores of each KV head's tokens.

        Args:
            query: `[B, Hq, D]` fp32; key: `[B, Hkv, T, D]` of any float dtype.
            seen: bool, expands to `[B, Hkv, T]`; the others have a score of −inf, whatever their keys hold.

        Returns:
            fp32 `[B, Hkv, G, T]`.
        """
        batch, heads, _, dim = key.shape
        products = query.view(batch, heads, -1, dim) @ key.float().transpose(2, 3)
        return self.of(products).masked_fill(~seen.unsqueeze(2), -torch.inf)


def softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the softmax over the last dimension and its log-sum-exp; 0 and −inf where all scores are −inf."""
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp(), lse


def attend_tokens(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scores: Scores
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend tokens of each KV head.

    Args:
        query, key, seen: as for `Scores.of_tokens`; value: `[B, Hkv, T, D]`.
        scores: parameters of the model's scores.

    Returns:
        out `[B, Hq, D]`, lse `[B, Hq]`, and the weights `[B, Hkv, G, T]`; fp32.
    """
    weights, lse = softmax(scores.of_tokens(query, key, seen))
    out = weights @ value.float().masked_fill(~seen.unsqueeze(-1), 0.0)
    return out.view(query.shape), lse.view(query.shape[:2]), weights
