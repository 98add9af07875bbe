"""Times of the device's operations against the time that their bytes alone would take."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from gpu import models
from gpu.operations import OPERATIONS, QUICK, Inputs, Size
from gpu.options import Options
from gpu.supervise import Cases
from gpu.timing import Timer, bandwidths

BATCHES = (1, 16)
LONG = 1024  # blocks: all of a context of 32k resident
SECONDS = 40
SHOWN = (
    "operation", "batch", "tokens", "context", "p50", "floor", "of_floor", "wall", "launch", "in_graph", "gb_per_s",
)  # fmt: skip


def cases(options: Options) -> Cases:
    """The bandwidths, and each operation at each size."""
    found = {"bandwidths": (SECONDS, functools.partial(speeds, options))}
    for size in [QUICK] if options.quick else [Size(batch) for batch in BATCHES]:
        sizes = [(name, size) for name in OPERATIONS]
        if not options.quick:
            sizes.append(("paged_attention", Size(size.batch, chosen=LONG, context=LONG)))
        for name, each in sizes:
            case = f"{name}, batch {each.batch}, {each.chosen} of {each.context} blocks"
            found[case] = SECONDS, functools.partial(measure, options, name, each)
    return found


_speeds = functools.cache(bandwidths)  # again in a process that goes on behind another


def speeds(options: Options) -> Iterator[dict[str, Any]]:
    """A row for each way that bytes take."""
    for way, speed in _speeds(options).items():
        yield {"operation": f"speed: {way}", "gb_per_s": speed / 1000}


def measure(options: Options, name: str, size: Size) -> Iterator[dict[str, Any]]:
    """One row of results, microseconds."""
    timer, operation = Timer(options), OPERATIONS[name](Inputs(options, size))
    call, prepare = operation.call, operation.prepare
    # Both ways are used at once: a kernel that reads the host's memory writes the device's meanwhile.
    link = operation.link_bytes / _speeds(options)["back" if operation.back else "link"]
    floor = max(operation.device_bytes / _speeds(options)["device"], link)
    wall, spread = timer.wall_time(call, prepare), timer.device_time(call, prepare)
    yield {
        "operation": name, "batch": size.batch, "tokens": size.chosen * size.block,
        "context": size.context * size.block, **spread, "floor": floor, "of_floor": spread["p50"] / floor,
        "wall": wall["p50"], "device_bytes": operation.device_bytes, "link_bytes": operation.link_bytes,
        "launch": timer.launch_time(call), "in_graph": timer.graph_time(call),
    }  # fmt: skip
    del operation, call, prepare
    models.free(options)
