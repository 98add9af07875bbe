"""A run: every row answers every sample, in as many processes as a launcher has started."""

from __future__ import annotations

import itertools
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from accelerate import PartialState
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

import common
from records import Records
from tasks.answers import CONTROL, SETUPS, Reading, answer
from tasks.prompts import Prompt, Prompter
from tasks.samples import Sample
from tasks.scores import report

KEYS = ("task", "sample", "row", "setup")
ROWS = (
    "full,dynamic,scout:budget=1024,scout:budget=2048,hgca:window=1024,hgca:window=2048,fixed_hybrid:budget=0.05,"
    "window:budget=1024,window:budget=2048"
)

Reader = Callable[[str, PreTrainedTokenizerBase], list[Sample]]


@dataclass(frozen=True)
class Asking:
    """The options that all benchmarks share."""

    tasks: Annotated[str, typer.Option(help="Tasks or sets of them; an unknown name tells which there are.")] = ""
    rows: common.RowsOption = field(default_factory=lambda: [ROWS])
    setup: Annotated[
        str, typer.Option(help='Questions "dense", attended like the prompt, "sparse", as the policy decodes, or both.')
    ] = "dense"
    limit: Annotated[int | None, typer.Option(min=1, help="Samples of each task [default: all].")] = None
    min_tokens: Annotated[int, typer.Option(min=0, help="Leave out shorter prompts.")] = 0
    max_tokens: Annotated[
        int | None, typer.Option(min=16, help="Cut longer prompts in the middle; by default to the model's positions.")
    ] = None
    new_tokens: Annotated[int | None, typer.Option(min=1, help="The longest answer; by default the task's own.")] = None
    data_dir: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A folder with the benchmark's files [the hub].")
    ] = None
    chat: Annotated[bool, typer.Option(help="Use the tokenizer's chat template, where the benchmark does.")] = True


def run(title: str, tasks: Sequence[str], read: Reader, asking: Asking, setting: common.Setting, **about: Any) -> None:
    """Answer and report; what an earlier run with the same settings has answered is not asked again.

    `read` gives the samples of a task; `about` says, in values for `json`, what else the answers depend on.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it advises on options of its own
    rows = common.rows_of(asking.rows, known={CONTROL: common.FULL})
    setups = common.listed(asking.setup, SETUPS, "setups")
    state = PartialState(cpu=not torch.cuda.is_available())  # left to itself it would not see the others on a CPU
    about |= {"benchmark": title, "model": setting.model, "dtype": setting.dtype, "most": asking.max_tokens}
    about |= {"new_tokens": asking.new_tokens, "chat": asking.chat}
    records = Records(setting.beside(".jsonl"), KEYS, about)
    model, tokenizer = setting.load(state.device)
    common.check_rows(rows, model)
    prompter = Prompter(model, tokenizer, asking.max_tokens, asking.chat)
    by_task = {
        task: list(itertools.islice(prompts(read(task, tokenizer), prompter, asking), asking.limit))
        for task in tqdm(tasks, desc="samples", unit="task", delay=5, leave=False, disable=not state.is_main_process)
    }
    missing = [task for task, found in by_task.items() if not found]
    everything = [each for found in by_task.values() for each in found]
    if not everything:
        raise typer.BadParameter(f"no sample of {', '.join(missing)}: no rows are there, or none is long enough")
    mine = everything[state.process_index :: state.num_processes]
    keys = list(itertools.product(setups, rows))
    for sample, prompt in tqdm(mine, unit="samples", disable=not state.is_main_process):
        reading = Reading(model, prompt.ids.to(model.device))
        for setup, row in keys:
            key = {"task": sample.task, "sample": sample.name, "row": row.name, "setup": setup}
            # What was answered to another prompt of this name, or with another file of a knob, is asked again.
            same = {"prompt": zlib.crc32(prompt.ids.numpy().tobytes()), "files": row.files}
            if not same.items() <= records.found.get(records.key(key), {}).items():
                length = {"tokens": prompt.ids.shape[1], "whole": prompt.whole, "asked": prompt.asked}
                records.add(key | same | length | answer(reading, row, setup, prompt, sample, tokenizer))
    state.wait_for_everyone()
    if state.is_main_process:
        records.read()
        every = [(s.task, s.name, row.name, setup) for setup, row in keys for s, _ in everything]
        report(title, setting, [records.found[key] for key in every], missing)
    state.destroy_process_group()


def prompts(samples: Iterable[Sample], prompter: Prompter, asking: Asking) -> Iterator[tuple[Sample, Prompt]]:
    """The samples that are long enough, with their prompts."""
    for sample in samples:
        sample = replace(sample, new_tokens=min(sample.new_tokens, asking.new_tokens or sample.new_tokens))
        prompt = prompter(sample)
        if prompt.whole >= asking.min_tokens:
            yield sample, prompt
