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
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

import common
from walk import configs
from walk.compare import compare

PAGE, RESULTS = Path(__file__).parent.parent / "docs" / "models.md", common.RESULTS / "families.csv"
# A process a type, forked from one that has imported what all need.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["walk.compare"])


HEAD = """# Models

What `HybridCache` does with each model type of Transformers {transformers} that generates text. `{command}` makes this
page from `eval/results/families.csv`, which has each type's class, differences and full message (commit {commit}, torch
{torch}, Python {python}).

**How it is tested.** A random model of each type, with four small layers of all the kinds that the type mixes, runs in
float32 on the CPU. It is compared with the same weights under `eager` attention and Transformers' `DynamicCache`:

- the logits of a left-padded prompt of 41 tokens in three rows, of a chunk of 13 tokens and of 6 single tokens must
    agree up to 1e-4 of the largest logit (most differ by 1e-6);
- greedy and beam search must give the same tokens.

A type is exact if both hold for the policy `full` and for `scout` with a budget that covers the context, each with one
memory and with `tier="split"` and four resident blocks of 8 tokens. As a control, a policy that leaves tokens out must
give other logits; if it does not, the type counts as not run. Weights are random, so this says nothing about what a
small budget loses.

| result | causal language models | multimodal models |
|---|---|---|
{counts}
"""

SECTIONS = {
    "exact": (
        "Exact",
        "A layer is held if its keys and values lie in `HybridCache`'s blocks. Other layers (sliding windows, linear "
        "attention, shared keys and values) keep the layers of Transformers' cache.",
    ),
    "exact by stock fallback": (
        "Exact by stock fallback",
        "Keys and values that do not fit into blocks stay in the layers of Transformers' cache, and a warning says so. "
        "The tokens are right, but nothing is offloaded.",
    ),
    "refused": ("Refused", "`HybridCache` raises when it is made or in the first forward. Use `DynamicCache`."),
    "not run": (
        "Not run",
        "The settings of a tiny model do not suit the type, or it wants an image or another package. "
        "`tests/test_vision.py` runs four vision-language models with an image.",
    ),
    "wrong": ("Wrong", "Other logits or tokens than eager attention: a bug."),
    "error": ("Errors", "Another error than a clear refusal: a bug."),
}

FALLBACK = re.compile(r"because (?:it has |its )?(.*?): (?:it is|they are) exact")
"""What the warning gives as the reason why layers keep Transformers' own cache."""


def render(rows: Sequence[Mapping[str, Any]], causal: set[str]) -> str:
    """The page: a table of counts of causal and other types, then for each result its types in lists by reason."""
    tally = Counter((row["status"], row["model_type"] in causal) for row in rows)
    counts = "\n".join(
        f"| {status} | {tally[status, True]} | {tally[status, False]} |"
        for status in SECTIONS
        if tally[status, True] or tally[status, False] or status == "wrong"
    )
    commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in rows))
    parts = [HEAD.format(**{**rows[0], "commit": commits}, counts=counts)]
    for status, (title, text) in SECTIONS.items():
        groups: dict[str, list[str]] = {}
        for row in rows:
            if row["status"] == status:
                groups.setdefault(_reason(row), []).append(f"`{row['model_type']}`")
        if groups:
            lists = [
                f"**{reason}** ({len(types)}): {', '.join(types)}.\n"
                for reason, types in sorted(groups.items(), key=lambda group: -len(group[1]))
            ]
            parts.append("\n".join([f"## {title}\n", f"{text}\n", *lists]))
    return "\n".join(parts)


def _reason(row: Mapping[str, Any]) -> str:
    """What the types of one list have in common: layers held, or the message without what only this type has."""
    message = " ".join(row["message"].split())
    if row["status"] == "exact":
        return f"{row['held']} of {row['layers']} layers held" + (f"; {message}" if message else "")
    if found := FALLBACK.search(message):
        return found[1]
    if row["status"] == "not run":
        if not row.get("model"):
            return "a tiny model could not be built"
        return "a tiny model does not run with Transformers' own cache" if "own cache" in message else message
    message = re.sub(r"^\w+Error: |; use DynamicCache.*", "", message).replace("<", "&lt;")
    return re.sub(r"list of \d+", "list of", message.replace(row["model"], "the model"))


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
        target = markdown or PAGE
        target.write_text(render(results, set(configs.causal_types())), encoding="utf-8")
        print(f"wrote {target.name}")
    raise typer.Exit(1 if bad else 0)


if __name__ == "__main__":
    common.command(main)()
