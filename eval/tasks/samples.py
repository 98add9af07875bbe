"""Samples of a benchmark, and lm-eval's own tasks as their source."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

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


def read_rows(folder: Path, task: str, fields: Iterable[str]) -> list[dict[str, Any]]:
    """The rows of `FOLDER/TASK.jsonl`; none where there is no such file.

    Args:
        fields: what each row must have.
    """
    file = folder / f"{task}.jsonl"
    if not file.exists():
        return []
    rows = []
    # Not splitlines: JSON may hold other ends of lines than this one as they are.
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise typer.BadParameter(f"{file}, line {number}, is no JSON: {error}") from None
        if lacking := [field for field in fields if not isinstance(row, dict) or field not in row]:
            raise typer.BadParameter(f"{file}, line {number}, has no {', '.join(lacking)}")
        rows.append(row)
    return rows


def named(text: str, tasks: Iterable[str], sets: dict[str, tuple[str, ...]]) -> list[str]:
    """Tasks of a comma-separated list, in which the name of a set stands for its tasks; each once."""
    names = common.listed(text, [*sets, *sorted(tasks)], "task")
    return list(dict.fromkeys(task for name in names for task in sets.get(name, (name,))))


def harness_task(folder: str, name: str, dataset: Callable[..., Any] | None = None) -> Any:
    """A task of lm-eval, with its rows.

    Args:
        folder: of lm-eval's tasks.
        name: of the task.
        dataset: makes the rows, `{"test": Dataset}`, in place of those that the task takes from the hub.
    """
    import lm_eval.tasks

    # One folder: reading all of lm-eval's thousands of files takes a minute.
    source = Path(lm_eval.tasks.__file__).parent / folder
    manager = lm_eval.tasks.TaskManager(include_path=str(source), include_defaults=False)
    changes = {} if dataset is None else {"custom_dataset": dataset}
    found = manager.load({"group": "chosen", "task": [{"task": name, **changes}]})
    return found["tasks"][name]


def score_of(task: Any, doc: dict[str, Any], metric: str) -> Callable[[str], float]:
    """What an answer to a row of lm-eval's task is worth by a metric, 0 to 100."""
    return lambda answer: 100 * float(task.process_results(doc, [answer])[metric])
