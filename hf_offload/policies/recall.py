"""When a layer refreshes its resident set: at fixed intervals, by its own CPU ratio, or as profiled offline."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_offload.fields import list_of
from hf_offload.knobs import check_count, shown

ADAPTIVE = "adaptive"
_MOST_BYTES = 1 << 26  # of a profile: it may come from anywhere, a pipe or a device never ends


def check_recall(recall: Any) -> None:
    """Raise ValueError unless `recall` is "adaptive", a number of steps (0 = never) or a profile file."""
    if isinstance(recall, bool) or not isinstance(recall, (int, str, Path)):
        raise ValueError(
            f'recall={shown(recall)} is not an interval; use "adaptive", a number of steps or a profile file'
        )
    if isinstance(recall, int):
        check_count("recall", recall, what="a number of steps", least=0, hint=" (0: no recall)")
    elif recall != ADAPTIVE:
        load_intervals(Path(recall))


def load_intervals(path: Path) -> list[int]:
    """The per-layer intervals of a profile file written by `hf-offload profile`.

    Raises:
        ValueError: there is no such file, or it is not a profile.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            raise ValueError(f"it is no file of at most {_MOST_BYTES} bytes")
        intervals = json.loads(path.read_bytes())["intervals"]
        list_of(partial(check_count, what="a number of steps"), "intervals", intervals)
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
    """Decides, step by step, whether one layer recalls (ScoutAttention §3.4).

    Args:
        interval: steps between recalls; 0 = never, None = whenever the running CPU ratio passes the threshold.
        threshold: the CPU ratio that is tolerated.
        since: fp32 `[]`, steps since the last recall.
        ratio: fp32 `[]`, the running CPU ratio since then, half of it the last step's; NaN before the first step.
    """

    interval: int | None
    threshold: float
    since: torch.Tensor
    ratio: torch.Tensor

    @classmethod
    def of(cls, recall: int | str | Path, threshold: float, layer: int, device: torch.device) -> RecallClock:
        """The clock of one layer.

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
            return cls(interval, threshold, torch.zeros((), device=device), torch.full((), torch.nan, device=device))

    def reset(self) -> None:
        """Begin anew."""
        self.since.zero_()
        self.ratio.fill_(torch.nan)

    def due(self, cpu_ratio: torch.Tensor) -> torch.Tensor | None:
        """Count one step; whether the layer recalls after it: int32 `[1]`, 0 or 1, or None if it never does.

        The answer stays on the device: nobody waits for it.

        Args:
            cpu_ratio: fp32 `[]`, tokens that the CPU attended in this step, as a share of the budget.
        """
        if self.interval == 0:
            return None
        since = self.since + 1
        # One odd token should not start a recall: the next one often wants the old blocks again.
        ratio = torch.where(self.ratio.isnan(), cpu_ratio, (self.ratio + cpu_ratio) / 2)
        due = ratio > self.threshold if self.interval is None else since >= self.interval
        self.since.copy_(torch.where(due, 0.0, since))
        self.ratio.copy_(torch.where(due, torch.nan, ratio))
        return due.to(torch.int32).view(1)
