"""Supervised cases: those that fail, crash or hang do not affect others."""

from __future__ import annotations

from typing import Any

import pytest

from gpu.supervise import Listener, here, supervise

from ._troubled import lost, no, troubled, yes


def watch(
    work: Any, names: list[str], seconds: float, healthy: Any = yes, run: Any = supervise
) -> tuple[Listener, dict[str, tuple[str, str]], list[str]]:
    """What a part told: its listener, status and note of each case, and the rows in their order."""
    ended: dict[str, tuple[str, str]] = {}
    rows: list[str] = []

    def on_end(name: str, status: str, note: str, seconds: float) -> None:
        assert seconds >= 0
        ended[name] = (status, note)

    listener = Listener(list(names), lambda row: rows.append(row["case"]), on_end)
    run(work, listener, seconds, healthy)
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


def test_a_process_without_a_healthy_device_is_given_up() -> None:
    _, ended, rows = watch(troubled, ["raises", "first"], 300, no)
    assert rows == ["raises", "first"]
    assert [status for status, _ in ended.values()] == ["failed", "done"]


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
