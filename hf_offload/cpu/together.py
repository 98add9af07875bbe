"""Standing launches that a team does in one visit: to wake threads that sleep takes longer than a small launch."""

from __future__ import annotations

from .bound import call_bound
from .launch import jit
from .memory import load_flag
from .standing import FINE, Standing, clear, entry_of, write_numbers
from .team import ALONE, share, team

_NONE = 0


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
