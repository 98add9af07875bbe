"""The last queries of a prompt or append, which place the resident set and serve as observation window."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LastQueries:
    """The last queries of a prompt or append.

    Args:
        values: fp32 `[B, Hq, n, D]`, of consecutive tokens.
        end: the last query is that of token `end - 1`.
    """

    values: torch.Tensor
    end: int

    @property
    def start(self) -> int:
        """The token of the first query."""
        return self.end - self.values.shape[2]

    def cropped(self, length: int) -> LastQueries | None:
        """The queries of a row's first `length` tokens, or None if there are none."""
        if length >= self.end:
            return self
        return LastQueries(self.values[:, :, : length - self.start], length) if length > self.start else None

    def select_rows(self, rows: torch.Tensor) -> LastQueries:
        """The queries of the rows of an index, int64 `[B']`."""
        return LastQueries(self.values[rows.to(self.values.device)], self.end)


def joined(before: LastQueries | None, query: torch.Tensor, past: int, window: int) -> LastQueries:
    """The last `window` queries after an append.

    Args:
        before: the queries so far; they are kept only if the append follows them directly, as chunks of a prompt do.
        query: `[B, Hq, Q, D]`, the queries of the append.
        past: tokens of a row before the append.
    """
    queries = query[:, :, -window:].float()
    if before is not None and before.end == past and queries.shape[2] < window:
        queries = torch.cat([before.values, queries], 2)[:, :, -window:]
    return LastQueries(queries.clone(), past + query.shape[2])
