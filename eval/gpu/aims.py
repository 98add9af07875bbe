"""What the check aims at, and what has been measured of it: a table over the results of all parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
Tables = Callable[[str], Iterable[Row]]

K = 1 << 10
REPLAY = "miss=0.08,drift=0.15"
FULL = "full-resident-graph"
# Context, batch, row and script of what the aims of decoding compare.
CASES = (
    (32 * K, 1, "scout-graph", None),
    (32 * K, 1, "full-resident-graph", None),
    (32 * K, 1, "scout", None),
    (32 * K, 1, "dynamic", None),
    (32 * K, 8, "scout-graph", None),
    (32 * K, 8, "offloading", None),  # of one row, what launches and weights take would hide the cache
    (64 * K, 1, "full-resident-graph", None),
    (64 * K, 1, "dynamic", None),
    (64 * K, 8, "scout-graph", None),
    (32 * K, 16, "scout-graph", REPLAY),
)


def aims(tables: Tables) -> list[dict[str, Any]]:
    """Each aim with what was measured of it; None where that was not.

    Args:
        tables: the rows of a part, by its name.
    """
    found = (
        ("paged_attention over 32k tokens, times what its bytes take", _floor(tables("kernels")), "below", 1.3),
        ("microseconds a layer to hand nothing over", _hand_over(tables("handoff")), "below", 15.0),
        (f"share of a graph's time that waits, 32k, batch 16, {REPLAY}", _waiting(tables("decode")), "below", 0.1),
        ("tokens a second over a full cache in a graph, 64k, one cap", _gain(tables("decode"), FULL), "at least", 5.0),
        ("tokens a second over Transformers' cache, 64k, one cap", _gain(tables("decode"), "dynamic"), "at least", 5.0),
        ("time a step of Transformers' offloaded cache over ours, 32k", _offloaded(tables("decode")), "at least", 20.0),
        ("time a step in Python over one of a graph, 32k, batch 1", _graph(tables("decode")), "at least", 1.5),
    )
    rows = []
    for aim, measured, kind, target in found:
        met = None if measured is None else measured < target if kind == "below" else measured >= target
        told = {None: "not measured", True: "yes", False: "no"}[met]
        rows.append({"aim": aim, "measured": measured, "target": f"{kind} {target:g}", "met": told})
    return rows


def _floor(rows: Iterable[Row]) -> float | None:
    """The worst of the batches."""
    long = (row for row in rows if row.get("operation") == "paged_attention" and row.get("tokens") == 32 * K)
    return max((row["of_floor"] for row in long if row.get("of_floor")), default=None)


def _hand_over(rows: Iterable[Row]) -> float | None:
    """With the best number of threads."""
    return min((row["p50"] for row in rows if row.get("work") == "nothing" and row.get("p50")), default=None)


def _chosen(rows: Iterable[Row], name: str, context: int, replay: str = "none") -> list[Row]:
    """Rows of a cache that were timed; by their own choice of blocks, or by a script."""
    return [
        row
        for row in rows
        if (row.get("row"), row.get("context"), row.get("replay")) == (name, context, replay) and row.get("p50")
    ]


def _waiting(rows: Iterable[Row]) -> float | None:
    """For the CPU's part or for blocks, with nothing else to do."""
    scripted = _chosen(rows, "scout-graph", 32 * K, REPLAY)
    shares = [row["waiting"] + row["moving"] for row in scripted if row["batch"] == 16 and row.get("busy")]
    return shares[0] if shares else None


def _gain(rows: Iterable[Row], over: str) -> float | None:
    """Each at the batch that suits it best among those that fit."""
    rows = list(rows)
    ours, theirs = (
        max((row["tokens_per_s"] for row in _chosen(rows, name, 64 * K)), default=None)
        for name in ("scout-graph", over)
    )
    return ours / theirs if ours and theirs else None


def _times(rows: list[Row], name: str) -> dict[int, float]:
    """Milliseconds a step at 32k, by batch."""
    return {row["batch"]: row["p50"] for row in _chosen(rows, name, 32 * K)}


def _offloaded(rows: Iterable[Row]) -> float | None:
    """At the largest batch that both were timed with."""
    rows = list(rows)
    ours, theirs = _times(rows, "scout-graph"), _times(rows, "offloading")
    both = max(ours.keys() & theirs.keys(), default=None)
    return None if both is None else theirs[both] / ours[both]


def _graph(rows: Iterable[Row]) -> float | None:
    rows = list(rows)
    graph, python = _times(rows, "scout-graph").get(1), _times(rows, "scout").get(1)
    return python / graph if graph and python else None
