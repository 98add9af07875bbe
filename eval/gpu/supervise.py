"""The cases of a part, in processes of their own: one that fails, crashes or hangs leaves the others alone.

A process goes through the cases of which `cases.csv` does not tell yet. It ends behind one that has failed, since a
device or its allocator may be of no use after it (torch 2.11 counts a capture that has failed as one under way), and
another one goes on.
"""

from __future__ import annotations

import faulthandler
import importlib
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from gpu.results import Results

if TYPE_CHECKING:
    from gpu.options import Options

Cases = dict[str, tuple[float, Callable[[], Iterable[dict[str, Any]]]]]
"""By name, the seconds that a case may take, and what yields its rows: `cases(options)` of a part's module."""
LEAST = 10  # seconds without which no case is begun
CHILD = "import gpu.supervise as s, pickle, sys; s.here(*pickle.load(sys.stdin.buffer), alone=True)"
_end = float("inf")


class NotApplicable(Exception):
    """Raised inside a case that cannot be had here; the message says why."""

    status = "not applicable"


class TimeUp(NotApplicable):
    """Raised inside a case that was given less time than it may take; the message says how far it got."""

    status = "cut off"


def seconds_left() -> float:
    """Until the part has to end."""
    return _end - time.monotonic()


def here(part: str, module: str, options: Options, results: Results, end: float, *, alone: bool = False) -> None:
    """Run the cases of a part here until `end`; a process of its own (`alone`) ends where one fails or takes too long.

    `module` is the name of the part's module, `end` a time of `time.monotonic`, one clock for all processes.
    """
    global _end
    _end, told, cases = end, results.cases(part), importlib.import_module(module).cases(options)
    for name, (most, work) in cases.items():
        if name in told:
            continue
        if alone:
            if seconds_left() < LEAST:
                return
            results.case(part, name, "running")
            faulthandler.dump_traceback_later(max(min(most, seconds_left()) - 1, 0.5), exit=True)
        start, status, note, fit = time.monotonic(), "done", "", True
        try:
            with torch.no_grad():
                for row in work():
                    results.add(part, row)
        except NotApplicable as reason:
            status, note = reason.status, str(reason)
        except torch.OutOfMemoryError as reason:  # of a capture, perhaps
            status, note, fit = NotApplicable.status, str(reason).splitlines()[0], False
        except Exception:
            status, note, fit = "failed", traceback.format_exc(), False
        faulthandler.cancel_dump_traceback_later()
        results.case(part, name, status, time.monotonic() - start, note)
        if alone and not fit:
            return


def supervise(part: str, module: ModuleType, options: Options, results: Results, seconds: float) -> None:
    """Run the cases of a part's module in processes, until all have been begun or time is up."""
    end, left = time.monotonic() + seconds, set(module.cases(options))
    while (left := left - results.cases(part).keys()) and (rest := end - time.monotonic()) > LEAST:
        given = pickle.dumps((part, module.__name__, options, results, end))
        command, folder = [sys.executable, "-X", "faulthandler", "-c", CHILD], Path(__file__).parents[1]
        try:
            ended = subprocess.run(command, cwd=folder, input=given, timeout=rest, check=False).returncode
            status, note = "failed", "took too long" if ended == 1 else f"the process ended with status {ended}"
        except subprocess.TimeoutExpired:
            ended, status, note = 0, "cut off", "time was up"
        for name, told in results.cases(part).items():
            if told == "running":
                results.case(part, name, status, note=note)
        if ended and not left & results.cases(part).keys():
            raise RuntimeError(f"{part}: the process ended with status {ended} before its first case")
