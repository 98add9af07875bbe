"""The cases of a part, in processes of their own: one that fails, crashes or hangs leaves the others alone.

A process goes through the cases of which `cases.csv` does not tell yet. It ends behind one that has failed, since a
device or its allocator may be of no use after it (torch 2.11 counts a capture that has failed as one under way), and
another one goes on.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gpu.options import Options
from gpu.results import Results

Cases = dict[str, tuple[float, Callable[[], Iterable[dict[str, Any]]]]]
"""By name, the seconds that a case may take, and what yields its rows: `cases(options)` of a part's module."""
LEAST = 10  # seconds without which no case is begun
_deadline = float("inf")


class NotApplicable(Exception):
    """Raised inside a case that cannot be had here; the message says why."""


class TimeUp(Exception):
    """Raised inside a case that was given less time than it may take; the message says how far it got."""


def seconds_left() -> float:
    """Until the part has to end."""
    return _deadline - time.monotonic()


def here(part: str, cases: Cases, results: Results, seconds: float, *, alone: bool = False) -> None:
    """Run the cases of a part here; a process of its own (`alone`) ends where a case fails or takes too long."""
    global _deadline
    _deadline = time.monotonic() + seconds
    told = results.cases(part)
    for name, (most, work) in cases.items():
        if name in told:
            continue
        if alone and seconds_left() < LEAST:
            return
        results.case(part, name, "running")
        if alone:
            faulthandler.dump_traceback_later(max(min(most, seconds_left()) - 1, 0.5), exit=True)
        start, status, note, fit = time.monotonic(), "done", "", True
        try:
            with torch.no_grad():
                for row in work():
                    results.add(part, row)
        except NotApplicable as reason:
            status, note = "not applicable", str(reason)
        except TimeUp as reason:
            status, note = "cut off", str(reason)
        except torch.OutOfMemoryError as reason:  # of a capture, perhaps
            status, note, fit = "not applicable", str(reason).splitlines()[0], False
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
        job = {"part": part, "module": module.__name__, "options": dataclasses.asdict(options)}
        job |= {"folder": str(results.folder.resolve()), "meta": results.meta, "end": end}
        command = [sys.executable, "-c", "import gpu.supervise as s, sys; s.child(sys.argv[1])", json.dumps(job)]
        try:
            ended = subprocess.run(command, cwd=Path(__file__).parents[1], timeout=rest, check=False).returncode
            status, note = "failed", f"the process ended with status {ended}"
        except subprocess.TimeoutExpired:
            ended, status, note = 0, "cut off", "time was up"
        for name, told in results.cases(part).items():
            if told == "running":
                results.case(part, name, status, note="took too long" if ended == 1 else note)
        if not left & results.cases(part).keys() and ended:
            raise RuntimeError(f"{part}: {note} before its first case")


def child(job: str) -> None:
    """A process of a part."""
    given = json.loads(job)
    cases = importlib.import_module(given["module"]).cases(Options(**given["options"]))
    faulthandler.enable()
    seconds = given["end"] - time.monotonic()  # one clock for all
    here(given["part"], cases, Results(Path(given["folder"]), given["meta"]), seconds, alone=True)
