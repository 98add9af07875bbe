"""Hidden numbers: how many answers contain the number that was asked for (digits may be grouped)?

evaluate.load("eval/metrics/needle").compute(predictions=["It is 7,482,915."], references=["7482915"])
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np
import torch

from hf_offload.assets import Needle

NO_PROMPT = torch.zeros(1, 0, dtype=torch.int64)


class Found(evaluate.Metric):
    """The share of answers that contain their number, 0 to 100."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions: answers; references: the number of each, in digits alone",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        pairs = zip(predictions, references, strict=True)
        return {"score": 100 * float(np.mean([Needle(NO_PROMPT, number).found_in(answer) for answer, number in pairs]))}
