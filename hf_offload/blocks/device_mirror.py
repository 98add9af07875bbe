"""Device copies of the host's metadata that kernels read: lengths, block tables, addresses and padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from hf_offload.blocks.memory import host_empty
from hf_offload.blocks.padding import Padding
from hf_offload.cpu.thread_pool import Worker
from hf_offload.gpu.backend import check_triton
from hf_offload.gpu.streams import RECALLS, stream_for

_CYCLES = 1.5e9  # cycles of a GPU in a second, roughly


class DeviceMirror:
    """What all layers on one device share: lengths and padding there, the recall stream, a capture in progress.

    A tensor keeps its address as long as its shape stays the same, so that a captured CUDA graph reads its new values.

    Args:
        padding: the cache's padding.
        device: the device of the tensors.
        worker: threads for work beside the model.

    Raises:
        RuntimeError: a GPU without Triton.
    """

    def __init__(self, padding: Padding, device: torch.device, worker: Worker) -> None:
        check_triton(device)
        self.padding, self.device, self.worker = padding, device, worker
        self.stream = stream_for(RECALLS, device) if device.type == "cuda" else None
        """The stream of recalls, which all caches on the device share."""
        self.capture: Any = None
        """The `graph.graph_capture.Capture` that is recording this step, or None."""
        self._held: dict[object, tuple[object, torch.Tensor]] = {}

    def current(self) -> AbstractContextManager[Any]:
        """A context in which this device is current, for kernel launches of a model on several devices."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def pause(self) -> None:
        """Delay the current stream in tests; see `pause`."""
        if self.worker.delay:
            pause(self.worker, self.device)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the body on the recall stream, after all work that the model's stream has so far."""
        stream = self.stream if self.capture is None else self.capture.beside()
        if stream is None or stream == torch.cuda.current_stream(self.device):
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self.pause()
            yield

    def _mirror(self, name: object, state: object, array: np.ndarray) -> torch.Tensor:
        """The tensor of a name, updated from `array` if `state` has changed since the last call."""
        held = self._held.get(name)
        if held is not None and held[0] == state:
            return held[1]
        self._held.pop(name, None)  # absent if the copy fails
        tensor = sent(array, self.device, None if held is None else held[1])
        self._held[name] = (state, tensor)
        return tensor

    def limits(self, role: str, length: int, sealed: int) -> torch.Tensor:
        """An int32 tensor `[2]` of (length, sealed).

        Args:
            role: name of the pair; each of the pairs that a step uses has its own tensor.
            length: tokens of every row.
            sealed: number of blocks that have a digest.
        """
        return self._mirror(role, (length, sealed), np.array([length, sealed], np.int32))

    def numbers(self, count: int) -> torch.Tensor:
        """The int32 numbers from 0 to `count` - 1."""
        return self._constant(("numbers", count), lambda: np.arange(count, dtype=np.int32))

    def every_slot(self, batch: int, heads: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of all slots of each row and KV head, int32 `[B, Hkv, R]`, and how many there are, `[B, Hkv]`."""
        shape = batch, heads, slots
        return (
            self._constant(("slots", shape), lambda: np.broadcast_to(np.arange(slots, dtype=np.int32), shape)),
            self._constant(("slot counts", shape), lambda: np.full(shape[:2], slots, np.int32)),
        )

    def _constant(self, name: object, make: Callable[[], np.ndarray]) -> torch.Tensor:
        """The tensor of a name, made once."""
        held = self._held.get(name)
        return self._mirror(name, None, make()) if held is None else held[1]

    def valid(self) -> torch.Tensor | None:
        """`[B, T]` uint8, 1 where a token may be attended; None while all may."""
        padding = self.padding
        if not padding.ragged:
            return None
        held, grown = self._held.get("valid"), padding.grown
        if held is None or grown is None or held[0] != grown[0] or held[1].shape != padding.valid.shape:
            return self._mirror("valid", padding.version, padding.valid)
        new = slice(grown[1], padding.seen)  # send the new tokens alone
        self._held.pop("valid")
        sent(padding.valid[:, new], self.device, held[1][:, new])
        self._held["valid"] = padding.version, held[1]
        return held[1]

    def sinks(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First block and end of each row's first `tokens` valid tokens, int32 `[B]` each."""
        both = np.stack(self.padding.sinks(tokens))
        low, high = self._mirror(("sinks", tokens), both.tobytes(), both)
        return low, high


def pause(worker: Worker | None, device: torch.device) -> None:
    """Delay the current stream in tests (`Worker.delay`), so that a missing wait reads old data."""
    if worker is not None and worker.delay and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda._sleep(int(worker.delay * _CYCLES))  # type: ignore[no-untyped-call]


def sent(array: np.ndarray, device: torch.device, old: torch.Tensor | None = None) -> torch.Tensor:
    """Copy an array to a device, on a CUDA device in stream order and without a wait.

    Args:
        array: of any memory layout; may change after the call.
        device: the target.
        old: a tensor to reuse if it has the array's shape.
    """
    fresh = torch.from_numpy(np.require(array, requirements=["C", "W"]))  # torch warns of what cannot be written
    if device.type == "cuda":  # torch waits for the stream before it reads pageable memory
        fresh = host_empty(fresh.shape, fresh.dtype, pin=True, brief=True, what="block tables").copy_(fresh)
    if old is not None and old.shape == fresh.shape:
        return old.copy_(fresh, non_blocking=True)
    with torch.inference_mode(False):
        return fresh.to(device, copy=True, non_blocking=True)


def to_host(tensor: torch.Tensor, what: str) -> tuple[torch.Tensor, Callable[[], None]]:
    """Start a copy of a tensor to the host; return it and a function that waits for it, from any thread.

    Args:
        tensor: contiguous.
        what: its name for errors.
    """
    if tensor.device.type != "cuda":
        return tensor.clone(), _nothing
    copy = host_empty(tensor.shape, tensor.dtype, pin=True, brief=True, what=what)
    copy.copy_(tensor, non_blocking=True)
    return copy, torch.cuda.current_stream(tensor.device).record_event().synchronize


def _nothing() -> None:
    """Nothing to wait for."""
