"""Launches that are made again and again: arguments are checked and handed over once, then a short call is enough."""

from __future__ import annotations

from typing import Any

import numpy as np

from .bound import bind, call_bound
from .launch import SHARE_BYTES, Array, Launch, jit
from .team import ALONE, share, team

_ENTRY, _PLACE, _RUNTIME, _THREADS, _WIDTH = 0, 1, 2, 3, 4  # of a `call` int64 [_WIDTH]
_NO_COUNTERS = np.zeros(0, np.int64)


@jit
def _take_part(entry: int, place: int) -> None:
    call_bound(entry, place)


@jit
def _clear(ticket: Array, counters: Array, threads: int) -> None:
    ticket[0] = ticket[1] = 0
    ticket[2] = threads
    counters[:] = 0


@jit
def _run(call: Array, ticket: Array, counters: Array) -> None:
    _clear(ticket, counters, call[_THREADS])
    share((call[_RUNTIME], call[_THREADS]), _take_part, (call[_ENTRY], call[_PLACE]))


class Standing:
    """A launch that can be made any number of times, one after the other.

    Its arrays are those of the launch, and stay so. Numbers may be changed between two times.

    Args:
        launch: that has not been made; its `counters` are cleared each time.
        label: what an error message calls it.
        most: the integer arguments of the kernel that will be changed, each with the largest value that its arrays
            allow.

    Raises:
        TypeError: the launch's kernel is not one that `launch.kernel` made.
    """

    __slots__ = ("_call", "_counters", "_memory", "_numbers", "_shared", "label", "launch")

    def __init__(self, launch: Launch, label: str, **most: int) -> None:
        bound = bind(launch)
        names: tuple[str, ...] = launch.kernel.names  # type: ignore[attr-defined]
        self.launch, self.label = launch, label
        self._memory = bound.memory
        self._numbers = {
            name: (bound.offsets[names.index(name)], limit) for name, limit in (*most.items(), ("tasks", launch.tasks))
        }
        self._counters = _NO_COUNTERS if launch.counters is None else launch.counters
        self._call: Array = np.array([bound.entry, bound.place, *ALONE], np.int64)
        self._shared = launch.cost >= SHARE_BYTES and launch.tasks > 1

    def set(self, name: str, value: int) -> None:
        """Change a number from the next time on.

        Raises:
            ValueError: the arrays do not cover so much.
        """
        place, most = self._numbers[name]
        if not 0 <= value <= most:
            raise ValueError(f"{self.label}: {name} {value} is not within 0..{most}, which the arrays cover")
        self._memory[place] = value

    def run(self) -> None:
        """Do all tasks now, as `Launch.run` does.

        Raises:
            MemoryError: a thread of the team could not do its tasks.
        """
        ticket = self.launch.ticket
        if self._shared:
            self._call[_RUNTIME:] = team()
        _run(self._call, ticket, self._counters)
        if self._shared and ticket[1] != self.tasks:
            raise MemoryError(f"{self.label}: only {ticket[1]} of {self.tasks} tasks were done; is memory left?")

    @property
    def tasks(self) -> int:
        """How many tasks there are; `set` may lower it."""
        return int(self._memory[self._numbers["tasks"][0]])

    def open(self, participants: int) -> None:
        """Make ready for so many calls of this object, each from a thread of its own."""
        _clear(self.launch.ticket, self._counters, participants)

    def __call__(self) -> None:
        """Do one participant's share, after `open`; when every participant has returned, all tasks are done."""
        _take_part(self._call[_ENTRY], self._call[_PLACE])


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
        if numbers != self._numbers:
            return None
        for mine, theirs in zip(self._arrays, arrays, strict=True):
            if mine is not theirs:
                return None
        return self.standing

    def keep(self, launch: Launch, arrays: tuple[Any, ...], numbers: tuple[Any, ...], **most: int) -> Standing:
        """Let a launch stand from now on; arguments as in `find` and `Standing`."""
        self.standing = Standing(launch, self.label, **most)
        self._arrays, self._numbers = arrays, numbers
        return self.standing
