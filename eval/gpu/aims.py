"""What the check aims at, and what has been measured of it: a table over the results of all parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hf_offload.gpu.kv_copy import FETCHERS

Row = Mapping[str, Any]
Tables = Callable[[str], Iterable[Row]]

K = 1 << 10
FEW, MANY = "miss=0.1,drift=0.15,recall=4", "miss=0.2,drift=0.2,recall=1"
"""Scripts (`gpu.replay`) of choices like a trained model's with 1.5 budgets and with one budget resident."""
SCRIPTS = FEW, MANY
FULL = "full-resident-graph"
# Context, batch, row and script of what the aims of decoding compare.
CASES = (
    (32 * K, 1, "default-graph", None),
    (32 * K, 1, FULL, None),
    (32 * K, 1, "scout-graph", FEW),
    (32 * K, 8, FULL, None),
    (32 * K, 8, "default-graph", None),
    (32 * K, 8, "scout-graph", FEW),
    (64 * K, 8, "scout-graph", FEW),
    (64 * K, 8, "default-graph", None),
    (32 * K, 8, "chosen-graph", None),
    (32 * K, 1, "dynamic", None),
    (32 * K, 1, "drawn-graph", None),
    (32 * K, 8, "scout-graph", MANY),
    (64 * K, 8, FULL, None),
    (32 * K, 1, "scout", FEW),
    (32 * K, 8, "offloading", None),  # of one row, what launches and weights take would hide the cache
)


def aims(tables: Tables) -> list[dict[str, Any]]:
    """Each aim with what was measured of it; None where that was not.

    Args:
        tables: the rows of a part, by its name.
    """
    decode, pieces = list(tables("decode")), list(tables("pieces"))
    more = "tokens a second over a full cache in a graph, 64k, one cap"
    found = (
        ("microseconds of a merge with the CPU's part, 8 rows", _merge(pieces), "below", 15.0),
        ("time of small kernels beside a fetch over that without", _beside(pieces), "below", 1.5),
        ("paged_attention over 32k tokens, times what its bytes take", _floor(tables("kernels")), "below", 1.3),
        ("microseconds a layer to hand nothing over", _hand_over(tables("handoff")), "below", 15.0),
        (f"share of a graph's time that waits, 32k, batch 8, {FEW}", _waiting(decode), "below", 0.1),
        (f"time a step over a full cache's, graphs, 32k, batch 1, {FEW}", _over_full(decode), "below", 1.0),
        ("time a step by default over the best of the others, graphs", _default(decode), "below", 1.05),
        (f"{more}, {FEW}", _gain(decode, FULL, FEW), "at least", 5.0),
        (f"{more}, {MANY}", _gain(decode, FULL, MANY), "at least", 5.0),
        ("tokens a second over Transformers' cache, 64k, one cap", _gain(decode, "dynamic", FEW), "at least", 5.0),
        ("time a step of Transformers' offloaded cache over ours, 32k", _offloaded(decode), "at least", 20.0),
        ("time a step in Python over one of a graph, 32k, batch 1", _graph(decode), "at least", 1.5),
    )  # fmt: skip
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


def _chosen(rows: Iterable[Row], name: str, context: int, replay: str) -> list[Row]:
    """Rows of a cache that were timed with a script, or "none" where nothing is chosen."""
    return [
        row
        for row in rows
        if (row.get("row"), row.get("context"), row.get("replay")) == (name, context, replay) and row.get("p50")
    ]


def _merge(rows: Iterable[Row]) -> float | None:
    """In a graph, the partial read where it lies."""
    wanted = ("merge", "read", 8)
    return next(
        (row["in_graph"] for row in rows if (row.get("piece"), row.get("variant"), row.get("batch")) == wanted), None
    )


def _beside(rows: Iterable[Row]) -> float | None:
    """With as many programs as a fetch has."""
    found = (row for row in rows if (row.get("piece"), row.get("programs")) == ("fetch", FETCHERS))
    return next((row["beside"] / row["alone"] for row in found if row.get("beside")), None)


def _waiting(rows: Iterable[Row]) -> float | None:
    """For the CPU's part or for blocks, with nothing else to do."""
    scripted = _chosen(rows, "scout-graph", 32 * K, FEW)
    shares = [row["waiting"] + row["moving"] for row in scripted if row["batch"] == 8 and row.get("busy")]
    return shares[0] if shares else None


def _gain(rows: Iterable[Row], over: str, script: str) -> float | None:
    """Each at the batch that suits it best among those that fit."""
    best = (
        max((row["tokens_per_s"] for row in _chosen(rows, name, 64 * K, replay)), default=None)
        for name, replay in (("scout-graph", script), (over, "none"))
    )
    ours, theirs = best
    return ours / theirs if ours and theirs else None


def _times(rows: Iterable[Row], name: str, script: str = "none") -> dict[int, float]:
    """Milliseconds a step at 32k, by batch."""
    return {row["batch"]: row["p50"] for row in _chosen(rows, name, 32 * K, script)}


def _ratio(over: dict[int, float], under: dict[int, float]) -> float | None:
    """At the largest batch that both were timed with."""
    both = max(over.keys() & under.keys(), default=None)
    return None if both is None else over[both] / under[both]


def _default(rows: Iterable[Row]) -> float | None:
    """The worst of the contexts and batches at which the default and one of the others were timed."""
    timed: dict[tuple[int, int], dict[str, float]] = {}
    for row in rows:
        if row.get("p50") and row.get("replay") in ("none", FEW):
            timed.setdefault((row["context"], row["batch"]), {})[row["row"]] = row["p50"]
    found = []
    for each in timed.values():
        others = [each[name] for name in (FULL, "scout-graph") if name in each]
        if "default-graph" in each and others:
            found.append(each["default-graph"] / min(others))
    return max(found, default=None)


def _over_full(rows: Iterable[Row]) -> float | None:
    return _ratio(_times(rows, "scout-graph", FEW), _times(rows, FULL))


def _offloaded(rows: Iterable[Row]) -> float | None:
    return _ratio(_times(rows, "offloading"), _times(rows, "scout-graph", FEW))


def _graph(rows: Iterable[Row]) -> float | None:
    return _ratio(_times(rows, "scout", FEW), _times(rows, "scout-graph", FEW))
