"""Threads that start, or say that they cannot.

`threading.Thread.start` waits for ever for a thread that dies before it has said that it runs, as one does for which
there is no memory left.
"""

from __future__ import annotations

import _thread
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

from .room import have_room

_HEAP = 136 << 20
"""Address space that a thread wants for a heap of its own. One without takes a page for each little thing, and C++ ends
the process where there are no more."""
_PAUSE = 0.01  # seconds between two looks at a thread that has not begun
_LOOKS = 3000


class Thread:
    """A thread that `start` made; an interpreter that ends does not wait for it."""

    __slots__ = ("_begun", "_ended", "_pid", "_wanted", "ident")

    def __init__(self) -> None:
        self._begun, self._ended, self._pid, self._wanted = _thread.allocate_lock(), _thread.allocate_lock(), 0, True
        self._begun.acquire()
        self._ended.acquire()
        self.ident = 0

    def is_alive(self) -> bool:
        """Whether it runs; a forked child has none of its parent's."""
        return self._ended.locked() and self._pid == os.getpid()

    def join(self, timeout: float) -> None:
        """Wait for its end, so many seconds at most."""
        if self.is_alive() and self._ended.acquire(timeout=timeout):
            self._ended.release()  # for the next who asks


def start(run: Callable[..., Any], args: tuple[Any, ...], what: str) -> Thread:
    """Start a thread.

    Args:
        run: what it calls, with `args`. What that raises is told on stderr.
        what: it is for, for the error.

    Raises:
        MemoryError: the system gives no thread, or it died before it began, or did not begin within half a minute.
    """
    have_room(_HEAP, f"a thread for {what}")
    thread = Thread()
    thread._pid = os.getpid()
    body = functools.partial(_live, thread, run, args)
    lives = weakref.ref(body)  # as long as the thread
    try:
        thread.ident = _thread.start_new_thread(body, ())
        del body
        for _ in range(_LOOKS):
            lost = lives() is None  # looked at first: one that has begun says so before it ends
            if thread._begun.acquire(timeout=_PAUSE):
                return thread
            if lost:
                raise RuntimeError("it died before it began")
        raise RuntimeError("it did not begin in time")
    except BaseException as error:
        thread._wanted = False
        if not isinstance(error, RuntimeError):
            raise
        raise MemoryError(
            f"no thread for {what} could be started: {error}; free memory, or use fewer threads"
        ) from error


def _live(thread: Thread, run: Callable[..., Any], args: tuple[Any, ...]) -> None:
    thread._begun.release()
    try:
        if thread._wanted:
            run(*args)
    finally:
        thread._ended.release()
