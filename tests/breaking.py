"""Faults for tests of errors: the n-th call of a kind fails, threads die, Ctrl-C comes at a certain point."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from histories import History, Setting
from tiny import DEVICE
from torch.utils._python_dispatch import TorchDispatchMode

import hf_offload
from hf_offload import ConstantPredictor, HybridCache
from hf_offload.blocks import memory
from hf_offload.blocks.host_pool import HostPool
from hf_offload.cpu.kernels import move_records
from hf_offload.cpu.launch import Array, Launch, LaunchSequence, kernel
from hf_offload.cpu.thread_pool import Worker
from hf_offload.policies.hgca.token_mass import TokenMass

PACKAGE = str(Path(hf_offload.__file__).parent)
UNDONE = r"only 0 of 1 tasks were done"  # what is said of a launch whose kernel died

_BLOCKS: dict[str, Any] = {"block_size": 8, "prefill_tile": 32, "timeout": 120.0}
_SPLIT: dict[str, Any] = {**_BLOCKS, "tier": "split", "resident": 48}
_SCOUT: dict[str, Any] = {
    **_SPLIT, "budget": 1024, "sinks": 8, "recent": 0, "lookahead": "select", "synchronous_layers": (0,),
}  # fmt: skip
_HGCA: dict[str, Any] = {**_BLOCKS, "block_size": 16, "window": 24, "beta": 0.0}
_FLUXION: dict[str, Any] = {"predictor": ConstantPredictor(sinks=16, local=16), "prefill_tile": 32, "timeout": 120.0}
_KNOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("scout", {**_SCOUT, "tier": "one", "resident": None, "lookahead": "off"}),
    "split": ("scout", {**_SCOUT, "recall": 1}),
    "attend": ("scout", {**_SCOUT, "resident": 512, "lookahead": "attend"}),
    "samples": ("scout", {**_SCOUT, "block_size": 16, "resident": 96, "budget": None, "samples": 2 * 10**9}),
    "int8": ("scout", {**_SCOUT, "host_dtype": "int8"}),
    "full, fetched": ("full", {**_SPLIT, "host": "fetch"}),
    "full, int8": ("full", {**_BLOCKS, "tier": "one", "host_dtype": "int8"}),
    "window": ("window", {**_BLOCKS, "tier": "one", "budget": 8192, "sinks": 8}),
    "quest": ("quest", {**_SPLIT, "budget": 8192, "sinks": 8}),
    "h2o": ("h2o", {**_BLOCKS, "tier": "split", "heavy": 1, "recent": 1}),
    "infinigen": ("infinigen", {**_BLOCKS, "tier": "split", "alpha": math.inf, "share": 1}),
    "fixed_hybrid": ("fixed_hybrid", {"tier": "split", "budget": 1.0, "sinks": 8, "local": 16, "block_size": 8}),
    "hgca": ("hgca", {**_HGCA, "tier": "split"}),
    "hgca, one": ("hgca", {**_HGCA, "tier": "one"}),
    "fluxion": ("fluxion", {**_FLUXION, "tier": "one"}),
    "fluxion, shared": ("fluxion", {**_FLUXION, "tier": "split", "schedule": "priority"}),
}
SETTINGS = {
    name: Setting(2, 16, policy, knobs if DEVICE == "cpu" else {**knobs, "tier": "split"}, True)
    for name, (policy, knobs) in _KNOBS.items()
}
"""Every policy in each memory, with budgets that cover all tokens: logits are those of full attention."""


def tokens(rows: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids and their mask `[rows, count]`; the first third of the first row is padding."""
    ids = torch.randint(3, 150, (rows, count), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    mask = torch.ones_like(ids)
    if count > 3:
        mask[0, : count // 3] = 0
    return ids, mask


def forward(history: History, count: int) -> Callable[[HybridCache], None]:
    """A forward of new tokens that the history does not note."""
    ids, mask = tokens(history.rows, count, 99)
    seen = torch.cat([history.mask, mask], 1)

    def act(cache: HybridCache) -> None:
        with torch.no_grad():
            history.run(cache, ids, seen)

    return act


@kernel
def _die(ticket: Array, tasks: int) -> None:
    raise ArithmeticError("the kernel died")


def broken_launch(*args: Any, **kwargs: Any) -> Launch:
    """A launch whose kernel raises, in place of another one."""
    return Launch(_die, 1, (), 0)


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

    def patch(self, patch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any]) -> None:
        patch.setattr(owner, name, self.before(getattr(owner, name), fault))


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
    real, failing = memory.host_empty, nth.before(memory.host_empty, no_memory)
    for name, module in list(sys.modules.items()):
        if name.startswith("hf_offload") and getattr(module, "host_empty", None) is real:
            patch.setattr(module, "host_empty", failing)
    yield


def calls(fault: Callable[..., Any], *places: tuple[Any, str]) -> Callable[..., Any]:
    """The n-th call of some functions fails."""

    @contextmanager
    def patched(patch: pytest.MonkeyPatch, nth: Nth) -> Iterator[None]:
        for owner, name in places:
            nth.patch(patch, owner, name, fault)
        yield

    return patched


memory_of_lists = calls(  # blocks, and what NumPy makes of them and of HGCA's lists
    no_memory, (HostPool, "allocate"), (move_records, "write_tokens"), (TokenMass, "reserve"),
    (TokenMass, "before_append"), (TokenMass, "append"), (TokenMass, "_copy_marked"),
)  # fmt: skip


@contextmanager
def threads_at_a_job(patch: pytest.MonkeyPatch, nth: Nth) -> Iterator[None]:
    """Threads die between a job's arrival and its start, so that nobody is left to do it."""
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


@contextmanager
def interruptions(patch: pytest.MonkeyPatch, nth: Nth) -> Iterator[None]:
    """Ctrl-C at any point of the package."""
    with interrupted_at(nth, PACKAGE):
        yield


@contextmanager
def interrupted_at(nth: Nth, *places: str) -> Iterator[None]:
    """Raise KeyboardInterrupt at the n-th point in these files or folders where Python looks for signals.

    It looks when a function begins and when one of C's returns.
    """

    def look(frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(places) and nth.due():
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


FAULTS: dict[str, Callable[..., Any]] = {
    "host_memory": host_memory,
    "memory_of_lists": memory_of_lists,
    "kernels": calls(break_down, (LaunchSequence, "run"), (Launch, "__call__")),  # by the model's thread and by others
    "divided_launches": calls(break_down, (Worker, "divide")),  # in a job, however many threads take part
    "threads_before_a_job": calls(kill, (Worker, "submit")),  # all threads of the worker die
    "threads_at_a_job": threads_at_a_job,
    "torch_operations": torch_operations,
    "interruptions": interruptions,
}
