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
from typing import Any

from ..knobs import check_count, check_number
from .helpers import Helpers
from .jobs import Job, WorkerError
from .launch import Launch
from .threads import Thread, start

__all__ = ["DELAY", "JOBS", "Job", "Worker", "WorkerError"]

DELAY = "HF_OFFLOAD_DELAY_MS"
"""Environment variable for tests: milliseconds by which every hand-over between CPU and device is late."""
JOBS = 4
"""Jobs that are under way at once, at most: one that waits for the device should not keep others waiting."""


MOST_THREADS = 512
"""More than any machine has use for; tens of thousands end the process."""
MOST_SECONDS = 1_000_000
"""The longest timeout, 11 days: no system's clock overflows by it."""


def _delay() -> float:
    """Seconds that `DELAY` asks for.

    Raises:
        ValueError: it is no number of milliseconds.
    """
    text = os.environ.get(DELAY) or "0"
    try:
        delay: Any = float(text)
    except ValueError:
        delay = text
    check_number(DELAY, delay, "a number of milliseconds, which this environment variable wants", least=0, most=60_000)
    return float(delay) / 1000


class Worker:
    """A few threads, started by `ready` or the first job and ended with the object.

    Args:
        threads: how many threads compute (at least 1); as many jobs are under way at once, `JOBS` at most.
        timeout: seconds that `Job.result` waits before it gives up.

    Raises:
        ValueError: `threads`, `timeout` or the environment variable `DELAY` is not allowed.
    """

    def __init__(self, threads: int = 1, timeout: float = 120.0) -> None:
        check_count("threads", threads, what="a number of threads", most=MOST_THREADS)
        check_number("timeout", timeout, "a time in seconds", above=0, most=MOST_SECONDS)
        self.threads = threads
        self.timeout = timeout
        self.delay = _delay()
        """Seconds that each job sleeps before it starts: tests make every hand-over slow with it."""
        self._jobs = min(threads, JOBS)
        self._helpers = Helpers(threads - 1, self._jobs)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pool: list[Thread] = []
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def alive(self) -> bool:
        """Whether at least one thread is there to run jobs."""
        return any(thread.is_alive() for thread in self._pool)

    def _begin_anew(self) -> None:
        """In a forked child, which has none of its parent's threads, and maybe a held queue."""
        self._queue, self._pool, self._lock, self._pid = queue.SimpleQueue(), [], threading.Lock(), os.getpid()
        self._helpers = Helpers(self.threads - 1, self._jobs)

    def _ensure_threads(self) -> None:
        if self._pid != os.getpid():
            self._begin_anew()
        if len(self._pool) == self._jobs and all(thread.is_alive() for thread in self._pool):
            return
        with self._lock:
            self._pool = [thread for thread in self._pool if thread.is_alive()]
            while len(self._pool) < self._jobs:
                self._pool.append(start(_serve, (self._queue,), "work beside the model"))
                weakref.finalize(self, self._queue.put, None)

    def ready(self) -> None:
        """Have all threads there: where memory is short later on, there are no more to be had.

        Raises:
            MemoryError: a thread cannot be started.
        """
        self._ensure_threads()
        self._helpers.ready()

    def submit(self, work: Callable[[], Any], label: str = "job", keep: Any = None) -> Job:
        """Queue a piece of work and return at once.

        Args:
            work: what to call.
            label: what an error message calls it.
            keep: what the work reaches only by address: it lives until the work has ended, whoever drops it.

        Raises:
            MemoryError: a thread was needed and cannot be started.
        """
        self._ensure_threads()
        job = Job(self, label)
        self._queue.put((job, work, self.delay, keep))
        return job

    def divide(self, launch: Launch) -> float:
        """In a job: do all tasks of a launch with all threads that are free.

        Returns:
            Seconds for which threads were at it, all together.
        """
        return self._helpers.divide(launch)

    def settle(self) -> None:
        """Wait until all that was submitted has ended, whoever knows of it.

        Raises:
            WorkerError: a thread is still at work when time is up.
        """
        if self._pid != os.getpid():
            return
        if self._pool:  # all threads meet, which none can in the midst of a job
            meeting = threading.Barrier(self._jobs)
            label = "waiting for all work"
            for job in [self.submit(lambda: meeting.wait(self.timeout), label) for _ in range(self._jobs)]:
                job.result()


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
