"""Which queries of a prompt or append count, on which tokens, and how much: what averages of weights are made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_offload.policies.salience import SalienceRule


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `first` to `stop - 1`, and how the newest `queries` queries' weights on them are joined.

    Args:
        share: what each query counts in a sum, `[queries]`; None: the largest weight is taken.
        decay: what the averages that are there are multiplied with before.
    """

    first: int
    stop: int
    queries: int
    share: np.ndarray | None
    decay: float


@dataclass(slots=True)
class Weighing:
    """How far a layer is in a prompt or append, which may come in chunks.

    Args:
        rule: of the policy.
        border: tokens before this one were on the host when the append began; 0 in a prompt, all of which is weighed as
            if it were in the window.
        queries: how many have been joined into what is known of the tokens on the host; in a prompt, of all tokens.
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

    def spans(self, length: int, count: int, *, anew: bool) -> list[Span]:
        """What the `count` newest queries, with `length` tokens in all, say about which tokens.

        Args:
            length, count: tokens.
            anew: whether it is decided anew which tokens on the host are kept.
        """
        if self.border:
            window = self._as_decoded(self.border, length, count)
            return [window, self._of_append(count)] if anew else [window]
        among = self.rule.prompt_queries
        return [self._as_decoded(0, length, count) if among is None else self._evenly(length, min(count, among), among)]

    def _as_decoded(self, first: int, length: int, count: int) -> Span:
        """The moving average over the queries; those whose share would be nothing are left out."""
        alpha, queries = self.rule.alpha, min(count, self.rule.horizon)
        share = alpha * (1 - alpha) ** np.arange(queries - 1, -1, -1, dtype=np.float64)
        return Span(first, length, queries, share.astype(np.float32), (1 - alpha) ** count)

    def _evenly(self, length: int, queries: int, among: int) -> Span:
        """The mean over a prompt's last `among` queries, of which these are the newest."""
        self.queries = min(self.queries + queries, among)
        share = np.full(queries, 1 / self.queries, np.float32)
        return Span(0, length, queries, share, 1 - queries / self.queries)

    def _of_append(self, count: int) -> Span:
        """A_cpu: what an append's queries say about the tokens on the host."""
        queries = min(count, self.rule.append_queries or count)
        before, self.queries = self.queries, self.queries + queries
        if self.rule.append == "max":
            return Span(0, self.border, queries, None, 1.0 if before else 0.0)
        share = np.full(queries, 1 / self.queries, np.float32)
        return Span(0, self.border, queries, share, before / self.queries)
