"""What a cache has done: counters a layer, and their sum."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class LayerStats:
    """Counters of one layer since the last `reset`.

    Args:
        layer: its number in the model.
        steps: decode steps.
        cpu_ratio_by_step: tokens attended by the CPU as a share of those attended within the budget, a number a step.
        recalls: times that resident blocks were exchanged; recall_blocks: how many; recall_bytes: bytes moved.
        placements: times that the resident set was decided anew, after a prompt or append; placement_bytes: bytes.
        wait_seconds: time that the model's thread waited for the CPU part and for copies.
        query_cosine: sum over steps of the cosine between predicted and real query; queries: how many steps.
        selection_overlap: sum of the share of wanted blocks that the prediction found; selections: how many.
        resident_bytes, host_bytes, digest_bytes: memory in use when the report was made.
    """

    layer: int
    steps: int = 0
    cpu_ratio_by_step: list[float] = field(default_factory=list)
    recalls: int = 0
    recall_blocks: int = 0
    recall_bytes: int = 0
    placements: int = 0
    placement_bytes: int = 0
    wait_seconds: float = 0.0
    query_cosine: float = 0.0
    queries: int = 0
    selection_overlap: float = 0.0
    selections: int = 0
    resident_bytes: int = 0
    host_bytes: int = 0
    digest_bytes: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The counters with means in place of sums (None where nothing was counted)."""
        row = asdict(self)
        row["cpu_ratio"] = _mean(sum(self.cpu_ratio_by_step), len(self.cpu_ratio_by_step))
        row["query_cosine"] = _mean(self.query_cosine, row.pop("queries"))
        row["selection_overlap"] = _mean(self.selection_overlap, row.pop("selections"))
        row["recall_interval"] = _mean(self.steps, self.recalls)
        return row


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


class Stats:
    """The statistics of a cache: `str()` is a table, `as_dict()` for a log.

    Args:
        layers: one a layer.
        device_bytes: bytes of KV and digests in device memory now, all layers.
    """

    def __init__(self, layers: list[LayerStats], device_bytes: int) -> None:
        self.layers = layers
        self.device_bytes = device_bytes

    def as_dict(self) -> dict[str, Any]:
        """Sums over the layers, means where a mean is meant (cpu_ratio, …), and `layers`, the same per layer."""
        rows = [layer.as_dict() for layer in self.layers]
        total: dict[str, Any] = {"steps": max((row["steps"] for row in rows), default=0)}
        for key in ("cpu_ratio", "query_cosine", "selection_overlap"):
            seen = [row[key] for row in rows if row[key] is not None]
            total[key] = _mean(sum(seen), len(seen))
        for key in (
            "recalls", "recall_blocks", "recall_bytes", "placements", "placement_bytes", "wait_seconds",
            "resident_bytes", "host_bytes",
            "digest_bytes",
        ):  # fmt: skip
            total[key] = sum(row[key] for row in rows)
        total["recall_interval"] = _mean(sum(row["steps"] for row in rows), total["recalls"])
        total["device_bytes"] = self.device_bytes
        total["layers"] = rows
        return total

    def __str__(self) -> str:
        table = Table(title="HybridCache")
        columns = {
            "layer": "layer", "steps": "steps", "cpu_ratio": "CPU ratio", "recalls": "recalls",
            "recall_bytes": "recalled MiB", "resident_bytes": "resident MiB", "host_bytes": "host MiB",
            "digest_bytes": "digest MiB", "wait_seconds": "waited s", "query_cosine": "query cosine",
            "selection_overlap": "overlap",
        }  # fmt: skip
        for title in columns.values():
            table.add_column(title, justify="right")
        whole = self.as_dict()
        for row in [*whole["layers"], {**whole, "layer": "all"}]:
            table.add_row(*(_cell(key, row[key]) for key in columns))
        console = Console(width=140)
        with console.capture() as capture:
            console.print(table)
        return capture.get()


def _cell(key: str, value: Any) -> str:
    if value is None:
        return "–"
    if key.endswith("_bytes"):
        return f"{value / 2**20:.2f}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
