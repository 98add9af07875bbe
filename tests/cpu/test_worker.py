"""The worker: order and sharing of jobs, errors, dead threads, forks."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import time

import pytest
from forks import in_fork

from hf_offload.cpu.thread_pool import JOBS, Job, Worker, WorkerError


def test_result_waits_for_the_work() -> None:
    done: list[int] = []
    worker = Worker()
    worker.delay = 0.05
    job = worker.submit(lambda: done.append(1))
    assert not job.done()
    job.result()
    assert done == [1]


def test_jobs_run_in_order_of_submission() -> None:
    worker, seen = Worker(), []
    jobs = [worker.submit(lambda i=i: seen.append(i)) for i in range(20)]
    for job in jobs:
        job.result()
    assert seen == list(range(20))


@pytest.mark.parametrize(("threads", "jobs"), [(3, 3), (9, JOBS)])
def test_jobs_are_under_way_at_once(threads: int, jobs: int) -> None:
    worker, met = Worker(threads=threads), threading.Barrier(jobs)
    for job in [worker.submit(lambda: met.wait(timeout=300)) for _ in range(jobs)]:
        job.result()


def test_an_error_surfaces_with_its_label_and_cause() -> None:
    def fail() -> None:
        raise MemoryError("no room")

    with pytest.raises(WorkerError, match=r"attention of layer 3 failed.*no room") as caught:
        Worker().submit(fail, "attention of layer 3").result()
    assert isinstance(caught.value.__cause__, MemoryError)


def test_a_thread_outlives_the_exit_of_a_job() -> None:
    def leave() -> None:
        raise SystemExit

    worker = Worker()
    with pytest.raises(WorkerError):
        worker.submit(leave).result()
    worker.submit(lambda: None).result()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_time_in_which_the_process_is_stopped_does_not_count() -> None:
    """What is late is late by its own time: a machine may sleep, a debugger or a scheduler may stop all of it."""

    def work() -> None:
        for _ in range(8):
            time.sleep(0.05)

    def wait() -> None:
        job = Worker(timeout=2.5).submit(work)
        stop = f"sleep 0.1; kill -STOP {os.getpid()}; sleep 2.7; kill -CONT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", stop]):
            job.result()
        assert job.done()

    assert in_fork(wait) == 0


def test_a_job_that_is_not_done_in_time_is_an_error() -> None:
    release = threading.Event()
    job = Worker(timeout=0.1).submit(release.wait, "recall of layer 1")
    with pytest.raises(WorkerError, match=r"recall of layer 1: not done in time"):
        job.result()
    release.set()


def test_a_killed_thread_is_noticed_and_replaced() -> None:
    worker = Worker()
    worker.submit(lambda: None).result()
    held = threading.Event()

    def busy() -> None:
        held.set()
        while True:
            time.sleep(0.01)

    stuck = worker.submit(busy)
    lost = worker.submit(lambda: None)
    held.wait(300)
    thread = worker._pool[0]
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    with pytest.raises(WorkerError):
        stuck.result()
    lost.result()  # the thread caught it and goes on
    worker._queue.put(None)  # now it really ends
    thread.join(300)
    with pytest.raises(WorkerError, match="every worker thread has died"):
        Job(worker, "CPU attention of layer 0").result()  # never served
    worker.submit(lambda: None).result()


def test_a_forked_child_gets_threads_of_its_own() -> None:
    worker = Worker()
    worker.submit(lambda: None).result()
    assert in_fork(lambda: worker.submit(lambda: None).result(timeout=100)) == 0


def test_threads_end_with_the_worker() -> None:
    worker = Worker(threads=2)
    worker.submit(lambda: None).result()
    threads = list(worker._pool)
    del worker
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()


@pytest.mark.parametrize(("knobs", "named"), [({"threads": 0}, "threads=0"), ({"timeout": -1.0}, "timeout=-1")])
def test_wrong_knobs_are_named(knobs: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Worker(**knobs)  # type: ignore[arg-type]


def test_many_may_ask_for_a_result_that_is_there() -> None:
    worker, lost = Worker(), []
    job = worker.submit(lambda: None)
    job.result()

    def ask() -> None:
        for _ in range(2000):
            try:
                job.result(timeout=0)
            except WorkerError as error:
                lost.append(error)

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert not lost
    job._gate.acquire()  # as an interruption between asking and handing back leaves it
    job.result(timeout=0)
