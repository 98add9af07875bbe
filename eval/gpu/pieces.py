"""The pieces of a decode step, each measured alone: merge, host time, pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from gpu import host_memory, host_time, merging
from gpu.options import Options
from gpu.supervise import Cases

SECONDS = 60
SHOWN = (
    "piece", "variant", "batch", "p50", "in_graph", "gb_per_s", "wrong", "mask", "prepare", "copies", "launch", "done",
)  # fmt: skip


def cases(options: Options) -> Cases:
    """Each case's name and the function that yields its rows."""
    found: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {}
    for batch in (2,) if options.quick else merging.BATCHES:
        found[f"merge, batch {batch}"] = partial(merging.times, options, batch)
    found["replays of a merge"] = partial(merging.replays, options)
    for policy in host_time.POLICIES:
        found[f"host time of a replay, {policy}"] = partial(host_time.replay, options, policy)
    for pages in ("ordinary", "huge"):
        found[f"pinned memory, {pages} pages"] = partial(host_memory.pin, options, pages)
    return {name: (SECONDS, partial(_named, name.split(", ")[0], work)) for name, work in found.items()}


def _named(piece: str, work: Callable[[], Iterable[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for row in work():
        yield {"piece": piece, **row}
