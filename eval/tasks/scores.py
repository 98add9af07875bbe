"""Scores by row and task, their differences to full attention with bootstrap intervals, and the report of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import bootstrap

import common
import figures
from tasks.answers import SETUPS

REFERENCE = "full"
"""The row that others are compared with: every token attended, through a HybridCache."""
AVERAGE = "average"
WORTH = "average, full above 20"
"""Over the tasks on which full attention scores above 20: where the model fails anyway, a cache has nothing to lose."""
RESAMPLES = 10_000
FEWEST = 5
"""Samples of each task that an interval takes: of fewer, resampling says too little."""

KEYS = ["setup", "task", "sample"]
SHARES = ["cpu_ratio", "kept_share", "retrieved_share"]


def difference(pairs: Sequence[np.ndarray]) -> dict[str, Any]:
    """What the mean over tasks is more than full attention's.

    The interval is that of a percentile bootstrap over the paired differences: each task's samples are drawn anew.

    Args:
        pairs: for each task a row's score less full's, `[samples]`, on the samples that both have answered.

    Returns:
        more: mean difference; low, high: where 95 % of the resampled ones lie (None: a task has fewer than
            `FEWEST` samples);
        pairs: samples that count. All None or 0 without any.
    """
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
    full's word by word; how many tasks, samples and cut prompts; and what the answers took: the time of a token counts
    those of a question that is fed token by token, too.

    Args:
        records: of `answers.answer`, with task, sample, row, setup and tokens.
    """
    frame = pd.DataFrame(records).astype(dict.fromkeys(SHARES, float))
    frame["fed"] = frame.new_tokens + frame.asked.where(frame.setup == "sparse", 0)
    full = frame[frame.row == REFERENCE]
    frame = frame.merge(full[[*KEYS, "score", "answer"]], "left", KEYS, suffixes=("", "_full"))
    frame["less"] = frame.score - frame.score_full
    frame["same"] = (frame.answer == frame.answer_full).where(frame.score_full.notna()).astype(float)
    lines = []
    for (setup, row), mine in frame.groupby(["setup", "row"], sort=False):
        base = full[full.setup == setup].groupby("task").score.mean()
        tasks = list(mine.task.unique())
        worth = [task for task in tasks if base.get(task, 0) > 20]
        over = {task: [task] for task in tasks} | {AVERAGE: tasks} | ({WORTH: worth} if worth else {})
        for name, chosen in over.items():
            each = mine[mine.task.isin(chosen)]
            by_task = each.groupby("task", sort=False)
            less = difference([task.dropna().to_numpy() for _, task in by_task.less])
            of_full = base.reindex(chosen).mean()
            lines.append({
                "setup": setup, "row": row, "task": name, "score": by_task.score.mean().mean(), **less,
                "full": of_full, "percent": 100 * less["more"] / of_full if less["pairs"] and of_full else None,
                "same": each.same.mean(), "tasks": len(chosen), "samples": len(each), "tokens": each.tokens.mean(),
                "cut": (each.whole > each.tokens).sum(),
                "ms_per_token": 1000 * each.answer_seconds.sum() / each.fed.sum(), **each[SHARES].mean(),
            })  # fmt: skip
    return [{name: None if value is not None and value != value else value for name, value in x.items()} for x in lines]


FEEDING = {
    "dense": "The whole prompt is attended exactly; the policy chooses for the tokens of the answer.",
    "sparse": "The question is fed token by token, and the policy chooses for each of its tokens, too; what comes "
    "before it is attended exactly.",
}


def report(title: str, setting: common.Setting, records: Sequence[dict[str, Any]], missing: Sequence[str]) -> None:
    """Write the CSV, and beside it a table (`.md`) of the same name.

    Args:
        title: of the table.
        records: all answers.
        missing: tasks without a sample, to be told.
    """
    lines = summarize(records)
    setting.write(lines)
    setting.beside(".md").write_text(_markdown(title, lines, missing), encoding="utf-8")
    print(f"wrote {setting.beside('.md')}")
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
    for setup in SETUPS:
        by_task: dict[str, dict[str, dict[str, Any]]] = {}
        for line in lines:
            if line["setup"] == setup:
                by_task.setdefault(line["task"], {})[line["row"]] = line
        table = []
        for task, by_row in by_task.items():
            first = next(iter(by_row.values()))
            of_tasks = f" of {first['tasks']} tasks" if task in (AVERAGE, WORTH) else ""
            counted = f"{first['samples']} ({first['cut']}){of_tasks}"
            table.append(" | ".join([task, counted, *map(spoken, by_row.values())]))
        if table:
            titles = " | ".join(["task", "samples (cut)", *by_row])
            parts += [f"## Question {setup}", FEEDING[setup], figures.lines(titles, table, words=2)]
    if missing:
        parts.append(f"No samples of {', '.join(missing)} were at hand: they are in no average.")
    return "\n\n".join(parts) + "\n"
