"""Launches that follow one another within one job: each begins when the one before is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

from .launch import Launch

_PAUSE = 20e-6  # seconds between two looks at what others are still doing


class Stages:
    """A job whose stages any number of threads share.

    Args:
        stages: an iterator that prepares one launch after the other; it goes on when a launch is done, so that it may
            look at what that has written.
    """

    def __init__(self, stages: Iterable[Launch]) -> None:
        self._stages: Iterator[Launch] = iter(stages)
        self._lock = threading.Lock()
        self._made: list[Launch | None] = []
        self._failed = False

    def _stage(self, number: int) -> Launch | None:
        with self._lock:
            if number == len(self._made):
                self._made.append(next(self._stages, None))
            return self._made[number]

    def __call__(self) -> None:
        """Do one participant's share of every stage; when every participant has returned, all are done."""
        number = 0
        try:
            while not self._failed and (launch := self._stage(number)) is not None:
                launch()
                while launch.ticket[1] < launch.tasks and not self._failed:
                    time.sleep(_PAUSE)
                number += 1
        except BaseException:
            self._failed = True
            raise
