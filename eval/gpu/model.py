"""A model of a decode step's time: the sum of its pieces, in the shape of Qwen3-8B on one GPU.

    cd eval && python -m gpu.model
    cd eval && python -m gpu.model --measured results/h200

It prints what was measured of rows in a graph, what the model says, and their ratio. The pieces and rows of a check
that has ended (`--measured`) take the place of the numbers below, as far as it got.

A piece is what one part of a step adds to the time of the model's stream, in milliseconds; pieces add up, since kernels
of one stream follow each other. Not in the model: noise, and what kernels do to each other's caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import typer

from common import command
from gpu.decoding import FEW, MANY, Case, K
from gpu.replay import parse
from hf_offload.cache.residence import blocks_soon, fitting_slots
from hf_offload.policies.base import DENSE_BYTES
from records import RESULTS, show, write_csv

LAYERS, AHEAD = 36, 33  # of which so many have their queries predicted
KV_HEADS, BLOCK, CHOSEN = 8, 32, 64  # blocks of 16 KiB a KV head
RECORD, DIGEST = 16384, 1608  # bytes of a block and KV head
WEIGHTS = 15.14e9  # bytes that a step reads: 36 layers of 192.9 M parameters and the head's 622 M, in bf16
QUERY_WEIGHTS = AHEAD * 33.5e6  # and for predicted queries
MODEL_LAUNCHES, AHEAD_LAUNCHES = 1680, 891  # small kernels of a step: of the model itself, for predicted queries
FULL, CHOICE, SCOUT = "full-resident-graph", "chosen-graph", "scout-graph"
LAUNCHES = {FULL: (0, 650), CHOICE: (LAYERS * 8, 650 + LAYERS * 5), SCOUT: (1050, 1200 + AHEAD_LAUNCHES)}
"""By row, small kernels of the package (`launches` of h200/decode) and launches that are no small kernels: products and
the package's own, such as scores, tail, join, selection and split; they count for the gaps between kernels."""
SCRIPT_LAUNCHES = 207  # small kernels of a script of choices
SHARES, WRITE = 4.0, 2.1
"""Microseconds of a merge of the device's own shares, an estimate, and of the write of a token (step_kernels)."""
SLOWED = 1.05  # how many times as long small kernels take beside a fetch, an estimate: 24 of 132 processors copy
HOST = 0.5  # ms between two replays in which the device waits for the host, an estimate: the launch, what is before it
SHOWN = ("context", "batch", "row", "replay", "measured", "predicted", "ratio", "tokens_per_s")


@dataclass(frozen=True)
class Machine:
    """Speeds of a machine, by default an H100 with 16 cores; GB/s and microseconds.

    Sources: `results/h100`, file and rows. Its `step_kernels.csv` is from torch's profiler, which the check used then.
    """

    device: float = 3030.0  # a copy within the device, read and write counted (kernels: "speed: device")
    products: float = 2440.0  # weights that products read (step_kernels, `nvjet` and `splitK`: 6.1 ms)
    products_row: float = 0.02  # what a row more takes, ms a step
    small: float = 1.57  # a small torch kernel (step_kernels, one, 8 and 16 rows)
    small_row: float = 0.03  # and what a row more adds
    # Digests that are scored, and what does not depend on them (step_kernels: `score_submeans_kernel`, 22.4, 150 and
    # 292 µs for 13, 105 and 211 MB).
    score: float = 733.0
    score_fixed: float = 4.2
    attend_fixed: float = 3.3  # an attention of nothing (step_kernels: `paged_attention_kernel`)
    fetch: float = 49.3  # a recall (step_kernels and decode: `fetch_kernel`, 633 MiB in 13.5 ms)
    cpu: float = 61.0  # CPU attention by 15 threads (three layers of 52 MB that are waited for: 2.5 ms)
    cpu_fixed: float = 20.0  # a hand-over with little to do (handoff: 5 blocks a head)
    # Between two kernels of a graph, an estimate: `add_one` takes 1.14 µs in a graph (kernels), a kernel of that size
    # 1.1 by the profiler's own clock.
    gap: float = 0.2
    # A merge with a host partial, and what a row more adds, estimates: a round trip of the bus, and 33 KB at 50 GB/s.
    merge: float = 4.0
    merge_row: float = 0.66


class Work(NamedTuple):
    """What a step of a case has to do: the CPU attends the share `miss` of the chosen blocks, and so many bytes are
    recalled.
    """

    case: Case
    miss: float = 0.0
    recalled: float = 0.0


def scripted(context: int, batch: int, script: str) -> Work:
    """A step of scout whose choices follow a script: each recall brings all that is missing then."""
    numbers = parse(script)
    recalled = LAYERS * batch * KV_HEADS * CHOSEN * numbers["miss"] * RECORD / numbers["recall"]
    return Work(Case(context, batch, SCOUT, script), numbers["miss"], recalled)


SHAPES = (32 * K, 1), (32 * K, 8), (64 * K, 8), (64 * K, 40)
AHEAD_OF_A_RUN = [Work(Case(context, 1, FULL)) for context in (32 * K, 64 * K)]
AHEAD_OF_A_RUN += [scripted(*shape, script) for shape in SHAPES for script in (FEW, MANY)]
"""What the check measures, and 40 rows at 64k, for which few machines have the memory."""


def pieces(work: Work, machine: Machine) -> dict[str, float]:
    """Milliseconds of a step by piece."""
    case, lines = work.case, work.case.batch * KV_HEADS
    each = machine.small + machine.small_row * case.batch
    small, others = LAUNCHES.get(case.row, LAUNCHES[SCOUT])
    small += 0 if case.replay == "none" else SCRIPT_LAUNCHES
    blocks = case.context // BLOCK if case.row == FULL else CHOSEN
    attended = (1 - work.miss) * lines * blocks * RECORD
    layer = {"attend": machine.attend_fixed + attended / machine.device / 1000, "merge": SHARES, "write": WRITE}
    if case.row != FULL:
        digests = lines * (case.context // BLOCK) * DIGEST
        layer |= {
            "score": machine.score_fixed + digests / machine.score / 1000,
            "select": 11.5 + 0.3 * case.batch + 6.0 * (case.context / (32 * K) - 1),  # join and split of the list, too
            "tail": 3.7,  # attention to the open block
        }  # the last two: step_kernels
    step = {
        "products": WEIGHTS / machine.products / 1e6 + machine.products_row * case.batch,
        "small": MODEL_LAUNCHES * each / 1000,
        "package": small * each / 1000,
        "between": HOST + (MODEL_LAUNCHES + small + others) * machine.gap / 1000,
    }
    if case.row not in (FULL, CHOICE):
        # Random choices ask for a recall in each step.
        recalls = float(work.recalled > 0) if case.replay == "none" else 1 / parse(case.replay)["recall"]
        layer |= {
            "merge": machine.merge + machine.merge_row * case.batch,
            "hand over": 3.9 + 0.3 * case.batch,
            "exchange": 2.9 + 6.7 * recalls,  # step_kernels: each eighth step, and in each
        }
        recall = work.recalled / machine.fetch / 1e6 + (0.4 if work.recalled else 0.0)  # step_kernels: 36 find nothing
        step |= {
            "query ahead": QUERY_WEIGHTS / machine.products / 1e6 + AHEAD_LAUNCHES * each / 1000,
            "recall": (1 - 1 / SLOWED) * recall,
        }
        cpu = machine.cpu_fixed + work.miss * lines * CHOSEN * RECORD / machine.cpu / 1000
        device = sum(layer.values()) + 1000 * (step["package"] + step["query ahead"] + step["recall"]) / LAYERS
        # Waited for is all of the CPU's work in three layers, in the others what is longer than the device's work.
        step["wait"] = ((LAYERS - AHEAD) * cpu + AHEAD * max(cpu - device, 4.0)) / 1000
    return step | {name: LAYERS * spent / 1000 for name, spent in layer.items()}


def predict(work: Work, machine: Machine, measured: float | None = None) -> dict[str, Any]:
    """One row of the table: milliseconds, and their pieces."""
    parts = pieces(work, machine)
    total = sum(parts.values())
    return {
        **work.case._asdict(), "measured": measured, "predicted": total, "ratio": measured and total / measured,
        "tokens_per_s": 1000 * work.case.batch / total, **dict(sorted(parts.items())),
    }  # fmt: skip


def table(folder: Path, part: str) -> pd.DataFrame:
    """The rows of a part of a check; none where it did not get to it."""
    path = folder / f"{part}.csv"
    return pd.read_csv(path) if path.exists() else pd.DataFrame()


def rows_of(folder: Path) -> Iterator[tuple[Work, float]]:
    """What was measured of the rows that the model knows, with what they had to do."""
    rows = table(folder, "decode")
    for row in rows.itertuples() if "p50" in rows else ():
        if row.row in (FULL, SCOUT, "scout-no-recall-graph") and row.layers == LAYERS and row.p50 > 0:
            case = Case(row.context, row.batch, row.row, row.replay)
            yield Work(case, row.cpu_ratio, row.recall_mib_per_step * 2**20), row.p50


def measured(folder: Path) -> Machine:
    """A machine with what a check has measured of it; what it did not get to is an H100's."""
    kernels = table(folder, "kernels")
    if kernels.empty:
        return Machine()

    def of(operation: str) -> pd.DataFrame:
        return kernels[kernels.operation == operation]

    def line(operation: str, column: str) -> tuple[float, float]:
        """Slope and start of the line through times by a column; no numbers where one point or none is there."""
        rows = of(operation).dropna(subset="in_graph")
        return np.polyfit(rows[column], rows.in_graph, 1) if rows[column].nunique() > 1 else (np.nan, np.nan)

    (a_byte, score), (a_row, merge) = line("score_submeans", "device_bytes"), line("merge_with_host", "batch")
    found = {
        "device": of("speed: device").gb_per_s.max(),
        "fetch": (of("fetch_all").link_bytes / of("fetch_all").p50).max() / 1000,
        "score": 1 / a_byte / 1000, "score_fixed": max(score, 0.0), "merge": merge, "merge_row": a_row,
    }  # fmt: skip
    return Machine(**{name: float(value) for name, value in found.items() if np.isfinite(value)})


def check(folder: Path) -> list[dict[str, Any]]:
    """What the model says with what a check has measured: of its rows, and of those that it did not get to."""
    machine, found = measured(folder), list(rows_of(folder))
    told = {work.case for work, _ in found}
    rows = [*found, *((work, None) for work in AHEAD_OF_A_RUN if work.case not in told)]
    return [predict(work, machine, time) for work, time in rows]


CARDS = {
    "80 GB": (Machine(), 62e9, 77.0),
    "24 GB": (Machine(device=1000.0, products=800.0, score=400.0, fetch=22.0), 6e9, 35.0),
}
"""By card, its speeds, the bytes that weights of 16 GB leave free, and a step of `DynamicCache`, ms, where it fits. An
H100, whose Python takes the time of that, and an estimate of a card with 1 TB/s behind PCIe 4."""


def defaults() -> list[dict[str, Any]]:
    """What a cache takes by default on some cards, beside what it could have taken; milliseconds a step."""
    rows = []
    for card, (machine, free, stock) in CARDS.items():
        for context, batch in SHAPES:
            blocks, lines = blocks_soon(context, BLOCK), LAYERS * batch * KV_HEADS
            digests, whole = blocks * lines * DIGEST, blocks * lines * RECORD
            slots = fitting_slots(int(free - digests), blocks, lines * RECORD, lines * DIGEST, 3 * CHOSEN // 2)
            default, ways = "none fits", dict[str, Work]()
            if digests + lines * 3 * CHOSEN // 2 * RECORD <= free:
                ways["split"], default = scripted(context, batch, FEW), "split"
            if slots >= blocks:
                default = "full" if whole / LAYERS <= DENSE_BYTES else "chosen"
                ways |= {"full": Work(Case(context, batch, FULL)), "chosen": Work(Case(context, batch, CHOICE))}
            times = {name: sum(pieces(work, machine).values()) for name, work in ways.items()}
            spent = times.get(default)
            rows.append({
                "card": card, "context": context, "batch": batch, "default": default, "ms": spent,
                "of_best": spent and spent / min(times.values()),
                **{f"{name}_ms": times.get(name) for name in ("full", "chosen", "split")},
                "stock_ms": stock if whole <= free else None,
            })  # fmt: skip
    return rows


def main(
    folder: Annotated[Path, typer.Option("--measured", help="Folder of a check.")] = RESULTS / "gpu",
    out: Annotated[Path, typer.Option(help="Where the CSV goes.")] = RESULTS / "gpu" / "model.csv",
) -> None:
    """Predict decode steps on a GPU from measured pieces."""
    rows, chosen = check(folder), defaults()
    show("milliseconds a step", rows, SHOWN)
    write_csv(out, rows)
    show("by default", chosen)
    write_csv(out.with_name("defaults.csv"), chosen)


if __name__ == "__main__":
    command(main)()
