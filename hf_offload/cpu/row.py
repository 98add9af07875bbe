"""Standing launches that follow one another, started by one call: Python comes back when the last one is done."""

from __future__ import annotations

import operator

import numpy as np

from .launch import Array, jit
from .memory import get_word
from .standing import FINE, Standing, run_standing

_WIDTH = 4  # of a launch: its address, numbers that change, and where its tasks are counted, if a team does them


@jit
def _run_row(row: int, count: int, number: int) -> int:
    """Run so many launches; the number of the first that did not do all, or `FINE`."""
    for i in range(count):
        place = row + 8 * _WIDTH * i
        if run_standing(int(np.int64(get_word(place))), int(np.int64(get_word(place + 8))), number, 0, 0) != FINE:
            return i
        tasks = np.int64(get_word(place + 16))
        if tasks and get_word(tasks) != get_word(np.int64(get_word(place + 24))):
            return i
    return FINE


class Row:
    """A row of standing launches, kept as long as they are the same.

    Args:
        most: how many launches there may be.
    """

    def __init__(self, most: int) -> None:
        self._launches: tuple[Standing, ...] = ()
        self._row: Array = np.zeros((most, _WIDTH), np.int64)
        self._address = self._row.ctypes.data
        self._shared: tuple[Standing, ...] = ()

    def run(self, launches: tuple[Standing, ...], number: int) -> None:
        """Do all launches now, one after the other, each as `Standing.run` does.

        Args:
            launches: of which each has one number that changes, or none.
            number: of those that have one, from this time on.

        Raises:
            ValueError: the arrays of a launch do not cover so much.
            MemoryError: a thread of the team could not do its tasks.
        """
        if len(launches) != len(self._launches) or any(map(operator.is_not, launches, self._launches)):
            self._keep(launches)
        for launch in self._shared:
            launch.gather()
        wrong = _run_row(self._address, len(launches), number)
        if wrong != FINE:
            refusing = launches[wrong]
            for name in refusing.changing:
                refusing.set(name, number)
            refusing.check()

    def _keep(self, launches: tuple[Standing, ...]) -> None:
        self._launches = ()  # until all of it is there
        for i, launch in enumerate(launches):
            self._row[i] = launch.address, len(launch.changing), *(launch.counters if launch.shared else (0, 0))
        self._launches, self._shared = launches, tuple(launch for launch in launches if launch.shared)
