"""Plots of results: one figure a file, and lines of records by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@contextmanager
def plot(path: Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[Any]:
    """A figure's axes (one, or an array of them), which is saved to `path` afterwards.

    Args:
        options: of `matplotlib.pyplot.subplots`.
    """
    figure, axes = plt.subplots(rows, columns, **{"figsize": (7, 4), "layout": "constrained"} | options)
    yield axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    print(f"wrote {path}")


def lines(
    axes: Any,
    records: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    by: str = "row",
    band: Sequence[str] = (),
    **style: Any,
) -> None:
    """Draw a line for each value of `by`, with a band between two more columns."""
    for name in dict.fromkeys(record[by] for record in records):
        mine = [record for record in records if record[by] == name]
        xs = [record[x] for record in mine]
        axes.plot(xs, [record[y] for record in mine], label=name, **{"marker": "o"} | style)
        if band:
            axes.fill_between(xs, *([record[column] for record in mine] for column in band), alpha=0.2)
