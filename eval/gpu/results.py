"""Results of the check as they come: a CSV for each part, what became of each case, and a log of what failed."""

from __future__ import annotations

import csv
import platform
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from common import environment


class Results:
    """A folder of results; every row is on disk when `add` returns.

    Args:
        folder: made if it is not there.
        commit: what the results call the commit where the sources are no git checkout, or None.
        parts: that are run now; what an earlier call has told of the cases of other parts stays.
        lasting: parts of which cases that were done at this commit stay, too.
    """

    def __init__(
        self, folder: Path, commit: str | None, parts: Collection[str] = (), lasting: Collection[str] = ()
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self.meta = environment()
        except FileNotFoundError:  # git is not installed
            gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
            self.meta = {
                "commit": "unknown",
                "gpu": gpu,
                "python": platform.python_version(),
                "torch": torch.__version__,
            }
        if commit is not None:
            self.meta["commit"] = commit
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.log = folder / "failed.txt"
        cases = self.table("cases")
        self.done = {
            (row["part"], row["case"])
            for row in cases
            if row["part"] in lasting and row["status"] == "done" and self._same(row)
        }
        """Part and name of each case that stays."""
        for part in lasting:
            if rows := [row for row in self.table(part) if (part, row["suite"]) in self.done]:
                self.rows[part] = rows
        if kept := [row for row in cases if row["part"] not in parts or (row["part"], row["case"]) in self.done]:
            self.rows["cases"] = kept
        told = self.log.read_text(encoding="utf-8") if self.log.exists() else ""
        texts = [
            text for text in re.split(r"^(?==== )", told, flags=re.M) if text[4:].split(":")[0] not in {"", *parts}
        ]
        self.log.write_text("".join(texts), encoding="utf-8")

    def add(self, table: str, row: Mapping[str, Any]) -> None:
        """Add a row to the table `<table>.csv`; floats with six significant digits."""
        rows = self.rows.setdefault(table, [])
        rows.append(dict(row))
        columns = list(dict.fromkeys(key for one in (*rows, self.meta) for key in one))
        with (self.folder / f"{table}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            for one in rows:
                short = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in one.items()}
                writer.writerow({**self.meta, **short})

    def table(self, name: str) -> list[dict[str, Any]]:
        """The rows of a table: this run's, or those that an earlier one has left in the folder."""
        return self.rows[name] if name in self.rows else read_table(self.folder, name)

    def _same(self, row: Mapping[str, Any]) -> bool:
        """Whether a row comes from the same sources, as far as is known, and the same kind of device."""
        commit = self.meta["commit"]
        known = commit != "unknown" and not commit.endswith("+changes")
        return known and (str(row["commit"]), row["gpu"]) == (commit, self.meta["gpu"])

    def complete(self, part: str) -> bool:
        """Whether all cases of a part are done, by this call or before."""
        return all(row["status"] == "done" for row in self.rows.get("cases", []) if row["part"] == part)

    def pack(self) -> None:
        """Write all of the folder into an archive beside it: what is copied from elsewhere is one file."""
        shutil.make_archive(str(self.folder), "gztar", self.folder)

    def failed(self, part: str, case: str, text: str) -> None:
        """Add to the log."""
        with self.log.open("a", encoding="utf-8") as file:
            file.write(f"=== {part}: {case}\n{text.rstrip()}\n\n")


def read_table(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a table in a folder; none where there is no such table."""
    path = folder / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: _number(text) for key, text in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    """What a cell says: None where it is empty."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text or None
