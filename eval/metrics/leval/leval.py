"""L-Eval's n-gram metrics, as its rows name them: `f1` of words, and `rouge`, which is ROUGE-L.

evaluate.load("eval/metrics/leval", "f1").compute(predictions=["an old man"], references=["The old man"])
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np
from lm_eval.tasks.longbench.metrics import qa_f1_score
from rouge_score.rouge_scorer import RougeScorer

ROUGE = RougeScorer(["rougeL"], use_stemmer=True)
METRICS = {"f1": qa_f1_score, "rouge": lambda answer, reference: ROUGE.score(reference, answer)["rougeL"].fmeasure}


class LEval(evaluate.Metric):
    """The mean over pairs of answer and reference, 0 to 100."""

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in METRICS:
            raise ValueError(f"config_name={self.config_name!r}: choose one of {', '.join(METRICS)}")
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="C. An et al.: L-Eval: Instituting Standardized Evaluation for Long Context Language Models, 2023",
            inputs_description="predictions: answers; references: what each of them should say",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        score = METRICS[self.config_name]
        return {"score": 100 * float(np.mean([score(*pair) for pair in zip(predictions, references, strict=True)]))}
