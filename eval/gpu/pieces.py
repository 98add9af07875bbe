"""The pieces of a decode step, each measured alone: merge, host time, launch of a graph, fetch, CPU attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from gpu import host_memory, host_time, merging, recalls
from gpu.options import Options
from gpu.supervise import Report

Rows = Iterable[dict[str, Any]]
SECONDS = 60
SHOWN = (
    "piece", "variant", "batch", "programs", "nodes", "forks", "host_threads", "p50", "in_graph", "gb_per_s", "alone",
    "beside", "wrong", "mask", "prepare", "copies", "launch", "done",
)  # fmt: skip


def cases(options: Options) -> dict[str, Callable[[Options], Rows]]:
    """Each case's name and the function that yields its rows."""
    found: dict[str, Callable[[Options], Rows]] = {}
    for batch in (2,) if options.quick else merging.BATCHES:
        found[f"merge, batch {batch}"] = partial(merging.times, batch=batch)
    found["replays of a merge"] = merging.replays
    for policy in host_time.POLICIES:
        found[f"host time of a replay, {policy}"] = partial(host_time.replay, policy=policy)
    for forks in host_time.FORKS:
        found[f"launch of a graph, {forks} forks"] = partial(host_time.launch, forks=forks)
    for programs in (8, 24) if options.quick else recalls.PROGRAMS:
        found[f"fetch, {programs} programs"] = partial(recalls.fetch, programs=programs)
    for pages in host_memory.PAGES:
        found[f"CPU attention, {pages} pages"] = partial(host_memory.attend, pages=pages)
    return found


def names(options: Options) -> list[str]:
    """The cases."""
    return list(cases(options))


def run(options: Options, todo: Sequence[str], report: Report) -> None:
    """Measure case after case; each row is reported as soon as it is measured."""
    found = cases(options)
    for name in todo:
        if report.seconds_left < 8:
            return
        with torch.no_grad(), report.case(name, SECONDS):
            for row in found[name](options):
                report.row(piece=name.split(", ")[0], **row)
