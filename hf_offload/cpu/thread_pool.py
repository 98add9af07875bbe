"""Threads beside the model's: they run launches without the GIL; what the model waits for runs in torch's own team.

A job is a callable, which one thread runs. The threads pull jobs from one queue in the order of submission. Everything
that goes wrong in a job is raised where its result is asked for.

The launches in a job may be divided among all cores (`Worker.divide`). A thread that needs Python for its share of a
launch would take the GIL several times, from the model's thread, which wants it for the next layer's work. So one
thread takes a job up, and calls helpers: all that they run is compiled. A call is a row of numbers; its state holds how
many are still invited, in the upper half, and how many are inside, in the lower. Who called takes part. Who finds no
task left withdraws the invitations, and who called waits until nobody is inside.
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
from hf_offload.cpu.launch import Array, Launch, jit, kernel
from hf_offload.cpu.memory import add_to, address_of, count_up, hold, peek, swap_if
from hf_offload.cpu.openmp_team import call_entry
from hf_offload.cpu.serving import nap, pause
from hf_offload.cpu.threads import Thread, start
from hf_offload.knobs import check_count, check_number


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


WORTH_BYTES = 1 << 16
"""A launch that reads less is done before a thread that sleeps has woken."""

# Entries of a call, a row of int64 [calls, WIDTH].
STATE, ENTRY, PLACE, NANOSECONDS = range(4)
WIDTH = 16
_INVITED = 1 << 32  # one of them, in the state
_INSIDE = _INVITED - 1

# Entries of `control` int64. BELL changes with every call.
BELL, STOP = 0, 8
CONTROL_WIDTH = 16

_BRANCHES = 2  # threads that each one wakes: the last of many is woken after a few turns, and the first does not wait
_TURNS = 2000  # of waiting for those inside before napping
_NAP = 50  # microseconds


@jit
def _ring(control: Array, threads: int) -> None:
    wake(address_of(control), threads)
    hold(control)


@jit
def _take_part(calls: Array, call: int) -> None:
    began = now()
    call_entry(calls[call, ENTRY], calls[call, PLACE])
    add_to(calls, call * WIDTH + NANOSECONDS, now() - began)


@jit
def _withdraw(calls: Array, call: int) -> None:
    """Invite nobody else: whoever took part has found no task left."""
    at = call * WIDTH + STATE
    state = peek(calls, at)
    while state >= _INVITED and not swap_if(calls, at, state, state & _INSIDE):
        state = peek(calls, at)


@jit
def dismiss(calls: Array, call: int) -> None:
    """Invite nobody else to a call, and wait until nobody is inside any more; it is free then."""
    _withdraw(calls, call)
    turns = 0
    while peek(calls, call * WIDTH + STATE) != 0:
        turns += 1
        if turns < _TURNS:
            pause()
        else:
            nap(_NAP)


@jit
def lead(calls: Array, control: Array, call: int, entry: int, place: int, helpers: int) -> int:
    """Do what is bound at these addresses together with so many helpers; nanoseconds of all who took part."""
    calls[call, ENTRY], calls[call, PLACE], calls[call, NANOSECONDS] = entry, place, 0
    swap_if(calls, call * WIDTH + STATE, 0, helpers * _INVITED)
    count_up(control, BELL)
    _ring(control, min(helpers, _BRANCHES))
    _take_part(calls, call)
    dismiss(calls, call)
    return peek(calls, call * WIDTH + NANOSECONDS)  # type: ignore[no-any-return]


@jit
def _enter(calls: Array) -> int:
    """Accept an invitation; its call, or -1."""
    for call in range(len(calls)):
        at = call * WIDTH + STATE
        state = peek(calls, at)
        while state >= _INVITED:
            if swap_if(calls, at, state, state - _INVITED + 1):
                return call
            state = peek(calls, at)
    return -1


@jit
def leave(calls: Array, call: int) -> None:
    """Be inside a call no more."""
    at = call * WIDTH + STATE
    state = peek(calls, at)
    while not swap_if(calls, at, state, state - 1):
        state = peek(calls, at)


@jit
def serve(calls: Array, control: Array) -> None:
    """Help whoever calls until told to stop."""
    while True:
        bell = peek(control, BELL)  # before looking around: a call that comes meanwhile changes it
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
    """Threads that sleep until a thread of a worker divides a launch; started at the first that is worth it.

    Args:
        count: how many.
        callers: how many threads may call at once.
    """

    def __init__(self, count: int, callers: int) -> None:
        self.count = count if FUTEX else 0
        self.calls: Array = np.zeros((callers, WIDTH), np.int64)
        self.control: Array = np.zeros(CONTROL_WIDTH, np.int64)
        self._free = list(range(callers))
        self._lock, self._threads = threading.Lock(), list[Thread]()

    def _start(self) -> int:
        """Have threads there; how many, as many as the system allows."""
        with self._lock:
            if self.count and not self._threads:
                _compile()
                weakref.finalize(self, _stop, self.control, os.getpid()).atexit = False
            while len(self._threads) < self.count:
                try:
                    self._threads.append(start(serve, (self.calls, self.control), "a helper"))
                except MemoryError:  # no more can be had
                    self.count = len(self._threads)
        return self.count

    def ready(self) -> int:
        """Have the threads there; how many."""
        return self.count if len(self._threads) == self.count else self._start()

    def divide(self, launch: Launch) -> float:
        """Do all tasks of a launch now, which nobody else runs meanwhile.

        Returns:
            Seconds for which threads were at it, all together.

        Raises:
            MemoryError: not all tasks were done.
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
    """Compile what the threads run, so that none of them has to, nor a job when memory is short."""
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
