"""Which tokens HGCA retains for each KV head, and by which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rule = Literal["any", "mean"]


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """What is kept, and by which weights.

    Args:
        alpha: share of a step in the moving average of attention weights, or what a peak of them loses in a step; None:
            one over the tokens of the window.
        beta: a token is kept for a head if its average exceeds beta over the number of tokens that shared the weights.
        group: how the averages of the query heads of a KV head are joined, `"any"` or `"mean"`.
        steps: how the weights of decode steps are joined, `"max"` or `"mean"`.
        append: how those of an append's queries are, `"max"` or `"mean"`.
        append_queries: so many of an append's last queries are weighed; None: all.
        append_run: so many tokens behind one that an append's queries weigh much are kept with it.
        prompt_queries: so many of a prompt's last queries are weighed; None: 1/alpha.
        reevaluate: whether an append decides anew about the tokens on the host.
        sinks: so many first tokens of each row are always kept.
    """

    alpha: float | None
    beta: float
    group: Rule
    steps: str
    append: str
    append_queries: int | None
    append_run: int
    prompt_queries: int | None
    reevaluate: bool
    sinks: int
