"""Fetches of blocks from pinned memory by their number of programs, and what small kernels cost beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from common import percentiles
from gpu.host_time import add_ones
from gpu.inputs import Inputs, size_of
from gpu.operations import fetch_all, fetch_recall
from gpu.options import Options
from gpu.timing import Timer
from hf_offload.gpu import kv_copy
from hf_offload.gpu.streams import RECALLS, stream_for

PROGRAMS = (8, 16, 24, 32, 64)
BATCH = 8
SHORT = ((64, 32), (128, 16), (64, 16))
"""Head dimension and block size of other records."""
_BUILT = kv_copy.FETCHERS
ONES = 20  # kernels of the model's size beside a fetch


@contextmanager
def programs_of_a_fetch(count: int) -> Iterator[None]:
    """Fetches of the inside have so many programs."""
    with mock.patch.object(kv_copy, "FETCHERS", count):
        yield


def fetch(options: Options, programs: int) -> Iterator[dict[str, Any]]:
    """Microseconds of a fetch and its GB/s; those of `ONES` additions without (`alone`) and with it (`beside`)."""
    timer = Timer(options)
    size = size_of(options, BATCH)
    with programs_of_a_fetch(programs):
        for variant, make in (("8 % of the slots", fetch_recall), ("all slots", fetch_all)):
            operation = make(Inputs(options, size))
            spread = timer.device_time(operation.call)
            speed = operation.link_bytes / spread["p50"] / 1000
            row: dict[str, Any] = {"programs": programs, "batch": size.batch, **spread, "gb_per_s": speed}
            if make is fetch_all and options.on_gpu:
                row |= {"alone": ones_beside(timer, None), "beside": ones_beside(timer, operation.call)}
            yield {"variant": variant, **row}
        if programs == _BUILT:  # shorter records, several of which are under way at once
            for dim, block in SHORT:
                operation = fetch_all(Inputs(options, replace(size, dim=dim, block=block)))
                spread = timer.device_time(operation.call)
                speed = operation.link_bytes / spread["p50"] / 1000
                variant = f"all slots, D {dim} block {block}"
                yield {"variant": variant, "batch": size.batch, **spread, "gb_per_s": speed}


def ones_beside(timer: Timer, call: Callable[[], Any] | None) -> float:
    """Median microseconds of `ONES` small kernels in a graph while a call, if any, runs on the stream of recalls."""
    main, side = torch.cuda.current_stream(), stream_for(RECALLS, torch.device("cuda", torch.cuda.current_device()))
    replay = add_ones(timer.options, ONES, 0)
    pairs = []
    for _ in range(timer.rounds):
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        timer.flush()  # the device is busy until all that follows is queued
        if call is not None:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                call()
        replay()  # meanwhile the call begins
        pair[0].record()
        replay()
        pair[1].record()
        main.wait_stream(side)
        pairs.append(pair)
    torch.cuda.synchronize()
    return percentiles(1000 * start.elapsed_time(end) for start, end in pairs)["p50"]
