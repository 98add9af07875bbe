"""Fluxion's parts one by one: who waits for whom, what each part is worth (Fluxion, Table 5, Figures 9 and 10).

    python eval/fluxion_report.py --predictor predictor.safetensors
    python eval/fluxion_report.py --predictor predictor.safetensors --sections tau,schedules --contexts 8k

Each section compares a few rows on one text, in turns; full attention reads it once and all rows take that over.

- idle: `fixed_hybrid` (16 tokens, 0.05) and `fluxion` with one row and four, two memories. `wait_ms` is how long the
  model's thread waits for the CPU's part in a step, all layers; `wait_share` is that as a share of the step. With a GPU
  `gpu_idle` is the share of a step in which no kernel runs there, by the profiler's timeline. `cpu_idle_ms` and
  `device_idle_ms` are what the CPU's threads and the device, where tasks are shared, wait for each other.
- criteria: budgets by 95 % of the attention's weight, by a deviation of a tenth of a head's own output, and by one of a
  tenth of the step's largest output. Nothing is predicted: every head gets what it needs in that very step. Times are
  those of the same needs told once more, so that finding them costs nothing.
- granularity: runs of 16 and of 32 tokens, runs chosen by V(blk), and the last with streaming heads skipped.
- schedules: four rows of mixed lengths, two memories; who takes which task.
- predictor: `fluxion`, and the same needs told again (`replayed`); `overhead` is the difference, of a step.
- tau: every deviation that the predictor knows.
- mixed: a row and one of an eighth of its length, against both as long as the longer one.

`chosen_MiB` is what is read of the host's keys and values in a step. A section that is done is not done again by a run
with the same settings that was stopped.
"""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm
from transformers import PreTrainedModel

from common import (
    FULL,
    RESULTS,
    DtypeOption,
    ModelOption,
    OutOption,
    ProseOption,
    Row,
    ThreadsOption,
    command,
    kinds_of,
    load,
    numbers,
    prefill,
    show,
    synchronize,
    text_of,
    window,
    write_csv,
)
from fluxion_rows import CRITERIA, WARM_UP, Batch, Needing, Replayed, recording
from hf_offload.policies.fluxion.predictor import ConstantPredictor, read_about
from hf_offload.policies.fluxion.scheduler import SCHEDULES
from resume import Progress

SPLIT = {"tier": "split"}
LINES = "lines.json"


class Report:
    """The sections, over one text of a context length.

    Args:
        model: the model.
        full: full attention's cache of the context.
        ids: the text `[1, N]`, with what follows the context.
        predictor: file of the predictor; tau: the deviation that is taken where a section does not vary it.
        rounds, steps: turns that each row has, and steps of each that count.
    """

    def __init__(
        self, model: PreTrainedModel, full: Any, ids: torch.Tensor, context: int, predictor: Path, tau: float,
        rounds: int, steps: int,
    ) -> None:  # fmt: skip
        self.model, self.full, self.ids, self.context = model, full, ids, context
        self.predictor, self.tau, self.rounds, self.steps = predictor, tau, rounds, steps
        about = read_about(predictor)
        self.taus = sorted(float(tau) for tau in about["predictors"])
        self.constant = ConstantPredictor(digest=about["digest"], sinks=about["sinks"], local=about["local"])

    def row(self, name: str, **options: Any) -> Row:
        """A row of `fluxion`."""
        return Row(name, "fluxion", {"predictor": self.predictor, "tau": self.tau} | options)

    def compared(self, rows: list[Row], lengths: list[int] | None = None) -> list[dict[str, Any]]:
        """Lines of rows over a batch (by default of one row, as long as the context)."""
        batch = Batch(self.model, self.full, self.ids, lengths or [self.context])
        caches = {row.name: batch.make_cache(row) for row in rows}
        lines = batch.compared(rows, caches, self.rounds, self.steps)
        if torch.cuda.is_available():
            done = self.rounds * (WARM_UP + self.steps)
            for row, line in zip(rows, lines, strict=True):
                work = functools.partial(batch.decode, row, caches[row.name], done, WARM_UP + 4)
                line["gpu_idle"] = gpu_idle(work)
        return [{"lengths": "+".join(map(str, batch.lengths))} | line for line in lines]

    def replayed(self, row: Row, name: str) -> tuple[dict[str, Any], Row]:
        """The line of a row, and a row that is told the same needs."""
        with recording() as needs:
            line = self.compared([FULL, row])[1]
        return line, Row(name, Replayed(self.constant, needs=needs, granularities=(16, 32, 64, 128)))

    def idle(self) -> list[dict[str, Any]]:
        rows = [
            Row("fixed-16-0.05", "fixed_hybrid", {"budget": 0.05, "block_size": 16} | SPLIT),
            self.row("fluxion", schedule="none", **SPLIT),
            self.row("fluxion, shared", schedule="priority", **SPLIT),
        ]
        return [line for batch in (1, 4) for line in self.compared(rows, [self.context] * batch)]

    def criteria(self) -> list[dict[str, Any]]:
        told = [self.replayed(Row(name, Needing(self.constant, criterion=name)), name) for name in CRITERIA]
        times = self.compared([row for _, row in told])
        kept = ("kl", "top1", "chosen_MiB")
        return [time | {name: line[name] for name in kept} for (line, _), time in zip(told, times, strict=True)]

    def granularity(self) -> list[dict[str, Any]]:
        knobs = {"fixed-16": (16,), "fixed-32": (32,), "dynamic": (16, 32, 64, 128)}
        rows = [self.row(name, granularities=runs, skip_streaming=False) for name, runs in knobs.items()]
        return self.compared([FULL, *rows, self.row("fluxion")])

    def schedules(self) -> list[dict[str, Any]]:
        lengths = [self.context, self.context // 2, self.context // 4, self.context // 8]
        return self.compared([self.row(name, schedule=name, **SPLIT) for name in SCHEDULES], lengths)

    def overhead(self) -> list[dict[str, Any]]:
        _, told = self.replayed(self.row("fluxion"), "replayed")
        lines = self.compared([self.row("fluxion"), told])
        lines[0]["overhead"] = 1 - lines[1]["step"] / lines[0]["step"]
        return lines

    def tau_effect(self) -> list[dict[str, Any]]:
        return self.compared([FULL, *(self.row(f"tau {tau:g}", tau=tau) for tau in self.taus)])

    def mixed(self) -> list[dict[str, Any]]:
        batches = [self.context, self.context // 8], [self.context] * 2
        return [line for lengths in batches for line in self.compared([FULL, self.row("fluxion")], lengths)]


SECTIONS: dict[str, Callable[[Report], list[dict[str, Any]]]] = {
    "idle": Report.idle, "criteria": Report.criteria, "granularity": Report.granularity,
    "schedules": Report.schedules, "predictor": Report.overhead, "tau": Report.tau_effect, "mixed": Report.mixed,
}  # fmt: skip


def gpu_idle(work: Callable[[], Any]) -> float:
    """The share of a piece of work in which no kernel or copy runs on the GPU."""
    from torch.profiler import DeviceType, ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        synchronize()
    spans = [(e.time_range.start, e.time_range.end) for e in seen.events() if e.device_type == DeviceType.CUDA]
    return 1 - busy(spans) / (max(end for _, end in spans) - min(start for start, _ in spans))


def busy(spans: list[tuple[float, float]]) -> float:
    """How long at least one of these spans of time lasts."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def write_lines(lines: list[dict[str, Any]], folder: Path) -> None:
    """Keep the lines of a section."""
    (folder / LINES).write_text(json.dumps(lines), encoding="utf-8")


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Draw for each section and context the attention's time of its rows, and beside it how far they are from full."""
    import matplotlib.pyplot as plt

    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(f"{line['section']}, {line['context']} tokens", []).append(line)
    figure, axes = plt.subplots(len(groups), 2, figsize=(9, 2 * len(groups) + 1), layout="constrained", squeeze=False)
    for (title, mine), pair in zip(groups.items(), axes, strict=True):
        names = [line["row"] + (f", {line['lengths']}" if line["batch"] > 1 else "") for line in mine]
        for axis, (column, label) in zip(pair, (("attention", "attention, ms a step"), ("kl", "KL")), strict=True):
            axis.barh(names, [line.get(column) or 0.0 for line in mine])
            axis.invert_yaxis()
            axis.set(title=title, xlabel=label)
        pair[1].set_yticklabels([])
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"wrote {path}")


def main(
    predictor: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="A file of hf-offload train-fluxion.")],
    sections: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(SECTIONS)}.")] = ",".join(SECTIONS),
    contexts: Annotated[str, typer.Option(help="Context lengths, comma-separated; k is 1,024.")] = "6k",
    tau: Annotated[float, typer.Option(help="The deviation, where a section does not vary it.")] = 0.1,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count, per round.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which the rows take turns.")] = 4,
    kind: Annotated[str, typer.Option(help="prose, documentation or code.")] = "code",
    prose: ProseOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 0,
    out: OutOption = RESULTS / "fluxion_report.csv",
) -> None:
    """Measure Fluxion's parts one by one."""
    names, lengths, (text,) = sections.replace(" ", "").split(","), sorted(numbers(contexts)), kinds_of(kind)
    if unknown := [name for name in names if name not in SECTIONS]:
        raise typer.BadParameter(f"unknown sections {', '.join(unknown)}: choose among {', '.join(SECTIONS)}")
    settings = {"predictor": predictor.name, "tau": tau, "steps": steps, "rounds": rounds, "kind": kind, "model": model,
                "dtype": dtype, "threads": threads, "contexts": lengths}  # fmt: skip
    language_model, tokenizer = load(model, dtype, threads)
    progress = Progress(out.with_suffix(""), settings)
    following = rounds * (WARM_UP + steps) + WARM_UP + 4
    ids = window(text_of(text, prose), tokenizer, 0, lengths[-1] + following).to(language_model.device)
    records: list[dict[str, Any]] = []
    with torch.inference_mode(), tqdm(total=len(lengths) * len(names)) as bar:
        for length in lengths:
            report = None
            for name in names:
                bar.set_description(f"{length} tokens, {name}")
                key = f"{name}-{length}"
                done = progress.latest(key)
                if done is None:
                    if report is None:
                        full = FULL.make_cache(language_model)
                        prefill(language_model, full, ids[:, :length], chunk=2048)
                        report = Report(language_model, full, ids, length, predictor, tau, rounds, steps)
                    lines = [{"section": name} | line for line in SECTIONS[name](report)]
                    progress.save(key, 0, functools.partial(write_lines, lines))
                    gc.collect()
                else:
                    lines = json.loads((done / LINES).read_text(encoding="utf-8"))
                records += [line | {"kind": text, "dtype": dtype, "steps": steps * rounds} for line in lines]
                write_csv(out, records)
                bar.update()
    plot(records, out.with_suffix(".png"))
    columns = ("section", "row", "lengths", "attention", "step", "kl", "top1", "chosen_MiB", "wait_ms", "device_tasks",
               "overhead")  # fmt: skip
    show("ms a step, MiB of the host's keys and values", [{c: record.get(c) for c in columns} for record in records])
    progress.remove()


if __name__ == "__main__":
    command(main)()
