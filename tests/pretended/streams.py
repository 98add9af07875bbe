"""Streams whose calls run late, with events and graphs."""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

DEVICE = torch.device("cuda", 0)
WAITS: Counter[str] = Counter()
"""What has made the host wait for the device, by name."""
LAG = ["late"]
"""When the device does what it is told: `late`, `random` or `eager`."""

_LOCK = threading.RLock()
_HERE = threading.local()
_STREAMS: weakref.WeakSet[Stream] = weakref.WeakSet()
_DICE = random.Random(0)


class Stream:
    """A queue of calls, the first of which are done."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device, self.priority, self.cuda_stream = DEVICE, priority, id(self)
        self.calls: deque[Callable[[], Any]] = deque()
        self.given = self.done = 0
        self.graph: Graph | None = None
        _STREAMS.add(self)

    def give(self, call: Callable[[], Any]) -> None:
        with _LOCK:
            if self.graph is not None:
                self.graph.calls.append(call)
                return
            self.calls.append(call)
            self.given += 1
            if LAG[0] == "eager":
                self.drain()
            elif LAG[0] == "random" and _DICE.random() < 0.1:
                stream = _DICE.choice(sorted(_STREAMS, key=id))
                stream.drain(_DICE.randint(stream.done, stream.given))

    def drain(self, until: int | None = None) -> None:
        """Do what was given first, so many calls in all."""
        with _LOCK, _disable_current_modes(), torch.inference_mode():
            while self.calls and (until is None or self.done < until):
                call = self.calls.popleft()
                self.done += 1
                call()

    def synchronize(self) -> None:
        refuse_capture("waiting for a stream")
        WAITS["stream"] += 1
        self.drain()

    def query(self) -> bool:
        self.drain(self.done + 1)
        return not self.calls

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        stream, mark = event.stream, event.mark
        if event.graph is not None:
            assert self.graph in (None, event.graph), "two captures meet"
            self.graph = event.graph
            event.graph.streams.add(self)
            return
        assert self.graph is None, "a captured stream waits for one that is not captured"
        if stream is not None and stream is not self:
            self.give(lambda: stream.drain(mark))

    def wait_stream(self, stream: Stream) -> None:
        if stream is not self:
            self.wait_event(stream.record_event())

    def __enter__(self) -> Stream:
        raise AssertionError("use torch.cuda.stream")


class Event:
    """A place in a stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.stream: Stream | None = None
        self.graph: Graph | None = None
        self.mark = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        self.graph, self.mark = self.stream.graph, self.stream.given

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        if self.stream is not None:
            refuse_capture("waiting for an event")
            assert self.graph is None, "an event of a capture cannot be waited for"
            WAITS["event"] += 1
            self.stream.drain(self.mark)

    def query(self) -> bool:
        if self.stream is None:
            return True
        self.stream.drain(self.stream.done + 1)
        return self.stream.done >= self.mark


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[Callable[[], Any]] = []
        self.streams: set[Stream] = set()

    def replay(self) -> None:
        for call in self.calls:
            current_stream().give(call)

    def reset(self) -> None:
        self.calls.clear()


@contextlib.contextmanager
def capture(graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    """`torch.cuda.graph`."""
    synchronize()
    stream = stream or Stream()
    stream.graph, graph.streams = graph, {stream}
    try:
        with use(stream):
            yield
    finally:
        for each in graph.streams:
            each.graph = None


_DEFAULT = Stream()


def current_stream(device: Any = None) -> Stream:
    return getattr(_HERE, "stream", None) or _DEFAULT


@contextlib.contextmanager
def use(stream: Stream | None) -> Iterator[None]:
    before = current_stream()
    _HERE.stream = stream or before
    try:
        yield
    finally:
        _HERE.stream = before


def synchronize(device: Any = None) -> None:
    refuse_capture("waiting for the device")
    for stream in list(_STREAMS):
        stream.drain()


def refuse_capture(what: str) -> None:
    if current_stream().graph is not None:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what}")


def wait_here(why: str) -> None:
    """Have all done that the current stream was given."""
    refuse_capture(why)
    WAITS[why] += 1
    current_stream().drain()
