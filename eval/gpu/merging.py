"""The merge with a host partial: its time on the device, and whether a replayed one sees what the CPU wrote last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpu.operations import Inputs, merge_with_host, size_of
from gpu.options import Options
from gpu.timing import Timer, recorded
from hf_offload.gpu.handover import wait_for_flag
from hf_offload.gpu.merge import HostResult, merge

BATCHES = (1, 8, 16)
REPLAYS = 200
_LINE = 16  # int32 of a cache line: each flag has its own
_SPINS = 5_000_000  # looks at the flag, some seconds


def times(options: Options, batch: int) -> Iterator[dict[str, Any]]:
    """Microseconds of one merge, whose kernel reads pinned memory."""
    timer, operation = Timer(options), merge_with_host(Inputs(options, size_of(options, batch)))
    spread, in_graph = timer.device_time(operation.call), timer.graph_time(operation.call)
    yield {"variant": "read", "batch": batch, **spread, "in_graph": in_graph, "link_bytes": operation.link_bytes}


def replays(options: Options) -> Iterator[dict[str, Any]]:
    """Replays of a wait and a merge whose partial the CPU changes each time, two of three while the device waits."""
    merged_by = _waiting_merge(options)
    count = 4 if options.quick else REPLAYS
    wrong = [number for number in range(1, count + 1) if merged_by(number) != {float(number)}]
    yield {"variant": "read", "batch": 2, "replays": count, "wrong": len(wrong)}
    if wrong:
        raise ArithmeticError(f"{len(wrong)} of {count} replays merged another partial, the first is {wrong[0]}")


def _waiting_merge(options: Options) -> Callable[[int], set[float]]:
    """A function that replays a wait for a flag and a merge, and returns what numbers are in the result.

    The CPU writes a number into all of the partial, and then into the flag.
    """
    size, pin, device = size_of(options, 2), options.on_gpu, options.device
    batch, heads = size.heads
    shares = torch.zeros(batch, heads, 1, size.dim, device=device), torch.full((batch, heads, 1), -1e30, device=device)
    query = torch.zeros(batch, heads, size.dim, device=device)
    host = HostResult(torch.zeros(batch, heads, size.dim, pin_memory=pin), torch.zeros(batch, heads, pin_memory=pin))
    flag, late = (torch.zeros(1, _LINE, dtype=torch.int32, pin_memory=pin)[:, 0] for _ in range(2))
    epoch = torch.zeros(1, dtype=torch.int32, device=device)
    merged = torch.empty_like(query)

    def step() -> None:
        epoch.add_(1)
        wait_for_flag(flag, epoch, late, spins=_SPINS)
        merged.copy_(merge(*shares, host, query, None, scale=1.0, dtype=torch.float32)[0])

    flag.fill_(1)
    step()  # compiles
    options.synchronize()
    epoch.zero_()
    flag.zero_()
    replay = recorded(options, step)

    def write(number: int) -> None:
        host.out.fill_(float(number))
        flag.fill_(number)

    def merged_by(number: int, kept: object = (shares, query, epoch)) -> set[float]:  # what a graph reads
        before = number % 3 == 0 or not options.on_gpu  # without a device the step would wait for this very thread
        if before:
            write(number)
        replay()
        if not before:
            write(number)
        options.synchronize()
        return set(merged.unique().tolist()) | {float("nan") for missed in late.tolist() if missed}

    return merged_by
