"""When a layer refreshes its resident set: at fixed intervals, by its own CPU ratio, or as profiled offline."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADAPTIVE = "adaptive"


def check_recall(recall: Any) -> None:
    """Raise ValueError unless `recall` is "adaptive", a number of steps (0 = never) or a profile file."""
    if isinstance(recall, bool) or not isinstance(recall, (int, str, Path)):
        raise ValueError(f'recall={recall!r} is not an interval; use "adaptive", a number of steps or a profile file')
    if isinstance(recall, int):
        if recall < 0:
            raise ValueError(f"recall={recall} is not a number of steps; use 1 or more, or 0 for no recall")
    elif recall != ADAPTIVE:
        load_intervals(Path(recall))


def load_intervals(path: Path) -> list[int]:
    """The per-layer intervals of a profile file written by `hf-offload profile`.

    Raises:
        ValueError: there is no such file, or it is not a profile.
    """
    try:
        intervals = json.loads(path.read_text())["intervals"]
        if not all(isinstance(steps, int) and steps >= 1 for steps in intervals):
            raise TypeError("intervals must be whole numbers of steps")
    except FileNotFoundError:
        raise ValueError(
            f'recall={str(path)!r} is neither "adaptive" nor a profile file; write one with `hf-offload profile`'
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"recall={str(path)!r} is not a profile of `hf-offload profile`: {error}") from error
    return list(intervals)


@dataclass(slots=True)
class RecallClock:
    """Decides, step by step, whether one layer recalls (ScoutAttention §3.4).

    Args:
        interval: steps between recalls; 0 = never, None = whenever the running CPU ratio passes the threshold.
        threshold: the CPU ratio that is tolerated.
        since: steps since the last recall.
        ratio: the running CPU ratio since then, half of it the last step's.
    """

    interval: int | None
    threshold: float
    since: int = 0
    ratio: float | None = None

    @classmethod
    def of(cls, recall: int | str | Path, threshold: float, layer: int) -> RecallClock:
        """The clock of one layer.

        Raises:
            ValueError: a profile file has no interval for this layer.
        """
        if recall == ADAPTIVE:
            return cls(None, threshold)
        if isinstance(recall, int):
            return cls(recall, threshold)
        intervals = load_intervals(Path(recall))
        if layer >= len(intervals):
            raise ValueError(
                f"recall={str(recall)!r} has {len(intervals)} layers, but the model has more: profile it again"
            )
        return cls(intervals[layer], threshold)

    def due(self, cpu_ratio: float) -> bool:
        """Count one step; whether the layer recalls after it.

        Args:
            cpu_ratio: tokens that the CPU attended in this step, as a share of the budget.
        """
        self.since += 1
        # One odd token should not start a recall: the next one often wants the old blocks again.
        self.ratio = cpu_ratio if self.ratio is None else (self.ratio + cpu_ratio) / 2
        wanted = self.ratio > self.threshold if self.interval is None else 0 < self.interval <= self.since
        if wanted:
            self.since, self.ratio = 0, None
        return wanted
