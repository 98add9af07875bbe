"""Exact merge of partial attention results by log-sum-exp, in torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_offload.scores import softmax


def merge_partials(
    partials: Sequence[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of keys into attention over their union.

    Args:
        partials: (out `[..., D]` fp32, lse `[...]` fp32, natural log); an lse of −inf has weight 0.
        sinks: `[...]` fp32, logits of attention sinks, which take weight and add no value; or None.

    Returns:
        (out, lse) of the union; out is 0 where nothing was attended.
    """
    if len(partials) == 1 and sinks is None:
        return partials[0]
    lses = [lse for _, lse in partials]
    weights, total = softmax(torch.stack(lses if sinks is None else [*lses, sinks.expand_as(lses[0])], -1))
    out = partials[0][0] * weights[..., :1]
    for weight, (partial, _) in zip(weights.unbind(-1)[1:], partials[1:], strict=False):
        out = out + partial * weight.unsqueeze(-1)
    return out, total
