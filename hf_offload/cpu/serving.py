"""The compiled loop of `host_signals.Doorbell`'s threads, which hold no GIL.

The threads walk the same list of items in order, epoch after epoch, each at its own pace. They synchronise at an item
by its state word: the epoch in the upper half, the number of threads inside in the lower half. A thread that enters
takes tasks from the item's ticket until none is left. A thread that leaves and sees all tasks done stores `done`. The
last thread to leave closes the item: it resets the ticket while no thread is inside, and opens the next epoch. A late
thread finds the item closed and goes on; nothing waits for it. Tasks that are undone at that point have failed.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from hf_offload.cpu.simd.vectors import BITS32, emit_call, lowered, lowered_as

from .launch import Array, jit, jit_for_python
from .memory import load_flag, peek, put_word, store_flag, swap_if
from .openmp_team import call_entry

# A row of `items` int64 [n, WIDTH]: addresses of the flags, the launch's entry and argument, the counters to clear, the
# flag of earlier work. The state, which threads write, lies on cache lines of its own.
READY, DONE, STATUS, ENTRY, ARGUMENT, TASKS, COUNTERS, COUNT, AFTER = range(9)
STATE, FAILED, FAILED_IN, UNDONE = range(16, 20)
WIDTH = 32
TICKET_WIDTH = 16  # a row of `tickets` int64 [n, TICKET_WIDTH] begins with a `Launch.ticket`

# Entries of `control` int64.
STOP, DELAY, TURNS, PATIENCE = 0, 1, 2, 3
CONTROL_WIDTH = 16

# Entries of a thread's `position` int64.
EPOCH, ITEM = 0, 1
POSITION_WIDTH = 16

_MANY = 0xFFFFFFFF
_CLOSING = 1 << 31
_STOPPED, _ENTERED, _OVER = 0, 1, 2
_SHORTEST_NAP, _LONGEST_NAP = 50, 1000  # microseconds


@lowered
def pause(typing: Any) -> Any:
    """Spin-wait hint for the core."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        triple = context.codegen().magic_tuple()[0]
        name, options = "", []
        if triple.startswith(("x86_64", "i686")):
            name = "llvm.x86.sse2.pause"
        elif triple.startswith(("aarch64", "arm64")):
            name, options = "llvm.aarch64.hint", [ir.Constant(BITS32, 1)]  # YIELD
        if name:
            emit_call(builder, name, ir.VoidType(), *options)

    return types.void(), emit


@lowered_as(types.void(types.int64))
def nap(builder: Any, microseconds: Any) -> None:
    """Sleep for less than a second."""
    emit_call(builder, "usleep", BITS32, builder.trunc(microseconds, BITS32))


@jit_for_python
def state_of(epoch: int) -> int:
    """State word of an item that is open for an epoch, with no thread inside."""
    return epoch << 32


@jit
def _after(epoch: int) -> int:
    """The next epoch, an int32 that wraps around."""
    return int(np.int64(np.int32(epoch + 1)))


@jit
def _announced(items: Array, item: int, epoch: int) -> bool:
    if np.int32(load_flag(items[item, READY]) - epoch) < 0:
        return False
    after = items[item, AFTER]
    return bool(after == 0 or np.int32(load_flag(after) - epoch) >= 0)


@jit
def _arrive(items: Array, tickets: Array, control: Array, item: int, epoch: int) -> int:
    """Wait for an item's announcement of the epoch and enter it, unless it is closed or all tasks are taken."""
    at, ticket = item * WIDTH, item * TICKET_WIDTH
    turns, waited = 0, control[PATIENCE]
    while peek(control, STOP) == 0:
        state = peek(items, at + STATE)
        ahead = np.int32((state >> 32) - epoch)
        if ahead > 0:
            return _OVER
        # While the previous epoch is not closed (ahead < 0), wait as if this one were not announced yet.
        if ahead == 0 and _announced(items, item, epoch):
            inside = state & _MANY
            if inside == _CLOSING or (inside > 0 and peek(tickets, ticket) >= items[item, TASKS]):
                return _OVER
            if peek(control, DELAY) > 0:
                nap(peek(control, DELAY))
            if swap_if(items, at + STATE, state, state + 1):
                return _ENTERED
            continue
        turns += 1
        if turns < control[TURNS]:
            pause()
        else:  # an eighth of the wait so far: it adds little to the latency in proportion
            rest = min(max(waited >> 3, _SHORTEST_NAP), _LONGEST_NAP)
            nap(rest)
            waited += rest
    return _STOPPED


@jit
def _leave(items: Array, tickets: Array, item: int, epoch: int) -> None:
    """Leave an item, and close it if no other thread is inside."""
    at, ticket, done = item * WIDTH + STATE, item * TICKET_WIDTH, items[item, DONE]
    if peek(tickets, ticket + 1) == items[item, TASKS] and load_flag(done) != epoch:
        store_flag(done, epoch)  # threads still inside have no task left
    state = peek(items, at)
    while not swap_if(items, at, state, state - 1):
        state = peek(items, at)
    state -= 1
    if state & _MANY != 0 or not swap_if(items, at, state, state | _CLOSING):
        return  # another thread is inside and will close it
    if peek(tickets, ticket + 1) != items[item, TASKS]:
        if items[item, FAILED] == 0:
            items[item, FAILED_IN], items[item, UNDONE] = epoch, items[item, TASKS] - peek(tickets, ticket + 1)
            swap_if(items, item * WIDTH + FAILED, 0, 1)  # written last: a reader that sees it sees the two others
        store_flag(items[item, STATUS], 1)
        store_flag(done, epoch)
    tickets[item, 0] = tickets[item, 1] = 0
    for i in range(items[item, COUNT]):
        put_word(items[item, COUNTERS] + 8 * i, 0)
    swap_if(items, at, state | _CLOSING, state_of(_after(epoch)))


@jit
def _walk(tickets: Array, position: Array) -> None:
    position[ITEM] += 1
    if position[ITEM] == tickets.shape[0]:
        position[ITEM], position[EPOCH] = 0, _after(position[EPOCH])


@jit_for_python
def serve(items: Array, tickets: Array, control: Array, position: Array) -> None:
    """Serve items from a thread's position on until `control[STOP]` is set."""
    while True:
        outcome = _arrive(items, tickets, control, position[ITEM], position[EPOCH])
        if outcome == _STOPPED:
            return
        if outcome == _ENTERED:
            call_entry(items[position[ITEM], ENTRY], items[position[ITEM], ARGUMENT])
            _leave(items, tickets, position[ITEM], position[EPOCH])
        _walk(tickets, position)


@jit_for_python
def turn(items: Array, control: Array, turns: int) -> None:
    """Poll as a waiting thread does, `turns` times: to time it."""
    for _ in range(turns):
        if peek(control, STOP) == 0 and peek(items, STATE) == 0 and load_flag(items[0, READY]) == 0:
            pause()
