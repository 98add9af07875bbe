"""By which way records come from pinned host memory to a device: the quicker one, measured once a process.

A kernel can read them where they lie ("uva"), or the CPU brings them together and the copy engine carries them over
("copy"). Which of the two is quicker depends on the link, on the host's memory and on what shares them, so that it is
measured on the machine itself. Both ways bring the same bytes.
"""

from __future__ import annotations

import functools
import os
import statistics
import threading
from collections.abc import Callable, Mapping

import torch

VARIABLE = "HF_OFFLOAD_TRANSFER"
"""Environment variable that says which way is taken, for tests and for runs that must be alike."""
WAYS = ("uva", "copy")
ROUNDS = 5

_chosen: dict[tuple[torch.device, int], str] = {}
_lock = threading.Lock()


def asked_for() -> str | None:
    """The way that the environment asks for, or None: the quicker one.

    Raises:
        ValueError: it asks for another than `WAYS`.
    """
    way = os.environ.get(VARIABLE)
    if way is not None and way not in WAYS:
        raise ValueError(f"{VARIABLE}={way!r} is no way for blocks to travel; use {' or '.join(WAYS)}, or unset it")
    return way


def way_for(
    device: torch.device,
    record_bytes: int,
    trials: Callable[[], Mapping[str, Callable[[], None]]],
    clock: Callable[[Callable[[], None]], float] | None = None,
) -> str:
    """The way for records of a size on a device: measured at the first call, remembered for the process.

    Args:
        device: where the records go; its current stream is the one that is timed. Nothing may be captured meanwhile.
        record_bytes: of one record.
        trials: makes, for each of `WAYS` that can be tried, a call that brings a typical number of records that way.
        clock: seconds of a call; by default the device's own, from event to event.
    """
    key = device, record_bytes
    if key not in _chosen:
        with _lock:
            if key not in _chosen:
                _chosen[key] = quicker(trials(), clock or functools.partial(_on_device, device))
    return _chosen[key]


def quicker(trials: Mapping[str, Callable[[], None]], clock: Callable[[Callable[[], None]], float]) -> str:
    """The name of the call with the lowest median of `ROUNDS` times, taken in turns; of equal ones the first.

    Args:
        trials: what is measured, by name. Each is called once more before, since it may compile.
        clock: seconds of a call.
    """
    times: dict[str, list[float]] = {way: [] for way in trials}
    for call in trials.values():
        clock(call)
    for _ in range(ROUNDS):
        for way, call in trials.items():
            times[way].append(clock(call))
    return min(times, key=lambda way: statistics.median(times[way]))


def _on_device(device: torch.device, call: Callable[[], None]) -> float:
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record(stream)  # which has nothing to do: every call before was waited for
    call()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
