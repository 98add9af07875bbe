"""Times of the device's operations against the time that their bytes alone would take."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from gpu.inputs import QUICK, Inputs, Operation, Size
from gpu.operations import OPERATIONS
from gpu.options import Options
from gpu.supervise import Report
from gpu.timing import Timer, bandwidths

BATCHES = (1, 16)
LONG = 1024  # blocks: all of a context of 32k resident
SPEEDS = "bandwidths"
SECONDS = 40
SHOWN = (
    "operation",
    "batch",
    "tokens",
    "context",
    "p50",
    "floor",
    "of_floor",
    "wall",
    "launch",
    "in_graph",
    "gb_per_s",
)


def _sizes(options: Options) -> dict[str, tuple[str, Size]]:
    """Operation and size of every case."""
    found: dict[str, tuple[str, Size]] = {}
    for size in [QUICK] if options.quick else [Size(batch) for batch in BATCHES]:
        for name in OPERATIONS:
            found[f"{name}, batch {size.batch}, {size.chosen} of {size.context} blocks"] = (name, size)
        if not options.quick:
            long = Size(size.batch, chosen=LONG, context=LONG)
            found[f"paged_attention, batch {size.batch}, all of {LONG} blocks"] = ("paged_attention", long)
    return found


def names(options: Options) -> list[str]:
    """The cases."""
    return [SPEEDS, *_sizes(options)]


def run(options: Options, todo: Sequence[str], report: Report) -> None:
    """Measure; the bandwidths come first, and again in a process that goes on behind another."""
    timer, sizes, speeds = Timer(options), _sizes(options), {}

    def measure_speeds() -> dict[str, float]:
        speeds.update(bandwidths(timer))
        return speeds

    with torch.no_grad():
        for name in todo:
            if report.seconds_left < 10:
                return
            with report.case(name, SECONDS):
                if name == SPEEDS:
                    for way, speed in measure_speeds().items():
                        report.row(operation=f"speed: {way}", gb_per_s=speed / 1000)
                    continue
                operation, size = sizes[name]
                made = OPERATIONS[operation](Inputs(options, size))
                report.row(
                    operation=operation, batch=size.batch, tokens=size.chosen * size.block,
                    context=size.context * size.block, **measure(timer, made, speeds or measure_speeds()),
                )  # fmt: skip
                del made
            gc.collect()
            if options.on_gpu:
                torch.cuda.empty_cache()


def measure(timer: Timer, operation: Operation, speeds: dict[str, float]) -> dict[str, Any]:
    """One row of results, microseconds."""
    call, prepare = operation.call, operation.prepare
    link = speeds["back" if operation.back else "link"]
    # Both ways are used at once: a kernel that reads the host's memory writes the device's meanwhile.
    floor = max(operation.device_bytes / speeds["device"], operation.link_bytes / link)
    wall = timer.wall_time(call, prepare)
    spread = timer.device_time(call, prepare)
    return {
        **spread, "floor": floor, "of_floor": spread["p50"] / floor, "wall": wall["p50"],
        "device_bytes": operation.device_bytes, "link_bytes": operation.link_bytes, "launch": timer.launch_time(call),
        "in_graph": timer.graph_time(call),
    }  # fmt: skip
