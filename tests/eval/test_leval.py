"""L-Eval's samples: one for each instruction, scored by its metric."""

from __future__ import annotations

import pytest

pytest.importorskip("evaluate", reason="needs evaluate: pip install hf-offload[eval]")
pytest.importorskip(
    "lm_eval.tasks.longbench.metrics",
    exc_type=ImportError,
    reason="needs lm-eval[longbench]: pip install hf-offload[eval]",
)

import leval

DOCUMENT = {"input": "A long document.", "source": "somewhere"}
ROWS = [
    {**DOCUMENT, "instructions": ["Who?", " When? "], "outputs": ["The old man", "1952"], "evaluation": "f1"},
    {**DOCUMENT, "instructions": ["Tell it."], "outputs": ["a b c d"], "evaluation": "rouge"},
    {**DOCUMENT, "instructions": ["Judge it."], "outputs": ["good"], "evaluation": "LLM"},
]


def test_samples():
    who, when, tell = leval.samples_of("financial_qa", ROWS)
    assert [sample.name for sample in (who, when, tell)] == ["0.0", "0.1", "1.0"]
    assert all(sample.prompt.endswith(sample.question) and DOCUMENT["input"] in sample.prompt for sample in (who, tell))
    assert when.question.startswith("When?\n")
    assert "about 3 words" in who.question
    assert who.score("an old man") == 100
    assert when.score("in 1953") == 0
    assert tell.score("a b x d") == pytest.approx(75)


def test_thirteen_tasks():
    assert len(set(leval.TASKS)) == 13
