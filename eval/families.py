"""Is every causal language model type of the installed Transformers, tiny and random, as under eager attention?

    python eval/families.py                          # all types, about a quarter of an hour on two idle cores
    python eval/families.py --types llama,deepseek_v3

Each type gets a random model of four small layers, of all the kinds that the type mixes. Logits of a left-padded
prompt, of a further chunk and of single tokens, and the tokens of greedy and beam search, are compared with those of
the same weights under eager attention and Transformers' own cache. A type runs in a process of its own with a time
limit. Results go to the CSV as they come; a walk that was interrupted goes on where it stopped. `docs/models.md` is
made of them.
"""

from __future__ import annotations

import csv
import multiprocessing
import threading
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

import common
from walk import configs, page

PAGE, RESULTS = Path(__file__).parent.parent / "docs" / "models.md", common.RESULTS / "families.csv"


class Helper:
    """A process that compares one type after the other; one that crashes or hangs is replaced.

    Args:
        limit: seconds that a type may take.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._process: multiprocessing.process.BaseProcess | None = None

    def compare(self, model_type: str) -> dict[str, Any]:
        """An `Outcome` as a dict; of a process that gives none, type, status and message alone."""
        if self._process is None:
            self._start()
        self._pipe.send(model_type)
        try:
            if self._pipe.poll(self.limit):
                return self._pipe.recv()
            told = f"no end after {self.limit:.0f} s"
        except (EOFError, ConnectionError):
            self._process.join()
            told = f"the process ended with code {self._process.exitcode}"
        self.stop()
        return {"model_type": model_type, "status": "error", "message": told}

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()


def serve(pipe: Connection) -> None:
    """Compare the types that arrive, until nobody asks any more."""
    from walk.compare import compare

    while True:
        try:
            pipe.send(compare(pipe.recv()))
        except EOFError:
            return


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Rows of an earlier walk, by type."""
    if not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row["model_type"]: row for row in csv.DictReader(file)}


def walk(
    types: list[str], rows: dict[str, dict[str, Any]], here: dict[str, str], out: Path, jobs: int, limit: float
) -> None:
    """Compare the types, some at a time, and keep `rows` and the CSV up to date."""
    left, helpers = deque(types), [Helper(limit) for _ in range(jobs)]
    lock = threading.Lock()

    def work(helper: Helper) -> None:
        while True:
            with lock:
                if not left:
                    return
                name = left.popleft()
            row = helper.compare(name)
            with lock:
                rows[name] = {**row, **here}
                common.write_csv(out, [rows[key] for key in sorted(rows)])
                progress.set_description(f"{name}: {row['status']}")
                progress.update()

    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(types)) as progress:
        try:
            for done in [pool.submit(work, helper) for helper in helpers]:
                done.result()
        finally:
            left.clear()
            for helper in helpers:
                helper.stop()


def main(
    types: Annotated[str | None, typer.Option(help="Comma-separated; all by default.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Types that are compared at once.")] = 2,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that a type may take.")] = 300.0,
    out: common.OutOption = RESULTS,
    markdown: Annotated[
        Path | None,
        typer.Option(help="The page of results [default: docs/models.md, for all types and the usual CSV]."),
    ] = None,
) -> None:
    """Compare every model type with eager attention."""
    known = [*configs.causal_types(), *configs.multimodal_types()]
    named = types.replace(" ", "").split(",") if types else []
    if unknown := [name for name in named if name not in known]:
        raise typer.BadParameter(f"unknown types {', '.join(unknown)}: choose among {', '.join(known)}")
    here, rows = common.environment(), read(out)
    rows = {name: row for name, row in rows.items() if row["transformers"] == here["transformers"]}
    done = [name for name, row in rows.items() if row["commit"] == here["commit"]]
    walk(named or [name for name in known if name not in done], rows, here, out, jobs, limit)
    results = [rows[name] for name in sorted(rows)]
    counts = Counter(row["status"] for row in results)
    common.show("Model types", [{"result": status, "types": count} for status, count in counts.most_common()])
    bad = [row for row in results if row["status"] in ("wrong", "error")]
    for row in bad:
        print(f"{row['model_type']}: {row['status']}: {row['message']}")
    if markdown or (not named and out == RESULTS):
        target = markdown or PAGE
        target.write_text(page.render(results, set(configs.causal_types())), encoding="utf-8")
        print(f"wrote {target.name}")
    raise typer.Exit(1 if bad else 0)


if __name__ == "__main__":
    common.command(main)()
