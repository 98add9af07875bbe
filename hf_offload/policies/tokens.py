"""Attention over single tokens in a policy's own tensors, in torch operations, for H2O and InfiniGen."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hf_offload.scores import Scores

if TYPE_CHECKING:
    from hf_offload.attention.step import Step


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    there: torch.Tensor,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend tokens of each KV head.

    Args:
        query: `[B, Hq, D]` fp32.
        key, value: `[B, Hkv, T, D]`.
        there: bool `[B, Hkv, T]`, the tokens to attend.
        scores: parameters of the model's scores.

    Returns:
        out `[B, Hq, D]`, lse `[B, Hq]`, and the weights `[B, Hkv, G, T]`; fp32.
    """
    batch, heads, _, dim = key.shape
    found = scores.of(query.view(batch, heads, -1, dim) @ key.float().transpose(2, 3))
    found = found.masked_fill(~there[:, :, None], -math.inf)
    lse = found.logsumexp(-1)
    weights = (found - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    out = weights @ value.float().masked_fill(~there[..., None], 0.0)
    return out.view(query.shape), lse.view(query.shape[:2]), weights


def valid_tokens(step: Step, count: int) -> torch.Tensor:
    """Return which of the first `count` tokens are no padding: bool `[B, count]` on the device."""
    return torch.from_numpy(step.store.padding.valid[:, :count] != 0).to(step.store.device)
