"""Results as CSV, as a table in Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from common import origin, show, write_csv
from tasks.answers import SETUPS
from tasks.rows import REFERENCE
from tasks.scores import AVERAGE, FEWEST, WORTH, summarize

matplotlib.use("Agg")
import matplotlib.pyplot as plt

AVERAGES = (AVERAGE, WORTH)
FEEDING = {
    "dense": "The whole prompt is attended exactly; the policy chooses for the tokens of the answer.",
    "sparse": "The question is fed token by token, and the policy chooses for each of its tokens, too; what comes "
    "before it is attended exactly.",
}


def write_report(title: str, out: Path, records: Sequence[dict[str, Any]], missing: Sequence[str]) -> None:
    """Write `OUT` (CSV), and beside it a table (`.md`) and a picture (`.png`) of the same name.

    Args:
        title: of table and picture.
        out: the CSV.
        records: all answers.
        missing: tasks without a sample, to be told.
    """
    lines = summarize(records)
    write_csv(out, lines)
    out.with_suffix(".md").write_text(_markdown(title, lines, missing), encoding="utf-8")
    _plot(title, lines, out.with_suffix(".png"))
    print(f"wrote {out.with_suffix('.md')}\nwrote {out.with_suffix('.png')}")
    columns = ("setup", "row", "task", "score", "more", "low", "high", "percent", "same", "pairs", "ms_per_token")
    averages = [line for line in lines if line["task"] in AVERAGES]
    show(
        f"{title}: scores, and what they are more than those of {REFERENCE}",
        [{c: x[c] for c in columns} for x in averages],
    )
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
    parts = [
        f"# {title}",
        origin(),
        f"Scores from 0 to 100. In brackets: what they are more than those of `{REFERENCE}` on the same samples, and "
        "the interval in which 95 % of resampled differences lie (paired bootstrap; none where a task has fewer than "
        f"{FEWEST} samples).",
    ]
    for setup in (setup for setup in SETUPS if any(line["setup"] == setup for line in lines)):
        mine = [line for line in lines if line["setup"] == setup]
        rows = list(dict.fromkeys(line["row"] for line in mine))
        cells = {(line["task"], line["row"]): spoken(line) for line in mine}
        most = {line["task"]: line for line in sorted(mine, key=lambda line: line["samples"])}
        tasks = [task for task in dict.fromkeys(line["task"] for line in mine) if task not in AVERAGES]
        table = [["task", "samples (cut)", *rows], ["---"] * (len(rows) + 2)]
        for task in [*tasks, *(name for name in AVERAGES if name in most)]:
            counted = f"{most[task]['samples']} ({most[task]['cut']})"
            if task in AVERAGES:
                counted += f" of {most[task]['tasks']} tasks"
            table.append([task, counted, *(cells.get((task, row), "–") for row in rows)])
        parts += [f"## Question {setup}", FEEDING[setup], "\n".join(f"| {' | '.join(row)} |" for row in table)]
    if missing:
        parts.append(f"No samples of {', '.join(missing)} were at hand: they are in no average.")
    return "\n\n".join(parts) + "\n"


def _plot(title: str, lines: list[dict[str, Any]], file: Path) -> None:
    """A line a row: the mean difference with its interval, and a dot a task."""
    names = list(
        dict.fromkeys((x["setup"], x["row"]) for x in lines if x["row"] != REFERENCE and x["more"] is not None)
    )
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.4 * max(len(names), 1)))
    for place, name in enumerate(names):
        mine = {x["task"]: x for x in lines if (x["setup"], x["row"]) == name and x["more"] is not None}
        mean = mine.pop(AVERAGE)
        mine.pop(WORTH, None)
        axes.plot([x["more"] for x in mine.values()], [place] * len(mine), "o", color="0.75", zorder=1)
        if mean["low"] is not None:
            axes.plot([mean["low"], mean["high"]], [place, place], color="C0", zorder=2)
        axes.plot(mean["more"], place, "D", color="C0", zorder=3)
    axes.axvline(0, color="0.3", linewidth=0.8)
    axes.set_yticks(range(len(names)), [f"{row}, {setup}" for setup, row in names])
    axes.invert_yaxis()
    axes.set_xlabel(f"score more than {REFERENCE}: mean over tasks with its 95 % interval, and single tasks (grey)")
    axes.set_title(title)
    figure.savefig(file, dpi=120, bbox_inches="tight")
    plt.close(figure)
