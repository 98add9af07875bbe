"""By what the CPU keeps single tokens for each KV head: the knobs of methods that learn it from attention weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Rule = Literal["any", "mean"]

FORGOTTEN = 2.0**-24
"""A query whose share in a moving average is less than this changes no digit of it."""


@dataclass(frozen=True, slots=True)
class SalienceRule:
    """What is kept, and by which weights.

    Args:
        alpha: share of a step in the moving average of attention weights.
        beta: a token is kept for a head if its average exceeds beta over the number of tokens that shared the weights.
        group: how the averages of the query heads of a KV head are joined, `"any"` or `"mean"`.
        append: how the weights of an append's queries are joined, `"max"` or `"mean"`.
        append_queries: so many of an append's last queries are weighed; None: all.
        prompt_queries: None: a prompt's queries count as decode steps do; n: its last n, evenly.
        reevaluate: whether an append decides anew about the tokens on the host.
        sinks: so many first tokens of each row are always kept.
    """

    alpha: float
    beta: float
    group: Rule
    append: str
    append_queries: int | None
    prompt_queries: int | None
    reevaluate: bool
    sinks: int

    @property
    def horizon(self) -> int:
        """How many of the newest queries have a share in the moving average that counts."""
        return 1 if self.alpha >= 1 else math.ceil(math.log(FORGOTTEN) / math.log1p(-self.alpha))
