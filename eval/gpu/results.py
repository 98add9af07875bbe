"""Results of the check as they come: a CSV for each part, what became of each case, and a log of what failed."""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Results:
    """A folder of results, which several processes add to, one after the other; a row is on disk when `add` returns.

    Every row says `meta` of machine and code (`common.environment`).
    """

    def __init__(self, folder: Path, meta: Mapping[str, str]) -> None:
        self.folder, self.meta, self.log = folder.resolve(), dict(meta), folder.resolve() / "failed.txt"
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self, parts: Collection[str], lasting: Collection[str]) -> None:
        """Forget what an earlier call has told of some parts; of lasting ones, what is done at this commit stays."""
        commit, gpu = self.meta["commit"], self.meta["gpu"]
        known = commit != "unknown" and not commit.endswith("+changes")

        def stays(row: Mapping[str, str]) -> bool:
            same = known and (row["commit"], row["gpu"]) == (commit, gpu)
            return row["part"] not in parts or (row["part"] in lasting and row["status"] == "done" and same)

        cases = [row for row in _read(self.folder, "cases") if stays(row)]
        self._write("cases", cases)
        done = {(row["part"], row["case"]) for row in cases}
        for part in parts:
            self._write(part, [row for row in _read(self.folder, part) if (part, row.get("suite")) in done])
        told = self.log.read_text(encoding="utf-8") if self.log.exists() else ""
        texts = re.split(r"^(?==== )", told, flags=re.M)
        self.log.write_text("".join(t for t in texts if t[4:].split(":")[0] not in {"", *parts}), encoding="utf-8")

    def add(self, table: str, *rows: Mapping[str, Any]) -> None:
        """Add rows to `<table>.csv`; floats with six significant digits."""
        short = [{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
        self._write(table, [*_read(self.folder, table), *(row | self.meta for row in short)])

    def case(self, part: str, name: str, status: str, seconds: float = 0.0, note: str = "") -> None:
        """Note what became of a case, and in the log why it failed."""
        last = note.strip().splitlines()[-1][:200] if note.strip() else ""
        others = [row for row in _read(self.folder, "cases") if (row["part"], row["case"]) != (part, name)]
        told = {"part": part, "case": name, "status": status, "seconds": f"{seconds:.6g}", "note": last}
        self._write("cases", [*others, told | self.meta])
        if status in ("failed", "cut off"):
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"=== {part}: {name}\n{note.rstrip()}\n\n")
        if status != "running":
            print(f"{part}: {name}: {status} ({seconds:.1f} s) {last}", flush=True)

    def cases(self, part: str) -> dict[str, str]:
        """The status of each case of a part that has been begun."""
        return {row["case"]: row["status"] for row in _read(self.folder, "cases") if row["part"] == part}

    def table(self, name: str) -> list[dict[str, Any]]:
        """The rows of a table."""
        return read_table(self.folder, name)

    def pack(self) -> None:
        """Write all of the folder into an archive beside it: what is copied from elsewhere is one file."""
        shutil.make_archive(str(self.folder), "gztar", self.folder)

    def _write(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        path = self.folder / f"{name}.csv"
        if not rows:
            path.unlink(missing_ok=True)
            return
        columns = [*dict.fromkeys(key for row in rows for key in row if key not in self.meta), *self.meta]
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def _read(folder: Path, name: str) -> list[dict[str, str]]:
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_table(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a table in a folder, with numbers; none where there is no such table."""
    return [{key: _number(text) for key, text in row.items()} for row in _read(folder, name)]


def _number(text: str) -> Any:
    """What a cell says: None where it is empty."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text or None
