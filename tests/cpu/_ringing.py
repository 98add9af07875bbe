"""The announcing side of a doorbell, for its tests: flags, kernels, and a check of each answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_offload.cpu.host_signals import Item
from hf_offload.cpu.launch import Array, Launch, jit, jit_for_python, kernel
from hf_offload.cpu.memory import count_up, load_flag, store_flag
from hf_offload.cpu.serving import nap, pause

READY, DONE, STATUS = 0, 16, 32
"""Where the flags lie in a row of int32, each in a cache line of its own."""


def flags(items: int) -> Array:
    return np.zeros((items, 48), np.int32)


def address(row: Array, flag: int) -> int:
    return int(row[flag:].ctypes.data)


def item(row: Array, launch: Launch, label: str = "work", ready: int = 0) -> Item:
    places = [address(row, flag) for flag in (READY, DONE, STATUS)]
    return Item(ready or places[0], places[1], places[2], launch, label, (row,))


@kernel
def answer_kernel(ticket: Array, tasks: int, question: Array, answer: Array, counter: Array) -> None:
    """Each task answers one entry: 3 x + 1; the last to finish counts all of them."""
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        answer[task] = 3 * question[task] + 1
        if count_up(counter, 0) == tasks - 1:
            answer[tasks] = counter[0]
        count_up(ticket, 1)


@kernel
def fail_kernel(ticket: Array, tasks: int, question: Array) -> None:
    """Fails at tasks whose question is negative."""
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        if question[task] < 0:
            raise ValueError("a negative question")
        count_up(ticket, 1)


@kernel
def idle_kernel(ticket: Array, tasks: int) -> None:
    """Nothing."""


@kernel
def stuck_kernel(ticket: Array, tasks: int, gate: Array) -> None:
    """Sleeps until the gate is open."""
    task = count_up(ticket, 0)
    while gate[0] == 0:
        nap(100)
    if task < tasks:
        count_up(ticket, 1)


def answering(tasks: int) -> tuple[Launch, Array, Array]:
    """A launch of `answer_kernel` with its question and its answer."""
    question, answer, counter = np.zeros(tasks, np.int64), np.zeros(tasks + 1, np.int64), np.zeros(1, np.int64)
    launch = Launch(answer_kernel, tasks, (question, answer, counter), 0, counters=counter)
    return launch, question, answer


@jit_for_python
def tell(place: int, epoch: int) -> None:
    """Store a flag."""
    store_flag(place, epoch)


@jit_for_python
def await_flag(place: int, epoch: int, naps: int) -> bool:
    """Wait for a flag, 50 microseconds a nap; whether it came."""
    for turn in range(500 + naps):
        if np.int32(load_flag(place) - epoch) >= 0:
            return True
        if turn < 500:
            pause()
        else:
            nap(50)
    return False


@jit
def _is_right(done: int, epoch: int, number: int, question: Array, answer: Array) -> bool:
    if not await_flag(done, epoch, 6_000_000):
        return False
    for task in range(question.size):
        if answer[task] != 3 * (1000 * epoch + 10 * number + task) + 1:
            return False
    return bool(answer[question.size] == question.size)


@jit_for_python
def ring(ready: Array, done: Array, questions: Any, answers: Any, first: int, epochs: int, in_turn: bool) -> int:
    """Announce all items epoch after epoch and check the answers: how many epochs were right before the first error.

    `in_turn`: each is announced when the one before is answered; otherwise all of an epoch at once.
    """
    for step in range(epochs):
        epoch = np.int64(np.int32(first + step))
        for i in range(len(questions)):
            for task in range(questions[i].size):
                questions[i][task] = 1000 * epoch + 10 * i + task
            answers[i][:] = -1
            tell(ready[i], epoch)
            if in_turn and not _is_right(done[i], epoch, i, questions[i], answers[i]):
                return step
        for i in range(len(questions)):
            if not _is_right(done[i], epoch, i, questions[i], answers[i]):
                return step
    return epochs
