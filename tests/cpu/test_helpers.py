"""Helpers of the thread pool: tasks of a launch shared by threads that run no Python."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from forks import in_fork

from hf_offload.cpu import thread_pool as helpers
from hf_offload.cpu.launch import Array, Launch, kernel
from hf_offload.cpu.memory import count_up
from hf_offload.cpu.serving import nap
from hf_offload.cpu.thread_pool import FUTEX, WORTH_BYTES, Helpers, Worker, WorkerError

pytestmark = pytest.mark.skipif(not FUTEX, reason="there are no helpers on this system")


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


def marking(tasks: int, pause: int = 0, broken: int = -1, cost: int = WORTH_BYTES) -> Launch:
    args = (pause, broken, np.zeros(max(tasks, 1), np.int64), np.zeros(1, np.int64))
    return Launch(_mark, tasks, args, cost)


def divided_by(crew: Any, threads: int) -> tuple[Launch, float]:
    """A launch that so many threads have shared: on a busy machine some may come too late for the first."""
    for _ in range(200):
        launch = marking(60, 3_000)
        spent = crew.divide(launch)
        assert launch.args[2].tolist() == [1] * 60
        assert launch.args[3][0] <= threads
        if launch.args[3][0] == threads:
            return launch, spent
    raise AssertionError(f"{threads} threads never came")


@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("tasks", [0, 1, 2, 31])
def test_every_task_is_done_once(count: int, tasks: int) -> None:
    crew = Helpers(count, 1)
    for _ in range(50):
        launch = marking(tasks)
        spent = crew.divide(launch)
        assert launch.args[2].tolist() == ([1] * tasks or [0])
        assert 1 <= launch.args[3][0] <= count + 1
        assert spent > 0


def test_all_helpers_come_if_there_is_time() -> None:
    crew = Helpers(5, 1)
    crew.divide(marking(60, 5_000))  # threads start
    launch, spent = divided_by(crew, 6)
    assert spent > 60 * 0.003  # the time of all, who sleep that long in their tasks
    assert launch.ticket[2] == 6


def test_no_more_are_called_than_there_is_work_for() -> None:
    crew = Helpers(5, 1)
    crew.divide(marking(2, 50))
    for launch, most in ((marking(3, 20_000), 3), (marking(9, 1_000, cost=WORTH_BYTES - 1), 1)):
        crew.divide(launch)
        assert launch.args[3][0] <= most
        assert launch.ticket[2] == most


def test_a_launch_is_divided_again_and_again() -> None:
    launch, crew = marking(20, 100), Helpers(2, 1)
    words, i = launch.word("pause")
    for turn in range(1, 20):
        words[i] = 50 * (turn % 2)
        crew.divide(launch)
        assert launch.args[2].tolist() == [turn] * 20


def test_threads_may_call_at_once() -> None:
    crew, wrong = Helpers(3, 4), []

    def call() -> None:
        for _ in range(200):
            launch = marking(13)
            crew.divide(launch)
            if launch.args[2].tolist() != [1] * 13:
                wrong.append(launch.args[2])

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.parametrize("broken", range(0, 12, 3))
def test_an_error_of_any_thread_is_raised_by_the_caller(broken: int) -> None:
    """Whoever meets it: the caller, or a helper, which helps on with the next launch."""
    crew = Helpers(3, 1)
    crew.divide(marking(40, 500))
    for _ in range(5):
        with pytest.raises(MemoryError):
            crew.divide(marking(12, 500, broken))
    divided_by(crew, 4)


def test_an_error_keeps_nobody_alive() -> None:
    """A frame that raises what it holds would hold itself, and the memory that the launch reads."""
    crew = Helpers(3, 1)
    crew.divide(marking(40, 500))
    gc.disable()
    try:
        for broken in range(0, 12, 2):
            launch = marking(12, 500, broken)
            gone = weakref.ref(launch.args[2])
            with pytest.raises(MemoryError):
                crew.divide(launch)
            del launch
            assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("had", [0, 2])
def test_threads_that_cannot_be_had_are_done_without(monkeypatch: pytest.MonkeyPatch, had: int) -> None:
    start, left = helpers.start, threading.Semaphore(had)

    def scarce(*args: Any) -> Any:
        if not left.acquire(blocking=False):
            raise MemoryError("no thread")
        return start(*args)

    monkeypatch.setattr(helpers, "start", scarce)
    crew = Helpers(5, 1)
    for _ in range(3):
        launch = marking(60, 2_000)
        crew.divide(launch)
        assert launch.args[2].tolist() == [1] * 60
        assert 1 <= launch.args[3][0] <= had + 1


def test_an_error_of_a_helper_is_that_of_the_job() -> None:
    worker = Worker(3)
    job = worker.submit(lambda: worker.divide(marking(12, 500, 7)), "attention of layer 3")
    with pytest.raises(WorkerError, match="attention of layer 3 failed: MemoryError"):
        job.result()
    launch = marking(12, 500)
    worker.submit(lambda: worker.divide(launch)).result()
    assert launch.args[2].tolist() == [1] * 12


def test_a_forked_child_has_helpers_of_its_own() -> None:
    worker = Worker(3)
    worker.submit(lambda: worker.divide(marking(12, 500))).result()

    def divide() -> None:
        worker.submit(lambda: worker.divide(marking(12, 500))).result(timeout=100)
        worker.submit(lambda: divided_by(worker, 3)).result(timeout=100)

    assert in_fork(divide) == 0


def test_helpers_end_with_the_worker() -> None:
    worker = Worker(threads=3)
    worker.submit(functools.partial(worker.divide, marking(12, 500))).result()
    threads = list(worker._helpers._threads)
    assert len(threads) == 2
    del worker
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


def test_helpers_that_wait_use_no_core() -> None:
    crew = Helpers(3, 1)
    crew.divide(marking(12, 500))
    spent = []
    for _ in range(100):  # they look for a moment before they sleep, which a busy machine may draw out
        began = time.process_time()
        time.sleep(0.1)
        spent.append(time.process_time() - began)
        if spent[-1] < 0.03:
            break
    assert min(spent) < 0.03
