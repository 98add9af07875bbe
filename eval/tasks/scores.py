"""Scores by row and task, their differences to full attention with bootstrap intervals, and the report of both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import bootstrap

import common
import figures
from records import environment
from tasks.answers import SETUPS

REFERENCE = "full"
"""The row that others are compared with: every token attended, through a HybridCache."""
AVERAGE = "average"
WORTH = "average, full above 20"
"""Over the tasks on which full attention scores above 20: where the model fails anyway, a cache has nothing to lose."""
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
    found: dict[str, Any] = {"more": None, "low": None, "high": None, "pairs": sum(map(len, pairs))}
    if pairs:
        found["more"] = float(_mean_of_means(*pairs, axis=0))
    if min(map(len, pairs), default=0) >= FEWEST:
        interval = bootstrap(
            pairs, _mean_of_means, n_resamples=10_000, method="percentile", rng=np.random.default_rng(0)
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
    of_full = full.groupby(["setup", "task"]).score.mean().rename("full")
    frame = frame.join(of_full, ["setup", "task"])
    frame["less"] = frame.score - frame.score_full
    frame["same"] = (frame.answer == frame.answer_full).where(frame.score_full.notna()).astype(float)
    lines = []
    for (setup, row), mine in frame.groupby(["setup", "row"], sort=False):
        for name, each in [*mine.groupby("task", sort=False), (AVERAGE, mine), (WORTH, mine[mine.full > 20])]:
            if each.empty:
                continue
            by_task = each.groupby("task", sort=False)
            less = difference([task.dropna().to_numpy() for _, task in by_task.less])
            mean_full = by_task.full.first().mean()
            lines.append({
                "setup": setup, "row": row, "task": name, "score": by_task.score.mean().mean(), **less,
                "full": mean_full, "percent": 100 * less["more"] / mean_full if less["pairs"] and mean_full else None,
                "same": each.same.mean(), "tasks": len(by_task), "samples": len(each), "tokens": each.tokens.mean(),
                "cut": (each.whole > each.tokens).sum(),
                "ms_per_token": 1000 * each.answer_seconds.sum() / each.fed.sum(), **each[SHARES].mean(),
            })  # fmt: skip
    return [{name: None if value is not None and value != value else value for name, value in x.items()} for x in lines]


def report(title: str, setting: common.Setting, records: Sequence[dict[str, Any]], missing: Sequence[str]) -> None:
    """Write the CSV of all answers, and beside it and on the screen tables (`.md`) that tell of missing tasks, too."""
    lines, meta = summarize(records), environment()
    parts = [
        f"# {title}",
        f"`{meta['command']}`, commit {meta['commit']}, {meta['cpu']}, GPU {meta['gpu']}, torch {meta['torch']}, "
        f"transformers {meta['transformers']}.",
        f"Scores from 0 to 100. In brackets: what they are more than those of `{REFERENCE}` on the same samples, and "
        "the interval in which 95 % of resampled differences lie (paired bootstrap; none where a task has fewer than "
        f"{FEWEST} samples).",
    ]
    for setup, of_setup in groupby(lines, itemgetter("setup")):
        by_row = {row: [*of_row] for row, of_row in groupby(of_setup, itemgetter("row"))}
        table = []
        for first, *others in zip(*by_row.values(), strict=True):
            counted = f"{first['samples']} ({first['cut']})"
            counted += f" of {first['tasks']} tasks" if first["tasks"] > 1 else ""
            table.append(" | ".join([first["task"], counted, *map(spoken, [first, *others])]))
        titles = " | ".join(["task", "samples (cut)", *by_row])
        parts += [f"## Question {setup}", SETUPS[setup], figures.lines(titles, table, words=2)]
    if missing:
        parts.append(f"No samples of {', '.join(missing)} were at hand: they are in no average.")
    text = "\n\n".join(parts) + "\n"
    setting.write(lines)
    setting.beside(".md").write_text(text, encoding="utf-8")
    print(text)


def spoken(line: dict[str, Any]) -> str:
    """A score and its difference to full attention, as a cell of a table."""
    score = f"{line['score']:.1f}"
    if line["more"] is None or line["row"] == REFERENCE:
        return score
    interval = "" if line["low"] is None else f", {line['low']:+.1f} to {line['high']:+.1f}"
    return f"{score} ({line['more']:+.1f}{interval})"
