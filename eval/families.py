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
from typing import Annotated, Any

import typer
from tqdm import tqdm

import common
import figures
from walk import configs
from walk.compare import compare

PAGE, RESULTS = Path(__file__).parent.parent / "docs" / "models.md", common.RESULTS / "families.csv"
# A process a type, forked from one that has imported what all need.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["walk.compare"])


def ask(model_type: str, limit: float) -> dict[str, Any]:
    """What `compare` gives; of a process that gives nothing in so many seconds, type, status and message alone."""
    pool = ProcessPoolExecutor(1, FORKS)
    try:
        return pool.submit(compare, model_type).result(limit)
    except (TimeoutError, BrokenProcessPool) as error:
        told = f"no end after {limit:.0f} s" if isinstance(error, TimeoutError) else "the process ended"
        for process in list((pool._processes or {}).values()):
            process.kill()
        return {"model_type": model_type, "status": "error", "message": told}
    finally:
        pool.shutdown()


def main(
    types: Annotated[str | None, typer.Option(help="Comma-separated; all by default.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Types that are compared at once.")] = 2,
    limit: Annotated[float, typer.Option(min=1, help="Seconds that a type may take.")] = 300.0,
    out: common.OutOption = RESULTS,
    markdown: Annotated[Path | None, typer.Option(help="The page [docs/models.md, for all types and CSV].")] = None,
) -> None:
    """Compare every model type with eager attention."""
    known = [*configs.causal_types(), *configs.multimodal_types()]
    named = common.listed(types, known, "types") if types else []
    if markdown and out.name != RESULTS.name:
        raise typer.BadParameter(f"--markdown {markdown} is made of {RESULTS.name}: give --out FOLDER/{RESULTS.name}")
    here, rows = common.environment(), {}
    if out.exists():  # of an earlier walk
        with out.open(newline="", encoding="utf-8") as file:
            earlier = list(csv.DictReader(file))
        rows = {row["model_type"]: row for row in earlier if row["transformers"] == here["transformers"]}
    done = [name for name, row in rows.items() if row["commit"] == here["commit"]]
    todo = named or [name for name in known if name not in done]
    with ThreadPoolExecutor(jobs) as threads, tqdm(total=len(todo)) as progress:
        for asked in as_completed([threads.submit(ask, name, limit) for name in todo]):
            row = asked.result()
            rows[row["model_type"]] = {**row, **here}
            common.write_csv(out, [rows[key] for key in sorted(rows)])
            progress.set_description(f"{row['model_type']}: {row['status']}")
            progress.update()
    results = [rows[name] for name in sorted(rows)]
    counts = Counter(row["status"] for row in results)
    common.show("Model types", [{"result": status, "types": count} for status, count in counts.most_common()])
    bad = [row for row in results if row["status"] in ("wrong", "error")]
    for row in bad:
        print(f"{row['model_type']}: {row['status']}: {row['message']}")
    if markdown or (not named and out == RESULTS):
        figures.RESULTS, target = out.parent, markdown or PAGE
        target.write_text(figures.write(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {target.name}")
    raise typer.Exit(1 if bad else 0)


if __name__ == "__main__":
    common.command(main)()
