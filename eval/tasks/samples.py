"""Samples of a benchmark, and lm-eval's own tasks as their source."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval.tasks
from datasets import Dataset

import common


@dataclass(frozen=True)
class Sample:
    """One prompt and what its answer is worth.

    Attributes:
        task: name of its task.
        name: its own name, of which a task has one only.
        prompt: what the model is asked, without a chat template.
        question: how the prompt ends: what comes after the long text.
        new_tokens: the longest answer.
        score: of an answer, 0 to 100.
        until: an answer ends before the first of these.
        start: how the answer begins; the model goes on from there.
        chat: whether the prompt goes into the tokenizer's chat template, if it has one.
    """

    task: str
    name: str
    prompt: str
    question: str
    new_tokens: int
    score: Callable[[str], float]
    until: tuple[str, ...] = ()
    start: str = ""
    chat: bool = True


def read_rows(folder: Path, task: str) -> list[dict[str, Any]]:
    """The rows of `FOLDER/TASK.jsonl`; none where there is no such file."""
    file = folder / f"{task}.jsonl"
    # Not splitlines: JSON may hold other ends of lines than this one as they are.
    lines = file.read_text(encoding="utf-8").split("\n") if file.exists() else ()
    return [json.loads(line) for line in lines if line.strip()]


def named(text: str, sets: dict[str, tuple[str, ...]]) -> list[str]:
    """Tasks of a comma-separated list, in which the name of a set stands for its tasks; each once."""
    tasks = sorted({task for each in sets.values() for task in each})
    names = common.listed(text, [*sets, *tasks], "task")
    return list(dict.fromkeys(task for name in names for task in sets.get(name, (name,))))


def harness_samples(
    folder: str, name: str, metric: str, question: Callable[..., str], rows: Dataset | None = None, **more: Any
) -> list[Sample]:
    """The samples of a task of lm-eval.

    Args:
        folder: of lm-eval's tasks; name: of the task.
        metric: of the task's metrics, 0 to 1, the one that scores.
        question: gives it, from a row and its prompt.
        rows: in place of those that the task takes from the hub.
        more: what else each sample has.
    """
    # One folder: reading all of lm-eval's thousands of files takes a minute.
    source = Path(lm_eval.tasks.__file__).parent / folder
    manager = lm_eval.tasks.TaskManager(include_path=str(source), include_defaults=False)
    changes = {} if rows is None else {"custom_dataset": lambda **_: {"test": rows}}
    task = manager.load({"group": "chosen", "task": [{"task": name, **changes}]})["tasks"][name]
    limits = task.config.generation_kwargs

    def sample(number: int, doc: dict[str, Any]) -> Sample:
        prompt, prefix = task.doc_to_text(doc), task.doc_to_prefix(doc)
        return Sample(
            name=str(number),
            prompt=prompt,
            question=question(doc, prompt),
            new_tokens=limits["max_gen_toks"],
            score=lambda answer: 100 * float(task.process_results(doc, [answer])[metric]),
            until=tuple(limits["until"]),
            start=task.config.target_delimiter + prefix if prefix else "",
            **more,
        )

    return [sample(number, doc) for number, doc in enumerate(task.test_docs())]
