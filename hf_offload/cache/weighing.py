"""Which queries of a prompt or append count, on which tokens, and how much: what averages of weights are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_offload.policies.salience import SalienceRule

PULL = 64
"""Tokens that follow one closely count as if a 64th of its weight were theirs."""
PEAK_SHARE = 1 / 3
"""What the weight of one query counts beside a mean over many, which is what thresholds are made for."""
NEAR_STEPS = 64
"""In its first steps, at most a quarter of a window, a token is attended for being near."""


def pull(weights: np.ndarray, run: int) -> np.ndarray:
    """Weights `[…, T]`, or a 64th of the largest among the `run` tokens before each, if that is more."""
    most, reach = np.zeros_like(weights), 1
    most[..., 1:] = weights[..., :-1] / PULL
    while reach < run:
        step = min(reach, run - reach)
        before = most[..., :-step].copy()
        np.maximum(most[..., step:], before, out=most[..., step:])
        reach += step
    np.maximum(weights, most, out=most)
    return most


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `first` to `stop - 1`, which the newest `queries` queries weigh.

    Args:
        largest: whether the largest of a token's weights counts, or their mean over the queries that see it.
        scale: float32 `[stop - first]`, `queries` over those that see the token.
        rate: float32 `[stop - first]`, share of these queries in the average.
        keeps: float32 `[stop - first]` or None: then what is larger counts, so much of the average or what these
            queries say.
        run: tokens that are pulled along by one before them.
    """

    first: int
    stop: int
    queries: int
    largest: bool
    scale: np.ndarray
    rate: np.ndarray
    keeps: np.ndarray | None = None
    run: int = 0

    def take_in(self, average: np.ndarray, weights: np.ndarray) -> None:
        """Bring averages `[B, Hq, T]` up to date with these queries' mean or largest weights, as many."""
        old, new = (part[:, :, self.first : self.stop] for part in (average, weights))
        if self.run:
            new = pull(new, self.run)
        if self.keeps is not None:
            np.maximum(old * self.keeps, new * self.scale, out=old)
        else:
            old += self.rate * (new * self.scale - old)


@dataclass(slots=True)
class Weighing:
    """How far a layer is in a prompt or append, which may come in chunks.

    Args:
        rule: of the policy.
        border: tokens before this one were on the host when the append began; 0 in a prompt, all of which is weighed.
        queries: how many have been joined into what is known of the tokens on the host.
        decoded: whether tokens were decoded since then.
    """

    rule: SalienceRule
    border: int = 0
    queries: int = 0
    decoded: bool = False

    def begin(self, past: int, outside: int) -> None:
        """Tokens arrive behind `past` others, of which the first `outside` are on the host."""
        if self.decoded or not past:
            self.border, self.queries, self.decoded = outside if past else 0, 0, False

    def moving(self, alpha: float, window: int) -> dict[str, Any]:
        """The last arguments of `move_averages` and `update_weights`, with a window of so many tokens."""
        if self.rule.steps == "mean":
            return {"alpha": alpha}
        return {"alpha": alpha, "share": PEAK_SHARE, "after": min(NEAR_STEPS, window // 4)}

    def spans(self, length: int, count: int, alpha: float, *, anew: bool) -> list[Span]:
        """What the `count` newest queries, with `length` tokens in all, say about which tokens.

        Args:
            length, count: tokens.
            alpha: share of a decode step in an average.
            anew: whether it is decided anew which tokens on the host are kept.
        """
        age = length - np.arange(self.border, length)
        met = np.minimum(count, age)
        among = self.rule.prompt_queries or max(round(1 / alpha), 1)
        keeps = None
        if self.border:  # as many steps
            left = (1 - alpha) ** met
            rate = np.maximum(1 - left, met / age)
            keeps = left.astype(np.float32) if self.rule.steps == "max" else None
            among = min(max(round(1 / alpha), 1), self.rule.append_queries or count)
        else:  # the mean over a prompt's last queries
            rate = met / np.minimum(np.maximum(among, met), age)
        queries = min(count, among)
        scale = queries / np.minimum(queries, age)
        spans = [Span(self.border, length, queries, False, scale.astype(np.float32), rate.astype(np.float32), keeps)]
        if self.border and anew:
            spans.append(self._of_append(count))
        return spans

    def _of_append(self, count: int) -> Span:
        """A_cpu: what an append's queries say about the tokens on the host."""
        queries = min(count, self.rule.append_queries or count)
        before, self.queries = self.queries, self.queries + queries
        largest, ones = self.rule.append == "max", np.ones(self.border, np.float32)
        rate, keeps = ones * np.float32(queries / self.queries), ones * np.float32(before > 0) if largest else None
        return Span(0, self.border, queries, largest, ones, rate, keeps, self.rule.append_run)
