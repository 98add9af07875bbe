"""Signals and threads at a cache: forwards are taken back, changes are refused, nothing hangs."""

from __future__ import annotations

import random
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from breaking import PACKAGE, Nth, forward, interrupted_at, tokens
from breaking import SETTINGS as ALL_SETTINGS
from forks import in_fork
from histories import History, Setting, check_books, empty
from llvmlite.binding import ffi

SHARED = ALL_SETTINGS["fluxion, shared"]
SETTINGS = ALL_SETTINGS | {"fluxion, shared": replace(SHARED, knobs=SHARED.knobs | {"schedule": "uniform"})}
"""With a static schedule: by "priority" a device's tasks depend on how fast it was, and a later forward may be the
first that calls a kernel. (Of "priority", see test_faults.py.)"""
ONE = SETTINGS["one"]


def begun(setting: Setting) -> History:
    history = empty(setting, 2)
    for count in (200, 1, 1, 1):  # the fifth token from here fills a block
        history.feed(*tokens(2, count, count))
    return history


def check_after(history: History, taken: int) -> None:
    """The cache holds what it held, or `taken` tokens more, and takes the next ones in as ever."""
    cache = history.caches[0]
    cache.crop(0)
    more = cache.get_seq_length() - history.length
    assert more in (0, taken)
    cache.crop(-more)
    check_books([history], leaks=True)
    for count in (1, 1, 6, 1):
        history.feed(*tokens(history.rows, count, count))
    history.crop(9)


QUICK = ("split", "attend", "samples", "int8", "h2o", "infinigen", "hgca", "fluxion, shared")


@pytest.mark.parametrize(
    ("memory", "times"),
    [*((name, 3) for name in QUICK), *(pytest.param(name, 3000, marks=pytest.mark.slow) for name in SETTINGS)],
)
def test_a_signal_comes_at_any_time(memory: str, times: int) -> None:
    """A real signal, wherever Python happens to look for it: forwards go on, and are taken back, until it has come.

    In a fork: a library's lock may stay locked if the signal comes just when the library has taken it.
    """
    assert in_fork(lambda: ring_at_any_time(memory, times), 300.0 + times) == 0


def ring_at_any_time(memory: str, times: int) -> None:
    history, chance = begun(SETTINGS[memory]), random.Random(memory)
    cache, rung = history.caches[0], list[bool]()
    for count in (1, 4, 40):  # what is not compiled yet takes longer than any signal
        forward(history, count)(cache)
        cache.crop(-count)

    def ring(*_: Any) -> None:
        rung.append(True)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(times):
            count = chance.choice((1, 1, 4, 40))
            act = forward(history, count)
            rung.clear()
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 1e-2))
                while not rung:  # where Python must ignore an exception (a finalizer), it comes and nobody sees it
                    act(cache)
                    cache.crop(-count)
            torch.set_grad_enabled(True)  # it may have come while torch's no_grad was putting this back
            check_after(history, count)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("memory", ["attend", "samples", "full, int8", "hgca", "fluxion, shared"])
def test_the_compiler_is_asked_nothing_once_all_is_compiled(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal during a call of llvmlite's makes it free memory twice, which ends the process."""
    history, asked = begun(SETTINGS[memory]), []
    acts = [(count, forward(history, count)) for count in (1, 4, 40)]

    def ask(function: Any, *args: Any) -> Any:
        asked.append(traceback.extract_stack())
        return function._cfn(*args)

    for act_again in (False, True):
        if act_again:
            monkeypatch.setattr(ffi._lib_fn_wrapper, "__call__", ask)
        for count, act in acts:
            act(history.caches[0])
            history.caches[0].crop(-count)
    assert not asked, "".join(traceback.format_list(asked[0]))


def during(act: Callable[[], Any]) -> Any:
    """Call something in the middle of each forward, for a block."""

    def hook(*_: Any) -> None:
        act()

    return ONE.model.model.layers[1].register_forward_pre_hook(hook)


def test_a_forward_that_ended_early_says_how_to_go_on() -> None:
    history = empty(ONE, 2)
    history.feed(*tokens(2, 30, 0))
    for error in (ArithmeticError, KeyboardInterrupt):

        def stop(error: type[BaseException] = error) -> None:
            raise error

        with pytest.raises(error), during(stop):
            forward(history, 40)(history.caches[0])
    with pytest.raises(RuntimeError, match="the last forward was interrupted; the cache holds the 30 tokens"):
        forward(history, 40)(history.caches[0])
    history.feed(*tokens(2, 40, 1))
    assert {layer.get_seq_length() for layer in history.caches[0].layers} == {70}


def test_a_cache_that_is_changed_within_a_forward_wants_a_reset() -> None:
    history = begun(ONE)
    cache = history.caches[0]
    for change in (lambda: cache.crop(0), cache.fork, cache.to_dynamic):
        with suppress(RuntimeError, ValueError), during(change):
            forward(history, 10)(cache)
        with pytest.raises(RuntimeError, match=r"changed.*call reset\(\)"):
            forward(history, 1)(cache)
        cache.reset()
        history.ids, history.mask = history.ids[:, :0], history.mask[:, :0]
        history.feed(*tokens(2, 20, 0))


@pytest.mark.parametrize("memory", ["one", "hgca"])
def test_another_thread_at_the_same_cache_is_told_so(memory: str) -> None:
    """Whatever it tries while a forward runs; that forward and what follows it are as ever."""
    history = begun(SETTINGS[memory])
    cache, told = history.caches[0], list[str]()
    attempts: list[Callable[[], Any]] = [
        lambda: forward(history, 1)(cache),
        lambda: forward(history, 5)(cache),
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.batch_select_indices(torch.tensor([0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.reset(),
    ]

    def intrude() -> None:
        for attempt in attempts:
            try:
                attempt()
            except RuntimeError as error:
                told.append(str(error))

    def meanwhile() -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()

    with during(meanwhile):
        for i in range(2):
            history.feed(*tokens(2, 1, i))
    assert len(told) == 2 * len(attempts)
    assert all("one thread at a time" in text for text in told)
    check_books([history])


def test_a_thread_that_died_in_a_forward_is_no_obstacle() -> None:
    history = begun(ONE)
    act = forward(history, 1)

    def die() -> None:
        with suppress(KeyboardInterrupt), interrupted_at(Nth(400), PACKAGE):
            act(history.caches[0])

    thread = threading.Thread(target=die)
    thread.start()
    thread.join()
    check_after(history, 1)
