"""The CPU's partial of a step with two memories: pinned buffers, the hand-over of a query, and the CPU's job."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_offload.cache.memory import host_empty
from hf_offload.cache.view import View
from hf_offload.cpu.kernels import move_records as movers
from hf_offload.cpu.kernels import sparse_decode as cpu_decode
from hf_offload.cpu.launch import Launch
from hf_offload.cpu.thread_pool import Job, WorkerError
from hf_offload.gpu.handover import Inbox, hand_over
from hf_offload.gpu.merge import HostPartial
from hf_offload.policies.base import RunningPartial, Selection
from hf_offload.scores import Scores

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer


class CpuPartial(RunningPartial):
    """Host buffers of one layer that CPU and device access, and the job that uses them; one job at a time.

    The device writes the query, the blocks and their counts to (pinned) host memory in stream order; the job waits for
    them, the model's thread does not. The device reads the result from host memory. The next job cannot overwrite it
    too early: it waits for its own query, which the device computes after it has read this result.

    Args:
        layer: the layer.
        query: `[B, Hq, D]` fp32, a tensor with the sizes of the queries.
        capacity: the most blocks that a row and KV head attends on the CPU.
    """

    def __init__(self, layer: HybridLayer, query: torch.Tensor, capacity: int) -> None:
        store = layer.store
        assert store is not None
        self._layer = weakref.ref(layer)  # the layer holds this part
        self.shape, self.capacity = query.shape, capacity
        heads = (store.batch, store.num_kv_heads)
        pin = store.device.type == "cuda"

        def buffer(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            with torch.inference_mode(False):
                return host_empty(shape, dtype, pin=pin, brief=True, what="the CPU's part of a step")

        self.query = buffer(*query.shape)
        self.blocks, self.counts = buffer(*heads, capacity, dtype=torch.int32), buffer(*heads, dtype=torch.int32)
        self.out, self.lse, self.kbar = buffer(*query.shape), buffer(*query.shape[:2]), buffer(*query.shape)
        # Checked here, since few calls are allowed in a capture.
        buffers = (self.query, self.blocks, self.counts, self.out, self.lse, self.kbar)
        self.reachable = not pin or all_pinned(buffers)
        """Whether GPU kernels can read and write the buffers."""
        arrived = None
        if self.reachable:
            with torch.inference_mode(False):
                arrived = torch.zeros(1, dtype=torch.int32, device=store.device)
        self._inbox = Inbox(self.query, self.blocks, self.counts, arrived)
        self._streams: list[torch.cuda.Stream] = []
        """The stream that uses the buffers. A CUDA graph that uses them keeps this part alive until its replay ends."""
        if pin:
            weakref.finalize(self, _settle, self._streams).atexit = False
        self.host: Selection | None = None
        self.predicted: torch.Tensor | None = None
        """The query of the running job, on the device."""
        self._correct = False
        self._job: Job | None = None
        self._planned: tuple[View, tuple[Scores, bool], Launch] | None = None

    @property
    def layer(self) -> HybridLayer:
        """The layer of this part."""
        layer = self._layer()
        assert layer is not None, "a part outlives its layer only while a job ends"
        return layer

    def fits(self, query: torch.Tensor, capacity: int) -> bool:
        """Whether the buffers have the sizes of this query and capacity."""
        return self.shape == query.shape and self.capacity == capacity

    def start(self, step: Step, host: Selection | None, *, correct: bool, label: str) -> CpuPartial:
        """Start a job that attends host blocks with the step's query.

        Args:
            step: the step with the query.
            host: sealed blocks to attend; None in a subclass that attends no blocks.
            correct: whether to compute k̄ for the first-order correction.
            label: the job's name in error messages.
        """
        self.host, self.predicted, self._correct = host, step.query, correct
        capture = self.layer.mirror.capture
        if capture is not None:
            launching = functools.partial(self.make_launch, step.scores)
            self._send(step.query, host, capture.flag_of(self, launching, step.label(label)), capture.epoch)
            return self
        self._send(step.query, host)
        arrived, launch = self._arrived(), self.launch(step.scores)
        worker = self.layer.settings.worker

        def attend() -> None:
            if arrived is not None:
                arrived.synchronize()
            worker.divide(launch)

        self._job = worker.submit(attend, step.label(label), keep=(step.store.pool, self))
        return self

    def _send(
        self,
        query: torch.Tensor,
        host: Selection | None,
        flag: torch.Tensor | None = None,
        epoch: torch.Tensor | None = None,
    ) -> None:
        assert host is not None
        self.cancel()
        self.layer.mirror.pause()
        hand_over(self._inbox, query, host.blocks, host.counts, flag=flag, epoch=epoch)

    def _arrived(self) -> torch.cuda.Event | None:
        """Return an event after the hand-over on a CUDA device, or None."""
        if self.layer.device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(self.layer.device)
        self._streams[:] = [stream]
        event: torch.cuda.Event = stream.record_event()
        return event

    def rehearse(self, capture: Any) -> None:
        """Hand over an empty part: the first launch loads the kernel, which a capture may refuse."""
        buffers = self.query, self.blocks, self.counts
        zeros = (torch.zeros(part.shape, dtype=part.dtype, device=self.layer.device) for part in buffers)
        hand_over(self._inbox, *zeros, flag=capture.flags[0, :1], epoch=capture.epoch)

    def launch(self, scores: Scores) -> Launch:
        """Return the launch of an eager step; it is reused as long as the store's view stays the same."""
        store = self.layer.store
        assert store is not None
        view, form = store.view(store.length), (scores, self._correct)
        if self._planned is None or self._planned[0] is not view or self._planned[1] != form:
            self._planned = view, form, self.make_launch(scores)
        return self._planned[2]

    def make_launch(self, scores: Scores) -> Launch:
        """Return a new launch that attends the buffers' blocks, with its own counters and scratch memory."""
        store = self.layer.store
        assert store is not None
        view = store.view(store.length)
        # Host blocks are full: the length need not be exact.
        return cpu_decode.sparse_decode(
            self.query.numpy(), view.block_ptr, view.table, self.blocks.numpy(), self.counts.numpy(), view.holes,
            view.valid, view.covered, self.out.numpy(), self.lse.numpy(), self.kbar.numpy() if self._correct else None,
            kv_dtype=store.dtype, block_size=store.block_size, **scores._asdict(), packed=store.format.packed,
        )  # fmt: skip

    def read(self, step: Step, host: Selection) -> None:
        """Start a job that reads host blocks into the CPU's caches, off the critical path."""
        self._send(step.query, host)
        arrived, store = self._arrived(), step.store
        blocks, counts = self.blocks.numpy(), self.counts.numpy()
        size = store.format.record_bytes if store.format.packs else store.pool.record_bytes

        def read() -> None:
            if arrived is not None:
                arrived.synchronize()
            rows, heads, column = np.nonzero(np.arange(blocks.shape[2]) < counts[..., None])
            addresses = store.pool.addresses(store.table[rows, blocks[rows, heads, column]], heads) & ~1
            movers.touch_records(addresses, size)()

        self._job = self.layer.settings.worker.submit(read, step.label("read-ahead"), keep=(store.pool, self))

    def share(self, step: Step) -> torch.Tensor | float:
        """Return the attended tokens as a share of the budget: fp32 `[]` on the device."""
        assert self.host is not None, "blocks are known"
        return step.share_of(self.host)

    def partial(self) -> HostPartial:
        """Wait for the job and return its result for the merge.

        Raises:
            WorkerError: the job failed.
        """
        if self.layer.mirror.capture is not None:
            self.layer.mirror.capture.wait(self)
        else:
            assert self._job is not None
            self._job.result()
            self._job = None
        out, lse, kbar = self.out, self.lse, self.kbar
        if not self.reachable:  # GPU kernels read pinned memory only
            out, lse, kbar = (tensor.to(self.layer.device) for tensor in (out, lse, kbar))
        return HostPartial(out, lse, kbar, self.predicted) if self._correct else HostPartial(out, lse)

    def cancel(self) -> None:
        """Wait for the job and drop its result, so that nothing reads blocks that are about to change.

        Raises:
            WorkerError: the job still uses these buffers after the timeout.
        """
        if self._job is not None:
            try:
                self._job.result()
            except WorkerError:  # the result is dropped, its error too
                if not self._job.done():
                    raise
            self._job = None


def all_pinned(buffers: tuple[torch.Tensor, ...]) -> bool:
    """Whether all buffers are pinned; empty ones (of a part without a block list) count as pinned."""
    return all(tensor.is_pinned() for tensor in buffers if tensor.numel())


def _settle(streams: list[torch.cuda.Stream]) -> None:
    """Wait until the device no longer uses buffers that are freed, which it knows by address alone.

    This waits for one stream, not for the device, on which another thread may be capturing.
    """
    if streams and not torch.cuda.is_current_stream_capturing():
        streams[0].synchronize()
