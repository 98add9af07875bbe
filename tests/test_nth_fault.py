"""A fault in the n-th allocation, kernel, hand-over or torch operation, for every n: an error, no token lost."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from histories import History, Setting, check_books, empty
from test_interruptions import tokens
from torch.utils._python_dispatch import TorchDispatchMode

import hf_offload
from hf_offload import ConstantPredictor, WorkerError
from hf_offload.blocks import memory
from hf_offload.cpu.launch import Launch, LaunchSequence
from hf_offload.cpu.thread_pool import Worker

SCOUT: dict[str, Any] = {
    "budget": 1024, "sinks": 8, "recent": 0, "block_size": 8, "prefill_tile": 32, "lookahead": "select",
    "synchronous_layers": (0,), "timeout": 120.0,
}  # fmt: skip
HGCA: dict[str, Any] = {"window": 24, "beta": 0.0, "block_size": 8, "prefill_tile": 32, "timeout": 120.0}
FIXED: dict[str, Any] = {"budget": 1.0, "sinks": 8, "local": 16, "block_size": 8, "timeout": 120.0}
FETCH: dict[str, Any] = {"budget": 8192, "sinks": 8, "block_size": 8, "prefill_tile": 32, "timeout": 120.0}
BLOCKS: dict[str, Any] = {"block_size": 8, "prefill_tile": 32, "timeout": 120.0}
FLUXION: dict[str, Any] = {"predictor": ConstantPredictor(sinks=16, local=16), "prefill_tile": 32, "timeout": 120.0}
SETTINGS = {
    "one": Setting(2, 16, "scout", {**SCOUT, "tier": "one", "lookahead": "off"}, True),
    "split": Setting(2, 16, "scout", {**SCOUT, "tier": "split", "resident": 48, "recall": 1}, True),
    "attend": Setting(2, 16, "scout", {**SCOUT, "tier": "split", "resident": 512, "lookahead": "attend"}, True),
    "int8": Setting(2, 16, "scout", {**SCOUT, "tier": "split", "resident": 48, "host_dtype": "int8"}, True),
    "hgca": Setting(2, 16, "hgca", {**HGCA, "tier": "split"}, True),
    "quest": Setting(2, 16, "quest", {**FETCH, "tier": "split", "resident": 48}, True),
    "fixed_hybrid": Setting(2, 16, "fixed_hybrid", {**FIXED, "tier": "split"}, True),
    "full, fetched": Setting(2, 16, "full", {"host": "fetch", "tier": "split", "resident": 48, **BLOCKS}, True),
    "h2o": Setting(2, 16, "h2o", {"heavy": 1, "recent": 1, "tier": "split", **BLOCKS}, True),
    "infinigen": Setting(2, 16, "infinigen", {"alpha": math.inf, "share": 1, "tier": "split", **BLOCKS}, True),
    "hgca, one": Setting(2, 16, "hgca", {**HGCA, "tier": "one"}, True),
    "fluxion": Setting(2, 16, "fluxion", {**FLUXION, "tier": "split"}, True),
    "fluxion, shared": Setting(2, 16, "fluxion", {**FLUXION, "tier": "split", "schedule": "priority"}, True),
}


PACKAGE = str(Path(hf_offload.__file__).parent)


class Broken(Exception):
    """Stands for whatever a kernel may die of."""


class Nth:
    """Counts calls; the n-th one fails."""

    def __init__(self, n: int) -> None:
        self.left = n

    def due(self) -> bool:
        self.left -= 1
        return self.left == 0

    def before(self, call: Callable[..., Any], fault: Callable[..., Any]) -> Callable[..., Any]:
        """The call, before which the fault may happen."""

        @functools.wraps(call)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.due():
                fault(*args, **kwargs)
            return call(*args, **kwargs)

        return counted


def no_memory(*args: Any, **kwargs: Any) -> None:
    with memory.memory_for("a test", "less"):
        raise MemoryError


def break_down(*args: Any, **kwargs: Any) -> None:
    raise Broken("the kernel died")


def kill(worker: Worker, *args: Any, **kwargs: Any) -> None:
    """End all threads of a worker."""
    for _ in worker._pool:
        worker._queue.put(None)
    for thread in worker._pool:
        thread.join(5)


@contextmanager
def host_memory(patch: pytest.MonkeyPatch, nth: Nth) -> Iterator[None]:
    """Memory on the host, wherever the package asks for it."""
    real = memory.host_empty
    failing = nth.before(real, no_memory)
    for name, module in list(sys.modules.items()):
        if name.startswith("hf_offload") and getattr(module, "host_empty", None) is real:
            patch.setattr(module, "host_empty", failing)
    yield


@contextmanager
def kernels(patch: pytest.MonkeyPatch, nth: Nth) -> Iterator[None]:
    """Launches, by the model's thread and by others."""
    for kind, name in ((LaunchSequence, "run"), (Launch, "__call__")):
        patch.setattr(kind, name, nth.before(getattr(kind, name), break_down))
    yield


@contextmanager
def divided_launches(patch: pytest.MonkeyPatch, nth: Nth) -> Iterator[None]:
    """Launches in a job, however many threads take part."""
    patch.setattr(Worker, "divide", nth.before(Worker.divide, break_down))
    yield


@contextmanager
def threads_before_a_job(patch: pytest.MonkeyPatch, nth: Nth) -> Iterator[None]:
    """All threads of the worker die before a job is handed over."""
    patch.setattr(Worker, "submit", nth.before(Worker.submit, kill))
    yield


@contextmanager
def threads_at_a_job(patch: pytest.MonkeyPatch, nth: Nth) -> Iterator[None]:
    """They die between its arrival and its start, so that nobody is left to do it."""
    real = Worker._ensure_threads

    def ensure(worker: Worker) -> None:
        real(worker)
        if nth.due():
            kill(worker)

    patch.setattr(Worker, "_ensure_threads", ensure)
    yield


def _in_a_cache() -> bool:
    """Whether this is called by the package, or by a forward with its cache: not by what a test computes itself."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code is History.run.__code__ or code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


@contextmanager
def torch_operations(patch: pytest.MonkeyPatch, nth: Nth) -> Iterator[None]:
    """Any operation of torch, in the model or in the cache, has no device memory left."""

    class Short(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if _in_a_cache() and nth.due():
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return func(*args, **(kwargs or {}))

    with Short():
        yield


FAULTS = [host_memory, kernels, divided_launches, threads_before_a_job, threads_at_a_job, torch_operations]


def live(history: History, step: Callable[[Callable[[], None]], None]) -> None:
    """Prompt, turns, steps that fill a block, rows that part and merge, crops, more steps: `step` does each of them."""
    cache = history.caches[0]

    def feed(rows: int, count: int) -> Callable[[], None]:
        return lambda: history.feed(*tokens(rows, count, count))

    def rows(change: Callable[[torch.Tensor], None], kept: list[int]) -> Callable[[], None]:
        def act() -> None:
            change(torch.tensor(kept))
            history.keep_rows(torch.tensor(kept))

        return act

    for count in (190, 40, 1, 1, 1):
        step(feed(2, count))
    step(rows(lambda index: cache.batch_repeat_interleave(2), [0, 0, 1, 1]))
    for count in (1, 1, 9):
        step(feed(4, count))
    step(rows(cache.batch_select_indices, [3, 0]))
    step(rows(cache.reorder_cache, [1, 0]))
    step(lambda: history.crop(101))
    for count in (1, 60, 1):
        step(feed(2, count))


def mend(history: History, held: int) -> None:
    """After an error: nothing was lost, or the cache says that it must begin anew."""
    cache = history.caches[0]
    try:
        cache.crop(0)
    except RuntimeError as error:
        if "call reset()" not in str(error):
            raise
        cache.reset()
        history.ids, ids = history.ids[:, :0], history.ids
        history.mask, mask = history.mask[:, :0], history.mask
        history.feed(ids, mask)
    assert history.length == held
    cache.crop(history.length - cache.get_seq_length())  # it may have failed behind the layers, in the model's head
    check_books([history])


def combinations() -> list[Any]:
    """All of them; in the quick set every fault in two memories and in HGCA's, and of the others every second one."""
    rows = []
    for (i, fault), (j, setting) in itertools.product(enumerate(FAULTS), enumerate(SETTINGS)):
        quick = setting in ("split", "hgca") or (i + j) % 2 == 0
        for most in (1, 100):
            marks = () if quick and most == 1 else pytest.mark.slow
            rows.append(pytest.param(most, fault, setting, marks=marks, id=f"{most}-{fault.__name__}-{setting}"))
    return rows


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("most", "fault", "memory"), combinations())
def test_the_nth_fault(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch, Nth], Any], memory: str, most: int
) -> None:
    def once(n: int) -> int:
        """Live with the n-th call failing; returns how many calls there were."""
        history, nth, errors = empty(SETTINGS[memory], 2), Nth(n), []

        def step(act: Callable[[], None]) -> None:
            held = history.length
            try:
                with monkeypatch.context() as patch, fault(patch, nth):
                    act()
            except (MemoryError, torch.OutOfMemoryError, Broken, WorkerError) as error:
                errors.append(error)
                mend(history, held)
                act()
            check_books([history])

        live(history, step)
        step(history.caches[0].drain)  # what is still in flight
        assert len(errors) <= 1
        # Threads that are replaced; a read-ahead that nobody misses.
        silent = fault in (threads_before_a_job, threads_at_a_job, kernels, divided_launches)
        assert errors or silent or nth.left > 0
        return n - nth.left

    total = once(10**9)
    if total == 0:
        assert memory == "one" or fault is divided_launches  # no job is handed over
        return
    stride = max(total // most, 1)
    for n in range(1 + stride // 2, total + 1, stride):
        once(n)


@pytest.mark.filterwarnings("ignore:pinned host memory")
def test_pinned_memory_that_is_refused_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other piece of host memory cannot be pinned: a warning, and pageable memory in its place."""
    real, asked = memory.host_empty, []

    def pinned(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(args)
        return real(*args, **(kwargs | {"pin": len(asked) % 2 == 0}))

    for name, module in list(sys.modules.items()):
        if name.startswith("hf_offload") and getattr(module, "host_empty", None) is real:
            monkeypatch.setattr(module, "host_empty", pinned)
    history = empty(SETTINGS["split"], 2)
    live(history, lambda act: act())
    assert len(asked) > 4
    assert history.caches[0].get_seq_length() == history.length
