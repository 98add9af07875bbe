"""Threads that help a thread of the `Worker` with a launch, without the interpreter on the way.

A thread that needs Python for its share of a launch takes the GIL several times, from the model's thread, which wants
it for the next layer's work. So one thread of the worker takes a job up, and calls these for help: all that they run is
compiled. A call is a row of numbers; its state holds how many are still invited, in the upper half, and how many are
inside, in the lower. Who called takes part. Who finds no task left withdraws the invitations, and who called waits
until nobody is inside.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
import os
import threading
import time
import weakref

import numpy as np

from .futex import FUTEX, LOWER, now, wait_for_change, wake
from .launch import Array, Launch, jit, kernel
from .memory import add_to, address_of, count_up, hold, peek, swap_if
from .openmp_team import call_entry
from .serving import nap, pause
from .threads import Thread, start

WORTH_BYTES = 1 << 16
"""A launch that reads less is done before a thread that sleeps has woken."""

# Entries of a call, a row of int64 [calls, WIDTH].
STATE, ENTRY, PLACE, NANOSECONDS = range(4)
WIDTH = 16
_INVITED = 1 << 32  # one of them, in the state
_INSIDE = _INVITED - 1

# Entries of `control` int64. BELL changes with every call.
BELL, STOP = 0, 8
CONTROL_WIDTH = 16

_BRANCHES = 2  # threads that each one wakes: the last of many is woken after a few turns, and the first does not wait
_TURNS = 2000  # of waiting for those inside before napping
_NAP = 50  # microseconds


@jit
def _ring(control: Array, threads: int) -> None:
    wake(address_of(control), threads)
    hold(control)


@jit
def _take_part(calls: Array, call: int) -> None:
    began = now()
    call_entry(calls[call, ENTRY], calls[call, PLACE])
    add_to(calls, call * WIDTH + NANOSECONDS, now() - began)


@jit
def _withdraw(calls: Array, call: int) -> None:
    """Invite nobody else: whoever took part has found no task left."""
    at = call * WIDTH + STATE
    state = peek(calls, at)
    while state >= _INVITED and not swap_if(calls, at, state, state & _INSIDE):
        state = peek(calls, at)


@jit
def dismiss(calls: Array, call: int) -> None:
    """Invite nobody else to a call, and wait until nobody is inside any more; it is free then."""
    _withdraw(calls, call)
    turns = 0
    while peek(calls, call * WIDTH + STATE) != 0:
        turns += 1
        if turns < _TURNS:
            pause()
        else:
            nap(_NAP)


@jit
def lead(calls: Array, control: Array, call: int, entry: int, place: int, helpers: int) -> int:
    """Do what is bound at these addresses together with so many helpers; nanoseconds of all who took part."""
    calls[call, ENTRY], calls[call, PLACE], calls[call, NANOSECONDS] = entry, place, 0
    swap_if(calls, call * WIDTH + STATE, 0, helpers * _INVITED)
    count_up(control, BELL)
    _ring(control, min(helpers, _BRANCHES))
    _take_part(calls, call)
    dismiss(calls, call)
    return peek(calls, call * WIDTH + NANOSECONDS)  # type: ignore[no-any-return]


@jit
def _enter(calls: Array) -> int:
    """Accept an invitation; its call, or -1."""
    for call in range(len(calls)):
        at = call * WIDTH + STATE
        state = peek(calls, at)
        while state >= _INVITED:
            if swap_if(calls, at, state, state - _INVITED + 1):
                return call
            state = peek(calls, at)
    return -1


@jit
def leave(calls: Array, call: int) -> None:
    """Be inside a call no more."""
    at = call * WIDTH + STATE
    state = peek(calls, at)
    while not swap_if(calls, at, state, state - 1):
        state = peek(calls, at)


@jit
def serve(calls: Array, control: Array) -> None:
    """Help whoever calls until told to stop."""
    while True:
        bell = peek(control, BELL)  # before looking around: a call that comes meanwhile changes it
        if peek(control, STOP) != 0:
            return
        call = _enter(calls)
        if call < 0:
            wait_for_change(address_of(control), bell & LOWER)
            hold(control)
            continue
        if peek(calls, call * WIDTH + STATE) >= _INVITED:
            _ring(control, _BRANCHES)
        _take_part(calls, call)
        _withdraw(calls, call)
        leave(calls, call)


class Helpers:
    """Threads that sleep until a thread of a worker divides a launch; started at the first that is worth it.

    Args:
        count: how many.
        callers: how many threads may call at once.
    """

    def __init__(self, count: int, callers: int) -> None:
        self.count = count if FUTEX else 0
        self.calls: Array = np.zeros((callers, WIDTH), np.int64)
        self.control: Array = np.zeros(CONTROL_WIDTH, np.int64)
        self._free = list(range(callers))
        self._lock, self._threads = threading.Lock(), list[Thread]()

    def _start(self) -> int:
        """Have threads there; how many, as many as the system allows."""
        with self._lock:
            if self.count and not self._threads:
                _compile()
                weakref.finalize(self, _stop, self.control, os.getpid()).atexit = False
            while len(self._threads) < self.count:
                try:
                    self._threads.append(start(serve, (self.calls, self.control), "a helper"))
                except MemoryError:  # no more can be had
                    self.count = len(self._threads)
        return self.count

    def ready(self) -> int:
        """Have the threads there; how many."""
        return self.count if len(self._threads) == self.count else self._start()

    def divide(self, launch: Launch) -> float:
        """Do all tasks of a launch now, which nobody else runs meanwhile.

        Returns:
            Seconds for which threads were at it, all together.

        Raises:
            MemoryError: not all tasks were done.
        """
        helpers = 0
        if launch.cost >= WORTH_BYTES and launch.tasks > 1:
            helpers = min(self.ready(), launch.tasks - 1)
        if not helpers:
            began = time.perf_counter()
            launch()
            return time.perf_counter() - began
        launch.open(helpers + 1)
        call = self._free.pop()
        try:
            spent = lead(self.calls, self.control, call, *launch.address, helpers)
        finally:
            dismiss(self.calls, call)
            self._free.append(call)
        launch.check()
        return spent / 1e9


def _stop(control: Array, pid: int) -> None:
    if os.getpid() == pid:
        control[STOP] = 1
        control[BELL] += 1
        _ring(control, 1 << 30)


@kernel
def _nothing_kernel(ticket: Array, tasks: int) -> None:
    while count_up(ticket, 0) < tasks:
        count_up(ticket, 1)


@functools.cache
def _compile() -> None:
    """Compile what the threads run, so that none of them has to, nor a job when memory is short."""
    calls, control = np.zeros((1, WIDTH), np.int64), np.zeros(CONTROL_WIDTH, np.int64)
    nothing = Launch(_nothing_kernel, 1, (), 0)
    nothing.open(1)
    lead(calls, control, 0, *nothing.address, 0)
    nothing.check()
    calls[0, STATE] = 1
    leave(calls, 0)
    dismiss(calls, 0)
    control[STOP] = 1
    serve(calls, control)
