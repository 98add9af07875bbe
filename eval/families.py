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
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

import typer
from tqdm import tqdm

import common
from walk import configs, page

PAGE, RESULTS = Path(__file__).parent.parent / "docs" / "models.md", common.RESULTS / "families.csv"


def compare(model_type: str) -> dict[str, Any]:
    """An `Outcome` as a dict; runs in a process of its own, since what it imports takes memory."""
    from walk.compare import compare

    return compare(model_type)


class Helper:
    """A process that compares one type after the other; one that crashes or hangs is replaced."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin the process, when it is first asked."""
        self.pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def ask(self, model_type: str, limit: float) -> dict[str, Any]:
        """What `compare` gives; of a process that gives nothing in so many seconds, type, status and message alone."""
        try:
            return self.pool.submit(compare, model_type).result(limit)
        except TimeoutError:
            told = f"no end after {limit:.0f} s"
        except BrokenProcessPool:
            told = "the process ended"
        self.stop()
        self.start()
        return {"model_type": model_type, "status": "error", "message": told}

    def stop(self) -> None:
        """End the process."""
        for process in list((self.pool._processes or {}).values()):
            process.kill()
        self.pool.shutdown()


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
    free: SimpleQueue[Helper] = SimpleQueue()
    for _ in range(jobs):
        free.put(Helper())

    def work(name: str) -> dict[str, Any]:
        helper = free.get()
        row = helper.ask(name, limit)
        free.put(helper)
        return row

    with ThreadPoolExecutor(jobs) as threads, tqdm(total=len(types)) as progress:
        for done in as_completed([threads.submit(work, name) for name in types]):
            row = done.result()
            rows[row["model_type"]] = {**row, **here}
            common.write_csv(out, [rows[key] for key in sorted(rows)])
            progress.set_description(f"{row['model_type']}: {row['status']}")
            progress.update()
    while not free.empty():
        free.get().stop()


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
