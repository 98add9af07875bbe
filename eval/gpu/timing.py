"""Times of single operations, and the speeds of the memories that they are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from common import percentiles
from gpu.models import free_pinned
from gpu.options import Options
from hf_offload.blocks.memory import host_empty
from hf_offload.graph.graph_capture import Recorder, undisturbed

FLUSH_BYTES = 1 << 30  # many times the second-level cache of any GPU, and longer to read than a call to launch
LAUNCHES = 20
Call = Callable[[], Any]


def recorded(options: Options, step: Call) -> Call:
    """A replay of a CUDA graph of a step that has run before; without a GPU the step itself."""
    if not options.on_gpu:
        return step
    recorder = Recorder()
    with undisturbed():
        recorder.record(step)
    return recorder.replay


class Timer:
    """Times calls on a device; microseconds everywhere."""

    def __init__(self, options: Options) -> None:
        self.options, self.rounds = options, 3 if options.quick else 30
        self._other = torch.zeros(FLUSH_BYTES // 4 if options.on_gpu else 1, device=options.device)

    def flush(self) -> None:
        """Fill the caches with something else, by reading it: what was written would go to memory during the call."""
        self._other.sum()

    def device_time(self, call: Call) -> dict[str, float]:
        """Time on the device alone, from event to event, the caches filled with something else before each call.

        While the device fills them, the call and its events queue up behind it: no launch is in the time.
        """
        if not self.options.on_gpu:
            return self.wall_time(call)
        call()
        return percentiles(1000 * spent for spent in self._events(call, self.flush))

    def wall_time(self, call: Call) -> dict[str, float]:
        """Time on the host's clock until the device is through, the caches filled with something else before."""
        call()
        times = []
        for _ in range(self.rounds):
            self.flush()
            self.options.synchronize()
            start = time.perf_counter()
            call()
            self.options.synchronize()
            times.append(1e6 * (time.perf_counter() - start))
        return percentiles(times)

    def launch_time(self, call: Call) -> float:
        """What a call costs the host's thread, which does not wait for the device."""
        self.options.synchronize()
        start = time.perf_counter()
        for _ in range(LAUNCHES):
            call()
        spent = time.perf_counter() - start
        self.options.synchronize()
        return 1e6 * spent / LAUNCHES

    def graph_time(self, call: Call) -> float | None:
        """Time of a call among `LAUNCHES` in a CUDA graph, with warm caches; None without a GPU."""
        if not self.options.on_gpu:
            return None
        replay = recorded(self.options, lambda: [call() for _ in range(LAUNCHES)])
        replay()
        return percentiles(1000 * spent / LAUNCHES for spent in self._events(replay))["p50"]

    def _events(self, call: Call, prepare: Call = lambda: None) -> list[float]:
        """Milliseconds of calls between two events."""
        pairs = []
        for _ in range(self.rounds):
            prepare()
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            call()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in pairs]


def bandwidths(options: Options) -> dict[str, float]:
    """Bytes a microsecond: "device" counts both the read and the write of a copy there, "link" is pinned to device,
    "back" the other way; "pin" is what torch pins, "pin, huge" the package's memory on huge pages, none of which has
    been pinned before.
    """
    timer, size = Timer(options), 1 << (16 if options.quick else 30)
    source = torch.empty(size, dtype=torch.uint8, device=options.device).random_()
    target = torch.empty_like(source)
    pinned = torch.empty(size // 4, dtype=torch.uint8, pin_memory=options.on_gpu).random_()
    there, back = target[: size // 4], torch.empty_like(pinned, pin_memory=options.on_gpu)
    found = {
        "device": 2 * size / timer.device_time(lambda: target.copy_(source))["p50"],
        "link": size / 4 / timer.device_time(lambda: there.copy_(pinned, non_blocking=True))["p50"],
        "back": size / 4 / timer.device_time(lambda: back.copy_(there, non_blocking=True))["p50"],
    }
    ways: dict[str, Call] = {
        "pin": lambda: torch.empty(size, dtype=torch.uint8, pin_memory=options.on_gpu),
        "pin, huge": lambda: host_empty((size,), torch.uint8, pin=options.on_gpu),
    }
    for way, make in ways.items():
        free_pinned(options)
        start = time.perf_counter()
        make()
        found[way] = size / 1e6 / (time.perf_counter() - start)
    return found
