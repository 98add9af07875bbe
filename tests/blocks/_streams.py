"""Stand-ins for CUDA streams and events: each stream is a slow thread, which reveals a missing wait."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_offload.blocks import prefill_tiles as tiles


class Event:
    """As `torch.cuda.Event`: waiting for one that was never recorded returns at once."""

    def __init__(self, blocking: bool = False) -> None:
        self.reached: threading.Event | None = None

    def record(self, stream: Stream) -> None:
        self.reached = reached = threading.Event()
        stream.enqueue(reached.set)

    def synchronize(self) -> None:
        if self.reached is not None:
            assert self.reached.wait(300)


class Stream:
    """Work in order, each piece some time after it was given."""

    def __init__(self, slowness: float) -> None:
        self.slowness, self.failed = slowness, False
        self.random = random.Random(1)
        self.work: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            work = self.work.get()
            time.sleep(self.random.random() * self.slowness)
            try:
                work()
            except BaseException:
                self.failed = True

    def enqueue(self, work: Callable[[], Any]) -> None:
        self.work.put(work)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        reached = event.reached
        if reached is not None:
            self.enqueue(lambda: reached.wait(300))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()
        assert not self.failed


class Device(TorchDispatchMode):
    """Where copies asked for with `non_blocking` are done by the current stream, later.

    Args:
        model, side: how slow the model's stream is, and those that are made.
    """

    def __init__(self, model: float, side: float) -> None:
        super().__init__()
        self.model, self._thread = Stream(model), threading.local()
        self.side_slowness, self.sides, self.taken = side, list[Stream](), list[torch.Tensor]()

    @property
    def current(self) -> Stream:
        """The stream of this thread."""
        return getattr(self._thread, "stream", self.model)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and len(args) == 3 and args[2]:
            self.current.enqueue(lambda: func(args[0], args[1]))
            return args[0]
        return func(*args, **(kwargs or {}))

    def make_stream(self, device: Any) -> Stream:
        self.sides.append(Stream(self.side_slowness))
        return self.sides[-1]

    def empty_like(self, like: torch.Tensor, *, device: Any) -> torch.Tensor:
        """Memory into which the model's stream, for whom it was before, still has to write."""
        made = torch.zeros(like.shape, dtype=like.dtype)
        self.model.enqueue(lambda: made.fill_(float("nan")))
        self.taken.append(made)
        return made

    def reuse(self) -> None:
        """Let the model's stream write into all memory that was taken: whoever took it has let it go."""
        for tensor in self.taken:
            self.model.enqueue(lambda tensor=tensor: tensor.fill_(float("nan")))  # type: ignore[misc]

    def synchronize(self) -> None:
        """All work is done."""
        for stream in (self.model, *self.sides, self.model):
            stream.synchronize()

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._thread.stream = stream
        try:
            with contextlib.nullcontext() if threading.current_thread() is threading.main_thread() else _Guest(self):
                yield
        finally:
            self._thread.stream = self.model

    def install(self, patch: Any) -> None:
        """Take the place of `torch.cuda`'s functions."""
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        patch.setattr(torch.cuda, "Stream", self.make_stream)
        patch.setattr(tiles, "stream_for", lambda purpose, device: self.make_stream(device))
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch, "empty_like", self.empty_like)


class _Guest(TorchDispatchMode):
    """The device, in a thread that has not entered it: modes are a thread's own."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.device.__torch_dispatch__(func, types, args, kwargs)
