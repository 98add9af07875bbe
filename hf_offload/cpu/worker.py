"""Threads that run launches without the GIL while the model goes on; what the model waits for runs in its own team.

A job is a callable, which one thread runs; the launches in it may be divided among all cores (`Worker.divide`). The
threads pull jobs from one queue in the order of submission. Launches that need no Python between them are posted
instead: a thread of their own makes them, and a job stands for them. Everything that goes wrong in a job is raised
where its result is asked for.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from .futex import FUTEX
from .helpers import Helpers
from .launch import Launch
from .runner import Errand, Runner
from .standing import Standing
from .together import Row

DELAY = "HF_OFFLOAD_DELAY_MS"
"""Environment variable for tests: milliseconds by which every hand-over between CPU and device is late."""
JOBS = 4
"""Jobs that are under way at once, at most: one that waits for the device should not keep others waiting."""


class WorkerError(RuntimeError):
    """A job of the worker failed, was lost with its thread, or did not end within its time."""


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


class _Called(Job):
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


class _Posted(Job):
    """Launches that the runner makes: those of an errand up to the last one that counts."""

    __slots__ = ("_ended", "_errand", "_last", "_runner", "_withdrawn")

    def __init__(self, worker: Worker, runner: Runner, errand: Errand, last: int) -> None:
        super().__init__(worker, errand.label)
        self._runner, self._errand, self._last = runner, errand, last
        self._withdrawn: WorkerError | None = None
        self._ended = False

    def first(self, count: int) -> Job:
        return _Posted(self._worker, self._runner, self._errand, self._errand.first + count - 1)

    def done(self) -> bool:
        if not self._ended and (self._withdrawn is not None or self._runner.has_ended(self._last)):
            self._ended = True
            if self._last == self._errand.last:
                self._errand.keep = None
        return self._ended

    def _wait(self, seconds: float) -> None:
        self._runner.wait(self._last, seconds)

    def _abandoned(self) -> bool:
        return not self._runner.alive

    def _error(self) -> BaseException | None:
        return self._withdrawn or self._errand.error

    def _withdraw(self, told: str, *, alone: bool = False) -> WorkerError:
        if self._runner.drop(self._errand.first, self._errand.last) or alone:
            self._withdrawn = WorkerError(told)
        return WorkerError(told)


class Worker:
    """A few threads, started at the first job and ended with the object.

    Args:
        threads: how many threads compute (at least 1); as many jobs are under way at once, `JOBS` at most.
        timeout: seconds that `Job.result` waits before it gives up.

    Raises:
        ValueError: `threads` or `timeout` is not positive.
    """

    def __init__(self, threads: int = 1, timeout: float = 120.0) -> None:
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise ValueError(f"threads={threads!r} is not a number of threads; use 1 or more")
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ValueError(f"timeout={timeout!r} is not a time in seconds; use a positive one")
        self.threads = threads
        self.timeout = timeout
        self.delay = float(os.environ.get(DELAY, "0")) / 1000
        """Seconds that each job sleeps before it starts: tests make every hand-over slow with it."""
        self._jobs = min(threads, JOBS)
        self._make_crew()
        self._last: Job | None = None
        """What was posted last, where a thread of Python does it."""
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pool: list[threading.Thread] = []
        self._gone: list[threading.Thread] = []
        """Threads that have ended since `_ensure_threads` looked: to ask each of them takes longer than a hand-over."""
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def _make_crew(self) -> None:
        self._helpers = Helpers(self.threads - 1, self._jobs + 1)
        self._runner = Runner(self._helpers)

    def alive(self) -> bool:
        """Whether at least one thread is there to run jobs."""
        return any(thread.is_alive() for thread in self._pool)

    def _begin_anew(self) -> None:
        """In a forked child, which has none of its parent's threads, and maybe a held queue."""
        self._queue, self._pool, self._lock, self._pid = queue.SimpleQueue(), [], threading.Lock(), os.getpid()
        self._gone = []
        self._make_crew()

    def _ensure_threads(self) -> None:
        if self._pid != os.getpid():
            self._begin_anew()
        if len(self._pool) == self._jobs and not self._gone:
            return
        with self._lock:
            gone = [self._gone.pop() for _ in range(len(self._gone))]
            self._pool = [thread for thread in self._pool if thread.is_alive() and thread not in gone]
            while len(self._pool) < self._jobs:
                args, name = (self._queue, self._gone), f"hf_offload-{len(self._pool)}"
                thread = threading.Thread(target=_live, args=args, name=name, daemon=True)
                thread.start()
                self._pool.append(thread)
                weakref.finalize(self, self._queue.put, None)

    def submit(self, work: Callable[[], Any], label: str = "job", keep: Any = None) -> Job:
        """Queue a piece of work and return at once.

        Args:
            work: what to call.
            label: what an error message calls it.
            keep: what the work reaches only by address: it lives until the work has ended, whoever drops it.
        """
        self._ensure_threads()
        job = _Called(self, label)
        self._queue.put((job, work, self.delay, keep))
        return job

    def post(
        self, row: Row, launches: tuple[Standing, ...], numbers: tuple[int, ...], label: str = "launches",
        keep: Any = None,
    ) -> Job:  # fmt: skip
        """Have standing launches made one after the other, and return at once; nobody else makes them meanwhile.

        Args:
            row: keeps them, as for `Row.run`.
            launches: in this order.
            numbers: of all launches one after the other; for each as many as it may change.
            label: what an error message calls them.
            keep: what they reach only by address: it lives until they have ended, whoever drops it.

        Raises:
            ValueError: the arrays of a launch do not cover so much; none is made.
        """
        keep = keep, launches
        if not FUTEX:
            opened = tuple(_numbered(launches, numbers))
            job = self._last = self.submit(functools.partial(self._make, opened), label, keep)
            return job
        if self._pid != os.getpid():
            self._begin_anew()
        errand = self._runner.post(row, launches, numbers, label, keep, self.delay)
        return _Posted(self, self._runner, errand, errand.last)

    @property
    def idle(self) -> bool:
        """Whether all that was posted has ended."""
        return self._runner.idle if FUTEX else self._last is None or self._last.done()

    def _make(self, launches: tuple[Standing, ...]) -> None:
        for launch in launches:
            self.divide(launch)

    def divide(self, work: Launch | Standing) -> float:
        """In a job: do all tasks of a launch, or of a standing one that is open, with all threads that are free.

        Returns:
            Seconds for which threads were at it, all together.
        """
        return self._helpers.divide(work)

    def settle(self) -> None:
        """Wait until all that was submitted has ended, whoever knows of it.

        Raises:
            WorkerError: a thread is still at work when time is up.
        """
        if self._pid != os.getpid():
            return
        newest = self._runner.newest
        if newest is not None:
            posted = _Posted(self, self._runner, newest, newest.last)
            try:
                posted.result()
            except WorkerError:
                if not posted.done():  # otherwise it is told to who asks for the result
                    raise
        if self._pool:  # all threads meet, which none can in the midst of a job
            meeting = threading.Barrier(self._jobs)
            label = "waiting for all work"
            for job in [self.submit(lambda: meeting.wait(self.timeout), label) for _ in range(self._jobs)]:
                job.result()


def _numbered(launches: tuple[Standing, ...], numbers: tuple[int, ...]) -> Iterator[Standing]:
    """Launches that are open for one participant, each with its numbers of those of all."""
    first = 0
    for launch in launches:
        launch.open(1, *numbers[first : first + len(launch.changing)])
        first += len(launch.changing)
        yield launch


def _live(jobs: queue.SimpleQueue[Any], gone: list[threading.Thread]) -> None:
    try:
        _serve(jobs)
    finally:
        gone.append(threading.current_thread())


def _serve(jobs: queue.SimpleQueue[Any]) -> None:
    while True:
        item = jobs.get()
        if item is None:
            return
        job, work, delay, keep = item
        try:
            if delay:
                time.sleep(delay)
            if job.begin():
                work()
                job.finish(None)
        except BaseException as error:  # every error, SystemExit too, belongs to the caller of the job
            job.finish(error)
        del item, job, work, keep
