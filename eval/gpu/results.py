"""Results of the check as they come: what became of every case, its rows, and why it failed."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import Records, write_csv


class Results(Records):
    """Cases in `cases.jsonl` in a folder, to which several processes add, one after the other.

    A case has a part, a name, a status, seconds, a note, rows, and `meta` of machine and code (`common.environment`).
    """

    def __init__(self, folder: Path, meta: Mapping[str, str]) -> None:
        super().__init__(folder.resolve() / "cases.jsonl", ("part", "case"), {})
        self.folder, self.meta = folder.resolve(), dict(meta)

    def begin(self, parts: Collection[str], lasting: str) -> None:
        """Forget what an earlier call has told of some parts; of a lasting one, what is done at this commit stays."""
        same = self.meta["commit"], self.meta["gpu"]
        known = same[0] != "unknown" and not same[0].endswith("+changes")

        def stays(case: Mapping[str, Any]) -> bool:
            done = case["status"] == "done" and (case["meta"]["commit"], case["meta"]["gpu"]) == same
            return case["part"] not in parts or (case["part"] == lasting and known and done)

        kept = [case for case in self.found.values() if stays(case)]
        self.remove()
        self.found.clear()
        for case in kept:
            self.add(case)
        for part in parts:
            (self.folder / f"{part}.csv").unlink(missing_ok=True)

    def note(
        self, part: str, name: str, status: str, rows: Sequence[Any] = (), *, seconds: float = 0.0, note: str = ""
    ) -> None:
        """Note what became of a case; it is on disk when this returns."""
        case = {"part": part, "case": name, "status": status, "seconds": seconds, "note": note}
        self.add(case | {"rows": list(rows), "meta": self.meta})
        if status != "running":
            print(f"{part}: {name}: {status} ({seconds:.1f} s) {last_line(note)}", flush=True)

    def cases(self, part: str) -> dict[str, dict[str, Any]]:
        """The cases of a part that have begun, by name."""
        return {name: case for (other, name), case in self.found.items() if other == part}

    def table(self, part: str) -> list[dict[str, Any]]:
        """The rows of a part, with what they say of machine and code."""
        return [row | case["meta"] for case in self.cases(part).values() for row in case["rows"]]

    def write(self, part: str) -> None:
        """Write the CSV of a part and that of all cases, why cases failed, and an archive of the folder beside it."""
        if rows := self.table(part):
            write_csv(self.folder / f"{part}.csv", rows)
        columns, every = ("part", "case", "status", "seconds"), self.found.values()
        told = [
            {key: case[key] for key in columns} | {"note": last_line(case["note"])} | case["meta"] for case in every
        ]
        write_csv(self.folder / "cases.csv", told)
        failed = [case for case in every if case["status"] in ("failed", "cut off")]
        text = "".join(f"=== {case['part']}: {case['case']}\n{case['note'].rstrip()}\n\n" for case in failed)
        (self.folder / "failed.txt").write_text(text, encoding="utf-8")
        shutil.make_archive(str(self.folder), "gztar", self.folder)


def last_line(note: str) -> str:
    """The last line of a note, or what of it fits a table."""
    return note.strip().rpartition("\n")[2][:200]
