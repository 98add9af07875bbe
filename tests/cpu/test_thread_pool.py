"""Threads beside the model: jobs, helpers that share a job's launches, errors, shortage."""

from __future__ import annotations

import _thread
import gc
import os
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from forks import in_fork

from hf_offload.cpu import thread_pool, threads
from hf_offload.cpu.launch import Array, Launch, kernel
from hf_offload.cpu.memory import count_up
from hf_offload.cpu.serving import nap
from hf_offload.cpu.thread_pool import FUTEX, WORTH_BYTES, Helpers, Worker, WorkerError
from hf_offload.cpu.threads import start

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
futex = pytest.mark.skipif(not FUTEX, reason="there are no helpers on this system")


LATER: list[Callable[[], Any]] = []


def refused(run: Callable[[], Any], args: tuple[Any, ...]) -> int:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        (refused, "can't start new thread"),
        (lambda run, args: 1, "it died before it began"),
        (lambda run, args: LATER.append(run) or 1, "it did not begin in time"),
    ],
    ids=["refused", "dead", "late"],
)
def test_a_thread_that_cannot_be_had_is_an_error_in_time(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[..., int], why: str
) -> None:
    monkeypatch.setattr(_thread, "start_new_thread", begin)
    monkeypatch.setattr(threads, "_LOOKS", 3)
    done, worker = list[int](), Worker()
    with pytest.raises(MemoryError, match=rf"^no thread for a test could be started: {why}; free memory, or use fewer"):
        start(done.append, (1,), "a test")
    for act in (worker.ready, lambda: worker.submit(print)):
        with pytest.raises(MemoryError, match="no thread for work beside the model"):
            act()
    for run in LATER[:1]:
        run()
    assert not done  # what comes too late does nothing
    LATER.clear()
    monkeypatch.undo()
    worker.submit(lambda: None).result()


@pytest.mark.parametrize("error", [MemoryError("no room"), SystemExit("no room")])
def test_an_error_surfaces_with_its_label_and_cause_and_the_thread_goes_on(error: BaseException) -> None:
    def fail() -> None:
        raise error

    worker = Worker()
    with pytest.raises(WorkerError, match=r"attention of layer 3 failed.*no room") as caught:
        worker.submit(fail, "attention of layer 3").result()
    assert caught.value.__cause__ is error
    worker.submit(lambda: None).result()


@forks
def test_time_in_which_the_process_is_stopped_does_not_count() -> None:
    """A machine may sleep, a debugger or a scheduler may stop all of the process."""

    def work() -> None:
        for _ in range(5):  # the stop takes the rest of one; some are left when the process goes on
            time.sleep(0.1)

    def wait() -> None:
        job = Worker(timeout=1.5).submit(work)
        stop = f"sleep 0.1; kill -STOP {os.getpid()}; sleep 1.7; kill -CONT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", stop]):
            job.result()
        assert job.done()

    assert in_fork(wait) == 0


@kernel
def _mark(ticket: Array, tasks: int, pause: int, broken: int, done: Array, met: Array) -> None:
    """Count each task; a task takes `pause` microseconds, one of them fails; `met` holds how many threads took part."""
    count_up(met, 0)
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        if pause:
            nap(pause)
        if task == broken:
            raise ArithmeticError
        count_up(done, task)
        count_up(ticket, 1)


def marking(tasks: int, pause: int = 0, broken: int = -1) -> Launch:
    args = (pause, broken, np.zeros(tasks, np.int64), np.zeros(1, np.int64))
    return Launch(_mark, tasks, args, WORTH_BYTES)


def divide_by(crew: Any, count: int) -> None:
    """Divide launches until so many threads have shared one: on a busy machine some may come too late for the first."""
    for _ in range(200):
        launch = marking(60, 3_000)
        crew.divide(launch)
        assert launch.args[2].tolist() == [1] * 60
        assert launch.args[3][0] <= count
        if launch.args[3][0] == count:
            return
    raise AssertionError(f"{count} threads never came")


def in_threads(count: int, act: Callable[[], None]) -> None:
    callers = [threading.Thread(target=act) for _ in range(count)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()


@pytest.mark.parametrize(("helpers", "callers"), [(0, 1), (1, 1), (7, 1), (3, 4)])
def test_every_task_is_done_once(helpers: int, callers: int) -> None:
    crew, wrong = Helpers(helpers, callers), []

    def call() -> None:
        for tasks in [0, 1, 2, 13, 31] * 20:
            launch = marking(tasks)
            spent, met = crew.divide(launch), launch.args[3][0]
            if launch.args[2].tolist() != [1] * tasks or not 1 <= met <= helpers + 1 or spent <= 0:
                wrong.append(launch)

    in_threads(callers, call)
    assert not wrong


def test_an_error_of_any_thread_is_the_callers_and_keeps_nobody_alive() -> None:
    """Whoever meets it helps on; a frame that raises what it holds would hold the memory that the launch reads."""
    worker = Worker(4)
    gc.disable()
    try:
        for broken in range(0, 12, 3):
            for _ in range(3):
                launch = marking(12, 500, broken)
                gone = weakref.ref(launch.args[2])
                with pytest.raises(MemoryError):
                    worker.divide(launch)
                del launch
                assert gone() is None
    finally:
        gc.enable()
    job = worker.submit(lambda: worker.divide(marking(12, 500, 7)), "attention of layer 3")
    with pytest.raises(WorkerError, match="attention of layer 3 failed: MemoryError"):
        job.result()
    if FUTEX:
        divide_by(worker, 4)


@futex
@pytest.mark.parametrize("had", [0, 2])
def test_threads_that_cannot_be_had_are_done_without(monkeypatch: pytest.MonkeyPatch, had: int) -> None:
    begin, left = thread_pool.start, threading.Semaphore(had)

    def scarce(*args: Any) -> Any:
        if not left.acquire(blocking=False):
            raise MemoryError("no thread")
        return begin(*args)

    monkeypatch.setattr(thread_pool, "start", scarce)
    divide_by(Helpers(5, 1), had + 1)


@futex
def test_helpers_that_wait_use_no_core() -> None:
    crew = Helpers(3, 1)
    crew.divide(marking(12, 500))
    for _ in range(100):  # they look for a moment before they sleep, which a busy machine may draw out
        began = time.process_time()
        time.sleep(0.1)
        if time.process_time() - began < 0.03:
            return
    raise AssertionError("helpers keep looking for work")
