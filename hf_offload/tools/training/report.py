"""Quality of a predictor on held-out samples (Fluxion, section 8.3)."""

from __future__ import annotations

import math
from typing import Any

import torch

from hf_offload.policies.fluxion.budgets import GRANULARITIES
from hf_offload.policies.fluxion.predictor import HeadPredictor
from hf_offload.tools.training.labels import fit_line


def r_squared(predicted: torch.Tensor, true: torch.Tensor) -> float:
    """1 − Σ(predicted − true)² / Σ(true − mean)²; NaN where all true values are equal."""
    spread = (true - true.mean()).double().square().sum()
    return float(1 - (predicted - true).double().square().sum() / spread) if spread > 0 else float("nan")


def quality(predictor: HeadPredictor, features: torch.Tensor, budgets: torch.Tensor, fit: str) -> dict[str, Any]:
    """Figures of a predictor.

    Args:
        predictor: the predictor.
        features: fp32 `[N, 41]`; budgets: `[N, granularities]`, what was needed.
        fit: how bgt₀ and k follow from budgets, as in `fit_line`.

    Returns:
        r2_budget0, r2_slope: over retrieval heads.
        streaming_share, streaming_precision, streaming_recall.
        budgets: for each granularity that is chosen from online, over all heads and as shares of the host's tokens: the
            means needed and predicted (0 for heads that count as streaming), the mean shortfall and excess, and
            enough, the share of heads that get what they need.
    """
    heads = predictor.predict(features)
    streaming = budgets.amax(1) == 0
    first, slope = fit_line(budgets[~streaming], fit)
    right = float((heads.streaming & streaming).sum())
    rows = {}
    for number, size in enumerate(GRANULARITIES[1:], 1):
        line = heads.budget0 + heads.slope * math.log2(size)
        predicted = torch.where(heads.streaming, 0.0, line.clamp(0, 1))
        error = predicted - budgets[:, number]
        rows[str(size)] = {
            "needed": float(budgets[:, number].mean()),
            "predicted": float(predicted.mean()),
            "too_little": float(-error.clamp(max=0).mean()),
            "too_much": float(error.clamp(min=0).mean()),
            "enough": float((error >= 0).float().mean()),
        }
    return {
        "r2_budget0": r_squared(heads.budget0[~streaming], first),
        "r2_slope": r_squared(heads.slope[~streaming], slope),
        "streaming_share": float(streaming.float().mean()),
        "streaming_precision": right / max(float(heads.streaming.sum()), 1.0),
        "streaming_recall": right / max(float(streaming.sum()), 1.0),
        "budgets": rows,
    }
