"""The doorbell, which serves work announced by flags: answers, races, errors, exit."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_offload.cpu.host_signals import Doorbell, Item
from hf_offload.cpu.launch import Array, Launch, kernel
from hf_offload.cpu.memory import count_up
from hf_offload.cpu.serving import nap
from hf_offload.cpu.thread_pool import WorkerError

READY, DONE, STATUS = 0, 16, 32
"""Where the flags lie in an item's row of int32, each in a cache line of its own."""
TASKS = Path("/proc/self/task")


@kernel
def answer_kernel(ticket: Array, tasks: int, gate: Array, question: Array, answer: Array, counter: Array) -> None:
    """Behind a gate, each task answers 3 x + 1 and fails where x is -1; the last to finish counts all of them."""
    while gate[0] == 0:
        nap(100)
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        if question[task] == -1:
            raise ValueError("no such question")
        answer[task] = 3 * question[task] + 1
        if count_up(counter, 0) == tasks - 1:
            answer[tasks] = counter[0]
        count_up(ticket, 1)


class Work:
    """Items of some tasks each, and their announcer; item i begins with its announcement, or behind item `waits[i]`."""

    def __init__(self, *tasks: int, waits: dict[int, int] | None = None, gates: tuple[int, ...] = ()) -> None:
        self.rows, self.gates = np.zeros((len(tasks), 48), np.int32), np.ones((len(tasks), 1), np.int64)
        self.gates[list(gates)] = 0
        self.questions = tuple(np.zeros(count, np.int64) for count in tasks)
        self.answers = tuple(np.zeros(count + 1, np.int64) for count in tasks)
        self.items = []
        for i, count in enumerate(tasks):
            counter = np.zeros(1, np.int64)
            arrays = self.gates[i], self.questions[i], self.answers[i], counter
            launch = Launch(answer_kernel, count, arrays, 0, counters=counter)
            before = (waits or {}).get(i)
            ready = self.address(i, READY) if before is None else self.address(before, DONE)
            places = ready, self.address(i, DONE), self.address(i, STATUS)
            self.items.append(Item(*places, launch, f"attention of layer {i}", (self.rows,)))

    def address(self, i: int, flag: int) -> int:
        return int(self.rows[i, flag:].ctypes.data)

    def ring(self, first: int, epochs: int, in_turn: bool) -> None:
        """Announce all items epoch after epoch, each when the one before is answered or all at once; check answers."""
        for epoch in np.arange(first, first + epochs).astype(np.int32):
            for i, question in enumerate(self.questions):
                question[:] = 1000 * int(epoch) + 10 * i + np.arange(question.size)
                self.answers[i][:] = -1
                self.announce(i, epoch)
                if in_turn:
                    until(lambda i=i, epoch=epoch: self.rows[i, DONE] == epoch)
            until(lambda epoch=epoch: (self.rows[:, DONE] == epoch).all())
            for question, answer in zip(self.questions, self.answers, strict=True):
                assert answer.tolist() == [*(3 * question + 1), question.size]

    def announce(self, i: int, epoch: int) -> None:
        self.rows[i, READY] = epoch


def until(holds: Callable[[], Any]) -> None:
    """Wait for what other threads do."""
    end = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < end
        time.sleep(0)


@pytest.mark.parametrize(
    ("threads", "spin", "in_turn", "first", "delay"),
    [
        (1, 0.0, True, 1, 0.0),
        (2, 2e-5, False, 2**31 - 1000, 0.0),  # epochs wrap around
        (3, 2e-5, True, 1, 0.0),
        (1, 1e-5, False, 1, 1e-3),  # slow hand-overs
    ],
)
def test_thousands_of_epochs(threads: int, spin: float, in_turn: bool, first: int, delay: float) -> None:
    bell, work = Doorbell(threads, spin), Work(1, 7, 2)
    bell.delay = delay
    bell.replace(work.items, epoch=first - 1)
    epochs, begin = 40 if delay else 1500 if spin else 300, time.monotonic()
    work.ring(first, epochs, in_turn)
    assert time.monotonic() - begin >= epochs * delay
    bell.check()
    bell.stop()
    assert (work.rows[:, DONE] == np.int64(first + epochs - 1).astype(np.int32)).all()
    assert not work.rows[:, STATUS].any()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_is_marked_answered_and_raised_with_its_label(threads: int) -> None:
    bell, work = Doorbell(threads, 1e-5), Work(3, 2, waits={1: 0})
    bell.replace(work.items)
    for epoch in range(1, 8):
        work.questions[0][1] = -(epoch % 2)
        work.answers[1][:] = -1
        work.announce(0, epoch)
        until(lambda epoch=epoch: work.rows[1, DONE] == epoch)  # nothing hangs
        assert work.answers[1][2] == 2
        assert work.rows[0, STATUS] == epoch % 2
        if epoch % 2:
            with pytest.raises(WorkerError, match=r"attention of layer 0 failed: .* tasks were not done") as caught:
                (bell.check if epoch < 7 else bell.stop)()  # at the end, if nobody has asked
            assert isinstance(caught.value.__cause__, MemoryError)
        bell.check()
        assert not work.rows[:, STATUS].any()
    bell.stop()


def test_what_is_not_done_in_time_is_an_error() -> None:
    bell, work = Doorbell(1, timeout=0.05), Work(1, gates=(0,))
    bell.replace(work.items)
    work.announce(0, 1)
    with pytest.raises(WorkerError, match="attention of layer 0: not done in time"):
        bell.replace(work.items)
    with pytest.raises(WorkerError, match="goes on and on"):
        bell.stop()
    work.gates[0] = 1
    until(lambda: work.rows[0, DONE] == 1)
    bell.stop()


@pytest.mark.skipif(not TASKS.is_dir(), reason="counts the threads that Linux tells")
@pytest.mark.parametrize(("spin", "stopped"), [(0.0, True), (1.0, False)])
def test_threads_that_wait_end_with_the_doorbell(spin: float, stopped: bool) -> None:
    def threads() -> int:
        return len(list(TASKS.iterdir()))

    bell, work, before = Doorbell(3, spin, timeout=3600), Work(1), threads()
    bell.replace(work.items)
    assert threads() > before
    if stopped:
        bell.stop()
    else:
        del bell
        gc.collect()
    until(lambda: threads() <= before)
