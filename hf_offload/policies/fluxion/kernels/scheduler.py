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

from hf_offload.cpu.kernels.block import STEP_TOKENS
from hf_offload.cpu.kernels.digest_scores import CHUNK_BLOCKS
from hf_offload.cpu.kernels.packed import spare_bytes
from hf_offload.cpu.kernels.parts import clear_part, merge_parts, part_blocks, partial_state
from hf_offload.cpu.kernels.record import record_of
from hf_offload.cpu.kernels.sparse_decode import attend_step, decode_kernel
from hf_offload.cpu.launch import I32, Array, Launch, jit, jit_for_python, kernel, require
from hf_offload.cpu.memory import address_of, count_up, hold, peek, swap_if
from hf_offload.cpu.simd.vectors import load_f32, splat, store

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
    """Empty lists for at most so many tasks."""
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
        mine = (lists.before[other, end] - lists.before[other, end - 1]) * lists.seconds[side, 0]
        theirs = (lists.before[other, end] - lists.before[other, first]) * lists.seconds[other, 1]
        if not mine <= theirs:
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


Attention = namedtuple("Attention", decode_kernel.names[2:])  # type: ignore[attr-defined, misc]
"""The arguments of `decode_kernel`, by its parameters' names."""


@jit
def _choose(choice: Any, b: int, h: int) -> None:
    first, end, span = choice.chosen.first[b], choice.chosen.end, choice.chosen.spans[b, h]
    scores, scratch, word = make_scratch(choice)
    for begin in range(min(max(first, 0), end) // CHUNK_BLOCKS * CHUNK_BLOCKS, end, CHUNK_BLOCKS):
        stop = min(begin + CHUNK_BLOCKS, end)
        score_blocks(choice, b, h, begin, stop, stop, scores)
    take_blocks(choice, b, h, span, scratch, word)


@jit
def _attend(attention: Any, b: int, h: int) -> None:
    """Attend the chosen blocks in the parts of `decode_kernel`, so that results are bitwise the same."""
    tag, full, rest, query, packed = (
        attention.tag, attention.full, attention.rest, attention.query, attention.packed,
    )  # fmt: skip
    block_ptr, table, blocks, counts = attention.block_ptr, attention.table, attention.blocks, attention.counts
    block_size, parts, partial = attention.block_size, attention.parts, attention.partial
    out, lse, scale = attention.out, attention.lse, attention.scale
    kv_heads, dim = counts.shape[1], query.shape[2]
    group, head = query.shape[1] // kv_heads, b * kv_heads + h
    record = 2 * block_size * dim * tag.itemsize
    step, stride = max(1, STEP_TOKENS // block_size), 4 * max(STEP_TOKENS, block_size)
    share = part_blocks(counts[b, h], parts, block_size, step)
    part, partial_step = 4 * group * dim, 4 * partial.shape[1]
    state_offset = partial_state(group, dim, False)
    scratch = np.empty(16 + (part + 2 * group * stride + spare_bytes(packed, dim, block_size)) // 4, np.float32)
    queries = (address_of(scratch) + 63) & ~63
    scores = queries + part
    spare = scores + 2 * group * stride
    addresses = np.empty(share + step, np.int64)
    source = address_of(query) + head * part
    for place in range(0, part, 64):
        store(queries + place, load_f32(source + place) * splat(np.float32(scale)))
    origin = address_of(partial) + head * parts * partial_step
    for number in range(parts):
        begin = min(number * share, counts[b, h])
        mine = min(counts[b, h] - begin, share)
        chosen = blocks[b, h, begin : begin + mine]
        sums = origin + number * partial_step
        clear_part(sums, dim, group, False)
        for i in range(mine):
            addresses[i] = record_of(block_ptr[table[b, chosen[i]]], h, record, packed)
        for i in range(mine, mine + step):
            addresses[i] = addresses[max(i - 1, 0)]
        for first in range(0, mine, step):
            last = min(first + step, mine)
            attend_step(
                tag, full, rest, group, addresses, chosen, first, last, attention.valid[b], attention.holes[b],
                attention.length, queries, dim, block_size, attention.cap, scores, stride, sums + state_offset, sums,
                0, 0, 0, attention.prefetches, packed, spare,
            )  # fmt: skip
    merge_parts(
        origin, parts, partial_step, dim, group, False, lse[b, h * group : (h + 1) * group],
        address_of(out) + head * part, 0,
    )  # fmt: skip
    hold(scratch)


@kernel
def task_kernel(ticket: Array, tasks: int, lists: Any, choice: Any, attention: Any) -> None:
    """One task = choice and attention of one (row, KV head); taken from the lists."""
    kv_heads = attention.counts.shape[1]
    while True:
        task = take_task(lists, 0)
        if task < 0:
            break
        count_up(ticket, 0)
        b, h = task // kv_heads, task % kv_heads
        _choose(choice, b, h)
        _attend(attention, b, h)
        count_up(ticket, 1)


def whole_tasks(choice: Launch, attention: Launch, lists: TaskLists) -> Launch:
    """Prepare choice and attention of (row, KV head) pairs, each in one task.

    Before it runs, the caller writes the granularities (`spans`), and the results of pairs that are in no list.

    Args:
        choice: from `retrieve_blocks`, not run.
        attention: from `sparse_decode`, not run, without `kbar` and `scores`, over what `choice` chooses.
        lists: for B * Hkv tasks; a task is row * Hkv + KV head. Read when the launch runs: each calling thread takes
            tasks until none is left for the CPU.

    Raises:
        ValueError: launches that do not fit together.
        TypeError: an array of another dtype.
    """
    chosen, counts = choice.arg("choice").chosen, attention.arg("counts")
    if attention.arg("blocks") is not chosen.blocks or counts is not chosen.counts:
        raise ValueError("the attention is to other blocks than those that are chosen; prepare both on the same arrays")
    if len(attention.arg("kbar")) or len(attention.arg("raw")):
        raise ValueError("tasks return neither kbar nor scores; prepare the attention without them")
    require("order", lists.order, I32, (2, counts.size))
    args = (lists, choice.arg("choice"), Attention(*attention.args))
    return Launch(task_kernel, counts.size, args, choice.cost + attention.cost, dealt=True)
