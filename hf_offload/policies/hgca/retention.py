"""`Retention`: the averages of a layer's tokens and those retained by them, as one state (HGCA §3.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hf_offload.policies.hgca.append import AppendProgress, average_capacity
from hf_offload.policies.hgca.retained_tokens import RetainedTokens


@dataclass(frozen=True, slots=True)
class Retention:
    """One state of a layer's averages and retained tokens. A change replaces it as a whole by another one.

    Where arrays and lists of two states are the same objects, these change in place: numbers in `average` of tokens in
    the window, by decode steps, and marks and lists of blocks that leave it, by a job whose state is not adopted yet.
    `cut` takes tokens from both. An append copies arrays and lists, so that the state before it can come back.

    Args:
        window_blocks: blocks of the window; there may be one more, while a job marks the oldest one's tokens.
        evicted: blocks that have left the window.
        average: float32 `[B, Hq, T]`, by token; with two memories those of resident tokens are in `ResidentMass`.
        kept: uint8 `[B, Hkv, T]`, 1 for retained tokens.
        weighed: bool `[B]`, whether averages come from attention. Where they do not, every token that leaves is
            retained.
        retained: K and V of the marked tokens of evicted blocks.
        progress: of the last prompt or append.
    """

    window_blocks: int
    evicted: int
    average: np.ndarray
    kept: np.ndarray
    weighed: np.ndarray
    retained: RetainedTokens
    progress: AppendProgress

    @property
    def outside(self) -> int:
        """Tokens of evicted blocks."""
        return self.evicted * self.retained.block_size

    @property
    def window(self) -> int:
        """Tokens of the window."""
        return self.window_blocks * self.retained.block_size

    def with_room(self, length: int, query_heads: int) -> Retention:
        """With averages and marks for a number of tokens at least; new ones are 0."""
        batch, heads, have = self.average.shape
        if have >= length and heads == query_heads:
            return self
        tokens = average_capacity(length, have, self.retained.block_size)
        average = np.zeros((batch, query_heads, tokens), np.float32)
        kept = np.zeros((*self.kept.shape[:2], tokens), np.uint8)
        if heads == query_heads:
            average[:, :, :have] = self.average
        kept[:, :, : self.kept.shape[2]] = self.kept
        return replace(self, average=average, kept=kept)

    def cut(self, length: int) -> Retention:
        """Without the tokens from `length` on, which are gone from this state's arrays and lists, too."""
        evicted = min(self.evicted, length // self.retained.block_size)
        made = replace(self, evicted=evicted)
        made = replace(made, progress=self.progress.cut(length, made.outside))
        made.clear(length)
        return made

    def clear(self, length: int) -> None:
        """Take from arrays and lists what is not of this state, which has `length` tokens."""
        self.average[:, :, length:] = 0.0
        self.kept[:, :, self.outside :] = 0
        self.retained.truncate(self.outside)

    def rows(self, index: np.ndarray) -> Retention:
        """With the rows of an index, in its order; the lists are reordered in place."""
        heads = self.kept.shape[1]
        self.retained.select_lists((index[:, None] * heads + np.arange(heads)).ravel())
        progress = replace(self.progress, queries=self.progress.queries[index])
        average, kept, weighed = self.average[index], self.kept[index], self.weighed[index]
        return replace(self, average=average, kept=kept, weighed=weighed, progress=progress)

    def fork(self) -> Retention:
        """A copy that shares K and V."""
        return replace(self, average=self.average.copy(), kept=self.kept.copy(), retained=self.retained.fork())
