"""HGCA's re-evaluation: how a prompt's or append's queries change the average weight A of each token (section 3.2.2).

Two spans of tokens are weighed. Tokens of the window take the new queries in as if each were a decode step. In an
append, tokens on the host get a new average, A_cpu, of the append's own queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

Rule = Literal["any", "mean"]
"""How the averages of a group's query heads are joined: their largest, or their mean."""
FOLLOWER_SHARE = 1 / 64
"""Share of a token's weight that the tokens right behind it count as theirs (`append_run`)."""
PEAK_SHARE = 1 / 3
"""Factor of one query's weight in a decaying maximum: thresholds are made for a mean over many queries."""
SKIPPED_STEPS = 64
"""A token's first steps, at most a quarter of a window, in which it is attended for being new; peaks leave them out."""


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """Which tokens are retained, and by which weights: knobs of `HGCA`, which describes them.

    Args:
        alpha: None: 1 / (tokens of the window).
        beta: a token is kept for a head if its average exceeds beta / (tokens that shared the weights).
        group: how the averages of a KV head's query heads are joined, `"any"` or `"mean"`.
        steps: how the weights of decode steps are joined, `"max"` or `"mean"`.
        append: how those of an append's queries are joined, `"max"` or `"mean"`.
        append_queries: number of an append's last queries that count; None: all.
        append_run: number of tokens behind a strongly attended one that are kept with it.
        prompt_queries: number of a prompt's last queries that count; None: 1/alpha.
        reevaluate: whether an append decides anew which tokens on the host are kept.
        sinks: number of each row's first tokens, which are always kept.
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


def mark_above(average: np.ndarray, valid: np.ndarray, bars: np.ndarray, kv_heads: int, rule: Rule) -> np.ndarray:
    """Mark the valid tokens whose average, joined over a KV head's query heads, is above the bar: bool `[B, Hkv, t]`.

    Args:
        average: float32 `[B, Hq, t]`, finite where a token is valid.
        valid: uint8 `[B, t]`; bars: float32 `[B, t]`.
        kv_heads: number of KV heads.
        rule: how averages are joined.
    """
    batch, query_heads, tokens = average.shape
    group = query_heads // kv_heads
    grouped = average.reshape(batch, kv_heads, group, tokens)
    joined = grouped.max(2) if rule == "any" else grouped.sum(2) * (np.float32(1) / np.float32(group))
    marks: np.ndarray = (joined > bars[:, None]) & (valid[:, None] != 0)
    return marks


def weigh_followers(weights: np.ndarray, run: int) -> np.ndarray:
    """The larger of each token's weight and 1/64 of the largest among the `run` tokens before it; `[…, T]`."""
    most, reach = np.zeros_like(weights), 1
    most[..., 1:] = weights[..., :-1] * FOLLOWER_SHARE
    while reach < run:
        step = min(reach, run - reach)
        before = most[..., :-step].copy()
        np.maximum(most[..., step:], before, out=most[..., step:])
        reach += step
    np.maximum(weights, most, out=most)
    return most


def newest_queries(valid: np.ndarray, most: int) -> np.ndarray:
    """Each row's last `most` queries that are no padding, by marks `[B, Q]`: bool `[B, Q']`, of the last Q'."""
    real: np.ndarray = valid != 0
    behind = real[:, ::-1].cumsum(1)[:, ::-1]
    real &= behind <= most
    last: np.ndarray = real[:, int(real.any(0).argmax()) if real.any() else -1 :]
    return last


def average_capacity(length: int, have: int, block_size: int) -> int:
    """Tokens to allocate averages for when rows grow to `length` tokens and there are `have` averages."""
    return -(-max(length, have * 5 // 4, 1024) // block_size) * block_size


def _by_token(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32)[None]


def _by_row(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32)[:, None]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `first` to `stop - 1`, and how the newest queries change their averages.

    Args:
        first, stop: tokens.
        counted: bool `[B, Q]`, which of the newest Q queries count; a row where none does keeps its averages.
        largest: whether the largest of a token's weights counts, or their mean over the queries that see it.
        scale: float32 `[B, T]`, with 1 for B or T where all are alike: Q / (queries that count and see the token).
        rate: as `scale`: share of these queries in the average.
        decay: None: A ← A + rate·(new − A). Otherwise, as `scale`: A ← max(decay·A, new).
        skipped: number of the newest tokens that a query sees, itself among them, that get nothing from it.
        run: number of tokens behind one that get a share of its weight (`weigh_followers`).
    """

    first: int
    stop: int
    counted: np.ndarray
    largest: bool
    scale: np.ndarray
    rate: np.ndarray
    decay: np.ndarray | None = None
    skipped: int = 0
    run: int = 0

    @property
    def queries(self) -> int:
        """How many queries may count in any row."""
        return int(self.counted.shape[1])

    @property
    def coefficient(self) -> np.ndarray | None:
        """Factor of each query's weights in their mean, float32 `[Q]`; None for the largest of them."""
        return None if self.largest else np.full(self.queries, 1 / self.queries, np.float32)

    def leave_out(self, lse: np.ndarray) -> None:
        """Write −inf for the queries that do not count into their log-sum-exp `[B, Hq, Q]`."""
        np.copyto(lse, -np.inf, where=~self.counted[:, None])

    def update(self, average: np.ndarray, weights: np.ndarray) -> None:
        """Update averages `[B, Hq, T]` with these queries' mean or largest weights, of the same shape."""
        old, new = (part[:, :, self.first : self.stop] for part in (average, weights))
        if self.run:
            new = weigh_followers(new, self.run)
        new = new * self.scale[:, None]
        if self.decay is None:
            moved = old + self.rate[:, None] * (new - old)
        else:
            moved = np.maximum(old * self.decay[:, None], new)
        any_counted: np.ndarray = np.any(self.counted, axis=1, keepdims=True)
        np.copyto(old, moved, where=any_counted[:, :, None])


@dataclass(frozen=True, slots=True)
class AppendProgress:
    """How far a layer is in a prompt or append, which may come in chunks.

    Args:
        rule: of the policy.
        queries: int64 `[B]`, how many are in A_cpu so far.
        border: tokens before this one were on the host when the append began; 0 in a prompt, all of which is weighed.
        prompt: whether it is a prompt: nothing has been decoded yet.
        begin: tokens before its first chunk: their earlier averages are gone.
        end: tokens after its last chunk; a further chunk starts there. −1: none can follow.
    """

    rule: RetentionRule
    queries: np.ndarray
    border: int = 0
    prompt: bool = True
    begin: int = 0
    end: int = 0

    def chunk(self, past: int, length: int, outside: int) -> AppendProgress:
        """With a chunk that brings the rows from `past` to `length` tokens, the first `outside` of them on the host."""
        if past and past == self.end:
            return replace(self, end=length)
        return AppendProgress(self.rule, np.zeros_like(self.queries), outside if past else 0, not past, past, length)

    def cut(self, length: int, outside: int) -> AppendProgress:
        """Without the tokens from `length` on, and with `outside` tokens on the host; a later chunk begins anew."""
        return replace(self, border=min(self.border, outside), end=self.end if length >= self.end else -1)

    def alpha(self, window: int) -> float:
        """Share of a step in the averages (algorithm 1, line 6), in a window of that many tokens."""
        return self.rule.alpha or 1 / window

    def skipped_steps(self, window: int) -> int:
        """A token's first steps whose weights do not count, in a window of that size."""
        return 0 if self.rule.steps == "mean" else min(SKIPPED_STEPS, window // 4)

    def step_update(self, window: int) -> dict[str, Any]:
        """How a decode step updates averages: the last arguments of `move_averages` and `update_weights`."""
        if self.rule.steps == "mean":
            return {"alpha": self.alpha(window)}
        return {"alpha": self.alpha(window), "share": PEAK_SHARE, "after": self.skipped_steps(window)}

    def spans(
        self, valid: np.ndarray, length: int, window: int, *, anew: bool
    ) -> tuple[list[Span], AppendProgress]:  # fmt: skip
        """Which averages the newest queries change, and how; and the progress with these queries.

        Args:
            valid: uint8 `[B, Q]`, which of the newest tokens are no padding.
            length: tokens, the newest among them.
            window: tokens of the window.
            anew: whether it is decided anew which tokens on the host are kept.
        """
        count, skipped, alpha = valid.shape[1], self.skipped_steps(window), self.alpha(window)
        # By token: its age in steps, and how many of the new queries it has met; both once more without skipped steps.
        age = length - np.arange(self.border, length)
        met, counted_age = np.minimum(count, age), np.maximum(age - skipped, 0)
        counted_met = np.minimum(count, counted_age)
        decay = None
        if self.prompt:  # the mean over its last queries
            most = self.rule.prompt_queries or max(round(1 / alpha), 1)
            rate = counted_met / np.maximum(np.minimum(np.maximum(most, counted_met), counted_age), 1)
        else:  # as many decode steps
            most = min(max(round(1 / alpha), 1), self.rule.append_queries or count)
            left = (1 - alpha) ** met
            rate = np.maximum(1 - left, met / age)
            decay = _by_token(left) if self.rule.steps == "max" else None
        counted = newest_queries(valid, most)
        queries = counted.shape[1]
        behind = np.pad(counted[:, ::-1].cumsum(1), ((0, 0), (1, 0)))
        scale = (queries / np.maximum(behind[:, np.minimum(queries, counted_age)], 1)).astype(np.float32)
        spans = [Span(self.border, length, counted, False, scale, _by_token(rate), decay, skipped)]
        if not (self.border and anew):
            return spans, self
        on_host, asked = self._host_span(valid)
        return [*spans, on_host], replace(self, queries=asked)

    def _host_span(self, valid: np.ndarray) -> tuple[Span, np.ndarray]:
        """A_cpu: the weights that an append's queries give to the tokens on the host; how many are in it now, `[B]`."""
        most, run = self.rule.append_queries, self.rule.append_run
        counted = newest_queries(valid, most or valid.shape[1])
        before, new = self.queries, counted.sum(1)
        asked = before + new
        joined = np.minimum(asked, most or asked)
        rate = _by_row(new / np.maximum(joined, 1))
        if self.rule.append == "mean":
            scale = _by_row(counted.shape[1] / np.maximum(new, 1))
            return Span(0, self.border, counted, False, scale, rate, run=run), asked
        # Weights of earlier chunks' queries are indistinguishable: as some are too old to count, all fade.
        decay = _by_row((joined - new) / np.maximum(np.minimum(before, joined), 1))
        return Span(0, self.border, counted, True, np.ones((1, 1), np.float32), rate, decay, run=run), asked
