"""What records a decode step as a CUDA graph, and what the layers hand over meanwhile."""

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
"""How often the device looks at a flag in a second, roughly."""
LINE = 16  # int32 of a cache line: flags that different threads write lie in lines of their own
_ONE = threading.Lock()


class Recorder:
    """A CUDA graph: what `record` runs is captured, and `replay` repeats it."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._ended = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]

    def record(self, step: Callable[[], Any]) -> Any:
        """Capture what a call launches; the call itself computes nothing. Returns what it returned."""
        here = torch.device("cuda", torch.cuda.current_device())
        # Where a capture fails, torch leaves its stream current. Threads of other caches may use CUDA meanwhile.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            # A stream of our own: torch's lies where the first capture was, and cuBLAS keeps memory for each.
            torch.cuda.graph(self._graph, stream=stream_for(CAPTURE, here), capture_error_mode="thread_local"),
        ):
            return step()

    def replay(self) -> None:
        """Run what was captured."""
        try:
            self._graph.replay()
        finally:  # an interruption comes between any two calls
            self._ended.record()

    def settle(self) -> None:
        """Wait for the last replay; not for the device, on which another thread may be capturing."""
        self._ended.synchronize()


@contextmanager
def undisturbed() -> Iterator[None]:
    """One capture at a time, and no garbage collected: letting go of a graph or slab asks what a capture refuses."""
    with _ONE:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


class Capture:
    """What the layers hand over while a step is captured: CPU parts, counters, tensors that must live on.

    Args:
        device: where the step runs.
        parts: how many CPU parts there may be.
        timeout: seconds that the device waits for one.
    """

    def __init__(self, device: torch.device, parts: int, timeout: float) -> None:
        pin = device.type == "cuda"
        with torch.inference_mode(False):
            self.flags = host_empty((2 * parts + 2, LINE), torch.int32, pin=pin, brief=True, what="flags").zero_()
            self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self.late = self.flags[-1, :1]
        """Not 0: the epoch in which a part was not done in time; what the device computed since then is wrong."""
        self._spins = min(int(timeout * LOOKS), 2**31 - 1)
        self.reachable = not pin or self.flags.is_pinned()
        """Whether the device's kernels can read and write the flags."""
        if self.reachable:  # a kernel's first launch loads it, which a capture may refuse
            handover.wait_for_flag(self.flags[0, :1], self.epoch, self.late, spins=self._spins)
        self.parts: list[tuple[CpuPartial, Callable[[], Launch], str]] = []
        self._counts: list[tuple[HybridLayer, str, torch.Tensor]] = []
        self._ledger: Ledger | None = None
        self._side = stream_for(CAPTURE_SIDE, device) if pin else None
        self._forked = False
        self._kept: list[Any] = []

    def beside(self) -> torch.cuda.Stream | None:
        """The stream for recalls, which is a part of the capture from here on."""
        self._forked = True
        return self._side

    def keep(self, value: Any) -> None:
        """Let tensors live until the capture has ended: the stream beside it reads them."""
        self._kept.append(value)

    def flag_of(self, part: CpuPartial, launch: Callable[[], Launch], label: str) -> torch.Tensor:
        """The flag of one more part: once it holds the epoch, the CPU works on what is in the part's buffers."""
        self.parts.append((part, launch, label))
        return self.flags[2 * len(self.parts) - 2, :1]

    def wait(self, part: CpuPartial) -> None:
        """Let the device wait for the CPU's result."""
        number = next(i for i, (known, _, _) in enumerate(self.parts) if known is part)
        handover.wait_for_flag(self.flags[2 * number + 1, :1], self.epoch, self.late, spins=self._spins)

    def count(self, layer: HybridLayer, name: str, value: torch.Tensor) -> None:
        """Remember a tensor for the statistics of a layer."""
        self._counts.append((layer, name, value.sum().float()))

    def finish(self) -> None:
        """The step has been captured: join what runs beside it, gather what is counted."""
        self._join()
        self.counted = torch.stack([value for _, _, value in self._counts]) if self._counts else None
        self._kept.clear()

    def abandon(self) -> None:
        """The step has failed: a capture that other streams have not left cannot be ended."""
        with suppress(RuntimeError):  # the step has an error of its own to tell
            self._join()
        self._kept.clear()

    def _join(self) -> None:
        if self._side is not None and self._forked:
            torch.cuda.current_stream(self._side.device).wait_stream(self._side)
        self._forked = False

    def tally(self) -> None:
        """Add what the last replay counted to the layers' statistics, without waiting for it."""
        if self.counted is None:
            return
        if self._ledger is None:
            self._ledger = Ledger([(layer.tally, name) for layer, name, _ in self._counts])
        self._ledger.add(self.counted.clone())

    def items(self) -> list[Item]:
        """What a doorbell serves: the parts in the order in which they are announced."""
        address = [int(flag.data_ptr()) for flag in self.flags]
        return [
            Item(address[2 * i], address[2 * i + 1], address[-2], launch(), label, keep=(self.flags, part))
            for i, (part, launch, label) in enumerate(self.parts)
        ]
