"""Launches that follow one another within one job, by any number of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from hf_offload.cpu.launch import Launch, new_ticket
from hf_offload.cpu.stages import Stages
from hf_offload.cpu.worker import Worker, WorkerError


def counting(done: list[int], lock: threading.Lock, tasks: int, stage: int, pause: float = 0.0) -> Launch:
    """A launch each of whose tasks notes its stage."""

    def kernel(team: object, ticket: np.ndarray, tasks: int) -> None:
        while True:
            with lock:
                task = int(ticket[0])
                ticket[0] += 1
            if task >= tasks:
                break
            time.sleep(pause)
            with lock:
                done.append(stage)
                ticket[1] += 1

    return Launch(kernel, tasks, (), new_ticket(), 0)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_stage_begins_when_the_one_before_is_done(threads: int) -> None:
    done: list[int] = []
    lock, seen = threading.Lock(), []

    def stages() -> Iterator[Launch]:
        for number, tasks in enumerate((7, 0, 1, 30, 0)):
            seen.append(len(done))
            yield counting(done, lock, tasks, number, 1e-3)

    Worker(threads, 20.0).submit(Stages(stages()), "stages", shares=threads).result()
    assert done == sorted(done)
    assert seen == [0, 7, 7, 8, 38]
    assert len(done) == 38


@pytest.mark.parametrize("threads", [1, 3])
def test_no_stages_end_at_once(threads: int) -> None:
    Worker(threads, 20.0).submit(Stages(()), "nothing", shares=threads).result()


@pytest.mark.parametrize("where", ["preparing", "running"])
@pytest.mark.parametrize("threads", [1, 4])
def test_an_error_in_a_stage_ends_all_participants(threads: int, where: str) -> None:
    done: list[int] = []
    lock = threading.Lock()

    def kernel(team: object, ticket: np.ndarray, tasks: int) -> None:
        with lock:
            task = int(ticket[0])
            ticket[0] += 1
        if task == 0:  # the others wait for a task that will never be done
            raise ArithmeticError("the kernel died")

    def stages() -> Iterator[Launch]:
        yield counting(done, lock, 3, 0)
        if where == "preparing":
            raise ArithmeticError("the kernel died")
        yield Launch(kernel, 2, (), new_ticket(), 0)
        yield counting(done, lock, 3, 2)

    worker = Worker(threads, 20.0)
    job = worker.submit(Stages(stages()), "stages", shares=threads)
    with pytest.raises(WorkerError, match="stages failed: ArithmeticError"):
        job.result()
    worker.settle()
    assert job.done()
    assert done == [0, 0, 0]


def test_whoever_comes_late_finds_all_done() -> None:
    done: list[int] = []
    stages = Stages(counting(done, threading.Lock(), 4, number) for number in range(3))
    stages()
    stages()
    assert done == [0] * 4 + [1] * 4 + [2] * 4
