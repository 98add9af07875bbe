"""Metrics of Hugging Face's `evaluate`, loaded from eval/metrics: neither the hub nor a network is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import evaluate

FOLDER = Path(__file__).parents[1] / "metrics"


def scorer(name: str, config: str | None = None) -> Callable[[str, str], float]:
    """What scores one answer, 0 to 100, by its reference.

    Args:
        name: a folder of eval/metrics.
        config: which of its metrics, where it has several.
    """
    metric = evaluate.load(str(FOLDER / name), config, keep_in_memory=True)

    def score(answer: str, reference: str) -> float:
        return float(metric.compute(predictions=[answer], references=[reference])["score"])

    return score
