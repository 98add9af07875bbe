"""L-Eval's samples: one for each instruction, scored by its metric."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(
    ("metric", "answer", "reference", "want"),
    [
        ("f1", "an old man", "The old man", 1),  # articles and cases do not count
        ("f1", "The old man slept.", "an old man", 2 * (2 / 3) / (2 / 3 + 1)),
        ("f1", "in 1953", "1952", 0),
        ("rouge", "a b x d", "a b c d", 0.75),
        ("rouge", "The cats sat.", "the cat sat on the mat", 2 * 0.5 / 1.5),  # stems: 3 of 3, 3 of 6
    ],
)
def test_one_answer(metric, answer, reference, want):
    assert leval.METRICS[metric](answer, reference) == pytest.approx(want, abs=1e-9)
