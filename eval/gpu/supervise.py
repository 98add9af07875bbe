"""The cases of a part, in processes of their own: one that fails, crashes or hangs leaves the others alone.

A process goes through the cases of which the results do not tell yet. It ends behind one that has failed, since a
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
from typing import Any

import torch

from gpu.options import Options
from gpu.results import Results

Cases = dict[str, tuple[float, Callable[[], Iterable[dict[str, Any]]]]]
"""By name, the seconds that a case may take, and what yields its rows: `cases(options)` of a part's module."""
LEAST = 10  # seconds without which no case is begun
CHILD = "import gpu.supervise as s, pickle, sys; s.here(*pickle.load(sys.stdin.buffer), alone=True)"
_end = float("inf")


class Stopped(Exception):
    """Raised inside a case that cannot be had here or does not come to its end: its status, and why."""


def seconds_left() -> float:
    """Until the part has to end."""
    return _end - time.monotonic()


def here(part: str, module: str, options: Options, results: Results, end: float, *, alone: bool = False) -> None:
    """Run the cases of a part here until `end`; a process of its own (`alone`) ends where one fails or takes too long.

    `module` is the name of the part's module, `end` a time of `time.monotonic`, one clock for all processes.
    """
    global _end
    _end = end
    for name, (most, work) in importlib.import_module(module).cases(options).items():
        if name in results.cases(part):
            continue
        if alone:
            if seconds_left() < LEAST:
                return
            faulthandler.dump_traceback_later(max(min(most, seconds_left()) - 1, 0.5), exit=True)
        results.note(part, name, "running")
        start, status, note, fit = time.monotonic(), "done", "", True
        rows: list[dict[str, Any]] = []
        try:
            with torch.no_grad():
                for row in work():
                    rows.append(row)
                    results.note(part, name, "running", rows)
        except Stopped as reason:
            status, note = reason.args
        except torch.OutOfMemoryError as reason:  # of a capture, perhaps
            status, note, fit = "not applicable", str(reason).splitlines()[0], False
        except Exception:
            status, note, fit = "failed", traceback.format_exc(), False
        faulthandler.cancel_dump_traceback_later()
        results.note(part, name, status, rows, seconds=time.monotonic() - start, note=note)
        if alone and not fit:
            return


def supervise(part: str, module: str, options: Options, results: Results, end: float) -> None:
    """Run the cases of a part in processes, until all have begun or time is up; arguments as of `here`."""
    names = importlib.import_module(module).cases(options)
    command, folder = [sys.executable, "-X", "faulthandler", "-c", CHILD], Path(__file__).parents[1]
    while left := [name for name in names if name not in results.cases(part)]:
        if (rest := end - time.monotonic()) < LEAST:
            return
        given = pickle.dumps((part, module, options, results, end))
        try:
            ended = subprocess.run(command, cwd=folder, input=given, timeout=rest, check=False).returncode
        except subprocess.TimeoutExpired:
            ended = 0
        results.read()
        others = "failed", f"the process ended with status {ended}"
        status, note = {0: ("cut off", "time was up"), 1: ("failed", "took too long")}.get(ended, others)
        told = results.cases(part)
        if left[0] not in told:
            results.note(part, left[0], status, note=f"a process ended with status {ended} before this case")
        for name, case in told.items():
            if case["status"] == "running":
                results.note(part, name, status, case["rows"], note=note)
