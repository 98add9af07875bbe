"""Threads that run the CPU work of a CUDA graph: the device announces work by flags in pinned memory.

A replayed decode step writes its number, the epoch, into a flag for each layer and waits for a second flag. The threads
of a `Doorbell` poll the first flag, run the layer's launch over fixed buffers and set the second, without Python in
between. They serve the items of a list in order, epoch after epoch.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hf_offload.cpu import serving
from hf_offload.cpu.launch import Array, Launch
from hf_offload.cpu.thread_pool import WorkerError
from hf_offload.cpu.threads import Thread, start

_TURNS = 2000  # polls that are timed


class ItemError(WorkerError):
    """An item's launch failed.

    Args:
        message: the error's text.
        epoch: the first epoch in which it failed.
    """

    def __init__(self, message: str, epoch: int) -> None:
        super().__init__(message)
        self.epoch = epoch


@dataclass(frozen=True, slots=True)
class Item:
    """Work that is announced and answered once an epoch; epochs are int32 numbers that grow by 1 and wrap around.

    Args:
        ready: address of the int32 in which the announcer stores the epoch once the launch's inputs are written. It may
            be the `done` of an earlier item.
        done: address of the int32 in which a thread stores the epoch once the launch's outputs are written.
        status: address of an int32 that becomes 1, before `done` is stored, if the launch fails.
        launch: the work; its buffers must not move.
        label: its name in error messages.
        keep: owners of the flags' memory, kept alive as long as the item.
        after: address of another int32 in which the epoch must stand, too, before the launch begins; 0: of none.
    """

    ready: int
    done: int
    status: int
    launch: Launch
    label: str
    keep: tuple[Any, ...] = field(default=())
    after: int = 0

    def __post_init__(self) -> None:
        for name in ("ready", "done", "status", "after"):
            address = getattr(self, name)
            if address < 0 or address % 4 or (address == 0 and name != "after"):
                raise ValueError(f"{self.label}: {name}={address:#x} is not the address of an int32")


class Doorbell:
    """Threads that serve a list of items, epoch after epoch, until `stop`.

    An item may start while other threads still finish the item before it. An item that depends on an earlier one uses
    that item's `done` flag as its own `ready` flag. Results do not depend on the number of threads.

    Args:
        threads: number of serving threads (at least 1).
        spin_seconds: how long, roughly, a thread polls a flag before it sleeps between polls. A sleep takes an eighth
            of the time waited so far, at least 50 us and at most 1 ms.
        timeout: seconds that `replace` and `stop` wait for running work.

    Raises:
        ValueError: `threads`, `spin_seconds` or `timeout` is out of range.
    """

    def __init__(self, threads: int = 1, spin_seconds: float = 1e-3, timeout: float = 120.0) -> None:
        if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
            raise ValueError(f"threads={threads!r} is not a number of threads; use 1 or more")
        if not 0 <= spin_seconds <= 1:
            raise ValueError(f"spin_seconds={spin_seconds!r} is not a time of at most a second")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r} is not a time in seconds; use a positive one")
        self.threads, self.spin_seconds, self.timeout = threads, float(spin_seconds), float(timeout)
        self._control = np.zeros(serving.CONTROL_WIDTH, np.int64)
        self._control[serving.TURNS] = self.spin_seconds / _turn_seconds()
        self._control[serving.PATIENCE] = self.spin_seconds * 1e6
        self._team: _Team | None = None
        self._finalizer: Any = None

    @property
    def delay(self) -> float:
        """Seconds that each thread sleeps before it enters an item; tests use it to slow every hand-over down."""
        return float(self._control[serving.DELAY]) / 1e6

    @delay.setter
    def delay(self, seconds: float) -> None:
        self._control[serving.DELAY] = int(seconds * 1e6)

    def replace(self, items: Sequence[Item], epoch: int = 0) -> None:
        """Serve these items from epoch + 1 on, after the announced work of the old items is done.

        Nothing may be announced during the call.

        Args:
            items: in the order of their announcements; at least one.
            epoch: the last finished epoch, int32; the flags of all items are set to it.

        Raises:
            ValueError: no items.
            TypeError: an item's launch has no compiled kernel.
            WorkerError: work of the old items is not done within the timeout, or has failed.
        """
        if not items:
            raise ValueError("a doorbell needs at least one item")
        team = _Team(items, self.threads, self._control.copy())
        if self._team is not None:
            self._team.wait(self.timeout)
            self.stop()
        self._team, self._control = team, team.control
        self._finalizer = weakref.finalize(self, team.end, self.timeout)
        team.open(epoch)

    def check(self) -> None:
        """Raise the first failure since the last call; in a forked child, start new threads first.

        Raises:
            ItemError: a launch left tasks undone.
        """
        if self._team is not None:
            self._team.start()
            self._team.check()

    def stop(self) -> None:
        """End the threads once they have finished their current launch; `replace` starts new ones.

        Raises:
            WorkerError: a launch does not end within the timeout, or has failed since the last `check`.
        """
        if self._team is None:
            return
        if not self._team.end(self.timeout):
            raise WorkerError("a launch goes on and on; raise Doorbell(timeout=...) if the machine is slow")
        self._finalizer.detach()
        team, self._team = self._team, None
        team.check()


class _Team:
    """The threads that serve one list of items."""

    def __init__(self, items: Sequence[Item], threads: int, control: Array) -> None:
        self.items, self.control, self.count = tuple(items), control, threads
        control[serving.STOP] = 0
        self._threads: list[Thread] = []
        self._pid = 0
        self._tickets = np.zeros((len(items), serving.TICKET_WIDTH), np.int64)
        self._tickets[:, 2] = threads
        self._launches = [
            item.launch.with_ticket(ticket, item.label) for item, ticket in zip(items, self._tickets, strict=True)
        ]
        self._rows = np.zeros((len(items), serving.WIDTH), np.int64)
        for row, item, launch in zip(self._rows, self.items, self._launches, strict=True):
            counters = launch.counters
            row[: serving.AFTER + 1] = (
                item.ready, item.done, item.status, *launch.address, launch.tasks,
                0 if counters is None else counters.ctypes.data, 0 if counters is None else len(counters), item.after,
            )  # fmt: skip

    def open(self, epoch: int) -> None:
        """Set all flags to `epoch` and serve the epochs after it."""
        self._rows[:, serving.STATE] = serving.state_of(_wrapped(epoch + 1))
        for item in self.items:
            _flag(item.ready).value = _flag(item.done).value = epoch
        self.start()

    def start(self) -> None:
        """Start the threads unless this process has them already; a forked child has none of its parent's.

        Raises:
            MemoryError: no thread can be started.
        """
        if self._pid == os.getpid():
            return
        self._pid, self._threads = os.getpid(), []
        epochs = (self._rows[:, serving.STATE] >> 32).tolist()
        self._rows[:, serving.STATE] = [serving.state_of(epoch) for epoch in epochs]
        self._rows[:, serving.FAILED] = 0
        self._tickets[:, :2] = 0
        for item in self.items:
            if item.launch.counters is not None:
                item.launch.counters.fill(0)
        # Items differ by at most one epoch. A thread that starts at the older one skips the items that are finished.
        oldest = min(epochs, key=lambda epoch: _wrapped(epoch - epochs[0]))
        for _ in range(self.count):
            position = np.zeros(serving.POSITION_WIDTH, np.int64)
            position[serving.EPOCH] = oldest
            args = (self._rows, self._tickets, self.control, position, self.items, self._launches)
            try:
                self._threads.append(start(_serve, args, "the CPU work of a CUDA graph"))
            except MemoryError:
                if not self._threads:
                    self._pid = 0
                    raise
                break  # the threads that did start serve all items

    def wait(self, timeout: float) -> None:
        """Wait until all announced work is done."""
        if self._pid != os.getpid():
            return
        limit = time.monotonic() + timeout
        for item in self.items:
            while _wrapped(_flag(item.ready).value - _flag(item.done).value) > 0:
                if time.monotonic() >= limit:
                    raise WorkerError(
                        f"{item.label}: not done in time; raise Doorbell(timeout=...) if the machine is slow"
                    )
                time.sleep(1e-4)

    def check(self) -> None:
        """Raise the earliest failure and clear all of them, so that each is reported once."""
        failed = np.flatnonzero(self._rows[:, serving.FAILED]).tolist()
        if failed:
            epochs = {i: int(self._rows[i, serving.FAILED_IN]) for i in failed}
            first = min(failed, key=lambda i: _wrapped(epochs[i] - epochs[failed[0]]))
            launch, undone = self._launches[first], int(self._rows[first, serving.UNDONE])
            for i in failed:
                _flag(self.items[i].status).value = 0
                self._rows[i, serving.FAILED] = 0
            cause = MemoryError(f"{undone} of {launch.tasks} tasks were not done; is memory left?")
            raise ItemError(f"{launch.label} failed: {cause}", epochs[first]) from cause

    def end(self, timeout: float) -> bool:
        """Tell the threads to stop; return whether all of them ended in time."""
        self.control[serving.STOP] = 1
        limit = time.monotonic() + timeout
        for thread in self._threads:
            if thread.ident != threading.get_ident():
                thread.join(max(0.0, limit - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _serve(rows: Array, tickets: Array, control: Array, position: Array, *keep: Any) -> None:
    serving.serve(rows, tickets, control, position)


def _flag(address: int) -> ctypes.c_int32:
    return ctypes.c_int32.from_address(address)


def _wrapped(epoch: int) -> int:
    return ctypes.c_int32(epoch).value


@functools.cache
def _turn_seconds() -> float:
    """Seconds of one poll of a waiting thread. Also compiles what the threads run, so that none of them has to."""
    flag, control = np.zeros(1, np.int32), np.zeros(serving.CONTROL_WIDTH, np.int64)
    rows, tickets = np.zeros((1, serving.WIDTH), np.int64), np.zeros((1, serving.TICKET_WIDTH), np.int64)
    rows[0, [serving.READY, serving.DONE, serving.STATUS]] = flag.ctypes.data
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        serving.turn(rows, control, _TURNS)
        times.append(time.perf_counter() - begin)
    position = np.zeros(serving.POSITION_WIDTH, np.int64)
    rows[0, serving.STATE] = 1
    control[serving.STOP] = 1
    serving.serve(rows, tickets, control, position)
    return min(times) / _TURNS
