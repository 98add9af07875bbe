"""Recall schedule of a layer: fixed intervals, by its CPU ratio, or from an offline profile (ScoutAttention §3.4)."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_offload.knobs import check_count, shown

ADAPTIVE = "adaptive"
_MOST_BYTES = 1 << 26  # largest profile; a pipe or a device may be endless


def check_recall(recall: Any) -> None:
    """Check the knob `recall`: "adaptive", a number of steps (0: never) or the path of a profile file.

    Raises:
        ValueError: another value, or a file that is not a profile.
    """
    if isinstance(recall, bool) or not isinstance(recall, (int, str, Path)):
        raise ValueError(
            f'recall={shown(recall)} is not an interval; use "adaptive", a number of steps or a profile file'
        )
    if isinstance(recall, int):
        check_count("recall", recall, what="a number of steps", least=0, hint=" (0: no recall)")
    elif recall != ADAPTIVE:
        load_intervals(Path(recall))


def load_intervals(path: Path) -> list[int]:
    """Return the intervals of a profile file of `hf-offload profile`, in steps, one for each layer.

    Raises:
        ValueError: there is no such file, or it is not a profile.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
            raise ValueError(f"it is not a file of at most {_MOST_BYTES} bytes")
        intervals = json.loads(path.read_bytes())["intervals"]
        for place, steps in enumerate(intervals):
            check_count(f"intervals[{place}]", steps, what="a number of steps")
    except FileNotFoundError:
        raise ValueError(
            f'recall={str(path)!r} is neither "adaptive" nor a profile file; write one with `hf-offload profile`'
        ) from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"recall={str(path)!r} is not a profile of `hf-offload profile`: {error}; write it again"
        ) from error
    return list(intervals)


@dataclass(slots=True)
class RecallClock:
    """Counter that decides after each step whether one layer recalls (ScoutAttention §3.4).

    Args:
        interval: steps between recalls; 0: never; None: when the moving average of the CPU ratio exceeds `threshold`.
        threshold: the largest allowed CPU ratio.
        since: fp32 `[]`, with an interval: steps since the last recall.
        ratio: fp32 `[]`, without one: moving average of the CPU ratio, weight 1/2 on the last step. It begins again
            behind a recall, that is, where it exceeds the threshold; NaN: no step yet.
    """

    interval: int | None
    threshold: float
    since: torch.Tensor
    ratio: torch.Tensor

    @classmethod
    def of(cls, recall: int | str | Path, threshold: float, layer: int, device: torch.device) -> RecallClock:
        """Return the clock of one layer.

        Args:
            recall, threshold: knobs of `Scout`.
            layer: number of the layer.
            device: device of the counters.

        Raises:
            ValueError: a profile file has no interval for this layer.
        """
        interval = None if recall == ADAPTIVE else recall
        if interval is not None and not isinstance(interval, int):
            intervals = load_intervals(Path(interval))
            if layer >= len(intervals):
                raise ValueError(
                    f"recall={str(recall)!r} has {len(intervals)} layers, but the model has more: profile it again"
                )
            interval = intervals[layer]
        with torch.inference_mode(False):
            since, ratio = (torch.full((), start, dtype=torch.float32, device=device) for start in (0.0, torch.nan))
            return cls(interval, threshold, since, ratio)

    def reset(self) -> None:
        """Reset to the state after a recall."""
        self.since.zero_()
        self.ratio.fill_(torch.nan)

    def due(self, cpu_ratio: torch.Tensor | float) -> torch.Tensor | None:
        """Count one step and decide whether the layer recalls after it.

        Args:
            cpu_ratio: fp32 `[]`, or a number: the CPU's tokens of this step as a share of the budget.

        Returns:
            int32 `[1]` on the device, 0 or 1, so that the host need not wait; None if the layer never recalls.
        """
        if self.interval == 0:
            return None
        if self.interval is None:
            # The average keeps a single odd token from a recall: the next token often needs the old blocks again.
            goes_on = self.ratio <= self.threshold
            ratio = torch.as_tensor(cpu_ratio, dtype=torch.float32, device=self.ratio.device)
            torch.where(goes_on, self.ratio.lerp(ratio, 0.5), ratio, out=self.ratio)
            flag = torch.empty(1, dtype=torch.int32, device=self.ratio.device)
            return torch.gt(self.ratio.view(1), self.threshold, out=flag)
        due = self.since.add_(1) >= self.interval
        self.since.masked_fill_(due, 0)
        return due.to(torch.int32).view(1)
