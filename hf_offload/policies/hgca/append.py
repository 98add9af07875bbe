"""Which queries of a prompt or append count, on which tokens, and how much: what averages of weights are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_offload.policies.hgca.rule import RetentionRule

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


def newest(valid: np.ndarray, among: int) -> np.ndarray:
    """Each row's last `among` queries that are no padding, by marks `[B, Q]`: bool `[B, Q']`, of the last Q'."""
    real: np.ndarray = valid != 0
    behind = real[:, ::-1].cumsum(1)[:, ::-1]
    real &= behind <= among
    last: np.ndarray = real[:, int(real.any(0).argmax()) if real.any() else -1 :]
    return last


def averages_for(length: int, have: int, block_size: int) -> int:
    """Tokens that there are averages of when there were `have` and rows get `length` tokens."""
    return -(-max(length, have * 5 // 4, 1024) // block_size) * block_size


def _of_tokens(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32)[None]


def _of_rows(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32)[:, None]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `first` to `stop - 1`, which the newest queries weigh.

    Args:
        first, stop: tokens.
        asking: bool `[B, Q]`, which of the newest Q queries count; in a row where none does, averages stay.
        largest: whether the largest of a token's weights counts, or their mean over the queries that see it.
        scale: float32 `[B, T]`, where one row or token stands for all: Q over those that count and see the token.
        rate: as `scale`: share of these queries in the average.
        keeps: as `scale`, or None: then what is larger counts, so much of the average or what these queries say.
        near: so many tokens up to a query get nothing from it.
        run: tokens that are pulled along by one before them.
    """

    first: int
    stop: int
    asking: np.ndarray
    largest: bool
    scale: np.ndarray
    rate: np.ndarray
    keeps: np.ndarray | None = None
    near: int = 0
    run: int = 0

    @property
    def queries(self) -> int:
        """How many queries may count in any row."""
        count: int = self.asking.shape[1]
        return count

    @property
    def coefficient(self) -> np.ndarray | None:
        """What each query's weights count in their mean, float32 `[Q]`; None for the largest of them."""
        return None if self.largest else np.full(self.queries, 1 / self.queries, np.float32)

    def pick(self, lse: np.ndarray) -> None:
        """Leave the queries out that do not count, in their log-sum-exp `[B, Hq, Q]`."""
        np.copyto(lse, -np.inf, where=~self.asking[:, None])

    def take_in(self, average: np.ndarray, weights: np.ndarray) -> None:
        """Bring averages `[B, Hq, T]` up to date with these queries' mean or largest weights, as many."""
        old, new = (part[:, :, self.first : self.stop] for part in (average, weights))
        if self.run:
            new = pull(new, self.run)
        new = new * self.scale[:, None]
        if self.keeps is None:
            moved = old + self.rate[:, None] * (new - old)
        else:
            moved = np.maximum(old * self.keeps[:, None], new)
        asked: np.ndarray = np.any(self.asking, axis=1, keepdims=True)
        np.copyto(old, moved, where=asked[:, :, None])


@dataclass(slots=True)
class AppendProgress:
    """How far a layer is in a prompt or append, which may come in chunks.

    Args:
        rule: of the policy.
        queries: int64 `[B]`, how many have been joined into what is known of the tokens on the host; never changed in
            place.
        border: tokens before this one were on the host when the append began; 0 in a prompt, all of which is weighed.
        prompt: whether it is a prompt: nothing has been decoded yet.
        end: tokens when its last chunk had come, behind which a further one goes on; -1: none does.
    """

    rule: RetentionRule
    queries: np.ndarray
    border: int = 0
    prompt: bool = True
    end: int = 0

    def begin(self, past: int, length: int, outside: int) -> bool:
        """Tokens arrive behind `past` others, which makes `length`; is it no further chunk?

        The first `outside` tokens are on the host.
        """
        anew = past != self.end or not past
        if anew:
            self.border, self.prompt = outside if past else 0, not past
            self.queries = np.zeros_like(self.queries)
        self.end = length
        return anew

    def select_rows(self, rows: np.ndarray) -> None:
        """Keep the rows of an index, in its order."""
        self.queries = self.queries[rows]

    def near(self, window: int) -> int:
        """A token's first steps, in a window of so many tokens, which say nothing of it."""
        return 0 if self.rule.steps == "mean" else min(NEAR_STEPS, window // 4)

    def moving(self, alpha: float, window: int) -> dict[str, Any]:
        """The last arguments of `move_averages` and `update_weights`, with a window of so many tokens."""
        if self.rule.steps == "mean":
            return {"alpha": alpha}
        return {"alpha": alpha, "share": PEAK_SHARE, "after": self.near(window)}

    def spans(self, valid: np.ndarray, length: int, alpha: float, window: int, *, anew: bool) -> list[Span]:
        """What the newest queries, with `length` tokens in all, say about which tokens.

        Args:
            valid: uint8 `[B, count]`, which of the newest tokens are no padding.
            length: tokens.
            alpha: share of a decode step in an average.
            window: tokens of the window.
            anew: whether it is decided anew which tokens on the host are kept.
        """
        count, near = valid.shape[1], self.near(window)
        age = length - np.arange(self.border, length)
        met, far = np.minimum(count, age), np.maximum(age - near, 0)
        met_far = np.minimum(count, far)
        keeps = None
        if self.prompt:  # the mean over its last queries
            among = self.rule.prompt_queries or max(round(1 / alpha), 1)
            rate = met_far / np.maximum(np.minimum(np.maximum(among, met_far), far), 1)
        else:  # as many steps
            among = min(max(round(1 / alpha), 1), self.rule.append_queries or count)
            left = (1 - alpha) ** met
            rate = np.maximum(1 - left, met / age)
            keeps = _of_tokens(left) if self.rule.steps == "max" else None
        asking = newest(valid, among)
        queries = asking.shape[1]
        behind = np.pad(asking[:, ::-1].cumsum(1), ((0, 0), (1, 0)))
        scale = (queries / np.maximum(behind[:, np.minimum(queries, far)], 1)).astype(np.float32)
        spans = [Span(self.border, length, asking, False, scale, _of_tokens(rate), keeps, near)]
        if self.border and anew:
            spans.append(self._of_append(valid))
        return spans

    def _of_append(self, valid: np.ndarray) -> Span:
        """A_cpu: what an append's queries say about the tokens on the host."""
        among, run = self.rule.append_queries, self.rule.append_run
        asking = newest(valid, among or valid.shape[1])
        before, mine = self.queries, asking.sum(1)
        self.queries = before + mine
        most = np.minimum(self.queries, among or self.queries)
        rate = _of_rows(mine / np.maximum(most, 1))
        if self.rule.append == "mean":
            scale = _of_rows(asking.shape[1] / np.maximum(mine, 1))
            return Span(0, self.border, asking, False, scale, rate, run=run)
        # Weights of earlier chunks' queries cannot be told from one another: as some are too old to count, all fade.
        keeps = _of_rows((most - mine) / np.maximum(np.minimum(before, most), 1))
        return Span(0, self.border, asking, True, np.ones((1, 1), np.float32), rate, keeps, run=run)
