"""The metrics in eval/metrics, loaded without the hub, against scores counted by hand."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("evaluate", reason="needs evaluate: pip install hf-offload[eval]")
pytest.importorskip(
    "lm_eval.tasks.longbench.metrics",
    exc_type=ImportError,
    reason="needs lm-eval[longbench]: pip install hf-offload[eval]",
)

import evaluate

from tasks.metrics import FOLDER, scorer


@pytest.mark.parametrize(
    ("name", "config", "answer", "reference", "want"),
    [
        ("leval", "f1", "an old man", "The old man", 100),  # articles and cases do not count
        ("leval", "f1", "The old man slept.", "an old man", 100 * 2 * (2 / 3) / (2 / 3 + 1)),
        ("leval", "f1", "in 1953", "1952", 0),
        ("leval", "rouge", "a b x d", "a b c d", 75),
        ("leval", "rouge", "The cats sat.", "the cat sat on the mat", 100 * 2 * 0.5 / 1.5),  # stems: 3 of 3, 3 of 6
        ("needle", None, "It is 7,482,915.", "7482915", 100),
        ("needle", None, "It is 74829151.", "7482915", 0),
    ],
)
def test_one_answer(name, config, answer, reference, want):
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert scorer(name, config)(answer, reference) == pytest.approx(want, abs=1e-9)


def test_many_answers():
    metric = evaluate.load(str(FOLDER / "needle"))
    assert metric.compute(predictions=["1234567", "no", "7654321", "?"], references=["1234567"] * 4) == {"score": 25.0}


def test_a_metric_that_is_none_is_refused():
    with pytest.raises(ValueError, match="config_name='LLM': choose one of f1, rouge"):
        scorer("leval", "LLM")
