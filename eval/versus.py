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

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from pandas.api.types import is_any_real_numeric_dtype
from tqdm import tqdm

import common
import hf_offload
from records import RESULTS, environment, show, write_csv
from turns import SOCKET

EVAL = Path(__file__).parent
ROOT = EVAL.parent
FIGURES = ("p50", "p20")


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
            tail = self.log.read_text(errors="replace")[-5000:]
            raise RuntimeError(f"{self.name}: the script ended with status {self.process.returncode}\n{tail}")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.giver.close()
        self.folder.cleanup()


def run(packages: Mapping[str, Path], command: Sequence[Any], bar: tqdm[Any]) -> list[pd.DataFrame]:
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
        return [pd.read_csv(side.csv, keep_default_na=False, na_values=[""]) for side in sides]


def compare(base: Sequence[pd.DataFrame], here: Sequence[pd.DataFrame]) -> list[dict[str, Any]]:
    """Join what the other commit and this checkout have written in each run; of no number what the first run tells."""
    runs = [*base, *here]
    if len({len(run) for run in runs}) > 1:
        raise ValueError(f"the other commit has {len(base[0])} rows and this one {len(here[0])}")
    about = set(environment()) - {"threads"}  # those of the scripts, not of this one, which computes nothing
    columns = [column for column in base[0] if column in here[0] and column not in about]
    equal = [column for column in columns if all(run[column].equals(here[0][column]) for run in runs)]
    compared = [c for c in FIGURES if c in columns] or [c for c in columns if c not in equal]
    found = here[0][[column for column in equal if column not in compared]].copy()
    for column in compared:
        numeric = all(is_any_real_numeric_dtype(run[column]) for run in runs)
        for name, side in ((f"{column}_base", base), (column, here)):
            cells = pd.concat([run[column] for run in side], axis=1)
            found[name] = cells.median(axis=1) if numeric else cells.iloc[:, 0]
        if numeric:
            found[f"{column}_ratio"] = found[column] / found[f"{column}_base"].where(lambda old: old != 0)
    return found.astype(object).where(found.notna(), None).to_dict("records")


def main(
    commit: Annotated[str, typer.Argument(help="The commit to compare with, as git names it.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="After `--`: the script's.")] = None,
    script: Annotated[str, typer.Option(help="The script's name, in eval/.")] = "decode",
    runs: Annotated[int, typer.Option(min=1, help="Times that both are started; the numbers are medians.")] = 1,
    out: common.OutOption = RESULTS / "versus.csv",
) -> None:
    """Run a script on two commits in turns."""
    base = git("rev-parse", "--short=12", "--verify", f"{commit}^{{commit}}").decode().strip()
    with tempfile.TemporaryDirectory() as folder, tqdm(desc="turns", unit="turn") as bar:
        archive = git("archive", "--format=tar", base, "hf_offload")
        subprocess.run(["tar", "--extract", f"--directory={folder}"], input=archive, check=True)
        packages = {base: Path(folder), "this checkout": ROOT}
        found = [run(packages, [EVAL / f"{script}.py", *(arguments or [])], bar) for _ in range(runs)]
    records = compare(*zip(*found, strict=True))
    write_csv(out, [{"base": base, "script": script, "runs": runs, **record} for record in records])
    show(f"{base} (base) and this checkout", records)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the sides end with this process
    common.command(main)()
