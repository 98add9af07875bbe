"""Results of the check as they come: what became of every case, its rows, and why it failed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from common import write_csv


class Results:
    """Cases in `cases.json` in a folder, to which several processes add, one after the other.

    A case has a part, a name, a status, seconds, a note, rows, and `meta` of machine and code (`common.environment`).
    It is on disk when a method returns.
    """

    def __init__(self, folder: Path, meta: Mapping[str, str]) -> None:
        self.folder, self.meta = folder.resolve(), dict(meta)
        folder.mkdir(parents=True, exist_ok=True)
        self.read()

    def read(self) -> None:
        """Take in what another process has added."""
        file = self.folder / "cases.json"
        self.all: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []

    def begin(self, parts: Collection[str], lasting: str) -> None:
        """Forget what an earlier call has told of some parts; of a lasting one, what is done at this commit stays."""
        same = self.meta["commit"], self.meta["gpu"]
        known = same[0] != "unknown" and not same[0].endswith("+changes")

        def stays(case: Mapping[str, Any]) -> bool:
            done = case["status"] == "done" and (case["meta"]["commit"], case["meta"]["gpu"]) == same
            return case["part"] not in parts or (case["part"] == lasting and known and done)

        self.all = [case for case in self.all if stays(case)]
        for part in parts:
            (self.folder / f"{part}.csv").unlink(missing_ok=True)
        self._save()

    def start(self, part: str, name: str) -> None:
        """Note that a case runs, to which `add` and `end` belong from now on."""
        case = {"part": part, "case": name, "status": "running", "seconds": 0.0, "note": "", "rows": []}
        self.all.append(case | {"meta": self.meta})
        self._save()

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row."""
        self.all[-1]["rows"].append(row)
        self._save()

    def end(self, status: str, seconds: float = 0.0, note: str = "") -> None:
        """Note what became of the case."""
        case = self.all[-1]
        case |= {"status": status, "seconds": seconds, "note": note}
        self._save()
        print(f"{case['part']}: {case['case']}: {status} ({seconds:.1f} s) {last_line(note)}", flush=True)

    def cases(self, part: str) -> dict[str, str]:
        """The status of each case of a part that has begun."""
        return {case["case"]: case["status"] for case in self.all if case["part"] == part}

    def table(self, part: str) -> list[dict[str, Any]]:
        """The rows of a part, with what they say of machine and code."""
        return [row | case["meta"] for case in self.all if case["part"] == part for row in case["rows"]]

    def write(self, part: str) -> None:
        """Write the CSV of a part and that of all cases, and why cases failed."""
        if rows := self.table(part):
            write_csv(self.folder / f"{part}.csv", rows)
        columns = "part", "case", "status", "seconds"
        told = [
            {key: case[key] for key in columns} | {"note": last_line(case["note"])} | case["meta"] for case in self.all
        ]
        write_csv(self.folder / "cases.csv", told)
        failed = [case for case in self.all if case["status"] in ("failed", "cut off")]
        text = "".join(f"=== {case['part']}: {case['case']}\n{case['note'].rstrip()}\n\n" for case in failed)
        (self.folder / "failed.txt").write_text(text, encoding="utf-8")

    def pack(self) -> None:
        """Write all of the folder into an archive beside it: what is copied from elsewhere is one file."""
        shutil.make_archive(str(self.folder), "gztar", self.folder)

    def _save(self) -> None:
        fresh = self.folder / "cases.json.new"
        fresh.write_text(json.dumps(self.all), encoding="utf-8")
        fresh.replace(self.folder / "cases.json")


def last_line(note: str) -> str:
    """The last line of a note, or what of it fits a table."""
    return note.strip().rpartition("\n")[2][:200]
