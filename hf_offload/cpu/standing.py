"""Launches that are made again and again: arguments are checked and handed over once, then a short call is enough."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from .bound import bind, call_bound
from .launch import SHARE_BYTES, Array, Launch, jit
from .memory import get_word, put_word
from .team import ALONE, share, team

# Entries of a `call` int64 [_WIDTH], which compiled code is told by its address: Python hands over a number sooner than
# an array. From _NUMBERS on: for each number that changes, where it lies and how large it may be.
_ENTRY, _PLACE, _RUNTIME, _THREADS, _TICKET, _COUNTERS, _COUNT, _NUMBERS = range(8)
_MOST_NUMBERS = 3
_WIDTH = _NUMBERS + 2 * _MOST_NUMBERS
FINE = -1
ANYWHERE = 2**63 - 1
"""The largest value of a number that is an address."""


@jit
def _take_part(entry: int, place: int) -> None:
    call_bound(entry, place)


@jit
def _entry(call: int, index: int) -> int:
    return int(np.int64(get_word(call + 8 * index)))


@jit
def clear(call: int, threads: int) -> int:
    """Make a call ready for so many participants; the address of its ticket."""
    ticket, counters = _entry(call, _TICKET), _entry(call, _COUNTERS)
    put_word(ticket, 0)
    put_word(ticket + 8, 0)
    put_word(ticket + 16, threads)
    for index in range(_entry(call, _COUNT)):
        put_word(counters + 8 * index, 0)
    return ticket


@jit
def entry_of(call: int) -> tuple[int, int]:
    """What `call_bound` needs to do one participant's share of a call."""
    return _entry(call, _ENTRY), _entry(call, _PLACE)


@jit
def write_numbers(call: int, count: int, first: int, second: int, third: int) -> int:
    """Write so many of a call's numbers; which of them is too large, or FINE."""
    for index, value in enumerate((first, second, third)):
        if index < count:
            place = _NUMBERS + 2 * index
            if value < 0 or value > _entry(call, place + 1):
                return index
            put_word(_entry(call, place), value)
    return FINE


@jit
def run_standing(call: int, count: int, first: int, second: int, third: int) -> int:
    """Write so many of the numbers and do all tasks; which number is too large, or FINE."""
    wrong = write_numbers(call, count, first, second, third)
    if wrong != FINE:
        return wrong
    threads = _entry(call, _THREADS)
    clear(call, threads)
    share((_entry(call, _RUNTIME), threads), _take_part, entry_of(call))
    return FINE


class Standing:
    """A launch that can be made any number of times, one after the other.

    Its arrays are those of the launch, and stay so. Numbers may be changed between two times.

    Args:
        launch: that has not been made; its `counters` are cleared each time.
        label: what an error message calls it.
        most: the integer arguments of the kernel that will be changed, three at most, each with the largest value that
            its arrays allow.

    Raises:
        TypeError: the launch's kernel is not one that `launch.kernel` made.
    """

    __slots__ = ("_call", "_numbers", "address", "bound", "changing", "label", "launch", "shared")

    def __init__(self, launch: Launch, label: str, **most: int) -> None:
        self.bound = bound = bind(launch)
        names: tuple[str, ...] = launch.kernel.names  # type: ignore[attr-defined]
        self.launch, self.label = launch, label
        self._numbers = {
            name: (bound.offsets[names.index(name)], limit) for name, limit in (*most.items(), ("tasks", launch.tasks))
        }
        self._call: Array = np.zeros(_WIDTH, np.int64)
        self._call[: _TICKET + 1] = bound.entry, bound.place, *ALONE, launch.ticket.ctypes.data
        if launch.counters is not None:
            self._call[[_COUNTERS, _COUNT]] = launch.counters.ctypes.data, len(launch.counters)
        for index, name in enumerate(most):
            place, limit = self._numbers[name]
            self._call[_NUMBERS + 2 * index : _NUMBERS + 2 * index + 2] = bound.place + 8 * place, limit
        self.changing = tuple(most)
        """The numbers that may be changed, in the order of `run`."""
        self.address = self._call.ctypes.data
        """Of what compiled code reads of it (`write_numbers`, `clear`, `entry_of`)."""
        self.shared = launch.cost >= SHARE_BYTES and launch.tasks > 1
        """Whether a team is worth its waking."""

    def set(self, name: str, value: int) -> None:
        """Change a number from the next time on.

        Raises:
            ValueError: the arrays do not cover so much.
        """
        place, most = self._numbers[name]
        if not 0 <= value <= most:
            raise ValueError(f"{self.label}: {name} {value} is not within 0..{most}, which the arrays cover")
        self.bound.memory[place] = value

    def run(self, first: int = 0, second: int = 0, third: int = 0) -> None:
        """Do all tasks now, as `Launch.run` does.

        Args:
            first, second, third: the numbers named in `most`, from this time on; 0 where there are less.

        Raises:
            ValueError: the arrays do not cover so much.
            MemoryError: a thread of the team could not do its tasks.
        """
        if self.shared:
            self.gather()
        wrong = run_standing(self.address, len(self.changing), first, second, third)
        if wrong != FINE:
            self.set(self.changing[wrong], (first, second, third)[wrong])
        if self.shared:
            self.check()

    def gather(self) -> None:
        """Have the caller's team."""
        self._call[_RUNTIME:_TICKET] = team()

    def check(self) -> None:
        """After all participants have returned: raise MemoryError unless all tasks were done."""
        if self.launch.ticket[1] != self.tasks:
            done = self.launch.ticket[1]
            raise MemoryError(f"{self.label}: only {done} of {self.tasks} tasks were done; is memory left?")

    @property
    def counters(self) -> tuple[int, int]:
        """Addresses of the number of tasks, and of how many of them are done."""
        place: int = self.bound.memory.ctypes.data + 8 * self._numbers["tasks"][0]
        return place, self.launch.ticket.ctypes.data + 8

    @property
    def tasks(self) -> int:
        """How many tasks there are; `set` may lower it."""
        return int(self.bound.memory[self._numbers["tasks"][0]])


class Kept:
    """A standing launch, made anew when what it was made of is not the same any more.

    Args:
        label: what an error message calls it.
    """

    __slots__ = ("_arrays", "_numbers", "label", "standing")

    def __init__(self, label: str) -> None:
        self.label = label
        self.standing: Standing | None = None
        self._arrays: tuple[Any, ...] = ()
        self._numbers: tuple[Any, ...] = ()

    def forget(self) -> None:
        """Make it anew the next time."""
        self.standing = None

    def find(self, arrays: tuple[Any, ...], numbers: tuple[Any, ...]) -> Standing | None:
        """The launch that was made of these very arrays and equal numbers, or None."""
        if self.standing is None or numbers != self._numbers or any(map(operator.is_not, arrays, self._arrays)):
            return None
        return self.standing

    def keep(self, launch: Launch, arrays: tuple[Any, ...], numbers: tuple[Any, ...], **most: int) -> Standing:
        """Let a launch stand from now on; arguments as in `find` and `Standing`."""
        self.standing = Standing(launch, self.label, **most)
        self._arrays, self._numbers = arrays, numbers
        return self.standing
