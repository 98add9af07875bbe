"""The scheduler's tasks: lists that CPU threads and the device take from, and the kernel that runs a task whole.

A task is the choice of blocks and the attention to them for one (row, KV head). Each side has a list, largest task
first. Its workers take from the beginning; when it is empty, they take from the end of the other side's list, where the
smallest tasks are, as long as that saves time.
Source: Fluxion, section 6.2.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np

from hf_offload.cpu.kernels.decode_attention import (
    attend_part,
    attention_kernel,
    attention_lists,
    attention_scratch,
    merge_head,
)
from hf_offload.cpu.kernels.digest_scores import CHUNK_BLOCKS
from hf_offload.cpu.launch import I32, Array, Launch, jit, jit_for_python, kernel, require
from hf_offload.cpu.memory import count_up, peek, swap_if

from .selector import make_scratch, score_blocks, take_blocks

NOTHING_LEFT = -1
_WARY = 2.0
_LOW = 0xFFFFFFFF
_LAST = 1 << 32  # one task from the end


# --- who takes which task --------------------------------------------------------------------------------------------


class TaskLists(NamedTuple):
    """The lists of both sides, the CPU's and the device's.

    Args:
        order: int32 [2, T], tasks, in the order in which their side takes them.
        before: float64 [2, T + 1], bytes that the tasks before each of them read together.
        counts: int64 [2], how many tasks a list has.
        taken: int64 [2], how many of them were taken from the beginning (the lower half) and from the end (the upper).
        seconds: float64 [2, 2]: seconds a byte of one worker of a side, and of all its workers together; the first is
            infinite where a side takes no task of the other's.
    """

    order: Array
    before: Array
    counts: Array
    taken: Array
    seconds: Array


def make_task_lists(most: int) -> TaskLists:
    """Empty lists for at most `most` tasks."""
    return TaskLists(
        np.zeros((2, most), np.int32), np.zeros((2, most + 1)), np.zeros(2, np.int64), np.zeros(2, np.int64),
        np.array([[np.inf, 0.0], [np.inf, 0.0]]),
    )  # fmt: skip


@jit_for_python
def take_task(lists: Any, side: int) -> int:
    """Take the next task of a worker of a side, atomically; `NOTHING_LEFT` if there is none for it.

    A worker takes a task of the other side's if it ends it before that side's workers end all that is left there.
    """
    while True:
        old = peek(lists.taken, side)
        first = old & _LOW
        if first + (old >> 32) >= lists.counts[side]:
            break
        if swap_if(lists.taken, side, old, old + 1):
            return int(lists.order[side, first])
    other = 1 - side
    while True:
        old = peek(lists.taken, other)
        first, end = old & _LOW, lists.counts[other] - (old >> 32)
        if first >= end:
            return NOTHING_LEFT
        own_seconds = (lists.before[other, end] - lists.before[other, end - 1]) * lists.seconds[side, 0]
        theirs = (lists.before[other, end] - lists.before[other, first]) * lists.seconds[other, 1]
        if not own_seconds <= theirs:
            return NOTHING_LEFT
        if swap_if(lists.taken, other, old, old + _LAST):
            return int(lists.order[other, end - 1])


@jit_for_python
def assign_tasks(volumes: Array, threads: int, thread: float, device: float, theirs: Array) -> None:
    """Assign each task, the largest first, to the worker that would end it first; write which are the device's.

    Times are estimates. A late task is later still on a device that is slower than a thread, and the step waits for it:
    the price of a task there is up to three times its estimate.

    Args:
        volumes: float64 [n], bytes that tasks read, descending.
        threads: of the CPU.
        thread, device: seconds a byte of a thread, and of the device.
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


# --- a task on the CPU -----------------------------------------------------------------------------------------------


Attending = namedtuple("Attending", attention_kernel.names[2:])  # type: ignore[attr-defined, misc]
"""The arguments of `attention_kernel`, by its parameters' names."""


@jit
def _choose(choice: Any, b: int, h: int) -> None:
    first, end, span = choice.chosen.first[b], choice.chosen.end, choice.chosen.spans[b, h]
    scores, scratch, word = make_scratch(choice)
    for begin in range(min(max(first, 0), end) // CHUNK_BLOCKS * CHUNK_BLOCKS, end, CHUNK_BLOCKS):
        stop = min(begin + CHUNK_BLOCKS, end)
        score_blocks(choice, b, h, begin, stop, stop, scores)
    take_blocks(choice, b, h, span, scratch, word)


@jit
def _attend(attending: Any, head: int) -> None:
    """Attend the chosen blocks of one (row, KV head) in the parts of `attention_kernel`, for the same bits."""
    attention, parts = attending.attention, attending.attention.parts
    packed, capacity = attention.blocks.packed, attention.items.shape[2]
    floats, lists = attention_scratch(attention.form, packed), attention_lists(attention.form, packed, capacity, parts)
    for task in range(head * parts, (head + 1) * parts):
        none = attention.counts.size * parts
        attend_part(attending.full, attending.rest, attention, floats, lists, task, none, attending.length)
    merge_head(attention, head)


@kernel
def task_kernel(ticket: Array, tasks: int, lists: Any, choice: Any, attending: Any) -> None:
    """One task = choice and attention of one (row, KV head); taken from the lists."""
    kv_heads = attending.attention.counts.shape[1]
    while True:
        task = take_task(lists, 0)
        if task < 0:
            break
        count_up(ticket, 0)
        b, h = task // kv_heads, task % kv_heads
        _choose(choice, b, h)
        _attend(attending, task)
        count_up(ticket, 1)


def whole_tasks(choice: Launch, attention: Launch, lists: TaskLists) -> Launch:
    """Prepare choice and attention of (row, KV head) pairs, each in one task.

    Before it runs, the caller writes the granularities (`spans`), and the results of pairs that are in no list.

    Args:
        choice: from `retrieve_blocks`, not run.
        attention: from `decode_attention`, not run, without `kbar` and `scores`, over what `choice` chooses.
        lists: for B * Hkv tasks; a task is row * Hkv + KV head. Read when the launch runs: each calling thread takes
            tasks until none is left for the CPU.

    Raises:
        ValueError: launches that do not fit together.
        TypeError: an array of another dtype.
    """
    chosen, attended = choice.arg("choice").chosen, attention.arg("attention")
    if attended.items is not chosen.blocks or attended.counts is not chosen.counts:
        raise ValueError("the attention is to other blocks than those that are chosen; prepare both on the same arrays")
    if attended.kbar or attended.scores:
        raise ValueError("tasks return neither kbar nor scores; prepare the attention without them")
    require("order", lists.order, I32, (2, chosen.counts.size))
    args = (lists, choice.arg("choice"), Attending(*attention.args))
    return Launch(task_kernel, chosen.counts.size, args, choice.cost + attention.cost, attention.keep, dealt=True)
