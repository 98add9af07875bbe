"""Standing launches that one call starts: in one visit to a team, or in a row, one after the other.

To wake threads that sleep takes longer than a small launch, and so does the way through Python from one to the next.
"""

from __future__ import annotations

import numpy as np

from .bound import call_bound
from .launch import Array, jit
from .memory import get_word, load_flag
from .standing import FINE, Standing, clear, entry_of, run_standing, write_numbers
from .team import ALONE, share, team

_NONE = 0
# A launch in a row: its address, the numbers that change, addresses of its tasks and of how many are done, whether
# a team does them.
ADDRESS, CHANGING, TASKS, DONE, SHARED = range(5)
ROW_WIDTH = 5
MOST_NUMBERS = 8
"""Numbers of all launches of a row."""
ZEROS = tuple((0,) * (MOST_NUMBERS - count) for count in range(MOST_NUMBERS + 1))


@jit
def _take_parts(
    first: int, first_place: int, beside: int, beside_place: int, then: int, then_place: int, done: int, tasks: int
) -> None:
    call_bound(first, first_place)
    if beside != _NONE:
        call_bound(beside, beside_place)
    if then != _NONE and load_flag(done) == tasks:
        call_bound(then, then_place)


@jit
def _run(first: int, beside: int, then: int, tasks: int, runtime: int, threads: int, number: int) -> int:
    """Do all tasks of the calls at these addresses; FINE, or which of them refuses the number."""
    if write_numbers(first, 1, number, 0, 0) != FINE:
        return 0
    if then != _NONE and write_numbers(then, 1, number, 0, 0) != FINE:
        return 1
    done = clear(first, threads) + 8
    entry, place = entry_of(first)
    beside_entry, beside_place, then_entry, then_place = _NONE, _NONE, _NONE, _NONE
    if beside != _NONE:
        clear(beside, threads)
        beside_entry, beside_place = entry_of(beside)
    if then != _NONE:
        clear(then, threads)
        then_entry, then_place = entry_of(then)
    share(
        (runtime, threads), _take_parts,
        (entry, place, beside_entry, beside_place, then_entry, then_place, done, tasks),
    )  # fmt: skip
    if then != _NONE and load_flag(done) == tasks:  # what nobody took, because the first was not done yet
        call_bound(then_entry, then_place)
    return FINE


def run_together(first: Standing, beside: Standing | None, then: Standing | None, number: int) -> None:
    """Do all tasks of launches that nobody else makes meanwhile, the second and third of which may be missing.

    Args:
        first: takes the number that may be changed.
        beside: neither reads nor writes what `first` writes; none of its numbers changes.
        then: reads what `first` has written, not what `beside` writes; takes the number, too.
        number: from this time on.

    Raises:
        ValueError: the arrays do not cover so much.
        MemoryError: a thread of the team could not do its tasks.
    """
    all_of_them = [standing for standing in (first, beside, then) if standing is not None]
    runtime, threads = team() if any(standing.shared for standing in all_of_them) else ALONE
    wrong = _run(
        first.address, _NONE if beside is None else beside.address, _NONE if then is None else then.address,
        first.tasks, runtime, threads, number,
    )  # fmt: skip
    if wrong != FINE:
        refusing = first if wrong == 0 or then is None else then
        refusing.set(refusing.changing[0], number)
    for standing in all_of_them:
        standing.check()


@jit
def _run_row(row: int, count: int, a: int, b: int, c: int, d: int, e: int, f: int, g: int, h: int) -> int:
    """Run so many launches; the number of the first that did not do all, or `FINE`."""
    numbers, at = (a, b, c, d, e, f, g, h, 0, 0), 0
    for i in range(count):
        place = row + 8 * ROW_WIDTH * i
        call = int(np.int64(get_word(place + 8 * ADDRESS)))
        changing = int(np.int64(get_word(place + 8 * CHANGING)))
        if run_standing(call, changing, numbers[at], numbers[at + 1], numbers[at + 2]) != FINE:
            return i
        at += changing
        if get_word(place + 8 * SHARED) != 0:
            tasks, done = np.int64(get_word(place + 8 * TASKS)), np.int64(get_word(place + 8 * DONE))
            if get_word(tasks) != get_word(done):
                return i
    return FINE


class Row:
    """A row of standing launches, kept as long as they are the same.

    Args:
        most: how many launches there may be.
    """

    __slots__ = ("_address", "_launches", "_row", "_shared")

    def __init__(self, most: int) -> None:
        self._launches: tuple[Standing, ...] = ()
        self._row: Array = np.zeros((most, ROW_WIDTH), np.int64)
        self._address = self._row.ctypes.data
        self._shared: tuple[Standing, ...] = ()

    def run(self, launches: tuple[Standing, ...], numbers: tuple[int, ...]) -> None:
        """Do all launches now, one after the other, each as `Standing.run` does.

        Args:
            launches: in this order.
            numbers: of all launches one after the other, from this time on: for each as many as it may change;
                `MOST_NUMBERS` in all.

        Raises:
            ValueError: the arrays of a launch do not cover so much.
            MemoryError: a thread of the team could not do its tasks.
        """
        address = self.address_of(launches)
        for launch in self._shared:
            launch.gather()
        wrong = _run_row(address, len(launches), *numbers, *ZEROS[len(numbers)])
        if wrong != FINE:
            self.refuse(launches, numbers, wrong)

    def address_of(self, launches: tuple[Standing, ...]) -> int:
        """Where compiled code reads which launches they are."""
        if launches != self._launches:
            self._launches = ()  # until all of it is there
            for i, launch in enumerate(launches):
                counters = launch.counters
                self._row[i] = launch.address, len(launch.changing), *counters, launch.shared
            self._launches, self._shared = launches, tuple(launch for launch in launches if launch.shared)
        return self._address

    @staticmethod
    def refuse(launches: tuple[Standing, ...], numbers: tuple[int, ...], wrong: int) -> None:
        """Raise what a launch refuses its numbers for, or that it has not done all its tasks."""
        first = sum(len(launch.changing) for launch in launches[:wrong])
        refusing = launches[wrong]
        for name, number in zip(refusing.changing, numbers[first:], strict=False):
            refusing.set(name, number)
        refusing.check()
