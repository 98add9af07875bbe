"""Threads that run launches without the GIL while the model goes on; what the model waits for runs in its own team.

A job is a callable, which one thread runs; the launches in it may be divided among all cores (`Worker.divide`). The
threads pull jobs from one queue in the order of submission. Everything that goes wrong in a job is raised where its
result is asked for.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from .helpers import Helpers
from .launch import Launch
from .standing import Standing

DELAY = "HF_OFFLOAD_DELAY_MS"
"""Environment variable for tests: milliseconds by which every hand-over between CPU and device is late."""
JOBS = 4
"""Jobs that are under way at once, at most: one that waits for the device should not keep others waiting."""


class WorkerError(RuntimeError):
    """A job of the worker failed, was lost with its thread, or did not end within its time."""


class Job:
    """One piece of work in flight; `result` waits for it and raises what it raised.

    Args:
        worker: whose threads run it.
        label: what an error message calls it.
    """

    __slots__ = ("_ended", "_error", "_gate", "_lock", "_pid", "_running", "_waiting", "_worker", "label")

    def __init__(self, worker: Worker, label: str) -> None:
        self.label = label
        self._worker = worker
        self._waiting, self._running = True, False
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._ended = False
        self._pid = worker._pid
        self._gate = threading.Lock()  # held until the job has ended; twice as fast as an Event
        self._gate.acquire()

    @property
    def foreign(self) -> bool:
        """Whether it was handed over in another process, of which this one is a fork."""
        return self._pid != os.getpid()

    def done(self) -> bool:
        """Whether the job has ended, well or not: nothing of it reads or writes any more, nor will."""
        return self._ended

    def _begin(self) -> bool:
        with self._lock:
            self._running, self._waiting = self._waiting, False
            return self._running

    def _finish(self, error: BaseException | None) -> None:
        with self._lock:
            self._running, self._error, self._ended = False, error, True
            self._gate.release()

    def _withdraw(self, told: str, *, alone: bool = False) -> WorkerError:
        """Let no thread begin the job any more; it has ended like this, unless a thread is in the midst of it.

        Args:
            told: what is told of it from now on.
            alone: whether no thread can be in the midst of it.
        """
        with nullcontext() if alone else self._lock:  # in a forked child a lock may be held for good
            self._waiting = False
            if not self._ended and (alone or not self._running):
                self._error, self._ended = WorkerError(told), True
        return WorkerError(told)

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
        while not self._ended:
            pause = min(0.2, left)
            left -= pause  # not what a clock says: a job does nothing either while the process is stopped
            if self._gate.acquire(timeout=pause):
                self._gate.release()  # for the next who asks
            elif self._ended:  # the gate was in the hands of another who asks
                break
            elif self.foreign or not self._worker.alive():
                lost = f"{self.label}: every worker thread has died before the job ended"
                raise self._withdraw(lost, alone=True)
            elif left <= 0:
                late = f"{self.label}: not done in time; raise HybridCache(timeout=...) if the machine is slow"
                raise self._withdraw(late)
        if isinstance(self._error, WorkerError):
            raise WorkerError(*self._error.args)  # one that is kept would keep whoever it passes by
        if self._error is not None:
            raise WorkerError(f"{self.label} failed: {self._error!r}") from self._error


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
        self._helpers = Helpers(threads - 1, self._jobs)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pool: list[threading.Thread] = []
        self._gone: list[threading.Thread] = []
        """Threads that have ended since `_ensure_threads` looked: to ask each of them takes longer than a hand-over."""
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def alive(self) -> bool:
        """Whether at least one thread is there to run jobs."""
        return any(thread.is_alive() for thread in self._pool)

    def _ensure_threads(self) -> None:
        if self._pid != os.getpid():  # a forked child has none of its parent's threads, and maybe a held queue
            self._queue, self._pool, self._lock, self._pid = queue.SimpleQueue(), [], threading.Lock(), os.getpid()
            self._gone, self._helpers = [], Helpers(self.threads - 1, self._jobs)
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
        job = Job(self, label)
        self._queue.put((job, work, self.delay, keep))
        return job

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
        if self._pool and self._pid == os.getpid():  # all threads meet, which none can in the midst of a job
            meeting = threading.Barrier(self._jobs)
            label = "waiting for all work"
            for job in [self.submit(lambda: meeting.wait(self.timeout), label) for _ in range(self._jobs)]:
                job.result()


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
            if job._begin():
                work()
                job._finish(None)
        except BaseException as error:  # every error, SystemExit too, belongs to the caller of the job
            job._finish(error)
        del item, job, work, keep
