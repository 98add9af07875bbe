"""A thread that makes standing launches in the order in which they were posted, without the interpreter on the way.

A thread of Python that takes a job up wants the GIL several times, from the model's thread, which then waits for it in
the midst of its layer. Launches that need no Python between them go into a ring instead, whose thread sleeps on a word
in memory. Positions in the ring are counted from 0 and never again: a launch has ended when more have ended.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import deque
from typing import Any

import numpy as np

from .bound import call_bound
from .futex import LOWER, now, wait_for_change, wake
from .helpers import Helpers, lead
from .launch import Array, jit
from .memory import add_to, address_of, count_up, get_word, hold, peek, swap_if
from .serving import nap, pause
from .standing import FINE, Standing, clear, entry_of, write_numbers
from .together import ADDRESS, CHANGING, DONE, ROW_WIDTH, SHARES, TASKS, ZEROS, Row

# A launch in the ring, a row of int64 [RING, _WIDTH]: its state, the bound call, addresses of its tasks and of how many
# are done, how many helpers are invited, and the last launch that was posted with it.
_STATE, _ENTRY, _PLACE, _TASKS, _DONE, _INVITED, _FIRST, _LAST = range(8)
_WIDTH = 8
_WAITING, _TAKEN, _DROPPED = range(3)
RING = 1024
"""Launches that are posted and have not ended, at most."""

# Entries of `control` int64, each in a cache line of its own. BELL changes with all that the thread should know.
_BELL, _POSTED, _ENDED, _ASLEEP, _WAITERS, _STOP, _DELAY = range(0, 56, 8)
_CONTROL_WIDTH = 56

_STOPPED, _IDLE, _FAILED = range(3)
_TURNS = 500  # of waiting for a launch before sleeping: tens of microseconds
_PATIENCE = 100_000_000  # nanoseconds without work after which what was kept for it is let go
_ALL = 1 << 30


@jit
def _ring(control: Array) -> None:
    count_up(control, _BELL)
    if swap_if(control, _ASLEEP, 1, 0):
        wake(address_of(control) + 8 * _BELL, 1)
        hold(control)


@jit
def _post(
    ring: Array, control: Array, row: int, count: int, helpers: int,
    a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int,
) -> int:  # fmt: skip
    """Append the launches of a row with their numbers; FINE, or which of them refuses its own: none is posted then."""
    numbers, at = (a, b, c, d, e, f, g, h, 0, 0), 0
    for i in range(count):
        place = row + 8 * ROW_WIDTH * i
        changing = int(np.int64(get_word(place + 8 * CHANGING)))
        call = int(np.int64(get_word(place + 8 * ADDRESS)))
        if write_numbers(call, changing, numbers[at], numbers[at + 1], numbers[at + 2]) != FINE:
            return i
        at += changing
    first = peek(control, _POSTED)
    for i in range(count):
        place, slot = row + 8 * ROW_WIDTH * i, (first + i) % RING
        call = int(np.int64(get_word(place + 8 * ADDRESS)))
        invited = min(helpers, int(np.int64(get_word(place + 8 * SHARES))))
        clear(call, invited + 1)
        entry, of_it = entry_of(call)
        ring[slot, _ENTRY], ring[slot, _PLACE], ring[slot, _INVITED] = entry, of_it, invited
        ring[slot, _TASKS] = np.int64(get_word(place + 8 * TASKS))
        ring[slot, _DONE] = np.int64(get_word(place + 8 * DONE))
        ring[slot, _FIRST], ring[slot, _LAST], ring[slot, _STATE] = first, first + count - 1, _WAITING
    add_to(control, _POSTED, count)
    _ring(control)
    return FINE


@jit
def _end(control: Array) -> None:
    """One launch more has ended."""
    count_up(control, _ENDED)
    if peek(control, _WAITERS) > 0:
        wake(address_of(control) + 8 * _ENDED, _ALL)
        hold(control)


@jit
def _follow(ring: Array, control: Array, calls: Array, crew: Array, call: int) -> int:
    """Make launches as they come until told to stop, until one leaves tasks undone, or after some work and none since.

    Args:
        ring, control: of the `Runner`.
        calls, crew, call: of its `Helpers`, and the row in which it calls them.
    """
    worked = False
    while True:
        bell = peek(control, _BELL)
        number = peek(control, _ENDED)
        if peek(control, _POSTED) == number:
            if peek(control, _STOP) != 0:
                return _STOPPED
            swap_if(control, _ASLEEP, 0, 1)
            began = now()
            if peek(control, _BELL) == bell:
                wait_for_change(address_of(control) + 8 * _BELL, bell & LOWER, _PATIENCE if worked else -1)
                hold(control)
            swap_if(control, _ASLEEP, 1, 0)
            if worked and peek(control, _BELL) == bell and now() - began >= _PATIENCE:
                return _IDLE
            continue
        worked = True
        slot = number % RING
        if swap_if(ring, slot * _WIDTH + _STATE, _WAITING, _TAKEN):
            if peek(control, _DELAY) > 0 and ring[slot, _FIRST] == number:
                nap(peek(control, _DELAY))
            if ring[slot, _INVITED] > 0:
                lead(calls, crew, call, ring[slot, _ENTRY], ring[slot, _PLACE], ring[slot, _INVITED])
            else:
                call_bound(ring[slot, _ENTRY], ring[slot, _PLACE])
            if get_word(ring[slot, _TASKS]) != get_word(ring[slot, _DONE]):
                return _FAILED
        _end(control)


@jit
def _drop(ring: Array, control: Array, first: int, last: int) -> int:
    """Let launches that nobody has begun never begin; the first of them, or the one behind the last."""
    dropped = last + 1
    for number in range(last, max(first, peek(control, _ENDED)) - 1, -1):  # who has ended may have given up its place
        if swap_if(ring, number % RING * _WIDTH + _STATE, _WAITING, _DROPPED):
            dropped = number
    return dropped


@jit
def _has_ended(control: Array, number: int) -> bool:
    return bool(peek(control, _ENDED) > number)


@jit
def _await(control: Array, number: int, nanoseconds: int) -> None:
    """Wait so long for a launch to end."""
    for _ in range(_TURNS):
        if peek(control, _ENDED) > number:
            return
        pause()
    until, left = now() + nanoseconds, nanoseconds
    count_up(control, _WAITERS)
    while left > 0:
        ended = peek(control, _ENDED)
        if ended > number:
            break
        wait_for_change(address_of(control) + 8 * _ENDED, ended & LOWER, left)
        left = until - now()
    add_to(control, _WAITERS, -1)


class Errand:
    """Launches that were posted together.

    Args:
        first, last: their positions.
        label: what an error message calls them.
        keep: what they reach only by address.
    """

    __slots__ = ("error", "failed", "first", "keep", "label", "last", "withdrawn")

    def __init__(self, first: int, last: int, label: str, keep: Any) -> None:
        self.first, self.last, self.label, self.keep = first, last, label, keep
        self.error: BaseException | None = None
        self.failed = last + 1
        """Where the error belongs: what comes before has been done."""
        self.withdrawn = False
        """Whether nothing of it was begun, nor will be."""

    def fail(self, position: int, error: BaseException) -> None:
        """Have an error at a position, if there is none before."""
        if position < self.failed:
            self.error, self.failed = error, position


class Runner:
    """The thread and its ring; started at the first post.

    Args:
        helpers: share the launches that are worth it.
    """

    def __init__(self, helpers: Helpers) -> None:
        self._ring: Array = np.zeros((RING, _WIDTH), np.int64)
        self._control: Array = np.zeros(_CONTROL_WIDTH, np.int64)
        self._helpers, self._call = helpers, helpers.lend()
        self._under_way: deque[Errand] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._gone: list[bool] = []
        """Something, once the thread has ended: to ask it takes longer."""
        self._delay = 0.0

    @property
    def alive(self) -> bool:
        """Whether the thread is there."""
        return self._thread is not None and not self._gone

    def post(
        self, row: Row, launches: tuple[Standing, ...], numbers: tuple[int, ...], label: str, keep: Any, delay: float
    ) -> Errand:
        """Let launches be made, one after the other, beside what the caller goes on to do.

        Args:
            row: keeps them; launches, numbers: as in `Row.run`.
            label, keep: see `Errand`.
            delay: seconds that the thread sleeps before them.

        Raises:
            ValueError: the arrays of a launch do not cover such numbers.
            RuntimeError: `RING` launches have not ended.
        """
        address, count = row.address_of(launches), len(launches)
        helpers = self._helpers.ready() if any(launch.shares for launch in launches) else 0
        with self._lock:
            if self._thread is None or self._gone:
                self._start()
            first, ended = self._control.item(_POSTED), self._control.item(_ENDED)
            if first + count - ended > RING:
                raise RuntimeError(f"{label}: {RING} launches wait for the worker; has its thread stopped?")
            if delay != self._delay:
                self._delay, self._control[_DELAY] = delay, int(1e6 * delay)
            while self._under_way and self._under_way[0].last < ended:
                self._under_way.popleft().keep = None
            errand = Errand(first, first + count - 1, label, keep)
            try:
                self._under_way.append(errand)  # whatever comes now, its memory is kept
                wrong = _post(self._ring, self._control, address, count, helpers, *numbers, *ZEROS[len(numbers)])
            finally:
                if self._control.item(_POSTED) == first and self._under_way and self._under_way[-1] is errand:
                    self._under_way.pop()
        if wrong == FINE:
            return errand
        row.refuse(launches, numbers, wrong)
        raise AssertionError(f"{label}: launch {wrong} of {count} was refused and is fine")

    def _start(self) -> None:
        _compile()
        weakref.finalize(self, _stop, self._control, os.getpid()).atexit = False
        self._control[_STOP], self._gone = 0, []
        args = (self._ring, self._control, self._under_way, self._helpers, self._call, self._gone)
        self._thread = threading.Thread(target=_serve, args=args, name="hf_offload-runner", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no more threads can be had
            self._gone.append(True)
            raise

    @property
    def idle(self) -> bool:
        """Whether all that was posted has ended."""
        return bool(self._control[_POSTED] == self._control[_ENDED])

    def has_ended(self, position: int) -> bool:
        """Whether the launch at a position has ended: what it wrote is visible."""
        return bool(_has_ended(self._control, position))

    def wait(self, position: int, seconds: float) -> None:
        """Wait until the launch at a position has ended, so long at most."""
        _await(self._control, position, int(1e9 * seconds))

    def drop(self, first: int, last: int) -> int:
        """Let launches that have not begun never begin; the first of them, or the one behind the last."""
        return int(_drop(self._ring, self._control, first, last))

    @property
    def newest(self) -> Errand | None:
        """The last errand, if it is not known to have ended."""
        with self._lock:
            return self._under_way[-1] if self._under_way else None


def _stop(control: Array, pid: int) -> None:
    if os.getpid() == pid:
        control[_STOP] = 1
        _ring(control)


def _serve(
    ring: Array, control: Array, under_way: deque[Errand], helpers: Helpers, call: int, gone: list[bool]
) -> None:
    try:
        while _follow_on(ring, control, under_way, helpers, call):
            pass
    finally:
        gone.append(True)


def _follow_on(ring: Array, control: Array, under_way: deque[Errand], helpers: Helpers, call: int) -> bool:
    """Make launches until one fails, or nothing has been posted for a while; whether there is more to come."""
    try:
        outcome = _follow(ring, control, helpers.calls, helpers.control, call)
        if outcome == _FAILED:
            raise helpers.error_of(call) or MemoryError("not all tasks were done; is memory left?")
        if outcome in (_IDLE, _STOPPED):
            _let_go(under_way, control)
        return bool(outcome != _STOPPED)
    except BaseException as error:  # it belongs to whoever waits for the errand
        helpers.dismiss(call)
        _give_up(ring, control, under_way, error)
        return True


def _let_go(under_way: deque[Errand], control: Array) -> None:
    """Keep no more what has ended."""
    for errand in list(under_way):
        if errand.last < control[_ENDED]:
            errand.keep = None


def _give_up(ring: Array, control: Array, under_way: deque[Errand], error: BaseException) -> None:
    """Go on behind the errand that failed."""
    number = int(control[_ENDED])
    for errand in list(under_way):
        if errand.first <= number <= errand.last:
            errand.fail(number, error.with_traceback(None))  # which would hold this frame
            _drop(ring, control, number + 1, errand.last)
            errand.keep = None
    _end(control)


@functools.cache
def _compile() -> None:
    """Compile what the thread runs, so that nobody waits for it in a step."""
    ring, control = np.zeros((RING, _WIDTH), np.int64), np.zeros(_CONTROL_WIDTH, np.int64)
    control[_STOP] = 1
    idle = Helpers(0, 1)
    _follow(ring, control, idle.calls, idle.control, 0)
    _end(control)
    _await(control, 0, 0)
    _has_ended(control, 0)
    _drop(ring, control, 0, 0)
