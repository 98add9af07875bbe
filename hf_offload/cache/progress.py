"""A progress bar for prompts: `HybridCache(progress=True)`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]

DELAY = 5.0
"""Seconds that a prompt takes before its bar is shown."""

_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"  # its count, layers × tokens, says little


class PromptProgress:
    """Shows how far a forward has come with its prompt, counted in layers × tokens.

    Prompts that arrive in chunks are several forwards, and nothing tells how many follow: each chunk has a bar of its
    own, and the delay counts from the first of them. Where nothing can be written there is no bar.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._layers = self._reached = self._tokens = 0
        self._start = self._spent = 0.0  # seconds: when this forward began, and what the chunks before it took
        self._broken = False

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
        if not past:
            self._spent = 0.0  # another prompt
        if self._bar is None and not self._broken and sys.stderr is not None:
            self._tokens = tokens
            with self._writing():
                self._bar = tqdm(
                    desc=f"tokens {past + 1:,} to {past + tokens:,}" if past else f"prompt of {tokens:,} tokens",
                    total=self._layers * tokens,
                    delay=max(DELAY - self._spent, 0.0),
                    leave=False,
                    bar_format=_FORMAT,
                )
        before, seen = self._reached * self._tokens, 0
        self._reached += 1
        if self._bar is not None:
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
        if self._bar is not None:
            with self._writing():
                self._bar.update(position - self._bar.n)

    def _close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with self._writing():
                bar.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """An error of the file is no error of the prompt: there is no bar from then on."""
        try:
            yield
        except (OSError, ValueError):  # a full disk, a reader that is gone; a closed file
            bar, self._bar, self._broken = self._bar, None, True
            if bar is not None:
                bar.disable = True  # it would write once more when it goes
