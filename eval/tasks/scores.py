"""Scores by row and task, their differences to full attention with bootstrap intervals, and the report of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import bootstrap

import common
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
"""By the sample's name."""


def difference(mine: Sequence[Scores], full: Sequence[Scores]) -> dict[str, Any]:
    """What the mean over tasks is more than full attention's, on the samples that both have answered.

    Returns:
        more: mean difference; low, high: where 95 % of the means lie that a percentile bootstrap over the paired
            differences gives (None: a task has fewer than `FEWEST` samples);
        pairs: samples that count. All None or 0 without any.
    """
    every = zip(mine, full, strict=True)
    tasks = [np.array([one[name] - other[name] for name in one if name in other]) for one, other in every]
    pairs = [task for task in tasks if len(task)]
    found: dict[str, Any] = {"more": None, "low": None, "high": None, "pairs": sum(map(len, pairs))}
    if pairs:
        found["more"] = float(np.mean([task.mean() for task in pairs]))
    if pairs and min(map(len, pairs)) >= FEWEST:
        interval = bootstrap(
            pairs, _mean_of_means, n_resamples=RESAMPLES, method="percentile", rng=np.random.default_rng(0)
        ).confidence_interval
        found |= {"low": float(interval.low), "high": float(interval.high)}
    return found


def scores_of(frame: pd.DataFrame, task: str) -> Scores:
    """The scores of a task's samples."""
    mine = frame[frame.task == task]
    return dict(zip(mine["sample"], mine.score, strict=True))


def _mean_of_means(*tasks: np.ndarray, axis: int) -> np.ndarray:
    return np.mean([task.mean(axis) for task in tasks], axis=0)


def summarize(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of the results: for each setup and row one a task, then the averages over tasks.

    score; what it is more than full's, in points with its interval and in percent; same, the share of answers that are
    full's word by word; how many tasks, samples and cut prompts; and what the answers took.
    """
    frame, lines = pd.DataFrame(records), []
    # Tokens that an answer's time was for: its own and, where the question is fed token by token, those of it.
    frame["fed"] = frame.new_tokens + frame.asked.where(frame.setup == "sparse", 0)
    for (setup, row), mine in frame.groupby(["setup", "row"], sort=False):
        full = frame[(frame.setup == setup) & (frame.row == REFERENCE)]
        base_of = full.groupby("task").score.mean()
        answers = full[["task", "sample", "score", "answer"]]
        both = mine.merge(answers, "left", ["task", "sample"], suffixes=("", "_full"))
        names = list(both.task.unique())
        worth = [task for task in names if base_of.get(task, 0) > 20]
        for name, tasks in {**{t: [t] for t in names}, AVERAGE: names, **({WORTH: worth} if worth else {})}.items():
            each = both[both.task.isin(tasks)]
            paired, by_task = each.dropna(subset="score_full"), each.groupby("task", sort=False)
            more = difference(*([scores_of(frame, task) for task in tasks] for frame in (both, full)))
            base = base_of.reindex(tasks).mean()
            measured = each[["cpu_ratio", "kept_share", "retrieved_share"]].astype(float).mean()
            line = {
                "setup": setup, "row": row, "task": name, "score": by_task.score.mean().mean(), **more, "full": base,
                "percent": 100 * more["more"] / base if more["pairs"] and base else None,
                "same": (paired.answer == paired.answer_full).mean(), "tasks": len(tasks), "samples": len(each),
                "tokens": each.tokens.mean(), "cut": int((each.whole > each.tokens).sum()),
                "ms_per_token": 1000 * each.answer_seconds.sum() / each.fed.sum(), **measured,
            }  # fmt: skip
            lines.append({key: None if pd.isna(value) else value for key, value in line.items()})
    return lines


FEEDING = {
    "dense": "The whole prompt is attended exactly; the policy chooses for the tokens of the answer.",
    "sparse": "The question is fed token by token, and the policy chooses for each of its tokens, too; what comes "
    "before it is attended exactly.",
}


def report(title: str, setting: common.Setting, records: Sequence[dict[str, Any]], missing: Sequence[str]) -> None:
    """Write the CSV of all answers, and beside it a table (`.md`), which names the tasks without a sample, too."""
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
    for setup in (setup for setup in SETUPS if any(line["setup"] == setup for line in lines)):
        table: dict[str, dict[str, str]] = {}
        for line in sorted(lines, key=lambda line: line["task"] in (AVERAGE, WORTH)):
            if line["setup"] == setup:
                of_tasks = f" of {line['tasks']} tasks" if line["task"] in (AVERAGE, WORTH) else ""
                counted = f"{line['samples']} ({line['cut']}){of_tasks}"
                cells = table.setdefault(line["task"], {"task": line["task"], "samples (cut)": counted})
                cells[line["row"]] = spoken(line)
        parts += [f"## Question {setup}", FEEDING[setup], common.markdown(list(table.values()))]
    if missing:
        parts.append(f"No samples of {', '.join(missing)} were at hand: they are in no average.")
    return "\n\n".join(parts) + "\n"
