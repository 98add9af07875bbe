"""Capture of a decode step: the CUDA graph, the flags of host partials, and counters read after each replay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_offload.attention.host_partial import BlockHostPartial
from hf_offload.blocks.memory import host_empty
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.stats import Ledger
from hf_offload.cpu.host_signals import Item
from hf_offload.cpu.launch import Launch
from hf_offload.gpu import handover
from hf_offload.gpu.streams import CAPTURE, CAPTURE_SIDE, stream_for

LOOKS = 1_000_000
"""Polls of a flag by the device in a second, roughly."""
LINE = 16  # int32 entries of a cache line: each flag has its own, since different threads write them
_CAPTURE_LOCK = threading.Lock()


class Announced(NamedTuple):
    """CPU work that a flag starts; fields as for `Capture.flag_of`, `after` as a number."""

    partial: BlockHostPartial
    launches: Callable[[], tuple[Launch, ...]]
    label: str
    key: object
    after: int | None


class Recorder:
    """A CUDA graph with its capture and replay."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._ended = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]

    def record(self, step: Callable[[], Any]) -> Any:
        """Capture the kernels that a callable launches, without running them; return its result."""
        device = torch.device("cuda", torch.cuda.current_device())
        # torch leaves the capture's stream current after a failure: this context restores it. "thread_local" lets
        # threads of other caches use CUDA meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            # torch's own capture stream is on the first capture's device; cuBLAS keeps a workspace for each stream.
            torch.cuda.graph(self._graph, stream=stream_for(CAPTURE, device), capture_error_mode="thread_local"),
        ):
            return step()

    def replay(self) -> None:
        """Launch the captured graph."""
        try:
            self._graph.replay()
        finally:  # also after an interruption between the two calls
            self._ended.record()

    def wait(self) -> None:
        """Wait for the last replay, not for the device, on which another thread may be capturing."""
        self._ended.synchronize()


@contextmanager
def undisturbed() -> Iterator[None]:
    """A context for one capture at a time without garbage collection: freeing a graph or slab would break a capture."""
    with _CAPTURE_LOCK:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


class Capture:
    """State of one capture: host partials with their flags, counters, tensors to keep alive.

    Args:
        device: the device of the step.
        most: the most pieces of CPU work in a step.
        timeout: seconds that the device waits for one.
    """

    def __init__(self, device: torch.device, most: int, timeout: float) -> None:
        pin = device.type == "cuda"
        with torch.inference_mode(False):
            self.flags = host_empty((2 * most + 2, LINE), torch.int32, pin=pin, brief=True, what="flags").zero_()
            self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self.late = self.flags[-1, :1]
        """int32 `[1]`, the epoch in which CPU work was not done in time, from which on results are wrong; 0: none."""
        self._spins = min(int(timeout * LOOKS), 2**31 - 1)
        self.reachable = not pin or self.flags.is_pinned()
        """Whether GPU kernels can read and write the flags."""
        if self.reachable:  # the first launch loads the kernel, which a capture may refuse
            handover.wait_for_flag(self.flags[0, :1], self.epoch, self.late, spins=self._spins)
        self.announced: list[Announced] = []
        self._counts: list[tuple[HybridLayer, str, torch.Tensor]] = []
        self._numbers: list[tuple[HybridLayer, str, float]] = []
        self._ledger: Ledger | None = None
        self._side = stream_for(CAPTURE_SIDE, device) if pin else None
        self._forked = False
        self._kept: list[Any] = []

    def beside(self) -> torch.cuda.Stream | None:
        """Return the stream for recalls and make it part of the capture; None on the CPU."""
        self._forked = True
        return self._side

    def keep(self, value: Any) -> None:
        """Keep tensors that the recall stream reads alive until the capture has ended."""
        self._kept.append(value)

    def flag_of(
        self,
        partial: BlockHostPartial,
        launches: Callable[[], tuple[Launch, ...]],
        label: str,
        *,
        key: object,
        after: object,
    ) -> torch.Tensor:
        """Register one more piece of CPU work; return its flag, int32 `[1]`, which starts it when set to the epoch.

        Args:
            partial: the host partial whose buffers it uses.
            launches: makes its launches, which run one after the other.
            label: its name in error messages.
            key: tells it from other work; after: the key of earlier work that must be done first, or None.
        """
        self.announced.append(Announced(partial, launches, label, key, None if after is None else self._number(after)))
        return self.flags[2 * len(self.announced) - 2, :1]

    def _number(self, key: object) -> int:
        return next(i for i, each in enumerate(self.announced) if each.key is key)

    def wait(self, key: object) -> None:
        """Make the device wait for the CPU's result of a piece of work."""
        done = self.flags[2 * self._number(key) + 1, :1]
        handover.wait_for_flag(done, self.epoch, self.late, spins=self._spins)

    def count(self, layer: HybridLayer, name: str, value: torch.Tensor | float) -> None:
        """Register a tensor whose sum, or a number, which each replay adds to a layer's statistics."""
        if isinstance(value, torch.Tensor):
            self._counts.append((layer, name, value.sum(dtype=torch.float32) if value.ndim else value.float()))
        else:
            self._numbers.append((layer, name, value))

    def finish(self) -> None:
        """End the step's capture: join the recall stream and gather the counters."""
        self._join()
        self.counted = torch.stack([value for _, _, value in self._counts]) if self._counts else None
        self._kept.clear()

    def abandon(self) -> None:
        """End a failed capture: join the recall stream, without which the capture cannot be ended."""
        with suppress(RuntimeError):  # the step's own error is raised instead
            self._join()
        self._kept.clear()

    def _join(self) -> None:
        if self._side is not None and self._forked:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        self._forked = False

    def tally(self) -> None:
        """Add the last replay's counters to the layers' statistics, without waiting for the device."""
        for layer, name, value in self._numbers:
            layer.tally.add(name, value)
        if self.counted is None:
            return
        if self._ledger is None:
            self._ledger = Ledger([(layer.tally, name) for layer, name, _ in self._counts])
        self._ledger.add(self.counted.clone())

    def items(self) -> list[Item]:
        """Return the work as a doorbell's items, in the order in which the device announces it."""
        address = [int(flag.data_ptr()) for flag in self.flags]
        items = []
        for i, each in enumerate(self.announced):
            launches = each.launches()
            between = np.zeros((len(launches) - 1, LINE), np.int32)  # flags that no device reads
            flags = [address[2 * i], *(int(flag.ctypes.data) for flag in between), address[2 * i + 1]]
            for number, launch in enumerate(launches):
                after = address[2 * each.after + 1] if number == 0 and each.after is not None else 0
                keep = self.flags, between, each.partial
                items.append(
                    Item(flags[number], flags[number + 1], address[-2], launch, each.label, after=after, keep=keep)
                )
        return items
