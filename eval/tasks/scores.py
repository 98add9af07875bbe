"""Scores by row and task, and what they differ from full attention's, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from tasks.rows import REFERENCE

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
    by_task: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for record in records:
        by_task.setdefault((record["setup"], record["row"], record["task"]), []).append(record)
    scores = {key: {r["sample"]: r["score"] for r in found} for key, found in by_task.items()}
    tasks = list(dict.fromkeys(record["task"] for record in records))
    lines = []
    for setup, row in dict.fromkeys((record["setup"], record["row"]) for record in records):

        def line(name: str, over: list[str], setup: str = setup, row: str = row) -> dict[str, Any]:
            mine = [scores[setup, row, task] for task in over]
            full = [scores.get((setup, REFERENCE, task), {}) for task in over]
            found = [record for task in over for record in by_task[setup, row, task]]
            less = difference(mine, full)
            means = [float(np.mean(list(task.values()))) for task in mine]
            said = {
                (r["task"], r["sample"]): r["answer"] for r in records if (r["setup"], r["row"]) == (setup, REFERENCE)
            }
            alike = [r["answer"] == said[key] for r in found if (key := (r["task"], r["sample"])) in said]
            base = [np.mean(list(task.values())) for task in full if task]
            return {
                "setup": setup, "row": row, "task": name, "score": float(np.mean(means)), **less,
                "full": float(np.mean(base)) if base else None,
                "percent": 100 * less["more"] / float(np.mean(base)) if less["pairs"] and np.mean(base) else None,
                "same": float(np.mean(alike)) if alike else None,
                "tasks": len(over), "samples": len(found),
                "tokens": float(np.mean([r["tokens"] for r in found])),
                "cut": sum(r["whole"] > r["tokens"] for r in found),
                "ms_per_token": 1000 * sum(r["answer_seconds"] for r in found) / sum(map(fed, found)),
                **{share: _mean([r[share] for r in found]) for share in ("cpu_ratio", "kept_share", "retrieved_share")},
            }  # fmt: skip

        mine = [task for task in tasks if (setup, row, task) in scores]
        lines += [line(task, [task]) for task in mine]
        lines.append(line(AVERAGE, mine))
        worth = [task for task in mine if np.mean(list(scores.get((setup, REFERENCE, task), {"": 0}).values())) > 20]
        if worth:
            lines.append(line(WORTH, worth))
    return lines


def fed(record: dict[str, Any]) -> int:
    """Tokens that an answer's time was for: its own and, where the question is fed token by token, those of it."""
    return int(record["new_tokens"] + (record["asked"] if record["setup"] == "sparse" else 0))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
