"""Plots of results: one figure a file."""

from __future__ import annotations

from collections.abc import Iterator
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
