"""What a device did during some steps: shares of the time for kernels, for waiting, for recalls alone, for nothing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import torch

Span = tuple[float, float]

WAITING = ("wait",)  # in the names of kernels that wait for the CPU
MOVING = ("fetch",)  # and of those that bring blocks beside the model


def profile(step: Callable[[], Any], steps: int) -> list[dict[str, Any]]:
    """The device's events in some steps, as the profiler's trace has them (microseconds)."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def by_kernel(events: Iterable[dict[str, Any]], steps: int, most: int = 60) -> list[dict[str, Any]]:
    """How often each kernel ran and how long, per step; those that took longest first."""
    found: dict[str, list[float]] = {}
    for event in events:
        found.setdefault(str(event["name"])[:80], []).append(event["dur"])
    rows = [
        {"kernel": name, "per_step": len(spent) / steps, "us_per_step": sum(spent) / steps, "us_each": mean(spent)}
        for name, spent in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us_per_step"])[:most]


def union(spans: Iterable[Span]) -> list[Span]:
    """Spans joined where they touch, ascending."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def length(spans: Iterable[Span]) -> float:
    """Sum of joined spans."""
    return sum(end - start for start, end in spans)


def shares(events: list[dict[str, Any]], steps: int) -> dict[str, float | None]:
    """Shares of the time from the first event to the end of the last; they add up to 1.

    Returns:
        `busy`: some kernel of the model or of the cache ran; `waiting`: nothing ran but the wait for the host partial;
        `moving`: nothing of these but a recall; `gaps`: nothing at all. `launches`: kernels and copies of a step.
        `profiled`: milliseconds a step, which the profiler makes longer. None for all where there are no events.
    """
    if not events:
        return dict.fromkeys(("busy", "waiting", "moving", "gaps", "launches", "profiled"))
    kinds: dict[str, list[Span]] = {"busy": [], "waiting": [], "moving": []}
    for event in events:
        name = str(event["name"])
        kind = "waiting" if any(part in name for part in WAITING) else "busy"
        kind = "moving" if any(part in name for part in MOVING) else kind
        kinds[kind].append((event["ts"], event["ts"] + event["dur"]))
    covered, told, seen = 0.0, {}, []
    for kind, spans in kinds.items():
        seen += spans
        told[kind] = length(union(seen)) - covered
        covered += told[kind]
    everything = union(seen)
    total = everything[-1][1] - everything[0][0]
    found: dict[str, float | None] = {kind: part / total for kind, part in told.items()}
    counted = {"launches": len(events) / steps, "profiled": total / 1000 / steps}
    return {**found, "gaps": 1 - covered / total, **counted}


def between(milliseconds: float, found: dict[str, float | None]) -> float | None:
    """Milliseconds of a step in which the device ran nothing: those of an unprofiled step less the union of kernels.

    A profiler makes gaps longer, and with them their share, but hardly the kernels.

    Args:
        milliseconds: of a step that was not profiled.
        found: what `shares` told of steps that were.
    """
    gaps, profiled = found["gaps"], found["profiled"]
    return None if gaps is None or profiled is None else milliseconds - (1 - gaps) * profiled
