"""Attention that was computed early, with a predicted query, taken into that with the real one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .launch import Array, jit


@jit
def take_in(
    query: Array, out: Array, lse: Array, predicted: Array, early_out: Array, early_lse: Array, kbar: Array,
    corrects: bool, scale: float,
) -> float:  # fmt: skip
    """Merge early attention into attention over other keys; return the mean cosine of the two queries.

    Args:
        query: float32 [B, Hq, D], the real one.
        out, lse: float32 [B, Hq, D] and [B, Hq], natural log: attention with the real query; those of all keys after.
        predicted, early_out, early_lse: the same, early.
        kbar: float32 [B, Hq, D], the early part's keys averaged with its weights.
        corrects: whether the early lse is corrected to first order: + scale·(query − predicted)·k̄.
        scale: softmax scale.
    """
    batch, heads, dim = query.shape
    cosines: Any = 0.0
    for b in range(batch):
        for h in range(heads):
            shift = both = square = early_square = np.float32(0.0)
            for d in range(dim):
                real, guess = query[b, h, d], predicted[b, h, d]
                both += real * guess
                square += real * real
                early_square += guess * guess
                if corrects:
                    shift += (real - guess) * kbar[b, h, d]
            cosines += both / max(math.sqrt(square) * math.sqrt(early_square), 1e-12)
            mine, theirs = lse[b, h], early_lse[b, h] + np.float32(scale) * shift
            peak = max(mine, theirs)
            if peak == -np.inf:
                continue
            total = peak + np.float32(math.log(math.exp(mine - peak) + math.exp(theirs - peak)))
            share, rest = np.float32(math.exp(mine - total)), np.float32(math.exp(theirs - total))
            for d in range(dim):
                out[b, h, d] = out[b, h, d] * share + early_out[b, h, d] * rest
            lse[b, h] = total
    return float(cosines / (batch * heads))
