"""What the host knows of the blocks, as tensors where the model computes: sizes, tables and padding for kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from hf_offload.cache.memory import host_empty
from hf_offload.cache.padding import Padding
from hf_offload.cpu.thread_pool import Worker

_CYCLES = 1.5e9  # of a GPU in a second, roughly


class DeviceMirror:
    """What all layers on one device share: sizes and padding there, the stream of recalls, a capture in progress.

    A tensor keeps its address for as long as its shape stays: a captured CUDA graph reads what the last call wrote.

    Args:
        padding: of the cache.
        device: where the tensors live.
        worker: runs on the CPU what need not be waited for.
    """

    def __init__(self, padding: Padding, device: torch.device, worker: Worker) -> None:
        self.padding, self.device, self.worker = padding, device, worker
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        """Recalls run here, beside the model."""
        self.capture: Any = None
        """The `attention.graph_capture.Capture` that records this step, or None."""
        self._held: dict[object, tuple[object, torch.Tensor]] = {}

    def current(self) -> AbstractContextManager[Any]:
        """Make this device the current one, on which kernels are launched: a model may be spread over several."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def pause(self) -> None:
        """Be slow, where tests ask for it; see `pause`."""
        pause(self.worker, self.device)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run what is inside on the stream of recalls, after what the model's stream has been given so far."""
        stream = self.stream if self.capture is None else self.capture.beside()
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.pause()
            yield

    def _mirror(self, name: object, state: object, array: np.ndarray) -> torch.Tensor:
        """The tensor of a name, brought up to date if `state` is another than at the last call."""
        held = self._held.get(name)
        if held is not None and held[0] == state:
            return held[1]
        self._held.pop(name, None)  # until all of it is there
        tensor = sent(array, self.device, None if held is None else held[1])
        self._held[name] = (state, tensor)
        return tensor

    def limits(self, role: str, length: int, sealed: int) -> torch.Tensor:
        """The tensor int32 `[2]` that holds (length, sealed), for one role in a step.

        Args:
            role: several pairs are in use in a step; each has a tensor of its own.
            length: tokens of every row.
            sealed: blocks that have a digest.
        """
        return self._mirror(role, (length, sealed), np.array([length, sealed], np.int32))

    def valid(self) -> torch.Tensor | None:
        """`[B, T]` uint8, which tokens may be attended; None while all may."""
        padding = self.padding
        if not padding.ragged:
            return None
        held, grown = self._held.get("valid"), padding.grown
        if held is None or grown is None or held[0] != grown[0] or held[1].shape != padding.valid.shape:
            return self._mirror("valid", padding.version, padding.valid)
        new = slice(grown[1], padding.seen)  # a long batch is long to send
        self._held.pop("valid")
        sent(padding.valid[:, new], self.device, held[1][:, new])
        self._held["valid"] = padding.version, held[1]
        return held[1]

    def sinks(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First block and end of each row's first `tokens` valid tokens, int32 `[B]` each."""
        low, high = self.padding.sinks(tokens)
        return (
            self._mirror(("low", tokens), low.tobytes(), low),
            self._mirror(("high", tokens), high.tobytes(), high),
        )


def pause(worker: Worker | None, device: torch.device) -> None:
    """Have the current stream be slow, where tests ask for it (`Worker.delay`): what does not wait reads too early."""
    if worker is not None and worker.delay and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(int(worker.delay * _CYCLES))  # type: ignore[no-untyped-call]


def sent(array: np.ndarray, device: torch.device, old: torch.Tensor | None = None) -> torch.Tensor:
    """A copy on a device of what an array holds now; on a CUDA device it comes in the stream's order, with no wait.

    Args:
        array: of any layout.
        device: where to.
        old: what takes the copy in, if its shape is that of the array.
    """
    fresh = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":  # torch waits for the stream before it reads pageable memory
        fresh = host_empty(fresh.shape, fresh.dtype, pin=True, brief=True, what="block tables").copy_(fresh)
    if old is not None and old.shape == fresh.shape:
        return old.copy_(fresh, non_blocking=True)
    with torch.inference_mode(False):
        return fresh.to(device, copy=True, non_blocking=True)


def brought(tensor: torch.Tensor, what: str) -> tuple[torch.Tensor, Callable[[], None]]:
    """A copy on the host of what a tensor holds now, and what waits for it, in any thread.

    Args:
        tensor: contiguous.
        what: it is, for errors.
    """
    if tensor.device.type != "cuda":
        return tensor.clone(), _nothing
    there = host_empty(tensor.shape, tensor.dtype, pin=True, brief=True, what=what)
    there.copy_(tensor, non_blocking=True)
    return there, torch.cuda.current_stream(tensor.device).record_event().synchronize


def _nothing() -> None:
    """It is there already."""
