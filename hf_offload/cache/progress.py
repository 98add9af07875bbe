"""A progress bar for prompts: `HybridCache(progress=True)`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]

DELAY = 5.0
"""Seconds that a prompt takes before its bar is shown."""

_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"  # its count, layers × tokens, says little


class PromptProgress:
    """Shows how far a forward has come with its prompt, counted in layers × tokens.

    Prompts that arrive in chunks are several forwards, and nothing tells how many follow: each chunk has a bar of its
    own, and the delay counts from the first of them.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._layers = self._reached = self._tokens = 0
        self._start = self._spent = 0.0  # seconds: when this forward began, and what the chunks before it took

    def begin(self, layers: int) -> None:
        """A forward through so many layers begins."""
        self._close()
        self._layers, self._reached, self._start = layers, 0, time.perf_counter()

    def attend(self, past: int, tokens: int) -> Callable[[int], None]:
        """A layer begins to attend.

        Args:
            past, tokens: cached tokens, and new ones.

        Returns:
            To be called after each tile, with the number of keys in it.
        """
        if self._bar is None:
            self._tokens = tokens
            self._bar = tqdm(
                desc=f"tokens {past + 1:,} to {past + tokens:,}" if past else f"prompt of {tokens:,} tokens",
                total=self._layers * tokens,
                delay=max(DELAY - self._spent, 0.0),
                leave=False,
                bar_format=_FORMAT,
            )
        before, seen = self._reached * self._tokens, 0
        self._reached += 1
        self._bar.set_postfix_str(f"layer {self._reached} of {self._layers}", refresh=False)

        def attended(keys: int) -> None:
            nonlocal seen
            seen += keys
            self._advance(before + tokens * seen // (past + tokens))

        return attended

    def end(self, finished: bool) -> None:
        """The forward ends, or raised."""
        prompt = finished and self._bar is not None
        if prompt:
            self._advance(self._bar.total)
        self._spent = self._spent + time.perf_counter() - self._start if prompt else 0.0
        self._close()

    def _advance(self, position: int) -> None:
        self._bar.update(position - self._bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
