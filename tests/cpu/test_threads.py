"""The threads of `cpu.threads`: start, failure to start, end, forks."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from forks import in_fork

from hf_offload.cpu import threads
from hf_offload.cpu.thread_pool import Worker
from hf_offload.cpu.threads import start

SHORTAGE = "no thread for a test could be started: {}; free memory, or use fewer threads"


def test_a_thread_is_alive_until_its_end() -> None:
    gate, seen = threading.Event(), list[int]()

    def run(number: int) -> None:
        gate.wait(300)
        seen.extend((number, threading.get_ident()))

    thread = start(run, (7,), "a test")
    thread.join(0.01)
    assert thread.is_alive()
    gate.set()
    for _ in range(2):
        thread.join(300)
        assert not thread.is_alive()
    assert seen == [7, thread.ident]


def test_a_thread_that_raises_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", lambda error: told.append(error.exc_type))
    thread = start(lambda: 1 / 0, (), "a test")
    thread.join(300)
    assert not thread.is_alive()
    while not told:
        time.sleep(0.01)
    assert told == [ZeroDivisionError]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_forked_child_has_no_thread_of_its_parent() -> None:
    gate = threading.Event()
    thread = start(gate.wait, (300,), "a test")

    def join() -> None:
        thread.join(100)  # at once
        assert not thread.is_alive()

    assert in_fork(join) == 0
    assert thread.is_alive()
    gate.set()


def refused(run: Callable[[], Any], args: tuple[Any, ...]) -> int:
    raise RuntimeError("can't start new thread")


def dead(run: Callable[[], Any], args: tuple[Any, ...]) -> int:
    return 1


@pytest.mark.parametrize(("begin", "why"), [(refused, "can't start new thread"), (dead, "it died before it began")])
def test_no_memory_for_a_thread_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[..., int], why: str
) -> None:
    monkeypatch.setattr(_thread, "start_new_thread", begin)
    with pytest.raises(MemoryError) as caught:
        start(print, (), "a test")
    assert str(caught.value) == SHORTAGE.format(why)
    worker = Worker()
    for act in (worker.ready, lambda: worker.submit(print)):
        with pytest.raises(MemoryError, match="no thread for work beside the model"):
            act()
    monkeypatch.undo()
    worker.submit(lambda: None).result()


def test_a_thread_that_does_not_begin_in_time_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    later, done = list[Callable[[], None]](), list[int]()
    monkeypatch.setattr(_thread, "start_new_thread", lambda run, args: later.append(run) or 1)
    monkeypatch.setattr(threads, "_LOOKS", 3)
    with pytest.raises(MemoryError) as caught:
        start(done.append, (1,), "a test")
    assert str(caught.value) == SHORTAGE.format("it did not begin in time")
    later[0]()
    assert not done
