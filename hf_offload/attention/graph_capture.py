"""Capture of a decode step: the CUDA graph, the flags of CPU parts, and counters read after each replay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from hf_offload.attention.cpu_partial import CpuPartial
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.memory import host_empty
from hf_offload.cache.stats import Ledger
from hf_offload.cpu.host_signals import Item
from hf_offload.cpu.launch import Launch
from hf_offload.gpu import handover
from hf_offload.gpu.streams import CAPTURE, CAPTURE_SIDE, stream_for

LOOKS = 1_000_000
"""Polls of a flag by the device in a second, roughly."""
LINE = 16  # int32 entries of a cache line: each flag has its own, since different threads write them
_CAPTURE_LOCK = threading.Lock()


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

    def settle(self) -> None:
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
    """State of one capture: CPU parts with their flags, counters, tensors to keep alive.

    Args:
        device: the device of the step.
        parts: the most CPU parts of a step.
        timeout: seconds that the device waits for a part.
    """

    def __init__(self, device: torch.device, parts: int, timeout: float) -> None:
        pin = device.type == "cuda"
        with torch.inference_mode(False):
            self.flags = host_empty((2 * parts + 2, LINE), torch.int32, pin=pin, brief=True, what="flags").zero_()
            self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self.late = self.flags[-1, :1]
        """int32 `[1]`, the epoch in which a part was not done in time, from which on results are wrong; 0: none."""
        self._spins = min(int(timeout * LOOKS), 2**31 - 1)
        self.reachable = not pin or self.flags.is_pinned()
        """Whether GPU kernels can read and write the flags."""
        if self.reachable:  # the first launch loads the kernel, which a capture may refuse
            handover.wait_for_flag(self.flags[0, :1], self.epoch, self.late, spins=self._spins)
        self.parts: list[tuple[CpuPartial, Callable[[], Launch], str]] = []
        self._counts: list[tuple[HybridLayer, str, torch.Tensor]] = []
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

    def flag_of(self, part: CpuPartial, launch: Callable[[], Launch], label: str) -> torch.Tensor:
        """Register one more part; return its flag, int32 `[1]`, which starts the CPU's work when set to the epoch."""
        self.parts.append((part, launch, label))
        return self.flags[2 * len(self.parts) - 2, :1]

    def wait(self, part: CpuPartial) -> None:
        """Make the device wait for the CPU's result of a part."""
        number = next(i for i, (known, _, _) in enumerate(self.parts) if known is part)
        handover.wait_for_flag(self.flags[2 * number + 1, :1], self.epoch, self.late, spins=self._spins)

    def count(self, layer: HybridLayer, name: str, value: torch.Tensor) -> None:
        """Register a tensor whose sum each replay adds to a layer's statistics."""
        self._counts.append((layer, name, value.sum().float()))

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
        if self.counted is None:
            return
        if self._ledger is None:
            self._ledger = Ledger([(layer.tally, name) for layer, name, _ in self._counts])
        self._ledger.add(self.counted.clone())

    def items(self) -> list[Item]:
        """Return the parts as a doorbell's items, in the order in which the device announces them."""
        address = [int(flag.data_ptr()) for flag in self.flags]
        return [
            Item(address[2 * i], address[2 * i + 1], address[-2], launch(), label, keep=(self.flags, part))
            for i, (part, launch, label) in enumerate(self.parts)
        ]
