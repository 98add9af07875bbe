"""CUDA streams by purpose, one of each for a device.

torch hands out 32 streams of each priority in turns: who makes one for each layer or prompt soon gets one that somebody
else has, and a stream that another thread is capturing must not be waited for.
"""

from __future__ import annotations

import functools

import torch

CAPTURE, CAPTURE_SIDE = "a capture", "what runs beside a capture"
RECALLS, TILES, TASKS = "recalls", "the tiles of a prompt", "tasks beside the CPU's"


@functools.cache
def stream_for(purpose: str, device: torch.device) -> torch.cuda.Stream:
    """The stream for a purpose, the same for all threads.

    Those of captures are of another priority than all others, and what runs beside a capture gives way to it.

    Args:
        purpose: one of those above.
        device: a CUDA device with its index.
    """
    priority = {CAPTURE: -2, CAPTURE_SIDE: -1}.get(purpose, 0)
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call, unused-ignore]
