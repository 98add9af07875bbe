"""A progress bar for prompts: `HybridCache(progress=True)`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm  # type: ignore[import-untyped]

DELAY = 5.0
"""Seconds after which the bar of a prompt is shown."""

_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"  # without the count, layers × tokens


class PromptProgress:
    """A progress bar of a forward over a prompt, counted in layers × tokens.

    A prompt in chunks is several forwards, of unknown number: each chunk has its own bar, and the delay counts from the
    first chunk. Without a writable stderr there is no bar.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._layers = self._reached = self._tokens = 0
        self._start = self._spent = 0.0  # seconds: begin of this forward, duration of the chunks before it
        self._broken = False

    def begin(self, layers: int) -> None:
        """Begin a forward through `layers` layers."""
        self._close()
        self._layers, self._reached, self._start = layers, 0, time.perf_counter()

    def attend(self, past: int, tokens: int) -> Callable[[int], None]:
        """Begin the attention of a layer.

        Args:
            past, tokens: cached and new tokens.

        Returns:
            A function to call after each tile with its number of keys.
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
        """End the forward; `finished` is False if it raised."""
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
        """Give up the bar on an error of stderr, which must not end the prompt."""
        try:
            yield
        except (OSError, ValueError):  # a full disk or broken pipe; a closed file
            bar, self._bar, self._broken = self._bar, None, True
            if bar is not None:
                bar.disable = True  # otherwise its destructor would write once more
