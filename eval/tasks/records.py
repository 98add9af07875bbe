"""What was answered, a line of JSON an answer, so that a run goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

Key = tuple[str, str, str, str]


def key_of(record: dict[str, Any]) -> Key:
    """Which answer a record is: task, sample, row, setup."""
    return record["task"], record["sample"], record["row"], record["setup"]


class Records:
    """Records in `NAME.jsonl`, behind a line with the settings that they depend on.

    Each process appends to a file of its own, from the second on `NAME.process1.jsonl`, …, and reads those of all.

    Args:
        file: `NAME.jsonl`.
        settings: what the records depend on, for `json`; a run with others does not go on from them.
        process: number of this process.

    Raises:
        typer.BadParameter: a file holds records of other settings, or a line that is no JSON.
    """

    def __init__(self, file: Path, settings: dict[str, Any], process: int = 0) -> None:
        self.file, self.settings = file, settings
        self.own = file if process == 0 else file.with_suffix(f".process{process}.jsonl")
        file.parent.mkdir(parents=True, exist_ok=True)
        self.found = {key_of(record): record for part in self._parts() for record in self._read(part)}
        _write(self.own, settings, self._read(self.own))  # without a line that a stopped run has left half written

    def check(self, row: str, files: dict[str, str]) -> None:
        """Refuse to go on from answers of a row with files of the same names in which something else was.

        Raises:
            typer.BadParameter: there are such answers.
        """
        if any(key[2] == row and record.get("files", {}) != files for key, record in self.found.items()):
            raise typer.BadParameter(
                f"{self.file} holds answers of --row {row} with another {', '.join(files)}: remove it, or give another "
                "--out"
            )

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record; it is on the disk when this returns."""
        self.found[key_of(record)] = record
        with self.own.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def join(self) -> None:
        """Bring the records of all processes into one file; the others have ended."""
        parts = self._parts()
        self.found = {key_of(record): record for part in parts for record in self._read(part)}
        _write(self.file, self.settings, list(self.found.values()))
        for part in parts:
            if part != self.file:
                part.unlink()

    def _parts(self) -> list[Path]:
        return [
            part
            for part in (self.file, *sorted(self.file.parent.glob(f"{self.file.stem}.process[0-9]*.jsonl")))
            if part.exists()
        ]

    def _read(self, part: Path) -> list[dict[str, Any]]:
        lines = part.read_text(encoding="utf-8").split("\n") if part.exists() else []
        whole = []
        for number, line in enumerate(lines[:-1], 1):  # the last one is empty, or was not written to its end
            try:
                whole.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise typer.BadParameter(f"{part}, line {number}, is no JSON ({error}): remove that line") from None
        if len(whole) > 1 and whole[0] != {"settings": self.settings}:
            raise typer.BadParameter(
                f"{part} holds answers of other settings, {json.dumps(whole[0].get('settings'))}: remove it, or give "
                "another --out"
            )
        return whole[1:]


def _write(file: Path, settings: dict[str, Any], records: list[dict[str, Any]]) -> None:
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in ({"settings": settings}, *records)]
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(file)
