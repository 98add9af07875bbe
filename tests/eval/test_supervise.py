"""Supervised cases: those that fail, crash or hang do not affect others."""

from __future__ import annotations

from typing import Any

import pytest

from gpu.supervise import Listener, here, supervise

from ._troubled import lost, troubled


def watch(
    work: Any, names: list[str], seconds: float, run: Any = supervise, rows_are: str = "case"
) -> tuple[Listener, dict[str, tuple[str, str]], list[str]]:
    """What a part told: its listener, status and note of each case, and the rows in their order."""
    ended: dict[str, tuple[str, str]] = {}
    rows: list[str] = []

    def on_end(name: str, status: str, note: str, seconds: float) -> None:
        assert seconds >= 0
        ended[name] = (status, note)

    listener = Listener(list(names), lambda row: rows.append(row[rows_are]), on_end)
    run(work, listener, seconds)
    return listener, ended, rows


def test_cases_survive_the_end_of_their_process() -> None:
    names = ["first", "raises", "dies", "cannot", "hangs", "last"]
    listener, ended, rows = watch(troubled, names, 3000)
    assert rows == names
    assert listener.names == []
    assert {name: status for name, (status, _) in ended.items()} == {
        "first": "done", "raises": "failed", "dies": "failed", "cannot": "not applicable", "hangs": "failed",
        "last": "done",
    }  # fmt: skip
    assert "ArithmeticError: seven" in ended["raises"][1]
    assert ended["dies"][1] == "the process ended with status 9"
    assert ended["hangs"][1] == "took too long"


@pytest.mark.slow
def test_what_there_is_no_time_for_stays() -> None:
    listener, ended, _ = watch(troubled, ["goes on", "never"], 8)
    assert ended == {"goes on": ("cut off", "time was up")}
    assert listener.names == ["never"]


def test_a_new_process_goes_on_behind_a_failure() -> None:
    """The device, or its allocator, may be of no use any more."""
    names = ["first", "raises", "last", "cannot", "later", "has no memory", "latest"]
    _, ended, rows = watch(troubled, names, 300, rows_are="process")
    assert [status for status, _ in ended.values()] == [
        "done", "failed", "done", "not applicable", "done", "not applicable", "done",
    ]  # fmt: skip
    first, raises, last, cannot, later, full, latest = rows
    assert first == raises != last == cannot == later == full != latest
    assert ended["has no memory"][1] == "3 GiB are missing"


def test_a_part_that_reaches_no_case_ends() -> None:
    listener, ended, _ = watch(lost, ["first"], 300)
    assert (listener.names, ended) == (["first"], {})
    assert listener.broken is not None
    assert "before any case" in listener.broken


def test_without_a_process_of_their_own_cases_fail_alone_too() -> None:
    listener, ended, rows = watch(troubled, ["raises", "cannot", "first"], 300, run=here)
    assert rows == ["raises", "cannot", "first"]
    assert listener.names == []
    assert [status for status, _ in ended.values()] == ["failed", "not applicable", "done"]
