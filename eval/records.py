"""Results: what they depend on, as tables and CSVs, and as records that a stopped run goes on from.

It imports no model and no cache: a process that needs nothing else begins early.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import typer

RESULTS = Path(__file__).parent / "results"
_FOLDERS = re.compile(r"(?<![^=,:])(?:\.{0,2}/)(?:[^/=,:]+/)*")
"""Of a file's path in an argument (`/a/b.txt`, `../b.txt`, `row:knob=/a/b`), what stands before the file's name."""


def environment() -> dict[str, str]:
    """What a result depends on: commit, machine, threads, versions, and the command that makes it again."""

    def git(arguments: str) -> str:
        done = subprocess.run(f"git {arguments}", shell=True, cwd=RESULTS.parent, capture_output=True, text=True)
        return done.stdout.strip()  # nothing where git is not installed

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    commit = git("rev-parse --short=12 HEAD") or "unknown"
    # The results themselves are rewritten by the very runs that record the commit.
    changed = git("status --porcelain --untracked-files=no -- :/ ':(exclude)results'")
    script, module = Path(sys.argv[0]), sys.modules["__main__"].__spec__
    program = [f"{script.parent.name}/{script.name}"] if module is None else ["-m", module.name]
    # Of a file's path only the name: where it lay is of no use to anyone else. Names of models stay.
    arguments = [_FOLDERS.sub("", argument) for argument in sys.argv[1:]]
    return {
        "commit": f"{commit}+changes" if changed else commit,
        "cpu": _cpu_model(),
        "threads": str(torch.get_num_threads()),
        "cores": str(len(os.sched_getaffinity(0))),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        **{name: installed(name) for name in ("torch", "transformers", "numba", "triton")},
        "command": shlex.join(["python", *program, *arguments]),
    }


def _cpu_model() -> str:
    """The CPU's name and, since virtual machines often hide it, its family and model."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    found = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    name = found.get("model name", platform.machine())
    return f"{name} (family {found.get('cpu family', '?')}, model {found.get('model', '?')})"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write results, each row with the `environment` unless it has one; floats with six significant digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = environment()
    columns = dict.fromkeys([*(key for row in rows for key in row if key not in meta), *meta])
    written = [{**meta, **{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}} for row in rows]
    pd.DataFrame(written, columns=list(columns), dtype=object).to_csv(path, index=False)
    print(f"wrote {path}")


def show(title: str, rows: Sequence[Mapping[str, Any]] | pd.DataFrame, columns: Sequence[str] | None = None) -> None:
    """Print rows as a table of these columns (all by default); floats get four significant digits."""
    table = pd.DataFrame(rows, columns=columns, dtype=object)
    table = table.where(table.notna(), "").to_string(index=False, float_format="{:.4g}".format)
    print(f"\n{title}\n{table}")


class Records:
    """What a long run has found, in a JSONL file: a stopped run goes on from it.

    Each line is one write and has the settings, too, so that processes may share the file. `keys` are the fields that
    name a record; a run with other settings does not go on from the records.
    """

    def __init__(self, file: Path, keys: Sequence[str], settings: dict[str, Any]) -> None:
        self.file, self.keys, self.settings = file, keys, settings
        self.found: dict[tuple[Any, ...], dict[str, Any]] = {}
        file.parent.mkdir(parents=True, exist_ok=True)
        self.read()

    def key(self, record: Mapping[str, Any]) -> tuple[Any, ...]:
        """Which one a record is."""
        return tuple(record[name] for name in self.keys)

    def read(self) -> None:
        """Take in what all processes have found."""
        for line in self.file.read_text(encoding="utf-8").split("\n") if self.file.exists() else ():
            try:
                settings, record = json.loads(line)
            except json.JSONDecodeError:  # a stopped run has left it half written: that record is made again
                continue
            except ValueError:
                raise typer.BadParameter(
                    f"{self.file} is of an older version: remove it, or give another --out"
                ) from None
            if settings != self.settings:
                told = f"{self.file} holds results of other settings, {json.dumps(settings)}"
                raise typer.BadParameter(f"{told}: remove it, or give another --out")
            self.found[self.key(record)] = record

    def add(self, record: dict[str, Any]) -> None:
        """Keep a record; it is on the disk when this returns."""
        self.found[self.key(record)] = record
        with self.file.open("ab", buffering=0) as file:
            file.write(("\n" + json.dumps([self.settings, record], ensure_ascii=False)).encode())

    def remove(self) -> None:
        """Forget everything: the run has ended, and its results are elsewhere."""
        self.file.unlink(missing_ok=True)
