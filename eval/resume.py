"""Long runs that go on where they were stopped: what each row has reached, in a folder beside the results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import typer


class Progress:
    """States of rows in a folder of their own: `ROW/POSITION`, of which only whole ones have that name.

    Args:
        folder: made where it is missing.
        settings: what the states depend on, for `json`; a run with others does not go on from them.

    Raises:
        typer.BadParameter: the folder holds states of other settings.
    """

    SETTINGS = "settings.json"

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        file, text = folder / self.SETTINGS, json.dumps(settings, indent=1, sort_keys=True)
        reached = any(path.is_dir() for path in folder.glob("*"))  # a run that was refused has reached nothing
        if reached and file.exists() and file.read_text(encoding="utf-8") != text:
            raise typer.BadParameter(
                f"{folder} holds what a run with other settings has reached: remove it, or give another --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def latest(self, row: str) -> Path | None:
        """The folder of the newest state of a row, or None."""
        return max((path for path in self._of(row).glob("[0-9]*")), default=None)

    def save(self, row: str, position: int, write: Callable[[Path], None]) -> None:
        """Keep a state of a row in place of the earlier ones.

        Args:
            row: its name.
            position: how far it is; a later state has a larger one.
            write: writes the state into the folder that it is given.
        """
        whole = self._of(row) / f"{position:09d}"
        partial = whole.with_name(f".{whole.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        partial.rename(whole)
        for other in whole.parent.iterdir():
            if other != whole:
                shutil.rmtree(other)

    def remove(self) -> None:
        """Forget everything: the run has ended."""
        shutil.rmtree(self.folder)

    def _of(self, row: str) -> Path:
        """The folder of a row, whose name may hold a path."""
        return self.folder / quote(row, safe=" ,:=")
