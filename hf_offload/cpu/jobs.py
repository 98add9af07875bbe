"""What was handed to the threads of a `Worker`: waited for, asked for its error, or given up."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING

from .runner import Errand, Runner

if TYPE_CHECKING:
    from .worker import Worker


class WorkerError(RuntimeError):
    """A job of a worker thread failed, was lost with its thread, or did not end within `HybridCache(timeout=...)`."""


class Job(ABC):
    """One piece of work in flight; `result` waits for it and raises what it raised.

    Args:
        worker: whose threads run it.
        label: what an error message calls it.
    """

    __slots__ = ("_pid", "_worker", "label")

    def __init__(self, worker: Worker, label: str) -> None:
        self.label = label
        self._worker = worker
        self._pid = worker._pid

    @property
    def foreign(self) -> bool:
        """Whether it was handed over in another process, of which this one is a fork."""
        return self._pid != os.getpid()

    def first(self, count: int) -> Job:
        """What stands for the first of the launches that were posted; where that is not known, for all of them."""
        return self

    @abstractmethod
    def done(self) -> bool:
        """Whether the job has ended, well or not: nothing of it reads or writes any more, nor will."""

    @abstractmethod
    def _wait(self, seconds: float) -> None:
        """Wait until the job has ended, so long at most."""

    @abstractmethod
    def _abandoned(self) -> bool:
        """Whether no thread is left to run it."""

    @abstractmethod
    def _error(self) -> BaseException | None:
        """What the job raised, once it has ended."""

    @abstractmethod
    def _withdraw(self, told: str, *, alone: bool = False) -> WorkerError:
        """Let no thread begin the job any more; it has ended like this, unless a thread is in the midst of it.

        Args:
            told: what is told of it from now on.
            alone: whether no thread can be in the midst of it.
        """

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
            if self.foreign or self._abandoned():
                lost = f"{self.label}: every worker thread has died before the job ended"
                raise self._withdraw(lost, alone=True)
            if left <= 0:
                late = f"{self.label}: not done in time; raise HybridCache(timeout=...) if the machine is slow"
                raise self._withdraw(late)
        error = self._error()
        if isinstance(error, WorkerError):
            raise WorkerError(*error.args)  # one that is kept would keep whoever it passes by
        if error is not None:
            raise WorkerError(f"{self.label} failed: {error!r}") from error


class Called(Job):
    """A callable, which a thread of Python calls."""

    __slots__ = ("_ended", "_gate", "_lock", "_raised", "_running", "_waiting")

    def __init__(self, worker: Worker, label: str) -> None:
        super().__init__(worker, label)
        self._waiting, self._running = True, False
        self._lock = threading.Lock()
        self._raised: BaseException | None = None
        self._ended = False
        self._gate = threading.Lock()  # held until the job has ended; twice as fast as an Event
        self._gate.acquire()

    def done(self) -> bool:
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
        if self._gate.acquire(timeout=seconds):
            self._gate.release()  # for the next who asks

    def _abandoned(self) -> bool:
        return not self._worker.alive()

    def _error(self) -> BaseException | None:
        return self._raised

    def _withdraw(self, told: str, *, alone: bool = False) -> WorkerError:
        with nullcontext() if alone else self._lock:  # in a forked child a lock may be held for good
            self._waiting = False
            if not self._ended and (alone or not self._running):
                self._raised, self._ended = WorkerError(told), True
        return WorkerError(told)


class Posted(Job):
    """Launches that the runner makes: those of an errand up to the last one that counts."""

    __slots__ = ("_ended", "_errand", "_last", "_runner")

    def __init__(self, worker: Worker, runner: Runner, errand: Errand, last: int) -> None:
        super().__init__(worker, errand.label)
        self._runner, self._errand, self._last = runner, errand, last
        self._ended = False

    def first(self, count: int) -> Job:
        return Posted(self._worker, self._runner, self._errand, self._errand.first + count - 1)

    def done(self) -> bool:
        if not self._ended and (self._errand.withdrawn or self._runner.has_ended(self._last)):
            self._ended = True
            if self._last == self._errand.last:
                self._errand.keep = None
        return self._ended

    def _wait(self, seconds: float) -> None:
        self._runner.wait(self._last, seconds)

    def _abandoned(self) -> bool:
        return not self._runner.alive

    def _error(self) -> BaseException | None:
        errand = self._errand
        return errand.error if errand.failed <= self._last else None

    def _withdraw(self, told: str, *, alone: bool = False) -> WorkerError:
        errand = self._errand
        dropped = errand.first if alone else self._runner.drop(errand.first, errand.last)
        errand.withdrawn = dropped == errand.first
        if dropped <= errand.last:
            errand.fail(dropped, WorkerError(told))
        return WorkerError(told)
