"""Is this checkout slower than another commit? The same script with both packages, in turns.

    python eval/versus.py HEAD~1
    python eval/versus.py v0.1.0 --runs 3 -- --contexts 128,8k --rows scout-1024,hgca --rounds 20 --threads 1
    python eval/versus.py v0.1.0 --script perplexity -- --row scout-1024 --texts code

Both sides run the script of this checkout, with the same Python and packages, and read the same texts and model; only
the package `hf_offload` is each commit's own. So a script can be compared that uses public names alone. What follows
`--` goes to the script.

Each side is a process of its own that works only when it is its turn. Scripts that measure times give up their turn
between rounds (`turns.turn`), so that a prompt is read once a run and the rounds of both sides alternate, forth and
back; a script without rounds runs as a whole. In the CSV `p50_base` is the other commit's, `p50` this checkout's and
`p50_ratio` how many times as much; with several runs each number is the median over the runs. Of a script that has no
percentiles every number that differs is compared.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

import common
import hf_offload
from turns import SOCKET

EVAL = Path(__file__).parent
ROOT = EVAL.parent
FIGURES = ("p50", "p20")
TAIL = 30  # lines of a script that failed

Rows = list[dict[str, str]]


def git(*arguments: str) -> bytes:
    """What git prints in this checkout."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise typer.BadParameter(done.stderr.decode().strip())
    return done.stdout


class Side:
    """A process that runs a command, the script and its arguments, with the package of a folder."""

    def __init__(self, name: str, package: Path, command: Sequence[Any]) -> None:
        self.name, self.running, self.folder = name, True, tempfile.TemporaryDirectory()
        self.csv, self.log = Path(self.folder.name) / "found.csv", Path(self.folder.name) / "log.txt"
        assets = sys.modules[hf_offload.load_demo_model.__module__]
        settings = {"assets": (assets.__name__, assets.__file__), "names": hf_offload.__all__}
        path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.giver, taker = socket.socketpair()
        starter = [sys.executable, Path(__file__).with_name("turns.py"), json.dumps(settings)]
        with taker, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*starter, *command, "--out", self.csv],
                env=os.environ | {"PYTHONPATH": path, SOCKET: str(taker.fileno())},
                pass_fds=[taker.fileno()], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def wait(self) -> None:
        """Wait until the script gives up its turn or ends."""
        self.running = bool(self.giver.recv(1))
        if not self.running and self.process.wait():
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL:])
            raise RuntimeError(f"{self.name}: the script ended with status {self.process.returncode}\n{tail}")

    def rows(self) -> Rows:
        """What the script has written."""
        with self.csv.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.giver.close()
        self.folder.cleanup()


def run(packages: Mapping[str, Path], command: Sequence[Any], bar: tqdm[Any]) -> list[Rows]:
    """Run the script once with each package, in turns; what each has written."""
    with ExitStack() as stack:
        sides = []
        for name, package in packages.items():
            sides.append(Side(name, package, command))
            stack.callback(sides[-1].close)
            sides[-1].wait()
        order = list(sides)
        while order := [side for side in reversed(order) if side.running]:
            for side in order:
                side.giver.sendall(b".")
                side.wait()
            bar.update()
        return [side.rows() for side in sides]


def figure(cells: Sequence[str]) -> float | str:
    """The median over the runs; of what is no number, what the first run tells."""
    try:
        return statistics.median(map(float, cells))
    except ValueError:
        return cells[0]


def compare(base: Sequence[Rows], here: Sequence[Rows]) -> list[dict[str, Any]]:
    """Join what the other commit and this checkout have written in each run."""
    runs = [*base, *here]
    if len({len(rows) for rows in runs}) > 1:
        raise ValueError(f"the other commit has {len(base[0])} rows and this one {len(here[0])}")
    meta = common.environment()
    columns = [column for column in base[0][0] if column in here[0][0] and column not in meta]
    equal = [c for c in columns if all(len({row[c] for row in same}) == 1 for same in zip(*runs, strict=True))]
    compared = [c for c in FIGURES if c in columns] or [c for c in columns if c not in equal]
    records = []
    for number, first in enumerate(here[0]):
        record: dict[str, Any] = {column: first[column] for column in equal if column not in compared}
        for column in compared:
            old, new = (figure([rows[number][column] for rows in side]) for side in (base, here))
            record |= {f"{column}_base": old, column: new}
            if isinstance(old, float) and isinstance(new, float):
                record[f"{column}_ratio"] = new / old if old else None
        records.append(record)
    return records


def main(
    commit: Annotated[str, typer.Argument(help="The commit to compare with, as git names it.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="After `--`: the script's.")] = None,
    script: Annotated[str, typer.Option(help="The script's name, in eval/.")] = "decode",
    runs: Annotated[int, typer.Option(min=1, help="Times that both are started; the numbers are medians.")] = 1,
    out: common.OutOption = common.RESULTS / "versus.csv",
) -> None:
    """Run a script on two commits in turns."""
    path = EVAL / f"{script}.py"
    if not path.is_file():
        raise typer.BadParameter(f"--script {script}: there is no eval/{script}.py")
    base = git("rev-parse", "--short=12", "--verify", f"{commit}^{{commit}}").decode().strip()
    found: list[list[Rows]] = []
    with tempfile.TemporaryDirectory() as folder, tqdm(desc="turns", unit="turn") as bar:
        archive = git("archive", "--format=tar", base, "hf_offload")
        subprocess.run(["tar", "--extract", f"--directory={folder}"], input=archive, check=True)
        packages = {base: Path(folder), "this checkout": ROOT}
        for _ in range(runs):
            found.append(run(packages, [path, *(arguments or [])], bar))
    old, new = zip(*found, strict=True)
    # The results tell the threads of the scripts, not of this one, which computes nothing.
    torch.set_num_threads(int(new[0][0]["threads"]))
    records = [{"base": base, "script": script, "runs": runs, **record} for record in compare(old, new)]
    common.write_csv(out, records)
    common.show(f"{base} (base) and this checkout", [dict(list(record.items())[3:]) for record in records])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the sides end with this process
    common.command(main)()
