"""The cases of a part, in processes of their own: one that fails, crashes or hangs leaves the others alone.

A process goes through the cases of which the results do not tell yet. It ends behind one that has failed, since a
device or its allocator may be of no use after it (torch 2.11 counts a capture that has failed as one under way), and
another one goes on.
"""

from __future__ import annotations

import faulthandler
import pickle
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from records import Records, write_csv

Cases = dict[str, tuple[float, Callable[[], Iterable[dict[str, Any]]]]]
"""By name, the seconds that a case may take, and what yields its rows; it can be pickled."""
LEAST = 10  # seconds without which no case is begun
CHILD = "import gpu.supervise as s, pickle, sys; s.here(*pickle.load(sys.stdin.buffer), alone=True)"
deadline = float("inf")  # of the part, as of `time.monotonic`, one clock for all processes


class Stopped(Exception):
    """Raised inside a case that cannot be had here or does not come to its end: its status, and why."""


class Results(Records):
    """Cases in `cases.jsonl` in a folder, to which several processes add, one after the other.

    A case has a part, a name, a status, seconds, a note of a line, rows, `meta` of machine and code
    (`records.environment`), and what there is to say of why it failed.
    """

    def __init__(self, folder: Path, meta: Mapping[str, str]) -> None:
        super().__init__(folder.resolve() / "cases.jsonl", ("part", "case"), {})
        self.folder, self.meta = folder.resolve(), dict(meta)

    def begin(self, parts: Collection[str], lasting: str) -> None:
        """Forget what an earlier call has told of some parts; of a lasting one, what is done at this commit stays."""
        machine = self.meta["commit"], self.meta["gpu"]
        known = not machine[0].endswith(("unknown", "+changes"))

        def stays(case: Mapping[str, Any]) -> bool:
            done = case["status"] == "done" and (case["meta"]["commit"], case["meta"]["gpu"]) == machine
            return case["part"] not in parts or (case["part"] == lasting and known and done)

        kept = [case for case in self.found.values() if stays(case)]
        self.remove()
        self.found.clear()
        for case in kept:
            self.add(case)
        for part in parts:
            (self.folder / f"{part}.csv").unlink(missing_ok=True)

    def note(self, part: str, name: str, status: str, rows: Any = (), *, seconds: float = 0.0, note: str = "") -> None:
        """Note what became of a case; it is on disk when this returns."""
        last = note.strip().rpartition("\n")[2][:200]
        case = {"part": part, "case": name, "status": status, "seconds": seconds, "note": last}
        self.add(case | {"rows": list(rows), "meta": self.meta, "why": note.rstrip()})
        if status != "running":
            print(f"{part}: {name}: {status} ({seconds:.1f} s) {last}", flush=True)

    def cases(self, part: str) -> dict[str, dict[str, Any]]:
        """The cases of a part that have begun, by name."""
        return {name: case for (other, name), case in self.found.items() if other == part}

    def write(self, part: str) -> None:
        """Write the CSV of a part and that of all cases, why cases failed, and an archive of the folder beside it."""
        self.read()
        if rows := [row | case["meta"] for case in self.cases(part).values() for row in case["rows"]]:
            write_csv(self.folder / f"{part}.csv", rows)
        every, inner = self.found.values(), ("rows", "meta", "why")
        told = [{key: case[key] for key in case if key not in inner} | case["meta"] for case in every]
        write_csv(self.folder / "cases.csv", told)
        failed = [case for case in every if case["status"] in ("failed", "cut off")]
        text = "".join(f"=== {case['part']}: {case['case']}\n{case['why']}\n\n" for case in failed)
        (self.folder / "failed.txt").write_text(text, encoding="utf-8")
        shutil.make_archive(str(self.folder), "gztar", self.folder)


def here(part: str, cases: Cases, results: Results, end: float, *, alone: bool = False) -> None:
    """Run the cases of a part here until `end`; a process of its own (`alone`) ends where one fails or takes long."""
    global deadline
    deadline = end
    for name, (most, work) in cases.items():
        if name in results.cases(part):
            continue
        if alone:
            if (left := end - time.monotonic()) < LEAST:
                return
            faulthandler.dump_traceback_later(max(min(most, left) - 1, 0.5), exit=True)
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


def supervise(part: str, cases: Cases, results: Results, end: float) -> None:
    """Run the cases of a part in processes, until all have begun or time is up; arguments as of `here`."""
    command, folder = [sys.executable, "-X", "faulthandler", "-c", CHILD], Path(__file__).parents[1]
    while left := [name for name in cases if name not in results.cases(part)]:
        if (rest := end - time.monotonic()) < LEAST:
            return
        given = pickle.dumps((part, cases, results, end))
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
