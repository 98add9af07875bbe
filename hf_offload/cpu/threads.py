"""Threads whose start raises MemoryError when memory is short.

`threading.Thread.start` instead waits for ever if the new thread dies before it has reported that it runs.
"""

from __future__ import annotations

import _thread
import functools
import os
import weakref
from collections.abc import Callable
from typing import Any

from .free_memory import check_free

_HEAP = 136 << 20
"""Address space of a thread's own malloc arena. A thread without one maps a page for each small allocation, and C++
code ends the process when no page is left."""
_PAUSE = 0.01  # seconds between two checks of a thread that has not begun
_LOOKS = 3000


class Thread:
    """A thread made by `start`; the interpreter does not wait for it at exit."""

    __slots__ = ("_begun", "_ended", "_pid", "_wanted", "ident")

    def __init__(self) -> None:
        self._begun, self._ended, self._pid, self._wanted = _thread.allocate_lock(), _thread.allocate_lock(), 0, True
        self._begun.acquire()
        self._ended.acquire()
        self.ident = 0

    def is_alive(self) -> bool:
        """Whether it runs in this process; a forked child has none of its parent's threads."""
        return self._ended.locked() and self._pid == os.getpid()

    def join(self, timeout: float) -> None:
        """Wait for its end, at most `timeout` seconds."""
        if self.is_alive() and self._ended.acquire(timeout=timeout):
            self._ended.release()  # for other waiters


def start(run: Callable[..., Any], args: tuple[Any, ...], what: str) -> Thread:
    """Start a thread and wait until it runs.

    Args:
        run: the function that the thread calls; its exception goes to stderr.
        args: the arguments of `run`.
        what: the purpose of the thread, for the error.

    Raises:
        MemoryError: the system gives no thread, or the thread died before it began or did not begin in 30 seconds.
    """
    check_free(_HEAP, f"a thread for {what}")
    thread = Thread()
    thread._pid = os.getpid()
    body = functools.partial(_live, thread, run, args)
    lives = weakref.ref(body)  # dies with the thread
    try:
        thread.ident = _thread.start_new_thread(body, ())
        del body
        for _ in range(_LOOKS):
            lost = lives() is None  # checked first: a thread reports its begin before it ends
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
