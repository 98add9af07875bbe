"""Posted launches: their order, numbers, errors, waiting, ends and forks."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from breaking import dying

from hf_offload.cpu import runner
from hf_offload.cpu.futex import FUTEX
from hf_offload.cpu.launch import Array, Launch, kernel
from hf_offload.cpu.memory import count_up
from hf_offload.cpu.serving import nap
from hf_offload.cpu.standing import WORTH_BYTES, Standing
from hf_offload.cpu.together import Row
from hf_offload.cpu.worker import Worker, WorkerError

native = pytest.mark.skipif(not FUTEX, reason="a thread of Python makes posted launches on this system")


@kernel
def _write(ticket: Array, tasks: int, value: int, pause: int, lines: Array, at: Array, met: Array) -> None:
    """Each task writes the value behind what is there already, after so many microseconds."""
    count_up(met, 0)
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        if pause:
            nap(pause)
        lines[count_up(at, 0)] = value
        count_up(ticket, 1)


class Log:
    """Where launches write."""

    def __init__(self, size: int = 10_000) -> None:
        self.lines, self.at, self.met = np.zeros(size, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)

    def writing(self, pause: int = 0, tasks: int = 1, cost: int = 0) -> Standing:
        args = (0, pause, self.lines, self.at, self.met)
        return Standing(Launch(_write, tasks, args, cost), "writing", value=10**6)

    @property
    def seen(self) -> list[int]:
        return list(self.lines[: self.at[0]].tolist())


@pytest.fixture(params=["native", "python"])
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """With the thread that this system has, and with that of the others."""
    if request.param == "python":
        monkeypatch.setattr("hf_offload.cpu.worker.FUTEX", 0)
    elif not FUTEX:
        pytest.skip("there is none on this system")
    return Worker()


def test_launches_run_in_order_with_their_numbers(worker: Worker) -> None:
    log, rows, want = Log(), [Row(3) for _ in range(40)], []
    posted = []
    for i, row in enumerate(rows):
        launches, numbers = tuple(log.writing() for _ in range(3)), (3 * i, 3 * i + 1, 3 * i + 2)
        posted.append(worker.post(row, launches, numbers))
        want += numbers
    for job in posted:
        job.result()
        assert job.done()
    assert log.seen == want


def test_the_same_launches_again_and_again(worker: Worker) -> None:
    log, row = Log(), Row(2)
    launches = log.writing(), log.writing()
    for i in range(runner.RING + 100):
        job = worker.post(row, launches, (i, i + 1))
        job.result()
    assert log.seen == [i + j for i in range(runner.RING + 100) for j in (0, 1)]


def test_a_number_that_arrays_do_not_cover_posts_nothing(worker: Worker) -> None:
    log = Log()
    with pytest.raises(ValueError, match=r"writing: value 1000001 is not within 0\.\.1000000"):
        worker.post(Row(2), (log.writing(), log.writing()), (5, 10**6 + 1))
    worker.post(Row(1), (log.writing(),), (7,)).result()
    assert log.seen == [7]


def test_an_error_ends_its_errand_and_no_other(worker: Worker) -> None:
    log = Log()
    first = worker.post(Row(1), (log.writing(20_000),), (1,))
    broken = worker.post(Row(3), (log.writing(), dying("it"), log.writing()), (2, 3), "attention of layer 3")
    last = worker.post(Row(1), (log.writing(),), (4,))
    with pytest.raises(WorkerError, match=r"attention of layer 3 failed.*the kernel died") as caught:
        broken.result()
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert broken.done()
    first.result()
    last.result()
    assert log.seen == [1, 2, 4]
    worker.settle()  # nobody is told again


@native
def test_the_first_of_an_errand_is_waited_for_alone() -> None:
    log, worker = Log(), Worker()
    whole = worker.post(Row(2), (log.writing(), log.writing(1_000_000)), (1, 2))
    first = whole.first(1)
    first.result()
    assert first.done()
    assert not whole.done()
    assert log.seen == [1]
    whole.result()
    assert log.seen == [1, 2]


def test_time_is_up(worker: Worker) -> None:
    log = Log()
    slow = worker.post(Row(1), (log.writing(1_000_000),), (1,))
    late = worker.post(Row(1), (log.writing(),), (2,), "late")
    time.sleep(0.05)
    with pytest.raises(WorkerError, match="late: not done in time"):
        late.result(timeout=0.01)
    assert late.done()  # it was withdrawn
    with pytest.raises(WorkerError, match="not done in time"):
        slow.result(timeout=0.01)
    assert not slow.done()  # it is still at work
    slow.result()
    worker.settle()
    assert log.seen == [1]


@native
def test_what_was_given_up_is_told_to_all_who_ask() -> None:
    log, worker = Log(), Worker()
    slow = worker.post(Row(2), (log.writing(1_000_000), log.writing()), (1, 2), "slow")
    waiting = worker.post(Row(2), (log.writing(), log.writing()), (3, 4), "waiting")
    time.sleep(0.05)
    for job in (slow, waiting.first(1)):
        with pytest.raises(WorkerError, match="not done in time"):
            job.result(timeout=0.01)
    assert not slow.done()
    assert waiting.done()
    worker.settle()
    for job in (slow, waiting):
        with pytest.raises(WorkerError, match="not done in time"):
            job.result()
    slow.first(1).result()
    assert log.seen == [1]


@native
def test_to_settle_is_to_wait_for_all_and_gives_up_nothing() -> None:
    log, worker = Log(), Worker(timeout=0.1)
    worker.post(Row(1), (log.writing(1_000_000),), (1,))
    last = worker.post(Row(1), (log.writing(),), (2,))
    with pytest.raises(WorkerError, match="waiting for all work: not done in time"):
        worker.settle()
    worker.timeout = 300.0
    worker.settle()
    assert last.done()
    assert log.seen == [1, 2]


@native
def test_an_error_is_told_to_those_who_wait_for_it_or_more() -> None:
    log, worker = Log(), Worker()
    job = worker.post(Row(3), (log.writing(), log.writing(), dying("it")), (1, 2))
    with pytest.raises(WorkerError, match="the kernel died"):
        job.result()
    job.first(2).result()
    with pytest.raises(WorkerError, match="the kernel died"):
        job.first(3).result()


@native
def test_a_thread_that_cannot_be_had_is_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    log, worker = Log(), Worker()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start"):
                worker.post(Row(1), (log.writing(),), (1,))
    worker.post(Row(1), (log.writing(),), (2,)).result()
    assert log.seen == [2]


def test_nobody_waits_for_more_than_there_is_room_for() -> None:
    if not FUTEX:
        pytest.skip("a queue has room for any number")
    log, worker = Log(), Worker()
    launches = [log.writing() for _ in range(runner.RING)]
    worker.post(Row(1), (log.writing(2_000_000),), (1,))
    for launch in launches[1:]:
        worker.post(Row(1), (launch,), (2,))
    with pytest.raises(RuntimeError, match=f"last: {runner.RING} launches wait"):
        worker.post(Row(1), (launches[0],), (2,), "last")
    worker.settle()
    assert log.seen == [1] + [2] * (runner.RING - 1)
    worker.post(Row(1), (launches[0],), (3,)).result()


@native
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_tasks_are_shared_by_as_many_as_find_some(threads: int) -> None:
    log, worker = Log(), Worker(threads=threads)
    launches = log.writing(2_000, 40, WORTH_BYTES), log.writing(0, 1, WORTH_BYTES), log.writing(0, 9, WORTH_BYTES - 1)
    row = Row(3)
    for _ in range(200):  # threads start with the first, and on a busy machine may come late
        log.at[0] = log.met[0] = 0
        worker.post(row, launches, (1, 2, 3)).result()
        assert log.seen == [1] * 40 + [2] + [3] * 9
        if log.met[0] == threads + 2:
            break
    assert log.met[0] == threads + 2


@native
def test_an_error_of_a_helper_is_the_errands(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(threads=3)

    @kernel
    def fail(ticket: Array, tasks: int, main: int) -> None:
        while True:
            task = count_up(ticket, 0)
            if task >= tasks:
                break
            nap(1000)
            if task == 17:
                raise ArithmeticError("the kernel died")
            count_up(ticket, 1)

    for _ in range(5):
        standing = Standing(Launch(fail, 40, (0,), WORTH_BYTES), "it")
        with pytest.raises(WorkerError, match="the kernel died"):
            worker.post(Row(1), (standing,), (), "it").result()
    log = Log()
    worker.post(Row(1), (log.writing(100, 40, WORTH_BYTES),), (1,)).result()
    assert log.seen == [1] * 40


@native
def test_delays_are_those_of_the_worker() -> None:
    log, worker = Log(), Worker()
    worker.delay = 0.05
    job = worker.post(Row(2), (log.writing(), log.writing()), (1, 2))
    began = time.perf_counter()
    job.result()
    assert time.perf_counter() - began > 0.03


def test_what_is_reached_by_address_lives_until_the_end(worker: Worker) -> None:
    class Memory:
        pass

    log, memory = Log(), Memory()
    gone = weakref.ref(memory)
    job = worker.post(Row(1), (log.writing(100_000),), (1,), keep=memory)
    del memory
    assert gone() is not None
    job.result()
    del job
    wait_until(lambda: gone() is None)


@native
def test_what_nobody_asks_for_is_let_go() -> None:
    class Memory:
        pass

    log, worker, memory = Log(), Worker(), Memory()
    gone = weakref.ref(memory)
    worker.post(Row(1), (log.writing(),), (1,), keep=memory)
    del memory
    wait_until(lambda: gone() is None)  # after a while without work
    worker.post(Row(1), (log.writing(),), (2,)).result()
    assert log.seen == [1, 2]


@native
def test_the_thread_ends_with_its_worker() -> None:
    log, worker = Log(), Worker()
    worker.post(Row(1), (log.writing(),), (1,)).result()
    thread = worker._runner._thread
    assert thread is not None
    gone = weakref.ref(worker)
    gc.disable()
    try:
        del worker
        assert gone() is None  # there are no cycles
    finally:
        gc.enable()
    thread.join(300)
    assert not thread.is_alive()


@native
def test_a_thread_that_has_ended_is_replaced() -> None:
    log, worker = Log(), Worker()
    for i in range(3):
        worker.post(Row(1), (log.writing(),), (i,)).result()
        runner._stop(worker._runner._control, os.getpid())
        thread: Any = worker._runner._thread
        thread.join(300)
    assert log.seen == [0, 1, 2]


def test_two_threads_post_at_once(worker: Worker) -> None:
    log, errors = Log(), list[BaseException]()

    def post(value: int) -> None:
        launch, row = log.writing(), Row(1)
        try:
            for _ in range(500):
                worker.post(row, (launch,), (value,)).result()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=post, args=(i,)) for i in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(log.seen) == [1] * 500 + [2] * 500 + [3] * 500


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks on this system")
def test_a_forked_child_posts_anew_and_its_parents_jobs_are_lost(worker: Worker) -> None:
    log = Log()
    job = worker.post(Row(1), (log.writing(1_000_000),), (1,))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with pytest.raises(WorkerError, match="every worker thread has died"):
                job.result()
            mine = Log()
            worker.post(Row(1), (mine.writing(),), (5,)).result()
            code = 0 if mine.seen == [5] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    job.result()
    assert log.seen == [1]


def wait_until(condition: Any) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
