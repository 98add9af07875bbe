"""The newest queries that were appended to a layer; who learns from them must know whose tokens' they are."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LastQueries:
    """The last queries of a prompt or append.

    Args:
        values: fp32 `[B, Hq, n, D]`, of tokens that follow one another.
        end: how many tokens a row had when the last of these was in it: that is the query of token `end - 1`.
    """

    values: torch.Tensor
    end: int

    @property
    def start(self) -> int:
        """The number of the token whose query is the first."""
        return self.end - self.values.shape[2]

    def cropped(self, length: int) -> LastQueries | None:
        """Those of a row's first `length` tokens, if there are any."""
        if length >= self.end:
            return self
        return LastQueries(self.values[:, :, : length - self.start], length) if length > self.start else None

    def select_rows(self, rows: torch.Tensor) -> LastQueries:
        """Those of the rows of an index, int64 `[B']`."""
        return LastQueries(self.values[rows.to(self.values.device)], self.end)


def joined(before: LastQueries | None, query: torch.Tensor, past: int, window: int) -> LastQueries:
    """The last `window` queries after an append.

    Args:
        before: those kept so far; they stay only if no token came since, as in a prompt that arrives in chunks.
        query: `[B, Hq, Q, D]`, of the append.
        past: tokens of a row before it.
    """
    queries = query[:, :, -window:].float()
    if before is not None and before.end == past and queries.shape[2] < window:
        queries = torch.cat([before.values, queries], 2)[:, :, -window:]
    return LastQueries(queries.clone(), past + query.shape[2])
