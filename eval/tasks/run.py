"""A run: every row answers every sample, in as many processes as a launcher has started."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import PartialState
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common import DTYPES, Row, check_rows, load
from tasks.answers import SETUPS, Reading, answer
from tasks.prompts import Prompt, Prompter
from tasks.records import Records
from tasks.report import write_report
from tasks.rows import parse_rows
from tasks.samples import Sample

RowOption = Annotated[
    list[str],
    typer.Option(
        "--row", help='A policy and knobs of it and of HybridCache, "scout:budget=512,tier=split"; give it again.'
    ),
]
SetupOption = Annotated[
    str,
    typer.Option(
        help='How the question is attended: "dense", like the prompt, "sparse", as the policy decodes, or both.'
    ),
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Samples of each task [default: all].")]
NewOption = Annotated[int | None, typer.Option(min=1, help="The longest answer [default: the task's own].")]
ChatOption = Annotated[bool, typer.Option(help="Use the tokenizer's chat template, where the benchmark does.")]
ChunkOption = Annotated[
    int | None, typer.Option(min=1, help="Tokens of a prompt in one forward [default: all]; each row reads for itself.")
]
ROWS = [
    "full", "dynamic", "scout:budget=1024", "scout:budget=2048", "hgca:window=1024", "hgca:window=2048",
    "fixed_hybrid:budget=0.05", "window:budget=1024", "window:budget=2048",
]  # fmt: skip

Reader = Callable[[str, PreTrainedTokenizerBase], list[Sample]]


@dataclass(frozen=True)
class Plan:
    """What is to be run, checked before anything is loaded.

    Args:
        tasks: names; setup: of `SETUPS`, or several with commas; rows: as `parse_rows` takes them.
        limit, least, most, new_tokens, chat, chunk, model, dtype, threads, out: the options of the same names.

    Raises:
        typer.BadParameter: an unknown setup, row, knob or dtype.
    """

    tasks: Sequence[str]
    rows: Sequence[str]
    setup: str
    limit: int | None
    least: int
    most: int | None
    new_tokens: int | None
    chat: bool
    chunk: int | None
    model: str | None
    dtype: str
    threads: int
    out: Path

    def __post_init__(self) -> None:
        if unknown := set(self.setups) - set(SETUPS):
            raise typer.BadParameter(f"unknown setups {', '.join(sorted(unknown))}: choose among {', '.join(SETUPS)}")
        if self.dtype not in DTYPES:
            raise typer.BadParameter(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.out.suffix != ".csv":
            raise typer.BadParameter(f"--out {self.out} is no CSV: the other results go beside it under its name")
        parse_rows(self.rows)

    @property
    def setups(self) -> list[str]:
        """The setups, one by one."""
        return list(dict.fromkeys(self.setup.replace(" ", "").split(",")))


@dataclass(frozen=True)
class Question:
    """A sample with its prompt, and how long the answer may be."""

    sample: Sample
    prompt: Prompt
    new_tokens: int


def run(title: str, plan: Plan, read: Reader, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Answer and report; what an earlier run with the same settings has answered is not asked again.

    Args:
        title: of the benchmark.
        plan: what to run.
        read: gives the samples of a task.
        settings: what else the answers depend on, for `json`.

    Returns:
        What was reported, an answer an entry; nothing in processes but the first.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it advises on options of its own
    state = PartialState(cpu=not torch.cuda.is_available())  # left to itself it would not see the others on a CPU
    rows = parse_rows(plan.rows)
    settings |= {"model": plan.model, "dtype": plan.dtype, "most": plan.most, "new_tokens": plan.new_tokens}
    settings |= {"chat": plan.chat, "chunk": plan.chunk}
    records = Records(plan.out.with_suffix(".jsonl"), settings, state.process_index)
    for row in rows:
        records.check(row.name, row.files)
    model, tokenizer = load(plan.model, plan.dtype, plan.threads, state.device)
    check_rows(rows, model)
    quiet = not state.is_main_process
    tasks = tqdm(plan.tasks, desc="samples", unit="task", delay=5, leave=False, disable=quiet)
    by_task = {task: questions(plan, fetched(read, task, tokenizer), model, tokenizer) for task in tasks}
    missing = [task for task, found in by_task.items() if not found]
    everything = [question for found in by_task.values() for question in found]
    if not everything:
        raise typer.BadParameter(f"no sample of {', '.join(missing)}: no rows are there, or none is long enough")
    mine = everything[state.process_index :: state.num_processes]
    jobs = [(question, row, setup) for question in mine for setup in plan.setups for row in rows]
    with tqdm(total=len(jobs), disable=quiet, unit="answers") as bar:
        for question in mine:
            ask(plan, rows, question, model, tokenizer, records, bar)
    state.wait_for_everyone()
    reported: list[dict[str, Any]] = []
    if state.is_main_process:
        records.join()
        keys = [
            (question.sample.task, question.sample.name, row.name, setup)
            for setup in plan.setups
            for row in rows
            for question in everything
        ]
        reported = [records.found[key] for key in keys]
        write_report(title, plan.out, reported, missing)
    state.destroy_process_group()
    return reported


def fetched(read: Reader, task: str, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """The samples of a task.

    Raises:
        typer.BadParameter: they cannot be fetched, or two of them have one name.
    """
    try:
        samples = read(task, tokenizer)
    except OSError as error:
        raise typer.BadParameter(
            f"what {task} is made of cannot be fetched ({error}): give it as files, with --data-dir or --prose"
        ) from error
    if twice := [name for name, count in Counter(sample.name for sample in samples).items() if count > 1]:
        raise typer.BadParameter(f"{task} has several samples named {twice[0]!r}: give each an _id of its own")
    return samples


def questions(
    plan: Plan, samples: Sequence[Sample], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[Question]:
    """The samples that a plan asks for, with their prompts."""
    prompter = Prompter(model, tokenizer, plan.most, plan.chat)
    found: list[Question] = []
    for sample in samples:
        if plan.limit is not None and len(found) == plan.limit:
            break
        new_tokens = min(sample.new_tokens, plan.new_tokens or sample.new_tokens)
        prompt = prompter(sample, new_tokens)
        if prompt.whole >= plan.least:
            found.append(Question(sample, prompt, new_tokens))
    return found


def ask(
    plan: Plan,
    rows: Sequence[Row],
    question: Question,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    records: Records,
    bar: tqdm[Any],
) -> None:
    """Let every row answer one question that it has not answered before, in these words."""
    sample, prompt = question.sample, question.prompt
    reading = Reading(model, prompt.ids.to(model.device), plan.chunk)
    with torch.inference_mode():
        for setup in plan.setups:
            for row in rows:
                bar.set_description(f"{sample.task}, {row.name}")
                known = records.found.get((sample.task, sample.name, row.name, setup))
                if known is None or known.get("prompt", prompt.checksum) != prompt.checksum:
                    found = answer(reading, row, setup, prompt, sample, tokenizer, question.new_tokens)
                    key = {"task": sample.task, "sample": sample.name, "row": row.name, "setup": setup}
                    about = {"tokens": prompt.ids.shape[1], "whole": prompt.whole, "asked": prompt.asked}
                    files = {"files": of_row} if (of_row := row.files) else {}
                    records.add(key | about | {"prompt": prompt.checksum} | files | found)
                bar.update()
