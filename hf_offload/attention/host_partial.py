"""The host partial of a step with two memories: pinned buffers, the hand-over of a query, and the CPU's job."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_offload.blocks.memory import host_empty
from hf_offload.blocks.view import View
from hf_offload.cpu.kernels import move_records as movers
from hf_offload.cpu.kernels.decode_attention import decode_attention
from hf_offload.cpu.launch import Launch
from hf_offload.cpu.thread_pool import Job, WorkerError
from hf_offload.gpu.handover import Inbox, hand_over
from hf_offload.gpu.merge import HostResult
from hf_offload.policies.base import Estimate, HostPartial, Selection
from hf_offload.scores import Scores

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.cache.layer import HybridLayer


class BlockHostPartial(HostPartial):
    """Attention to host blocks: buffers of one layer that CPU and device access, and the job that uses them.

    Subclasses attend something else in the same way. There is one job at a time.

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
        self.store, self.stats, self.mirror, self.worker = store, layer.stats, layer.mirror, layer.settings.worker
        self.form = query.shape, capacity
        """The sizes of the buffers: shape of the query, blocks of a row and KV head."""
        heads, self._pin = (store.batch, store.num_kv_heads), store.device.type == "cuda"
        self._buffers: list[torch.Tensor] = []
        self.query = self._buffer(*query.shape)
        self.blocks = self._buffer(*heads, capacity, dtype=torch.int32)
        self.counts = self._buffer(*heads, dtype=torch.int32)
        self.out, self.lse = self._buffer(*query.shape), self._buffer(*query.shape[:2])
        self.kbar = self._buffer(*query.shape)
        self._inbox = self._make_inbox(self.query, self.blocks, self.counts)
        self._streams: list[torch.cuda.Stream] = []
        """The stream that uses the buffers. A CUDA graph that uses them keeps this object until its replay ends."""
        if self._pin:
            weakref.finalize(self, _synchronize, self._streams).atexit = False
        self.host: Selection | None = None
        self.predicted: torch.Tensor | None = None
        """The query of the running job, on the device."""
        self._correct = False
        self._job: Job | None = None
        self._planned: dict[tuple[object, ...], tuple[View, tuple[Launch, ...]]] = {}
        """The launches of eager steps by what they depend on, and the view that they were made for."""

    def _buffer(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a new buffer that CPU and device access."""
        with torch.inference_mode(False):
            self._buffers.append(host_empty(shape, dtype, pin=self._pin, brief=True, what="a host partial"))
        return self._buffers[-1]

    def _make_inbox(
        self, query: torch.Tensor, blocks: torch.Tensor, counts: torch.Tensor, *tail_and_limits: torch.Tensor
    ) -> Inbox:
        """Return an inbox of buffers. Whether kernels reach these is asked here: a capture allows few questions."""
        # Whether GPU kernels can read and write the buffers.
        self.reachable = not self._pin or all_pinned(tuple(self._buffers))
        arrived = None
        if self.reachable:
            with torch.inference_mode(False):
                arrived = torch.zeros(1, dtype=torch.int32, device=self.store.device)
        return Inbox(query, blocks, counts, arrived, *tail_and_limits)

    def start(self, step: Step, host: Selection | None, *, correct: bool, label: str) -> BlockHostPartial:
        """Start a job that attends host blocks with the step's query.

        Args:
            step: the step with the query.
            host: sealed blocks to attend; None in a subclass that attends no blocks.
            correct: whether to compute k̄ for the first-order correction.
            label: the job's name in error messages.
        """
        self.host, self.predicted, self._correct = host, step.query, correct
        self._drop()
        self._job = self._submit(step, functools.partial(self._send, step.query, host), self.make_launches, label)
        return self

    def _submit(
        self,
        step: Step,
        send: Callable[..., None],
        make: Callable[[Scores], tuple[Launch, ...]],
        label: str,
        *,
        key: object = None,
        after: object = None,
        before: Job | None = None,
    ) -> Job | None:
        """Hand over and run launches, one after the other; return the job, None in a capture.

        Args:
            step: the step.
            send: hands over, announced by a flag if it gets one and an epoch.
            make: makes the launches; kept as long as the view is the same.
            label: the job's name in error messages.
            key: tells this work from others of the partial in a capture; None: the partial, whose result is waited for.
            after: the key of earlier work that must be done first, in a capture; before: its job, in an eager step.
        """
        capture = self.mirror.capture
        if capture is not None:
            making = functools.partial(make, step.scores)
            flag = capture.flag_of(self, making, step.label(label), key=self if key is None else key, after=after)
            send(flag, capture.epoch)
            return None
        send()
        arrived, launches, worker = self._arrived(), self._launches(step.scores, make), self.worker

        def work() -> None:
            if before is not None:
                before.result()
            if arrived is not None:
                arrived.synchronize()
            for launch in launches:
                worker.divide(launch)

        return worker.submit(work, step.label(label), keep=(step.store.pool, self))

    def _send(
        self,
        query: torch.Tensor,
        host: Selection | None,
        flag: torch.Tensor | None = None,
        epoch: torch.Tensor | None = None,
    ) -> None:
        assert host is not None
        self.mirror.pause()
        hand_over(self._inbox, query, host.items, host.counts, flag=flag, epoch=epoch)

    def _arrived(self) -> torch.cuda.Event | None:
        """Return an event after the hand-over on a CUDA device, or None."""
        if not self._pin:
            return None
        stream = torch.cuda.current_stream(self.store.device)
        self._streams[:] = [stream]
        event: torch.cuda.Event = stream.record_event()
        return event

    def rehearse(self, capture: Any) -> None:
        """Hand over an empty partial: the first launch loads the kernel, which a capture may refuse."""
        self._rehearse(capture, self._inbox)

    def _rehearse(self, capture: Any, inbox: Inbox) -> None:
        buffers = inbox.query, inbox.blocks, inbox.counts, inbox.tail, inbox.limits
        zeros = (torch.zeros(x.shape, dtype=x.dtype, device=self.store.device) for x in buffers if x is not None)
        hand_over(inbox, *zeros, flag=capture.flags[0, :1], epoch=capture.epoch)

    def _launches(self, scores: Scores, make: Callable[[Scores], tuple[Launch, ...]]) -> tuple[Launch, ...]:
        """Return the launches of an eager step; they are reused as long as the store's view stays the same."""
        view, key = self.store.view(self.store.length), (make.__name__, scores, self._correct)
        planned = self._planned.get(key)
        if planned is None or planned[0] is not view:
            planned = self._planned[key] = view, make(scores)
        return planned[1]

    def make_launches(self, scores: Scores) -> tuple[Launch, ...]:
        """Return new launches that attend the buffers' blocks, with their own counters and scratch memory."""
        view = self.store.view(self.store.length)
        # Host blocks are full: the length need not be exact.
        return (
            decode_attention(
                self.query.numpy(), view.blocks, self.blocks.numpy(), self.counts.numpy(), view.covered,
                self.out.numpy(), self.lse.numpy(), self.kbar.numpy() if self._correct else None, **scores._asdict(),
            ),
        )  # fmt: skip

    def read(self, step: Step, host: Selection) -> None:
        """Start a job that reads host blocks into the CPU's caches, off the critical path; a captured step has none."""
        if self.mirror.capture is not None:
            return
        self._drop()
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

        self._job = self.worker.submit(read, step.label("read-ahead"), keep=(store.pool, self))

    def share(self, step: Step) -> torch.Tensor | float:
        """Return the attended tokens as a share of the budget: fp32 `[]` on the device."""
        assert self.host is not None, "blocks are known"
        return step.share_of(self.host)

    def result(self) -> HostResult:
        """Wait for the job and return its result for the merge.

        Raises:
            WorkerError: the job failed.
        """
        if self.mirror.capture is not None:
            self.mirror.capture.wait(self)
        else:
            assert self._job is not None
            self._job.result()
            self._job = None
        out, lse, kbar = self.out, self.lse, self.kbar
        if not self.reachable:  # GPU kernels read pinned memory only
            out, lse, kbar = (tensor.to(self.store.device) for tensor in (out, lse, kbar))
        return HostResult(out, lse, kbar, self.predicted) if self._correct else HostResult(out, lse)

    def real_lse(self, step: Step) -> np.ndarray:
        """Return the result's lse `[B, Hq]` as the merge takes it, after `result`: corrected to the step's query."""
        lse = self.lse
        if self._correct:
            assert self.predicted is not None
            moved = step.scores.scale * ((step.query - self.predicted).cpu() * self.kbar).sum(-1)
            lse = torch.where(lse == -torch.inf, lse, lse + moved)
        return lse.numpy()

    def estimate(self, step: Step) -> Estimate | None:
        if self is not step.layer.ahead or self.host is None:
            return None
        selection = Selection(self.blocks.numpy(), self.counts.numpy(), step.block_size)
        return Estimate(selection, self.real_lse(step))

    def cancel(self) -> None:
        """Wait for the job and drop its result, so that nothing reads blocks that are about to change.

        Raises:
            WorkerError: the job still uses these buffers after the timeout.
        """
        self._drop()

    def _drop(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            discard(job)


def discard(job: Job) -> None:
    """Wait for a job and drop its result, or its error.

    Raises:
        WorkerError: it still runs after the timeout.
    """
    try:
        job.result()
    except WorkerError:
        if not job.done():
            raise


def all_pinned(buffers: tuple[torch.Tensor, ...]) -> bool:
    """Whether all buffers are pinned; empty ones (of a partial without a block list) count as pinned."""
    return all(tensor.is_pinned() for tensor in buffers if tensor.numel())


def _synchronize(streams: list[torch.cuda.Stream]) -> None:
    """Wait until the device no longer uses buffers that are freed, which it knows by address alone.

    This waits for one stream, not for the device, on which another thread may be capturing.
    """
    if streams and not torch.cuda.is_current_stream_capturing():
        streams[0].synchronize()
