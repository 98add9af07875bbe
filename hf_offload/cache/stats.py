"""Statistics of a cache: counters of each layer, totals, and their table."""

from __future__ import annotations

import time
import weakref
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from hf_offload.cache.checks import Checked
from hf_offload.cpu.kernels.decode_attention import ERROR_BINS, ERROR_STEPS, LEAST_ERROR

KEEP_STEPS = 4096
"""Newest steps of which each layer keeps a number."""


@dataclass(slots=True)
class LayerStats:
    """Counters of one layer since the last `reset`.

    Args:
        layer: its index in the model.
        steps: decode steps; dense_steps: those that attended all tokens on the device, without a choice.
        cpu_ratio: sum over steps of the CPU ratio: tokens attended by the CPU as a share of those attended within the
            budget; ratio_steps: number of these steps; cpu_ratio_by_step: ratios of the newest `KEEP_STEPS` of them.
        recalls: exchanges of resident blocks; recall_blocks: blocks moved; recall_bytes: bytes moved.
        placements: placements of the resident set after a prompt or append; placement_bytes: bytes copied.
        wait_seconds: time that the model's thread waited for host partials and for copies.
        drawn: int64 `[4]`: tokens attended where keys are drawn (`samples`), the number of lists of them, one
            for each step, row and KV head, the tokens cached in their rows, and the pairs for which a list had no room
            (`dropped_pairs`: 0, or the bound of a list's length is wrong).
        errors: int64, estimated errors of the softmax's sum: the tally of `cpu.kernels.decode_attention.Pairs`.
        checked: results of the checks against full attention (`check_every`).
        query_cosine: sum over steps of the cosine between predicted and real query; queries: number of these steps.
        selection_overlap: share of the real query's blocks that the predicted query selected, summed over steps;
            selections: number of these steps.
        resident_bytes, host_bytes, digest_bytes: memory in use when the report was made.
        shared_bytes: the part of host_bytes that forks share.
        context_bytes: copies of the tokens that are kept for the CPU; salience_bytes: attention averages of all tokens.
        kept_share_by_head: kept tokens as a share of those that have left the window, of all rows, for each KV head;
            empty as long as none has.
        evictions: blocks that have left the window; eviction_seconds: time to choose their kept tokens.
        reevaluations: re-evaluations of the kept tokens after prompts and appends; reevaluation_seconds: their time,
            beside the model.
        retrievals: for policies whose host partials select blocks (`SelectionCounts.as_dict`): shares of streaming
            groups (`streaming_groups`) and of query heads that took nothing (`streaming_heads`), mean share of host
            blocks that a query head took (`head_budget`) and that its group attended (`retrieved_share`), bytes of them
            (`retrieved_bytes`), the same of the blocks whose digests were read (`scored_share`, and with the digests'
            bytes `scored_bytes`), share of groups by tokens of a run (`granularities`); empty otherwise.
    """

    layer: int
    steps: int = 0
    dense_steps: int = 0
    cpu_ratio: float = 0.0
    ratio_steps: int = 0
    cpu_ratio_by_step: deque[float] = field(default_factory=lambda: deque(maxlen=KEEP_STEPS))
    recalls: int = 0
    recall_blocks: int = 0
    recall_bytes: int = 0
    placements: int = 0
    placement_bytes: int = 0
    wait_seconds: float = 0.0
    drawn: np.ndarray = field(default_factory=lambda: np.zeros(4, np.int64))
    errors: np.ndarray = field(default_factory=lambda: np.zeros(2 + ERROR_BINS, np.int64))
    checked: Checked = field(default_factory=Checked)
    query_cosine: float = 0.0
    queries: int = 0
    selection_overlap: float = 0.0
    selections: int = 0
    resident_bytes: int = 0
    host_bytes: int = 0
    digest_bytes: int = 0
    shared_bytes: int = 0
    context_bytes: int = 0
    salience_bytes: int = 0
    kept_share_by_head: list[float] = field(default_factory=list)
    evictions: int = 0
    eviction_seconds: float = 0.0
    reevaluations: int = 0
    reevaluation_seconds: float = 0.0
    retrievals: dict[str, Any] = field(default_factory=dict)

    def count_step(self, *, dense: bool) -> None:
        """Count a decode step."""
        self.steps += 1
        self.dense_steps += dense

    def as_dict(self) -> dict[str, Any]:
        """The counters as a dict, with means in place of sums (None where nothing was counted)."""
        row = asdict(replace(self, cpu_ratio_by_step=deque(), checked=Checked()))
        row["cpu_ratio"] = _mean(self.cpu_ratio, row.pop("ratio_steps"))
        row["cpu_ratio_by_step"] = list(self.cpu_ratio_by_step)
        row["query_cosine"] = _mean(self.query_cosine, row.pop("queries"))
        row["selection_overlap"] = _mean(self.selection_overlap, row.pop("selections"))
        attended, lists, cached, row["dropped_pairs"] = row.pop("drawn").tolist()
        row["attended_tokens"] = _mean(attended, lists)
        row["attended_share"] = _mean(attended, cached)
        row["estimated_error"], row["estimated_error_p99"] = _errors(row.pop("errors"))
        del row["checked"]
        row["missed_mass"] = _mean(self.checked.missed_mass, self.checked.heads)
        row["output_error"] = _mean(self.checked.output_error, self.checked.heads)
        row["checked_errors"] = list(self.checked.errors)
        row["dense_share"] = _mean(row.pop("dense_steps"), self.steps)
        row["recall_interval"] = _mean(self.steps, self.recalls)
        row["kept_share"] = _mean(sum(self.kept_share_by_head), len(self.kept_share_by_head))
        return row


class Pace:
    """The time between tokens: between the ends of two forwards of one token that follow each other."""

    KEEP = 1 << 16  # newest tokens that are kept

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=self.KEEP)
        self._last: float | None = None

    def forward(self, tokens: int) -> None:
        """Record the end of a forward of `tokens` tokens."""
        now = time.perf_counter()
        if tokens == 1 and self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now

    def percentiles(self) -> dict[str, float] | None:
        """p50, p95 and p99 of the seconds between tokens; None without any."""
        if not self._seconds:
            return None
        percentiles = np.percentile(np.array(self._seconds), (50, 95, 99)).tolist()
        return dict(zip(("p50", "p95", "p99"), percentiles, strict=True))


class Tally:
    """Device tensors to be counted when statistics are read; reading them at once would stall the step."""

    KEEP = 1024  # tensors of one name that are collected before they are read

    def __init__(self, stats: LayerStats) -> None:
        self.stats, self.record_bytes = stats, 0
        self.ledger: Ledger | None = None
        """The counts of replayed steps for this tally, or None."""
        self._pending: dict[tuple[str, torch.Size], list[torch.Tensor]] = {}

    def add(self, name: str, value: torch.Tensor | float) -> None:
        """Add the sum of a tensor to a counter: `"cpu_ratio"`, `"cosine"`, `"overlap"`, or `"moves"` (blocks recalled).

        A float is counted at once, a tensor later.
        """
        if isinstance(value, float):
            self.take({name: [value]})
            return
        if self.ledger is not None and self.ledger.rows:
            self.count()
        pending = self._pending.setdefault((name, value.shape), [])
        pending.append(value)
        if len(pending) >= self.KEEP:
            self.count()

    def count(self) -> None:
        """Add all collected tensors to the counters."""
        if self.ledger is not None:
            self.ledger.count()
        self.flush()

    def flush(self) -> None:
        """`count` without the ledger."""
        pending, self._pending = self._pending, {}
        sums: dict[str, list[float]] = {}
        for (name, _), kept in pending.items():
            sums.setdefault(name, []).extend(torch.stack(kept).view(len(kept), -1).float().sum(1).tolist())
        self.take(sums)

    def take(self, sums: dict[str, list[float]]) -> None:
        """Add to the counters: for each name of `add`, one number for each step."""
        stats = self.stats
        stats.cpu_ratio_by_step += sums.get("cpu_ratio", [])
        stats.cpu_ratio += sum(sums.get("cpu_ratio", []))
        stats.ratio_steps += len(sums.get("cpu_ratio", []))
        stats.query_cosine += sum(sums.get("cosine", []))
        stats.queries += len(sums.get("cosine", []))
        stats.selection_overlap += sum(sums.get("overlap", []))
        stats.selections += len(sums.get("overlap", []))
        moves = [int(blocks) for blocks in sums.get("moves", []) if blocks]
        stats.recalls += len(moves)
        stats.recall_blocks += sum(moves)
        stats.recall_bytes += sum(moves) * self.record_bytes


class Ledger:
    """Counts of replayed CUDA graphs: one tensor for each step and all layers, read when statistics are read.

    Args:
        columns: tally and name (as in `Tally.add`) of each entry of the tensor.
    """

    def __init__(self, columns: list[tuple[Tally, str]]) -> None:
        self.rows: list[torch.Tensor] = []
        self._columns = [(weakref.ref(tally), name) for tally, name in columns]
        for tally, _ in columns:
            if tally.ledger is not self:
                tally.count()
                tally.ledger = self

    def add(self, row: torch.Tensor) -> None:
        """Add the counts of a step, fp32 `[columns]`."""
        self.rows.append(row)
        if len(self.rows) >= Tally.KEEP:
            self.count()

    def count(self) -> None:
        """Add all collected rows to the counters of the tallies, after the tallies' own earlier counts."""
        rows, self.rows = self.rows, []
        if not rows:
            return
        for (reference, name), numbers in zip(self._columns, torch.stack(rows).T.tolist(), strict=True):
            tally = reference()
            if tally is not None:
                tally.flush()
                tally.take({name: numbers})


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


def _errors(tally: np.ndarray) -> tuple[float | None, float | None]:
    """The mean and the 99th percentile (to a quarter octave) of a tally of errors; None: it is empty."""
    count, total = tally[:2].tolist()
    if not count:
        return None, None
    upper = int(np.searchsorted(tally[2:].cumsum(), 0.99 * count)) + 1
    return total / 2**32 / count, 2 ** (upper / ERROR_STEPS + LEAST_ERROR)


class Stats:
    """The statistics of a cache, as `cache.stats()` returns them.

    `str()` is one line, `table()` has a row for each layer, `as_dict()` is for a log.

    Args:
        layers: statistics of each layer.
        device_bytes: bytes of keys, values and digests in the model's memory, all layers.
        stock: indices of the layers that keep Transformers' own cache.
        seconds: time between tokens by percentile, or None.
    """

    def __init__(
        self, layers: list[LayerStats], device_bytes: int, stock: list[int], seconds: dict[str, float] | None = None
    ) -> None:
        self.layers = layers
        self.device_bytes = device_bytes
        self.stock = stock
        self.seconds = seconds

    def as_dict(self) -> dict[str, Any]:
        """Return totals over the layers, means for ratios, and in `layers` the same keys for each layer.

        Times are in seconds, memory in bytes, ratios from 0 to 1; None: nothing was counted.
        """
        rows = [layer.as_dict() for layer in self.layers]
        total: dict[str, Any] = {"steps": max((row["steps"] for row in rows), default=0)}
        for key in (
            "cpu_ratio", "attended_tokens", "attended_share", "missed_mass", "output_error", "query_cosine",
            "selection_overlap", "kept_share", "dense_share",
        ):  # fmt: skip
            seen = [row[key] for row in rows if row[key] is not None]
            total[key] = _mean(sum(seen), len(seen))
        errors = np.sum([layer.errors for layer in self.layers], 0) if self.layers else np.zeros(2 + ERROR_BINS)
        total["estimated_error"], total["estimated_error_p99"] = _errors(errors)
        for key in (
            "recalls", "recall_blocks", "recall_bytes", "placements", "placement_bytes", "wait_seconds",
            "resident_bytes", "host_bytes", "digest_bytes", "shared_bytes", "context_bytes", "salience_bytes",
            "evictions", "eviction_seconds", "reevaluations", "reevaluation_seconds", "dropped_pairs",
        ):  # fmt: skip
            total[key] = sum(row[key] for row in rows)
        total["retrievals"] = joined([row["retrievals"] for row in rows])
        total["recall_interval"] = _mean(sum(row["steps"] for row in rows), total["recalls"])
        total["device_bytes"] = self.device_bytes
        total["stock_layers"] = self.stock
        total["time_between_tokens"] = self.seconds
        total["layers"] = rows
        return total

    def __str__(self) -> str:
        whole = self.as_dict()
        parts = [f"{whole['steps']:,} decode steps"]
        if whole["attended_tokens"] is not None:
            parts.append(
                f"{whole['attended_tokens']:,.0f} tokens attended ({whole['attended_share']:.1%} of the context)"
            )
        for key, name in (("host", "in host memory"), ("resident", "resident"), ("digest", "digests")):
            if whole[f"{key}_bytes"]:
                parts.append(f"{whole[f'{key}_bytes'] / 2**20:,.1f} MiB {name}")
        for key, name in (("missed_mass", "missed mass"), ("output_error", "output error")):
            if whole[key] is not None:
                parts.append(f"{name} {whole[key]:.2g}")
        return f"HybridCache: {'; '.join([*parts, *_times(whole)])}. By layer: stats().table()"

    def table(self) -> str:
        """Return a table with a row for each layer; columns in which nothing was counted are left out."""
        whole = self.as_dict()
        whole |= {"layer": "all", "kept_share_by_head": [s for row in self.layers for s in row.kept_share_by_head]}
        table = Table(title="HybridCache")
        columns = {
            "layer": "layer", "steps": "steps", "dense_share": "dense", "cpu_ratio": "CPU ratio",
            "attended_tokens": "tokens", "estimated_error": "error", "missed_mass": "missed",
            "output_error": "output error", "recalls": "recalls", "recall_bytes": "recalled MiB",
            "resident_bytes": "resident MiB", "host_bytes": "host MiB", "context_bytes": "kept MiB",
            "kept_share": "kept share", "kept_share_by_head": "by head", "digest_bytes": "digest MiB",
            "retrievals": "retrieved", "wait_seconds": "waited s", "query_cosine": "query cosine",
            "selection_overlap": "overlap",
        }  # fmt: skip
        columns = {key: title for key, title in columns.items() if whole[key]}
        for title in columns.values():
            table.add_column(title, justify="right")
        for row in [*whole["layers"], whole]:
            table.add_row(*(_cell(key, row[key]) for key in columns))
        console = Console(width=180)
        with console.capture() as capture:
            console.print(table)
        return "\n".join([capture.get().rstrip(), "; ".join(_times(whole))]).rstrip()


def _times(whole: dict[str, Any]) -> list[str]:
    """Times of the whole cache in words."""
    parts = []
    if whole["time_between_tokens"]:
        times = ", ".join(f"{name} {1000 * value:.1f}" for name, value in whole["time_between_tokens"].items())
        parts.append(f"ms between tokens: {times}")
    for what, count in (("eviction", whole["evictions"]), ("reevaluation", whole["reevaluations"])):
        if count:
            parts.append(f"{count} {what}s of {1000 * whole[f'{what}_seconds'] / count:.2f} ms")
    return parts


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return f"{min(value):.2f}–{max(value):.2f}" if value else "–"
    if isinstance(value, dict):
        return f"{value['retrieved_share']:.3f}" if value else "–"
    if key.endswith("_bytes"):
        return f"{value / 2**20:.2f}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def joined(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the retrievals of several layers: sums of bytes and seconds, means of shares."""
    reported = [layer for layer in layers if layer]
    if not reported:
        return {}
    totals: dict[str, Any] = {}
    for key in dict.fromkeys(key for layer in reported for key in layer):
        values = [
            layer[key] for layer in reported if key in layer
        ]  # a model on several devices shares tasks in some layers
        if isinstance(values[0], dict):
            totals[key] = {tokens: sum(each[tokens] for each in values) / len(values) for tokens in values[0]}
        else:
            totals[key] = sum(values) if key.endswith(("_bytes", "_seconds")) else sum(values) / len(values)
    return totals
