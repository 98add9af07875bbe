"""The thread pool for work beside the model's thread: jobs, and helpers that share a job's launches.

A job is a callable that one thread runs. The threads take jobs from one queue in the order of submission. An exception
in a job is raised by `Job.result`. (Launches that the model waits for run on torch's own team instead:
`openmp_team.py`.)

`Worker.divide` shares a launch of a job among all cores. Helper threads run compiled code only, so that a job takes the
GIL from the model's thread once, not once for each core. A call is a row of int64; the upper half of its state is the
number of helpers still invited, the lower half the number of helpers inside. The caller works too. The first to find no
task left withdraws the invitations, and the caller waits until no helper is inside.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from hf_offload.cpu.futex import FUTEX, LOWER, now, wait_for_change, wake
from hf_offload.cpu.launch import Array, Launch, jit, jit_for_python, kernel
from hf_offload.cpu.memory import add_to, address_of, count_up, hold, peek, swap_if
from hf_offload.cpu.openmp_team import call_entry
from hf_offload.cpu.serving import nap, pause
from hf_offload.cpu.threads import Thread, start
from hf_offload.knobs import check_count, check_number


class WorkerError(RuntimeError):
    """A worker thread's job failed, lost its thread, or did not end within `HybridCache(timeout=...)`."""


class Job:
    """A submitted callable; `result` waits for it and raises its exception.

    Args:
        worker: the owner of the threads.
        label: its name in error messages.
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
        self._gate = threading.Lock()  # held until the job ends; twice as fast as an Event
        self._gate.acquire()

    @property
    def foreign(self) -> bool:
        """Whether it was submitted before a fork, in the parent process."""
        return self._pid != os.getpid()

    def result(self, timeout: float | None = None) -> None:
        """Wait for the job to end.

        Args:
            timeout: seconds to wait at most, not counting time in which the process was stopped; default: the worker's
                timeout.

        Raises:
            WorkerError: the job raised (its exception is the cause), no thread is left to run it, or the time is up. In
                the last case the job still runs unless it is `done`.
        """
        left = self._worker.timeout if timeout is None else timeout
        while not self._ended:
            pause = min(0.2, left)
            left -= pause  # not measured by a clock: a stopped process runs no job either
            self._wait(pause)
            if self._ended:
                break
            if self.foreign or not self._worker.alive():
                lost = f"{self.label}: every worker thread has died before the job ended"
                raise self._withdraw(lost, alone=True)
            if left <= 0:
                late = f"{self.label}: not done in time; raise HybridCache(timeout=...) if the machine is slow"
                raise self._withdraw(late)
        error = self._raised
        if isinstance(error, WorkerError):
            raise WorkerError(*error.args)  # a new object: the stored one's traceback would keep frames alive
        if error is not None:
            raise WorkerError(f"{self.label} failed: {error!r}") from error

    def done(self) -> bool:
        """Whether the job has ended, successfully or not, and no longer reads or writes any memory."""
        return self._ended

    def begin(self) -> bool:
        """Mark the job as running; return False if it was withdrawn."""
        with self._lock:
            self._running, self._waiting = self._waiting, False
            return self._running

    def finish(self, error: BaseException | None) -> None:
        """Mark the job as ended, with its exception or None."""
        with self._lock:
            self._running, self._raised, self._ended = False, error, True
            self._gate.release()

    def _wait(self, seconds: float) -> None:
        """Wait for the end of the job, at most `seconds`."""
        if self._gate.acquire(timeout=seconds):
            self._gate.release()  # for other waiters

    def _withdraw(self, message: str, *, alone: bool = False) -> WorkerError:
        """Withdraw the job unless a thread is running it; return the error to raise.

        Args:
            message: the error's text.
            alone: whether no thread can be running it.
        """
        with nullcontext() if alone else self._lock:  # in a forked child the lock may stay held
            self._waiting = False
            if not self._ended and (alone or not self._running):
                self._raised, self._ended = WorkerError(message), True
        return WorkerError(message)


WORTH_BYTES = 1 << 16
"""Launches that read fewer bytes are done before a sleeping helper has woken."""

# Entries of a row of `calls` int64 [callers, WIDTH].
STATE, ENTRY, ARGUMENT, NANOSECONDS = range(4)
WIDTH = 16
_INVITED = 1 << 32  # one invitation in a state
_INSIDE = _INVITED - 1

# Entries of `control` int64. BELL changes with every call.
BELL, STOP = 0, 8
CONTROL_WIDTH = 16

_BRANCHES = 2  # helpers that each helper wakes: a tree reaches all of them in a few steps
_TURNS = 2000  # polls before `dismiss` sleeps between them
_NAP = 50  # microseconds


@jit_for_python
def _ring(control: Array, threads: int) -> None:
    wake(address_of(control), threads)
    hold(control)


@jit
def _take_part(calls: Array, call: int) -> None:
    began = now()
    call_entry(calls[call, ENTRY], calls[call, ARGUMENT])
    add_to(calls, call * WIDTH + NANOSECONDS, now() - began)


@jit_for_python
def _withdraw(calls: Array, call: int) -> None:
    """Withdraw the remaining invitations of a call: no task is left."""
    at = call * WIDTH + STATE
    state = peek(calls, at)
    while state >= _INVITED and not swap_if(calls, at, state, state & _INSIDE):
        state = peek(calls, at)


@jit_for_python
def dismiss(calls: Array, call: int) -> None:
    """Withdraw the invitations of a call and wait until no helper is inside; then its row is free."""
    _withdraw(calls, call)
    turns = 0
    while peek(calls, call * WIDTH + STATE) != 0:
        turns += 1
        if turns < _TURNS:
            pause()
        else:
            nap(_NAP)


@jit_for_python
def lead(calls: Array, control: Array, call: int, entry: int, argument: int, helpers: int) -> int:
    """Run a launch (`Launch.address`) with up to `helpers` helpers; return the nanoseconds of all threads together."""
    calls[call, ENTRY], calls[call, ARGUMENT], calls[call, NANOSECONDS] = entry, argument, 0
    swap_if(calls, call * WIDTH + STATE, 0, helpers * _INVITED)
    count_up(control, BELL)
    _ring(control, min(helpers, _BRANCHES))
    _take_part(calls, call)
    dismiss(calls, call)
    return peek(calls, call * WIDTH + NANOSECONDS)  # type: ignore[no-any-return]


@jit
def _enter(calls: Array) -> int:
    """Accept an invitation; return the call, or -1 if there is none."""
    for call in range(len(calls)):
        at = call * WIDTH + STATE
        state = peek(calls, at)
        while state >= _INVITED:
            if swap_if(calls, at, state, state - _INVITED + 1):
                return call
            state = peek(calls, at)
    return -1


@jit_for_python
def leave(calls: Array, call: int) -> None:
    """Leave a call."""
    at = call * WIDTH + STATE
    state = peek(calls, at)
    while not swap_if(calls, at, state, state - 1):
        state = peek(calls, at)


@jit_for_python
def serve(calls: Array, control: Array) -> None:
    """The loop of a helper: accept invitations until `control[STOP]` is set."""
    while True:
        bell = peek(control, BELL)  # read first: a call that arrives during the search changes it
        if peek(control, STOP) != 0:
            return
        call = _enter(calls)
        if call < 0:
            wait_for_change(address_of(control), bell & LOWER)
            hold(control)
            continue
        if peek(calls, call * WIDTH + STATE) >= _INVITED:
            _ring(control, _BRANCHES)
        _take_part(calls, call)
        _withdraw(calls, call)
        leave(calls, call)


class Helpers:
    """Helper threads, which sleep until a job divides a launch; started at the first launch that is large enough.

    Args:
        count: number of helpers.
        callers: number of threads that may divide launches at once.
    """

    def __init__(self, count: int, callers: int) -> None:
        self.count = count if FUTEX else 0
        self.calls: Array = np.zeros((callers, WIDTH), np.int64)
        self.control: Array = np.zeros(CONTROL_WIDTH, np.int64)
        self._free = list(range(callers))
        self._lock, self._threads = threading.Lock(), list[Thread]()

    def _start(self) -> int:
        """Start the missing helpers, as many as the system allows; return their number."""
        with self._lock:
            if self.count and not self._threads:
                _compile()
                weakref.finalize(self, _stop, self.control, os.getpid()).atexit = False
            while len(self._threads) < self.count:
                try:
                    self._threads.append(start(serve, (self.calls, self.control), "a helper"))
                except MemoryError:  # the system gives no more threads
                    self.count = len(self._threads)
        return self.count

    def ready(self) -> int:
        """Start the helpers if they are not running; return their number."""
        return self.count if len(self._threads) == self.count else self._start()

    def divide(self, launch: Launch) -> float:
        """Run all tasks of a launch; nothing else may run it at the same time.

        Returns:
            The seconds that all threads together spent on it.

        Raises:
            MemoryError: tasks were left undone.
        """
        helpers = 0
        if launch.cost >= WORTH_BYTES and launch.tasks > 1:
            helpers = min(self.ready(), launch.tasks - 1)
        if not helpers:
            began = time.perf_counter()
            launch()
            return time.perf_counter() - began
        launch.open(helpers + 1)
        call = self._free.pop()
        try:
            spent = lead(self.calls, self.control, call, *launch.address, helpers)
        finally:
            dismiss(self.calls, call)
            self._free.append(call)
        launch.check()
        return spent / 1e9


def _stop(control: Array, pid: int) -> None:
    if os.getpid() == pid:
        control[STOP] = 1
        control[BELL] += 1
        _ring(control, 1 << 30)


@kernel
def _nothing_kernel(ticket: Array, tasks: int) -> None:
    while count_up(ticket, 0) < tasks:
        count_up(ticket, 1)


@functools.cache
def _compile() -> None:
    """Compile what the helpers run, so that neither they nor a job must do so, perhaps when memory is short."""
    calls, control = np.zeros((1, WIDTH), np.int64), np.zeros(CONTROL_WIDTH, np.int64)
    nothing = Launch(_nothing_kernel, 1, (), 0)
    nothing.open(1)
    lead(calls, control, 0, *nothing.address, 0)
    nothing.check()
    calls[0, STATE] = 1
    leave(calls, 0)
    dismiss(calls, 0)
    control[STOP] = 1
    serve(calls, control)


__all__ = ["DELAY", "JOBS", "Job", "Worker", "WorkerError"]

DELAY = "HF_OFFLOAD_DELAY_MS"
"""Environment variable for tests: milliseconds by which every hand-over between CPU and device is delayed."""
JOBS = 4
"""Most jobs that run at once: a job that waits for the device should not block the others."""


MOST_THREADS = 512
"""The largest allowed `threads`; tens of thousands of threads end the process."""
MOST_SECONDS = 1_000_000
"""The longest timeout, 11 days, within the range of every system's clock."""


def _delay() -> float:
    """The value of `DELAY` in seconds.

    Raises:
        ValueError: the variable is not a number of milliseconds.
    """
    text = os.environ.get(DELAY) or "0"
    try:
        delay: Any = float(text)
    except ValueError:
        delay = text
    check_number(DELAY, delay, "a number of milliseconds, which this environment variable wants", least=0, most=60_000)
    return float(delay) / 1000


class Worker:
    """A pool of threads, started by `ready` or the first job and ended with the object.

    Args:
        threads: number of computing threads (at least 1); as many jobs run at once, at most `JOBS`.
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
        """Seconds that each job sleeps before it starts; tests use it to slow every hand-over down."""
        self._jobs = min(threads, JOBS)
        self._helpers = Helpers(threads - 1, self._jobs)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pool: list[Thread] = []
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def alive(self) -> bool:
        """Whether at least one thread is alive to run jobs."""
        return any(map(Thread.is_alive, self._pool))

    def _begin_anew(self) -> None:
        """Reset a forked child, which has none of its parent's threads and perhaps a locked queue."""
        self._queue, self._pool, self._lock, self._pid = queue.SimpleQueue(), [], threading.Lock(), os.getpid()
        self._helpers = Helpers(self.threads - 1, self._jobs)

    def _ensure_threads(self) -> None:
        if self._pid != os.getpid():
            self._begin_anew()
        if len(self._pool) == self._jobs and all(map(Thread.is_alive, self._pool)):
            return
        with self._lock:
            self._pool = [thread for thread in self._pool if thread.is_alive()]
            while len(self._pool) < self._jobs:
                self._pool.append(start(_serve, (self._queue,), "work beside the model"))
                weakref.finalize(self, self._queue.put, None)

    def ready(self) -> None:
        """Start all threads now: later, memory may be too short to start them.

        Raises:
            MemoryError: a thread cannot be started.
        """
        self._ensure_threads()
        self._helpers.ready()

    def submit(self, work: Callable[[], Any], label: str = "job", keep: Any = None) -> Job:
        """Queue a piece of work and return at once.

        Args:
            work: what to call.
            label: its name in error messages.
            keep: objects whose memory the work reaches only by address; they live until the work has ended.

        Raises:
            MemoryError: a thread is missing and cannot be started.
        """
        self._ensure_threads()
        job = Job(self, label)
        self._queue.put((job, work, self.delay, keep))
        return job

    def divide(self, launch: Launch) -> float:
        """Run all tasks of a launch, from within a job, with all free helpers.

        Returns:
            The seconds that all threads together spent on it.
        """
        return self._helpers.divide(launch)

    def wait_for_all(self) -> None:
        """Wait until all submitted jobs have ended, also those whose `Job` is lost.

        Raises:
            WorkerError: a job still runs when the time is up.
        """
        if self._pid != os.getpid():
            return
        if self._pool:  # every thread reaches the barrier only after its current job
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
        except BaseException as error:  # any exception, SystemExit included, is raised by `Job.result`
            job.finish(error)
        del item, job, work, keep
