"""A model of a decode step's time: the sum of its pieces, in the shape of Qwen3-8B on one GPU.

    cd eval && python -m gpu.model
    cd eval && python -m gpu.model --measured results/gpu

It prints what was measured of rows in a graph, what the model says, and their ratio: of the code that the rows of
`results/h100` were measured with ("before"), and of the code as it is ("after"), which no GPU has run. With
`--measured` the pieces and rows of a check that has ended take the place of the numbers below, as far as it got.

A piece is what one part of a step adds to the time of the model's stream, in milliseconds; pieces add up, since kernels
of one stream follow each other. Not in the model: noise, and what kernels do to each other's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from common import RESULTS, command, show, write_csv
from gpu.decoding import FEW, MANY
from gpu.replay import parse
from gpu.results import read_table
from hf_offload.cache.residence import blocks_soon, fitting_slots
from hf_offload.policies.base import DENSE_BYTES

K = 1 << 10
LAYERS, AHEAD = 36, 33  # of which so many have their queries predicted
KV_HEADS, BLOCK, CHOSEN = 8, 32, 64  # blocks of 16 KiB a KV head
RECORD, DIGEST = 16384, 1608  # bytes of a block and KV head
WEIGHTS = 15.14e9  # bytes that a step reads: 36 layers of 192.9 M parameters and the head's 622 M, in bf16
QUERY_WEIGHTS = AHEAD * 33.5e6  # and for predicted queries
MODEL_LAUNCHES, AHEAD_LAUNCHES, SCRIPT_LAUNCHES = 1680, 891, 207
"""Small kernels of a step: of the model itself, for predicted queries, and of a script of choices."""
OTHERS_OF_FULL, OTHERS_OF_SCOUT = 650, 1200
"""Launches that are no small kernels: products and the package's own; they count for the gaps between kernels."""
LAUNCHES_OF_A_CHOICE, OTHERS_OF_A_CHOICE = 8, 5
"""In a layer that chooses among resident blocks: small kernels, and scores, tail, join, selection and split."""
SHARES, WRITE = 4.0, 2.1
"""Microseconds of a merge of the device's own shares, an estimate, and of the write of a token (step_kernels)."""
FULL, CHOSEN_ROW = "full-resident-graph", "chosen-graph"
SCRIPTS = FEW, MANY
SHOWN = ("code", "context", "batch", "row", "replay", "measured", "predicted", "ratio", "tokens_per_s")

Tables = Callable[[str], Iterable[Mapping[str, Any]]]
"""The rows of a part of the check, by its name."""


@dataclass(frozen=True)
class Setup:
    """A state of the package on a machine, by default an H100 with 16 cores; GB/s and microseconds.

    Sources of the machine's speeds: `results/h100`, file and rows.

    Args:
        code: name of the state, as it is shown.
        merge, merge_row: a merge with a host partial, and what a row more adds.
        slowed: how many times as long small kernels take beside a fetch.
        host: milliseconds between two replays in which the device waits for the host.
        scorings: of all layers in a step of scout: a layer with a predicted query scored with the real one, too.
        launches_of_full, launches_of_scout: small kernels of the package; those of `full` are of its hand-overs, where
            it hands over, waits and merges though all blocks are resident.
        device: GB/s of a copy within the device, read and write counted (kernels: "speed: device").
        products: GB/s at which products read weights (step_kernels, `nvjet` and `splitK`: 6.1 ms); `products_row`:
            what a row more takes, ms a step.
        small, small_row: a small torch kernel, and what a row more adds (step_kernels, one, 8 and 16 rows).
        score, score_fixed: GB/s of digests that are scored, and what does not depend on them (step_kernels:
            `score_submeans_kernel`, 22.4, 150 and 292 µs for 13, 105 and 211 MB).
        attend_fixed: an attention of nothing (step_kernels: `paged_attention_kernel`).
        fetch: GB/s of a recall (step_kernels and decode: `fetch_kernel`, 633 MiB in 13.5 ms).
        cpu, cpu_fixed: GB/s of CPU attention by 15 threads (three layers of 52 MB that are waited for: 2.5 ms), and a
            hand-over with little to do (handoff: 5 blocks a head).
        gap: between two kernels of a graph; an estimate: `add_one` takes 1.14 µs in a graph (kernels), a kernel of
            that size 1.1 by the profiler's own clock.
    """

    code: str
    merge: float
    merge_row: float
    slowed: float
    host: float
    scorings: int
    launches_of_full: int
    launches_of_scout: int
    device: float = 3030.0
    products: float = 2440.0
    products_row: float = 0.02
    small: float = 1.57
    small_row: float = 0.03
    score: float = 733.0
    score_fixed: float = 4.2
    attend_fixed: float = 3.3
    fetch: float = 49.3
    cpu: float = 61.0
    cpu_fixed: float = 20.0
    gap: float = 0.2


BEFORE = Setup(
    "before",
    merge=69.0, merge_row=4.3,  # step_kernels: `merge_kernel`, 69 to 77, 104.5 and 136.7 µs
    slowed=20.0,  # step_kernels: one integer sum takes 1.9 µs without a recall, 30 and 57 beside one
    host=2.7,  # `between` of full and scout, one row at 32k, less the gaps
    scorings=LAYERS + AHEAD, launches_of_full=612, launches_of_scout=1780,  # step_kernels
)  # fmt: skip
AFTER = Setup(
    "after",
    # All estimates: a round trip of the bus and 33 KB a row at 50 GB/s; 24 of 132 processors busy with copies; the
    # launch and what comes before it.
    merge=4.0, merge_row=0.66, slowed=1.05, host=0.5,
    scorings=LAYERS, launches_of_full=0, launches_of_scout=1050,  # h200/decode: `launches`
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What a step of a row (`scout-graph`, `chosen-graph`, …) has to do, whose choices follow the script `replay` or
    "none": the CPU attends the share `miss` of the chosen blocks, and so many bytes are recalled.
    """

    context: int
    batch: int
    row: str
    replay: str = "none"
    miss: float = 0.0
    recalled: float = 0.0

    @property
    def recalls(self) -> float:
        """Recalls a step: random choices ask for one in each."""
        if self.replay == "none":
            return float(self.recalled > 0)
        every = parse(self.replay)["recall"]
        return 1 / every if every else 0.0

    @property
    def lines(self) -> int:
        """Rows and KV heads."""
        return self.batch * KV_HEADS


def scripted(context: int, batch: int, script: str) -> Work:
    """A step of scout whose choices follow a script: each recall brings all that is missing then."""
    numbers = parse(script)
    miss, every = numbers["miss"], numbers["recall"]
    recalled = LAYERS * batch * KV_HEADS * CHOSEN * miss * RECORD / every if every else 0.0
    return Work(context, batch, "scout-graph", script, miss, recalled)


AHEAD_OF_A_RUN = (
    Work(32 * K, 1, FULL), *(scripted(32 * K, batch, script) for batch in (1, 8) for script in SCRIPTS),
    Work(64 * K, 1, FULL), *(scripted(64 * K, batch, script) for batch in (8, 40) for script in SCRIPTS),
)  # fmt: skip
"""What the check measures, and 40 rows at 64k, for which few machines have the memory."""


def pieces(work: Work, setup: Setup) -> dict[str, float]:
    """Milliseconds of a step by piece."""
    each = setup.small + setup.small_row * work.batch
    script = 0 if work.replay == "none" else SCRIPT_LAUNCHES
    found = {"products": WEIGHTS / setup.products / 1e6 + setup.products_row * work.batch}
    small, others = 0, OTHERS_OF_FULL  # launches beside the model's
    if work.row == FULL:
        small, layer = setup.launches_of_full, _full(work, setup)
    elif work.row == CHOSEN_ROW:
        small, others = LAYERS * LAUNCHES_OF_A_CHOICE, OTHERS_OF_FULL + LAYERS * OTHERS_OF_A_CHOICE
        layer = _scoring(work, setup) | {
            "attend": _attention(work.lines * CHOSEN * RECORD, setup), "merge": SHARES, "write": WRITE,
        }  # fmt: skip
    else:
        small, others = setup.launches_of_scout + script, OTHERS_OF_SCOUT + AHEAD_LAUNCHES
        found["query ahead"] = QUERY_WEIGHTS / setup.products / 1e6 + AHEAD_LAUNCHES * each / 1000
        layer = _scout(work, setup)
    found |= {"small": MODEL_LAUNCHES * each / 1000, "package": small * each / 1000}
    found |= {name: LAYERS * spent / 1000 for name, spent in layer.items()}
    if work.row not in (FULL, CHOSEN_ROW):
        recall = work.recalled / setup.fetch / 1e6 + (0.4 if work.recalled else 0.0)  # step_kernels: 36 find nothing
        found["recall"] = (1 - 1 / setup.slowed) * recall
        found["wait"] = _wait(work, setup, (sum(found.values()) - found["products"] - found["small"]) / LAYERS)
    found["between"] = setup.host + (MODEL_LAUNCHES + small + others) * setup.gap / 1000
    return found


def _full(work: Work, setup: Setup) -> dict[str, float]:
    """Microseconds of a layer whose blocks are all resident."""
    attended = _attention(work.lines * (work.context // BLOCK) * RECORD, setup)
    if not setup.launches_of_full:
        return {"attend": attended, "merge": SHARES, "write": WRITE}
    answer = 62.0  # microseconds until 15 threads have answered a list of nothing: attention and wait of the row at 32k
    return {
        "attend": attended, "merge": setup.merge + setup.merge_row * work.batch, "wait": max(answer - attended, 4.0),
        "write": WRITE, "hand over": 4.0 + 2.3,  # and the split of the list
    }  # fmt: skip


def _scoring(work: Work, setup: Setup) -> dict[str, float]:
    """Microseconds of one scoring and its selection."""
    digests = work.lines * (work.context // BLOCK) * DIGEST
    return {
        "score": setup.score_fixed + digests / setup.score / 1000,
        "select": 11.5 + 0.3 * work.batch + 6.0 * (work.context / (32 * K) - 1),  # join and split of the list, too
        "tail": 3.7,  # attention to the open block
    }  # the last two: step_kernels


def _scout(work: Work, setup: Setup) -> dict[str, float]:
    """Microseconds of a layer that splits its choice between device and CPU."""
    scoring = {name: setup.scorings / LAYERS * spent for name, spent in _scoring(work, setup).items()}
    return scoring | {
        "attend": _attention((1 - work.miss) * work.lines * CHOSEN * RECORD, setup),
        "merge": setup.merge + setup.merge_row * work.batch,
        "write": WRITE,
        "hand over": 3.9 + 0.3 * work.batch,
        "exchange": 2.9 + 6.7 * work.recalls,  # step_kernels: each eighth step, and in each
    }


def _wait(work: Work, setup: Setup, layer: float) -> float:
    """Milliseconds that a step waits for the CPU: all of its work in three layers, in the others what is longer than
    the device's work of a layer (milliseconds).
    """
    cpu = (setup.cpu_fixed + work.miss * work.lines * CHOSEN * RECORD / setup.cpu / 1000) / 1000
    return (LAYERS - AHEAD) * cpu + AHEAD * max(cpu - layer, 0.004)


def _attention(nbytes: float, setup: Setup) -> float:
    """Microseconds of attention to resident blocks of so many bytes."""
    return setup.attend_fixed + nbytes / setup.device / 1000


def predict(work: Work, setup: Setup, measured: float | None = None) -> dict[str, Any]:
    """One row of the table: milliseconds, and their pieces."""
    parts = pieces(work, setup)
    total = sum(parts.values())
    return {
        "code": setup.code, "context": work.context, "batch": work.batch, "row": work.row, "replay": work.replay,
        "measured": measured, "predicted": total, "ratio": measured and total / measured,
        "tokens_per_s": 1000 * work.batch / total, **dict(sorted(parts.items())),
    }  # fmt: skip


def rows_of(tables: Tables) -> Iterator[tuple[Work, float]]:
    """What was measured of the rows that the model knows, with what they had to do."""
    for row in tables("decode"):
        known = row["row"] in (FULL, "scout-graph", "scout-no-recall-graph") and row["layers"] == LAYERS
        if known and row.get("p50"):
            recalled = (row.get("recall_mib_per_step") or 0.0) * 2**20
            facts = row["context"], row["batch"], row["row"], row["replay"]
            yield Work(*facts, row.get("cpu_ratio") or 0.0, recalled), row["p50"]


def measured(tables: Tables, setup: Setup) -> Setup:
    """A setup with what a check has measured of it; what it did not get to stays."""
    kernels = list(tables("kernels"))
    speeds = {
        "device": [row["gb_per_s"] for row in kernels if row["operation"] == "speed: device"],
        "fetch": [row["link_bytes"] / row["p50"] / 1000 for row in kernels if row["operation"] == "fetch_all"],
    }
    found = {name: max(each) for name, each in speeds.items() if each}

    def line(operation: str, column: str) -> tuple[float, float] | None:
        """Slope and start of the line through times by a column; None where one point or none is there."""
        rows = [row for row in kernels if row["operation"] == operation and row.get("in_graph")]
        if len({row[column] for row in rows}) < 2:
            return None
        slope, start = np.polyfit([row[column] for row in rows], [row["in_graph"] for row in rows], 1)
        return float(slope), float(start)

    if scored := line("score_submeans", "device_bytes"):
        found |= {"score": 1 / scored[0] / 1000, "score_fixed": max(scored[1], 0.0)}
    if merged := line("merge_with_host", "batch"):
        found |= {"merge": merged[1], "merge_row": merged[0]}
    return replace(setup, **found)


def check(tables: Tables) -> list[dict[str, Any]]:
    """What the model says with what a check has measured: of its rows, and of those that it did not get to."""
    setup = measured(tables, AFTER)
    rows = [predict(work, setup, time) for work, time in rows_of(tables)]
    told = {(row["context"], row["batch"], row["row"], row["replay"]) for row in rows}
    others = [work for work in AHEAD_OF_A_RUN if (work.context, work.batch, work.row, work.replay) not in told]
    return rows + [predict(work, setup) for work in others]


CARDS = {
    "80 GB": (AFTER, 62e9, 77.0),
    "24 GB": (replace(AFTER, device=1000.0, products=800.0, score=400.0, fetch=22.0), 6e9, 35.0),
}
"""By card, its speeds, the bytes that weights of 16 GB leave free, and a step of `DynamicCache`, ms, where it fits. An
H100, whose Python takes the time of that, and an estimate of a card with 1 TB/s behind PCIe 4."""
SHAPES = (32 * K, 1), (32 * K, 8), (64 * K, 8), (64 * K, 40)


def defaults() -> list[dict[str, Any]]:
    """What a cache takes by default on some cards, beside what it could have taken; milliseconds a step."""
    rows = []
    for card, (setup, free, stock) in CARDS.items():
        for context, batch in SHAPES:
            blocks, lines = blocks_soon(context, BLOCK), LAYERS * batch * KV_HEADS
            digests, whole = blocks * lines * DIGEST, blocks * lines * RECORD
            slots = fitting_slots(int(free - digests), blocks, lines * RECORD, lines * DIGEST, 3 * CHOSEN // 2)
            fits = slots >= blocks
            dense = fits and whole / LAYERS <= DENSE_BYTES
            ways: dict[str, Work] = {}
            if digests + lines * 3 * CHOSEN // 2 * RECORD <= free:
                ways["split"] = scripted(context, batch, FEW)
            if fits:
                ways |= {"full": Work(context, batch, FULL), "chosen": Work(context, batch, CHOSEN_ROW)}
            times = {name: sum(pieces(work, setup).values()) for name, work in ways.items()}
            default = "full" if dense else "chosen" if fits else "split" if ways else "none fits"
            spent, best = times.get(default), min(times.values(), default=None)
            rows.append({
                "card": card, "context": context, "batch": batch, "default": default, "ms": spent,
                "of_best": None if spent is None or best is None else spent / best,
                **{f"{name}_ms": times.get(name) for name in ("full", "chosen", "split")},
                "stock_ms": stock if whole <= free else None,
            })  # fmt: skip
    return rows


def main(
    folder: Annotated[Path | None, typer.Option("--measured", exists=True, help="Folder of a check.")] = None,
    out: Annotated[Path, typer.Option(help="Where the CSV goes.")] = RESULTS / "gpu" / "model.csv",
) -> None:
    """Predict decode steps on a GPU from measured pieces."""
    h100 = rows_of(partial(read_table, RESULTS / "h100"))
    rows = [predict(work, BEFORE, time) for work, time in h100]
    rows += [predict(work, BEFORE) for work in AHEAD_OF_A_RUN if work.row != FULL]
    rows += check((lambda name: []) if folder is None else partial(read_table, folder))
    show("milliseconds a step", rows, SHOWN)
    write_csv(out, rows)
    chosen = defaults()
    show("by default", chosen)
    write_csv(out.with_name("defaults.csv"), chosen)


if __name__ == "__main__":
    command(main)()
