"""What it costs that the device hands a layer's work to the CPU and waits for the result."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from bench_cpu import Memory
from common import clock, percentiles, synchronize
from gpu.models import Options
from gpu.operations import recorded
from gpu.supervise import Cases
from hf_offload.cpu.host_signals import Doorbell
from hf_offload.cpu.kernels.move_records import touch_records
from hf_offload.cpu.launch import Launch
from hf_offload.gpu.handover import Inbox, hand_over
from hf_offload.graph.graph_capture import Capture

TARGET = 15.0  # microseconds a layer
FEW = 5  # blocks of a KV head: 8 % of a budget of 2,048 tokens
SECONDS = 30
ALONE, NOTHING, SOME = "kernels alone", "nothing", f"{FEW} blocks a head"


def cases(options: Options) -> Cases:
    """A work, and how many threads there are for it; a step hands over as many pieces of it as a model has layers."""
    counts = [1] if options.quick else sorted({1, 4, 8, max((os.cpu_count() or 2) - 1, 1)})
    every = {ALONE: (ALONE, 0)} | {f"{work}, {n} threads": (work, n) for work in (NOTHING, SOME) for n in counts}
    return {name: (SECONDS, partial(measure, options, *case)) for name, case in every.items()}


def measure(options: Options, work: str, threads: int) -> Iterator[dict[str, Any]]:
    """Microseconds a layer of steps in which a graph hands over a query of one row and a list of blocks, out of 64 that
    it might be, and waits; a doorbell serves. `ALONE`: all answers are there, `SOME`: attention to blocks of 32 tokens
    of eight KV heads.
    """
    layers, steps, unmeasured = (4, 4, 1) if options.quick else (36, 220, 20)
    shapes = ((1, 32, 128), torch.float32), ((1, 8, 64), torch.int32), ((1, 8), torch.int32)
    sent = [torch.zeros(shape, dtype=dtype, device=options.device) for shape, dtype in shapes]
    sent[2].fill_(FEW if work == SOME else 0)
    there = (torch.zeros(shape, dtype=dtype, pin_memory=options.on_gpu) for shape, dtype in shapes)
    inbox = Inbox(*there, torch.zeros(1, dtype=torch.int32, device=options.device))
    capture, keys = Capture(torch.device(options.device), layers, timeout=10.0), [object() for _ in range(layers)]
    memory = Memory(8, 128, 32, options.dtype) if work == SOME else None

    def launches() -> tuple[Launch, ...]:
        return (memory.decode(4, 1, 32 * FEW) if memory else touch_records(np.zeros(2, np.int64), 0),)

    def step() -> None:
        capture.announced.clear()
        capture.epoch.add_(1)
        for number, key in enumerate(keys):
            flag = capture.flag_of(key, launches, f"item {number}", key=key, after=None)
            hand_over(inbox, *sent, flag=flag, epoch=capture.epoch)
            capture.wait(key)

    capture.flags[1 : 2 * layers : 2] = 1 << 30  # all answers are there up to this epoch: nobody is waited for
    step()  # kernels are compiled before they are captured
    synchronize()
    replay, doorbell, times = recorded(options, step), Doorbell(max(threads, 1)), list[float]()
    capture.epoch.zero_()
    if work != ALONE:
        capture.flags.zero_()
        doorbell.replace(capture.items())
    try:
        for _ in range(steps):
            with clock(times):
                replay()
        doorbell.check()
    finally:
        doorbell.stop()
    if int(capture.late[0]):
        raise TimeoutError("the device gave up waiting for the CPU")
    a_layer = percentiles(1e6 * seconds / layers for seconds in times[unmeasured:])
    yield {"work": work, "host_threads": threads, "layers": layers, **a_layer, "target": TARGET}
