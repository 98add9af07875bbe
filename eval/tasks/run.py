"""A run: every row answers every sample, in as many processes as a launcher has started."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import PartialState
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import common
from tasks.answers import CONTROL, SETUPS, Reading, answer
from tasks.prompts import Prompt, Prompter
from tasks.samples import Sample
from tasks.scores import report

DataOption = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="A folder with the benchmark's own files, in place of the hub."),
]
KEYS = ("task", "sample", "row", "setup")
ROWS = (
    "full,dynamic,scout:budget=1024,scout:budget=2048,hgca:window=1024,hgca:window=2048,fixed_hybrid:budget=0.05,"
    "window:budget=1024,window:budget=2048"
)

Reader = Callable[[str, PreTrainedTokenizerBase], list[Sample]]


@dataclass(frozen=True)
class Asking:
    """The options that all benchmarks share."""

    rows: common.RowsOption = field(default_factory=lambda: [ROWS])
    setup: Annotated[
        str,
        typer.Option(
            help='How the question is attended: "dense", like the prompt, "sparse", as the policy decodes, or both.'
        ),
    ] = "dense"
    limit: Annotated[int | None, typer.Option(min=1, help="Samples of each task [default: all].")] = None
    min_tokens: Annotated[int, typer.Option(min=0, help="Leave out shorter prompts.")] = 0
    max_tokens: Annotated[
        int | None, typer.Option(min=16, help="Cut longer prompts in the middle; by default to the model's positions.")
    ] = None
    new_tokens: Annotated[int | None, typer.Option(min=1, help="The longest answer; by default the task's own.")] = None
    chat: Annotated[bool, typer.Option(help="Use the tokenizer's chat template, where the benchmark does.")] = True
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt in one forward; each row then reads for itself.")
    ] = None

    def __post_init__(self) -> None:
        if unknown := set(self.setups) - set(SETUPS):
            raise typer.BadParameter(f"unknown setups {', '.join(sorted(unknown))}: choose among {', '.join(SETUPS)}")

    @property
    def setups(self) -> list[str]:
        """The setups, one by one."""
        return list(dict.fromkeys(self.setup.replace(" ", "").split(",")))


def run(
    title: str, tasks: Sequence[str], read: Reader, asking: Asking, setting: common.Setting, **settings: Any
) -> list[dict[str, Any]]:
    """Answer and report; what an earlier run with the same settings has answered is not asked again.

    Args:
        title: of the benchmark.
        tasks: names of its tasks; read: gives the samples of one.
        settings: what else the answers depend on, for `json`.

    Returns:
        What was reported, an answer an entry; nothing in processes but the first.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it advises on options of its own
    rows = common.rows_of(asking.rows, known={CONTROL: common.FULL})
    if setting.out.suffix != ".csv":
        raise typer.BadParameter(f"--out {setting.out} is no CSV: the other results go beside it under its name")
    state = PartialState(cpu=not torch.cuda.is_available())  # left to itself it would not see the others on a CPU
    settings |= {"benchmark": title, "model": setting.model, "dtype": setting.dtype, "most": asking.max_tokens}
    settings |= {name: getattr(asking, name) for name in ("new_tokens", "chat", "chunk")}
    records = common.Records(setting.beside(".jsonl"), KEYS, settings)
    model, tokenizer = setting.load(state.device)
    common.check_rows(rows, model)
    quiet = not state.is_main_process
    by_task = {
        task: questions(asking, read, task, model, tokenizer)
        for task in tqdm(tasks, desc="samples", unit="task", delay=5, leave=False, disable=quiet)
    }
    missing = [task for task, found in by_task.items() if not found]
    everything = [question for found in by_task.values() for question in found]
    if not everything:
        raise typer.BadParameter(f"no sample of {', '.join(missing)}: no rows are there, or none is long enough")
    mine = everything[state.process_index :: state.num_processes]
    with tqdm(total=len(mine) * len(asking.setups) * len(rows), disable=quiet, unit="answers") as bar:
        for question in mine:
            ask(asking, rows, *question, model, tokenizer, records, bar)
    state.wait_for_everyone()
    reported: list[dict[str, Any]] = []
    if state.is_main_process:
        records.read()
        samples = [sample for sample, _ in everything]
        keys = [(each.task, each.name, row.name, s) for s in asking.setups for row in rows for each in samples]
        reported = [records.found[key] for key in keys]
        report(title, setting, reported, missing)
    state.destroy_process_group()
    return reported


def questions(
    asking: Asking, read: Reader, task: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[Sample, Prompt]]:
    """The samples of a task that are asked for, with their prompts."""
    try:
        samples = read(task, tokenizer)
    except OSError as error:
        raise typer.BadParameter(
            f"what {task} is made of cannot be fetched ({error}): give it as files, with --data-dir or --prose"
        ) from error
    if twice := [name for name, count in Counter(sample.name for sample in samples).items() if count > 1]:
        raise typer.BadParameter(f"{task} has several samples named {twice[0]!r}: give each an _id of its own")
    prompter = Prompter(model, tokenizer, asking.max_tokens, asking.chat)
    found: list[tuple[Sample, Prompt]] = []
    for sample in samples:
        if len(found) == asking.limit:
            break
        sample = replace(sample, new_tokens=min(sample.new_tokens, asking.new_tokens or sample.new_tokens))
        prompt = prompter(sample)
        if prompt.whole >= asking.min_tokens:
            found.append((sample, prompt))
    return found


def ask(
    asking: Asking, rows: Sequence[common.Row], sample: Sample, prompt: Prompt, model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase, records: common.Records, bar: tqdm[Any],
) -> None:  # fmt: skip
    """Let every row answer one question that it has not answered before, in these words."""
    reading = Reading(model, prompt.ids.to(model.device), asking.chunk)
    for setup in asking.setups:
        for row in rows:
            bar.set_description(f"{sample.task}, {row.name}")
            key = {"task": sample.task, "sample": sample.name, "row": row.name, "setup": setup}
            known = records.found.get(records.key(key))
            if known is not None and known.get("files", {}) != row.files:
                raise typer.BadParameter(
                    f"{records.file} holds answers of --row {row.name} with another {', '.join(row.files)}: remove it, "
                    "or give another --out"
                )
            if known is None or known.get("prompt", prompt.checksum) != prompt.checksum:
                about = {"tokens": prompt.ids.shape[1], "whole": prompt.whole, "asked": prompt.asked}
                about |= {"prompt": prompt.checksum} | ({"files": row.files} if row.files else {})
                records.add(key | about | answer(reading, row, setup, prompt, sample, tokenizer))
            bar.update()
