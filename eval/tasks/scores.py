"""Scores by row and task, their differences to full attention with bootstrap intervals, and the report of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import bootstrap

import common
from plotting import plot
from tasks.answers import SETUPS

REFERENCE = "full"
"""The row that others are compared with: every token attended, through a HybridCache."""
AVERAGE = "average"
WORTH = "average, full above 20"
"""Over the tasks on which full attention scores above 20: where the model fails anyway, a cache has nothing to lose."""
RESAMPLES = 10_000
FEWEST = 5
"""Samples of each task that an interval takes: of fewer, resampling says too little."""

Scores = dict[str, float]


def difference(mine: Sequence[Scores], full: Sequence[Scores]) -> dict[str, Any]:
    """What the mean over tasks is more than full attention's, on the samples that both have answered.

    The interval is that of a percentile bootstrap over the paired differences: each task's samples are drawn anew.

    Args:
        mine, full: for each task the score of each sample, by its name.

    Returns:
        more: mean difference; low, high: where 95 % of the resampled ones lie (None: a task has fewer than
            `FEWEST` samples);
        pairs: samples that count. All None or 0 without any.
    """
    pairs = [
        np.array([one[name] - other[name] for name in one if name in other])
        for one, other in zip(mine, full, strict=True)
    ]
    pairs = [task for task in pairs if len(task)]
    if not pairs:
        return {"more": None, "low": None, "high": None, "pairs": 0}
    found = {"more": float(np.mean([task.mean() for task in pairs])), "low": None, "high": None}
    found["pairs"] = sum(map(len, pairs))
    if min(map(len, pairs)) >= FEWEST:
        interval = bootstrap(
            pairs, _mean_of_means, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0)
        ).confidence_interval
        found |= {"low": float(interval.low), "high": float(interval.high)}
    return found


def _mean_of_means(*tasks: np.ndarray, axis: int) -> np.ndarray:
    return np.mean([task.mean(axis) for task in tasks], axis=0)


def summarize(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of the results: for each setup and row one a task, then the averages over tasks.

    score; what it is more than full's, in points with its interval and in percent; same, the share of answers that are
    full's word by word; how many tasks, samples and cut prompts; and what the answers took.

    Args:
        records: of `answers.answer`, with task, sample, row, setup and tokens.
    """
    by_task: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for record in records:
        by_task.setdefault((record["setup"], record["row"], record["task"]), {})[record["sample"]] = record
    scores = {key: {name: r["score"] for name, r in found.items()} for key, found in by_task.items()}
    lines = []
    for setup, row in dict.fromkeys((record["setup"], record["row"]) for record in records):
        mine = [task for s, r, task in by_task if (s, r) == (setup, row)]
        worth = [task for task in mine if np.mean(list(scores.get((setup, REFERENCE, task), {"": 0}).values())) > 20]
        over = {task: [task] for task in mine} | {AVERAGE: mine} | ({WORTH: worth} if worth else {})
        for name, tasks in over.items():
            less = difference(*([scores.get((setup, r, t), {}) for t in tasks] for r in (row, REFERENCE)))
            full = [by_task.get((setup, REFERENCE, task), {}) for task in tasks]
            found = [by_task[setup, row, task] for task in tasks]
            pairs = [(r, them.get(key)) for each, them in zip(found, full, strict=True) for key, r in each.items()]
            each = [record for record, _ in pairs]
            base = common.mean(common.mean(r["score"] for r in task.values()) for task in full if task)
            lines.append({
                "setup": setup, "row": row, "task": name,
                "score": common.mean(common.mean(scores[setup, row, task].values()) for task in tasks), **less,
                "full": base, "percent": 100 * less["more"] / base if less["pairs"] and base else None,
                "same": common.mean(r["answer"] == other["answer"] for r, other in pairs if other is not None),
                "tasks": len(tasks), "samples": len(each), "tokens": common.mean(r["tokens"] for r in each),
                "cut": sum(r["whole"] > r["tokens"] for r in each),
                "ms_per_token": 1000 * sum(r["answer_seconds"] for r in each) / sum(map(fed, each)),
                **{s: common.mean(r[s] for r in each) for s in ("cpu_ratio", "kept_share", "retrieved_share")},
            })  # fmt: skip
    return lines


def fed(record: dict[str, Any]) -> int:
    """Tokens that an answer's time was for: its own and, where the question is fed token by token, those of it."""
    return int(record["new_tokens"] + (record["asked"] if record["setup"] == "sparse" else 0))


FEEDING = {
    "dense": "The whole prompt is attended exactly; the policy chooses for the tokens of the answer.",
    "sparse": "The question is fed token by token, and the policy chooses for each of its tokens, too; what comes "
    "before it is attended exactly.",
}


def report(title: str, setting: common.Setting, records: Sequence[dict[str, Any]], missing: Sequence[str]) -> None:
    """Write the CSV, and beside it a table (`.md`) and a picture (`.png`) of the same name.

    Args:
        title: of table and picture.
        records: all answers.
        missing: tasks without a sample, to be told.
    """
    lines = summarize(records)
    setting.write(lines)
    setting.beside(".md").write_text(_markdown(title, lines, missing), encoding="utf-8")
    print(f"wrote {setting.beside('.md')}")
    _draw(title, lines, setting)
    columns = ("setup", "row", "task", "score", "more", "low", "high", "percent", "same", "pairs", "ms_per_token")
    averages = [line for line in lines if line["task"] in (AVERAGE, WORTH)]
    common.show(f"{title}: scores, and what they are more than those of {REFERENCE}", averages, columns)
    if missing:
        print(f"no samples of {', '.join(missing)}")


def spoken(line: dict[str, Any]) -> str:
    """A score and its difference to full attention, as a cell of a table."""
    score = f"{line['score']:.1f}"
    if line["more"] is None or line["row"] == REFERENCE:
        return score
    if line["low"] is None:
        return f"{score} ({line['more']:+.1f})"
    return f"{score} ({line['more']:+.1f}, {line['low']:+.1f} to {line['high']:+.1f})"


def _markdown(title: str, lines: list[dict[str, Any]], missing: Sequence[str]) -> str:
    meta = common.environment()
    parts = [
        f"# {title}",
        f"`{meta['command']}`, commit {meta['commit']}, {meta['cpu']}, GPU {meta['gpu']}, torch {meta['torch']}, "
        f"transformers {meta['transformers']}.",
        f"Scores from 0 to 100. In brackets: what they are more than those of `{REFERENCE}` on the same samples, and "
        "the interval in which 95 % of resampled differences lie (paired bootstrap; none where a task has fewer than "
        f"{FEWEST} samples).",
    ]
    for setup in (setup for setup in SETUPS if any(line["setup"] == setup for line in lines)):
        mine = [line for line in lines if line["setup"] == setup]
        cells = {(line["task"], line["row"]): spoken(line) for line in mine}
        most = {line["task"]: line for line in sorted(mine, key=lambda line: line["samples"])}
        averages = [name for name in (AVERAGE, WORTH) if name in most]
        table = []
        for task in [*(t for t in dict.fromkeys(line["task"] for line in mine) if t not in averages), *averages]:
            of_tasks = f" of {most[task]['tasks']} tasks" if task in averages else ""
            counted = f"{most[task]['samples']} ({most[task]['cut']}){of_tasks}"
            found = {row: cells.get((task, row), "–") for row in dict.fromkeys(line["row"] for line in mine)}
            table.append({"task": task, "samples (cut)": counted, **found})
        parts += [f"## Question {setup}", FEEDING[setup], common.markdown(table)]
    if missing:
        parts.append(f"No samples of {', '.join(missing)} were at hand: they are in no average.")
    return "\n\n".join(parts) + "\n"


def _draw(title: str, lines: list[dict[str, Any]], setting: common.Setting) -> None:
    """A line a row: the mean difference with its interval, and a dot a task."""
    different = [line for line in lines if line["row"] != REFERENCE and line["more"] is not None]
    names = list(dict.fromkeys((line["setup"], line["row"]) for line in different))
    with plot(setting.beside(".png"), figsize=(8, 1.5 + 0.4 * max(len(names), 1))) as axes:
        for place, name in enumerate(names):
            mine = {line["task"]: line for line in different if (line["setup"], line["row"]) == name}
            mean = mine.pop(AVERAGE)
            mine.pop(WORTH, None)
            axes.plot([line["more"] for line in mine.values()], [place] * len(mine), "o", color="0.75")
            if mean["low"] is not None:
                axes.plot([mean["low"], mean["high"]], [place, place], color="C0")
            axes.plot(mean["more"], place, "D", color="C0")
        axes.axvline(0, color="0.3", linewidth=0.8)
        axes.set_yticks(range(len(names)), [f"{row}, {setup}" for setup, row in names])
        axes.invert_yaxis()
        axes.set_xlabel(f"score more than {REFERENCE}: mean over tasks with its 95 % interval, and single tasks (grey)")
        axes.set_title(title)
