"""Who does which task: two sides with a list each, the largest first, and what is left of one taken by the other.

A side's workers take the tasks of their own list from its beginning; when there are none left, from the end of the
other side's, where the smallest are, as long as that is worth it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hf_offload.cpu.launch import Array, jit
from hf_offload.cpu.memory import peek, swap_if

NOTHING_LEFT = -1
_WARY = 2.0
_LOW = 0xFFFFFFFF
_LAST = 1 << 32  # one task from the end


class Hands(NamedTuple):
    """The lists of both sides, the CPU's and the device's.

    Args:
        order: int32 [2, T], tasks, in the order in which their side takes them.
        before: float64 [2, T + 1], what those before each of them read, all together.
        counts: int64 [2], how many tasks a list has.
        taken: int64 [2], how many of them were taken from the beginning (the lower half) and from the end (the upper).
        seconds: float64 [2, 2]: what reading one takes a worker of a side, and what it takes all workers of it; the
            first is infinite where nobody takes what is the other side's.
    """

    order: Array
    before: Array
    counts: Array
    taken: Array
    seconds: Array


def new_hands(most: int) -> Hands:
    """Lists without tasks, for at most so many."""
    return Hands(
        np.zeros((2, most), np.int32), np.zeros((2, most + 1)), np.zeros(2, np.int64), np.zeros(2, np.int64),
        np.array([[np.inf, 0.0], [np.inf, 0.0]]),
    )  # fmt: skip


@jit
def take(hands: Any, side: int) -> int:
    """The task that a worker of a side does next, which nobody else gets from now on (atomic), or `NOTHING_LEFT`.

    A task of the other side's is taken if it ends before that side's workers would have ended all that is left there.
    """
    while True:
        old = peek(hands.taken, side)
        first = old & _LOW
        if first + (old >> 32) >= hands.counts[side]:
            break
        if swap_if(hands.taken, side, old, old + 1):
            return int(hands.order[side, first])
    other = 1 - side
    while True:
        old = peek(hands.taken, other)
        first, end = old & _LOW, hands.counts[other] - (old >> 32)
        if first >= end:
            return NOTHING_LEFT
        mine = (hands.before[other, end] - hands.before[other, end - 1]) * hands.seconds[side, 0]
        theirs = (hands.before[other, end] - hands.before[other, first]) * hands.seconds[other, 1]
        if not mine <= theirs:
            return NOTHING_LEFT
        if swap_if(hands.taken, other, old, old + _LAST):
            return int(hands.order[other, end - 1])


@jit
def deal(volumes: Array, threads: int, thread: float, device: float, theirs: Array) -> None:
    """Give each task to the worker that would end it first, the largest first: which tasks are the device's.

    What a task takes is only estimated. One that is late is later still on a device that is slower than a thread, and
    all others wait for it: there a task counts up to three times.

    Args:
        volumes: float64 [n], what tasks read, descending.
        threads: of the CPU.
        thread, device: seconds that reading one takes a thread, and the device.
        theirs: uint8 [n], written: 1 for the device's.
    """
    ends, end = np.zeros(threads), 0.0
    price = device * (1.0 + _WARY * max(1.0 - thread / device, 0.0))
    for i in range(len(volumes)):
        worker = np.argmin(ends)
        theirs[i] = end + volumes[i] * price < ends[worker] + volumes[i] * thread
        if theirs[i]:
            end += volumes[i] * device
        else:
            ends[worker] += volumes[i] * thread
