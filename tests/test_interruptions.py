"""Ctrl-C at any point: the cache is right afterwards or its error says what to do; nothing hangs."""

from __future__ import annotations

import itertools
import math
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from breaking import interrupted_at
from forks import in_fork
from histories import History, Setting, check_books, empty
from llvmlite.binding import ffi
from tiny import DEVICE, prompt

import hf_offload
from hf_offload import ConstantPredictor, HybridCache

PACKAGE = str(Path(hf_offload.__file__).parent)
SCOUT: dict[str, Any] = {
    "budget": 1024, "sinks": 8, "recent": 0, "block_size": 8, "prefill_tile": 32, "lookahead": "select",
    "synchronous_layers": (0,), "timeout": 120.0,
}  # fmt: skip
HGCA: dict[str, Any] = {"window": 24, "beta": 0.0, "block_size": 8, "prefill_tile": 32, "timeout": 120.0}
FLUXION: dict[str, Any] = {"predictor": ConstantPredictor(sinks=16, local=32), "prefill_tile": 32, "timeout": 120.0}
BLOCKS: dict[str, Any] = {"block_size": 8, "prefill_tile": 32, "timeout": 120.0}
SETTINGS = {
    "one": Setting(2, 16, "scout", {**SCOUT, "tier": "one", "lookahead": "off"}, True),
    "split": Setting(2, 16, "scout", {**SCOUT, "tier": "split", "resident": 48, "recall": 1}, True),
    "attend": Setting(2, 16, "scout", {**SCOUT, "tier": "split", "resident": 512, "lookahead": "attend"}, True),
    "int8": Setting(2, 16, "scout", {**SCOUT, "tier": "split", "resident": 48, "host_dtype": "int8"}, True),
    "full, fetched": Setting(2, 16, "full", {"host": "fetch", "tier": "split", "resident": 48, **BLOCKS}, True),
    "quest": Setting(2, 16, "quest", {"budget": 8192, "tier": "split", "resident": 48, **BLOCKS}, True),
    "h2o": Setting(2, 16, "h2o", {"heavy": 1, "recent": 1, "tier": "split", **BLOCKS}, True),
    "infinigen": Setting(2, 16, "infinigen", {"alpha": math.inf, "share": 1, "tier": "split", **BLOCKS}, True),
    "hgca": Setting(2, 16, "hgca", {**HGCA, "tier": "split"}, True),
    "hgca, one": Setting(2, 16, "hgca", {**HGCA, "tier": "one"}, True),
    "fluxion": Setting(2, 16, "fluxion", {**FLUXION, "tier": "one"}, True),
}
CONTEXT = 203  # the fifth token from here fills a block


def tokens(rows: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 150, (rows, count), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    mask = torch.ones_like(ids)
    if count > 3:
        mask[0, : count // 3] = 0
    return ids, mask


def begun(setting: Setting) -> History:
    history = empty(setting, 2)
    history.feed(*tokens(2, CONTEXT - 3, 0))
    for i in range(3):
        history.feed(*tokens(2, 1, i))
    return history


def interrupt(history: History, point: int, act: Callable[[HybridCache], None]) -> bool:
    """Do something to the cache that is interrupted; whether it was, or ended before that point."""
    with interrupted_at(point, PACKAGE) as left:
        try:
            act(history.caches[0])
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
    return left[0] <= 0  # where Python must ignore an exception (a finalizer), it came and nobody saw it


def check_after(history: History, taken: int, seed: int) -> None:
    """The cache holds what it held, or `taken` tokens more, and takes the next ones in as ever."""
    cache = history.caches[0]
    cache.crop(0)
    more = cache.get_seq_length() - history.length
    assert more in (0, taken)
    cache.crop(-more)
    check_books([history], leaks=True)
    for count in (1, 1, 6, 1):
        history.feed(*tokens(history.rows, count, seed))
    history.crop(9)


def forward(history: History, count: int) -> Callable[[HybridCache], None]:
    ids, mask = tokens(history.rows, count, 99)
    seen = torch.cat([history.mask, mask], 1)

    def act(cache: HybridCache) -> None:
        with torch.no_grad():
            history.run(cache, ids, seen)

    return act


def points(history: History, act: Callable[[HybridCache], None]) -> int:
    """How many points there are at which it can be interrupted."""
    with interrupted_at(10**9, PACKAGE) as left:
        act(history.caches[0])
    return 10**9 - left[0]


def chosen(count: int, most: int) -> list[int]:
    """So many points among all of them, the same ones in every run."""
    return sorted(random.Random(0).sample(range(1, count + 1), min(count, most)))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, pytest.param(5, marks=pytest.mark.slow), 30])
@pytest.mark.parametrize("memory", SETTINGS)
@pytest.mark.parametrize("most", [2, pytest.param(10**6, marks=pytest.mark.slow)])
def test_a_forward_is_interrupted_anywhere(memory: str, count: int, most: int) -> None:
    history = begun(SETTINGS[memory])
    act = forward(history, count)
    total = points(history, act)
    history.caches[0].crop(-count)
    for point in chosen(total, most):
        interrupt(history, point, act)
        check_after(history, count, point)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("memory", SETTINGS)
@pytest.mark.parametrize("most", [2, pytest.param(400, marks=pytest.mark.slow)])
def test_a_first_prompt_is_interrupted_anywhere(memory: str, most: int) -> None:
    """Nothing is cached before it: then nobody knows either how many rows there are."""
    total = points(empty(SETTINGS[memory], 2), forward(empty(SETTINGS[memory], 2), 90))
    for point in chosen(total, most):
        history = empty(SETTINGS[memory], 2)
        interrupt(history, point, forward(history, 90))
        cache = history.caches[0]
        cache.crop(0)
        cache.crop(-cache.get_seq_length())  # it may have ended
        for count in (90, 1, 1, 6, 1):
            history.feed(*tokens(2, count, point))
        check_books([history], leaks=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("memory", SETTINGS)
@pytest.mark.parametrize("most", [3, pytest.param(10**6, marks=pytest.mark.slow)])
def test_a_crop_is_interrupted_anywhere(memory: str, most: int) -> None:
    history = begun(SETTINGS[memory])

    def act(cache: HybridCache) -> None:
        cache.crop(-150)

    total = points(begun(SETTINGS[memory]), act)
    for point in chosen(total, most):
        interrupt(history, point, act)
        history.caches[0].crop(0)
        left = history.caches[0].get_seq_length()
        assert left in (CONTEXT, CONTEXT - 150)
        history.ids, history.mask = history.ids[:, :left], history.mask[:, :left]
        check_after(history, 0, point)
        if left < CONTEXT:
            history.feed(*tokens(2, CONTEXT - left, point))


ROWS: dict[str, tuple[Callable[[HybridCache], None], list[int]]] = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    "reset": (lambda cache: cache.reset(), []),
}


def changes() -> list[Any]:
    """All of them; in the quick set every setting with two changes, and every change with half of the settings."""
    rows = []
    for (i, memory), (j, name) in itertools.product(enumerate(SETTINGS), enumerate(ROWS)):
        for most in (2, 10**6):
            marks = () if (i + j) % 2 == 0 and most == 2 else pytest.mark.slow
            rows.append(pytest.param(most, memory, name, marks=marks, id=f"{most}-{memory}-{name}"))
    return rows


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("most", "memory", "name"), changes())
def test_a_change_of_the_rows_is_interrupted_anywhere(memory: str, name: str, most: int) -> None:
    """Whole before or whole after, or an error that says to reset."""
    act, rows = ROWS[name]
    total = points(begun(SETTINGS[memory]), act)
    for point in chosen(total, most):
        history = begun(SETTINGS[memory])
        cache = history.caches[0]
        interrupt(history, point, act)
        kept = rows
        if torn(cache):
            with pytest.raises(RuntimeError, match=r"call reset\(\)"):
                history.feed(*tokens(2, 1, 0))
            cache.reset()
            kept = []
        batch = cache.layers[0].batch_size
        if batch == len(kept) and (name != "reorder" or torch.equal(held(cache), held_by(history, kept))):
            history.keep_rows(torch.tensor(kept))
        if cache.get_seq_length() == 0:
            history.ids = history.mask = torch.zeros(2, 0, dtype=torch.long, device=DEVICE)
            history.feed(*tokens(2, 40, point))
        check_after(history, 0, point)


def torn(cache: HybridCache) -> bool:
    """Whether the cache says that it must begin anew."""
    try:
        cache.crop(0)
    except RuntimeError as error:
        if "call reset()" not in str(error):
            raise
        return True
    return False


def held(cache: HybridCache) -> torch.Tensor:
    return torch.from_numpy(cache.settings.padding.valid[:, : cache.get_seq_length()])


def held_by(history: History, rows: list[int]) -> torch.Tensor:
    return history.mask[rows].to("cpu", torch.uint8)


@pytest.mark.parametrize("memory", SETTINGS)
@pytest.mark.parametrize("times", [4, pytest.param(3000, marks=pytest.mark.slow)])
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
        for i in range(times):
            count = chance.choice((1, 1, 4, 40))
            act = forward(history, count)
            rung.clear()
            with suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-4, 1e-2))
                while not rung:  # where Python must ignore an exception (a finalizer), it comes and nobody sees it
                    act(cache)
                    cache.crop(-count)
            torch.set_grad_enabled(True)  # it may have come while torch's no_grad was putting this back
            check_after(history, count, i)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("memory", SETTINGS)
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


@pytest.mark.parametrize("memory", ["one", "split", "hgca"])
def test_another_thread_at_the_same_cache_is_told_so(memory: str) -> None:
    """Whatever it tries while a forward runs; that forward and what follows it are as ever."""
    history = begun(SETTINGS[memory])
    cache, told, seen = history.caches[0], [], []

    def intrude() -> None:
        attempts: list[Callable[[], Any]] = [
            lambda: forward(history, 1)(cache),
            lambda: forward(history, 5)(cache),
            lambda: cache.crop(-1),
            lambda: cache.reorder_cache(torch.tensor([1, 0])),
            lambda: cache.batch_select_indices(torch.tensor([0])),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.reset(),
        ]
        for attempt in attempts:
            try:
                attempt()
            except RuntimeError as error:
                told.append(str(error))

    def meanwhile(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            seen.append(True)
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()

    handle = SETTINGS[memory].model.model.layers[1].mlp.register_forward_pre_hook(meanwhile)
    try:
        for i in range(4):
            history.feed(*tokens(2, 1, i))
    finally:
        handle.remove()
    assert len(seen) == 4
    assert len(told) == 4 * 7
    assert all("one thread at a time" in text for text in told)
    check_books([history])


def test_a_thread_that_died_in_a_forward_is_no_obstacle() -> None:
    history = begun(SETTINGS["one"])
    act = forward(history, 1)

    def die() -> None:
        interrupt(history, 400, act)

    thread = threading.Thread(target=die)
    thread.start()
    thread.join()
    check_after(history, 1, 5)


def test_a_row_that_is_not_there_is_refused_and_nothing_has_happened() -> None:
    history = begun(SETTINGS["split"])
    for attempt in (history.caches[0].reorder_cache, history.caches[0].batch_select_indices):
        with pytest.raises(IndexError, match=r"rows 0 to 1, not \[0, 2\]"):
            attempt(torch.tensor([0, 2]))
    check_books([history])
    history.feed(*prompt(2, 3))
