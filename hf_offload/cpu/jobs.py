"""What was handed to the threads of a `Worker`: waited for, asked for its error, or given up."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .worker import Worker


class WorkerError(RuntimeError):
    """A job of a worker thread failed, was lost with its thread, or did not end within `HybridCache(timeout=...)`."""


class Job:
    """One callable in flight; `result` waits for it and raises what it raised.

    Args:
        worker: whose threads run it.
        label: what an error message calls it.
    """

    __slots__ = ("_ended", "_gate", "_lock", "_pid", "_raised", "_running", "_waiting", "_worker", "label")

    def __init__(self, worker: Worker, label: str) -> None:
        self.label = label
        self._worker = worker
        self._pid = worker._pid
        self._waiting, self._running = True, False
        self._lock = threading.Lock()
        self._raised: BaseException | None = None
        self._ended = False
        self._gate = threading.Lock()  # held until the job has ended; twice as fast as an Event
        self._gate.acquire()

    @property
    def foreign(self) -> bool:
        """Whether it was handed over in another process, of which this one is a fork."""
        return self._pid != os.getpid()

    def result(self, timeout: float | None = None) -> None:
        """Wait for the job to end.

        Args:
            timeout: seconds to wait at most, less those in which the process was stopped; the worker's own limit by
                default.

        Raises:
            WorkerError: the job raised (its error is the cause), no thread is left to run it, or time is up; it is then
                still at work unless it is `done`.
        """
        left = self._worker.timeout if timeout is None else timeout
        while not self.done():
            pause = min(0.2, left)
            left -= pause  # not what a clock says: a job does nothing either while the process is stopped
            self._wait(pause)
            if self.done():
                break
            if self.foreign or not self._worker.alive():
                lost = f"{self.label}: every worker thread has died before the job ended"
                raise self._withdraw(lost, alone=True)
            if left <= 0:
                late = f"{self.label}: not done in time; raise HybridCache(timeout=...) if the machine is slow"
                raise self._withdraw(late)
        error = self._raised
        if isinstance(error, WorkerError):
            raise WorkerError(*error.args)  # one that is kept would keep whoever it passes by
        if error is not None:
            raise WorkerError(f"{self.label} failed: {error!r}") from error

    def done(self) -> bool:
        """Whether the job has ended, well or not: nothing of it reads or writes any more, nor will."""
        return self._ended

    def begin(self) -> bool:
        """Be at it from now on; false: it was withdrawn."""
        with self._lock:
            self._running, self._waiting = self._waiting, False
            return self._running

    def finish(self, error: BaseException | None) -> None:
        """Have ended."""
        with self._lock:
            self._running, self._raised, self._ended = False, error, True
            self._gate.release()

    def _wait(self, seconds: float) -> None:
        """Wait until the job has ended, so long at most."""
        if self._gate.acquire(timeout=seconds):
            self._gate.release()  # for the next who asks

    def _withdraw(self, told: str, *, alone: bool = False) -> WorkerError:
        """Let no thread begin the job any more; it has ended like this, unless a thread is in the midst of it.

        Args:
            told: what is told of it from now on.
            alone: whether no thread can be in the midst of it.
        """
        with nullcontext() if alone else self._lock:  # in a forked child a lock may be held for good
            self._waiting = False
            if not self._ended and (alone or not self._running):
                self._raised, self._ended = WorkerError(told), True
        return WorkerError(told)
