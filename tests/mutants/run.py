"""Do the tests find faults? Each patch beside this file puts one into the package, and the tests run until one fails.

    make mutants
    make mutants MUTANTS="--csv found.csv"
    make mutants MUTANTS="--nearest fork-shared-table padding-stale-sinks"

A patch begins with three lines: what is wrong, its kind, and the nearest tests. These run first. If they find nothing,
all quick tests run, as they do once without a fault, where they must pass. Faults in `hf_offload/cpu/` come last, since
their tests compile kernels anew. The patches are applied to a copy of this checkout; nothing is written into it.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

PATCHES = Path(__file__).parent
ROOT = PATCHES.parents[1]
COLUMNS = ("mutant", "kind", "found_by", "seconds")
LEFT_OUT = (".*", "build", "dist", "site", "*.egg-info")
QUICK = ("-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=0")
# A process that crashes or waits forever ends the run, which finds the fault, too.
PYTEST = (
    "-m", "pytest", "-x", "-q", "--tb=no", "-rfE", "--disable-warnings",
    "-o", "faulthandler_timeout=1200", "-o", "faulthandler_exit_on_timeout=true",
)  # fmt: skip


class Mutant(NamedTuple):
    """A patch, the kind of its fault, the nearest tests, and whether it changes compiled kernels."""

    name: str
    path: Path
    kind: str
    tests: list[str]
    compiled: bool


def read(path: Path) -> Mutant:
    """Read a patch; ValueError if a line at its begin is missing."""
    text = path.read_text(encoding="utf-8")
    head = re.match(r"\S.*\.\nKind: (.+)\nTests: (.+)\n\ndiff --git ", text)
    if head is None:
        raise ValueError(f"{path.name} begins with other lines than: a sentence, Kind: …, Tests: …")
    return Mutant(path.stem, path, head[1], head[2].split(), "+++ b/hf_offload/cpu/" in text)


def mutants() -> list[Mutant]:
    """All mutants, those of compiled kernels last."""
    return sorted(map(read, PATCHES.glob("*.patch")), key=lambda mutant: (mutant.compiled, mutant.name))


def patch(tree: Path, mutant: Mutant, *options: str) -> None:
    """Apply a patch.

    Raises:
        ValueError: it does not apply.
    """
    command = ["git", "apply", *options, mutant.path]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{mutant.path.name} no longer applies: {done.stderr.strip()}")


def run(tree: Path, *options: str) -> str | None:
    """The first test that fails, or None; ValueError if no test can run."""
    settings = {"PYTHONPATH": str(tree), "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive")}
    command = [sys.executable, *PYTEST, *options]
    done = subprocess.run(command, cwd=tree, env=os.environ | settings, capture_output=True, text=True, check=False)
    if done.returncode in (4, 5):  # wrong arguments, or nothing to run
        raise ValueError(f"{' '.join(options)}: {(done.stderr or done.stdout).strip()}")
    if done.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"a process that ended with {done.returncode}"


def find(tree: Path, mutant: Mutant, nearest: bool) -> str | None:
    """The test that finds a mutant, or None."""
    patch(tree, mutant)
    try:
        return run(tree, *mutant.tests) or (None if nearest else run(tree, *QUICK))
    finally:
        patch(tree, mutant, "--reverse")


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Mutants, without .patch; none: all.")] = None,
    nearest: Annotated[bool, typer.Option(help="Run the nearest tests alone.")] = False,
    out: Annotated[Path | None, typer.Option("--csv", help="A row for each mutant is appended to this file.")] = None,
) -> None:
    every = mutants()
    if unknown := set(names or ()) - {mutant.name for mutant in every}:
        raise typer.BadParameter(f"no mutant is named {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in every if not names or mutant.name in names]
    found = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for mutant in chosen:
            patch(tree, mutant, "--check")
        if not nearest and (wrong := run(tree, *QUICK)):
            raise typer.BadParameter(f"{wrong} fails without a fault")
        for mutant in chosen:
            start = time.monotonic()
            by = find(tree, mutant, nearest)
            seconds = round(time.monotonic() - start)
            found += by is not None
            print(f"{mutant.name:32} {'SURVIVED' if by is None else f'found by {by}'}  ({seconds} s)", flush=True)
            if out is not None:
                row = mutant.name, mutant.kind, by or "survived", seconds
                rows = [row] if out.exists() else [COLUMNS, row]
                with out.open("a", newline="", encoding="utf-8") as file:
                    csv.writer(file, lineterminator="\n").writerows(rows)
    print(f"{found} of {len(chosen)} mutants are found")


if __name__ == "__main__":
    typer.run(main)
