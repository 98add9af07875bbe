"""The host's part of a step where the device takes tasks beside the CPU's threads."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch

from hf_offload.cpu.launch import Launch
from hf_offload.gpu.merge import HostPartial
from hf_offload.policies.base import Partial
from hf_offload.policies.fluxion.device_tasks import DeviceTasks
from hf_offload.policies.fluxion.kernels.tasks import whole_tasks
from hf_offload.policies.fluxion.schedule import CPU, DEVICE, Queue
from hf_offload.policies.fluxion.selected_part import SelectedPart
from hf_offload.policies.fluxion.selector import Properties

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.attention.step_split import TieredStep
    from hf_offload.cache.layer import HybridLayer


class ScheduledPart(SelectedPart):
    """A part whose tasks, a KV head of a row each, are attended by the CPU's threads and by the device.

    The device is fed by the model's own thread, which would otherwise wait for the CPU: it launches a task's kernels,
    waits for them and takes the next. No thread beside it wants the interpreter meanwhile, since kernels of the CPU run
    without it.

    Args:
        layer: the layer.
        query: `[B, Hq, D]` fp32, tells the sizes.
        schedule: one of `SCHEDULES`.
    """

    def __init__(self, layer: HybridLayer, query: torch.Tensor, schedule: str) -> None:
        super().__init__(layer, query)
        self.queue = Queue(self.selector.counts.size, schedule, layer.settings.worker.threads)
        self.device = DeviceTasks(layer, query)
        self._lock = threading.Lock()
        self._launch: Launch | None = None
        """Of this step, once its tasks are dealt out."""
        self._sent: torch.cuda.Event | None = None
        self._began = self._device_ended = self._ended = self._busy = 0.0
        """When tasks could be taken and when the device and the CPU found none left; seconds of the CPU's threads."""
        self._all = 0
        self._taken: list[int] = []  # by the device
        self._tried = False
        """Whether the device has done a task before: the first compiles and loads kernels, which says nothing of it."""

    def select(self, step: Step, properties: Properties) -> ScheduledPart:
        """Let the CPU's threads begin; nobody is at work in the buffers."""
        self._counts = step.state.counts
        self.layer.mirror.pause()
        self.query.copy_(step.query, non_blocking=True)
        self.selector.take(properties)
        self._sent, self._launch = self._arrived(), None
        worker = self.layer.settings.worker

        def work() -> None:
            self._busy = worker.divide(self._deal(step))
            self._ended = time.perf_counter()

        label = step.label("choice of blocks and attention")
        self._job = worker.submit(work, label, keep=(step.store.pool, self))
        return self

    def _deal(self, step: Step) -> Launch:
        """Rank the tasks and deal them out, once for all who take them, when needs and query have arrived."""
        with self._lock:
            if self._launch is not None:
                return self._launch
            if self._sent is not None:
                self._sent.synchronize()
            store, selector, scores = step.store, self.selector, step.scores
            assert store.digests is not None, "a policy without a digest cannot choose"
            bundle = selector.bundle(store.digests, scores)  # of some digests made of the query
            launch = whole_tasks(
                selector.choosing(store, bundle, scores), selector.attending(store, scores), self.queue.hands
            )
            tasks = selector.rank(store)
            lengths = (selector.end - selector.first.clip(max=selector.end))[tasks // store.num_kv_heads]
            self.queue.fill(tasks, lengths, selector.volumes[tasks])
            self._all = len(tasks)
            self._began, self._launch = time.perf_counter(), launch
            return launch

    def assist(self, step: TieredStep) -> tuple[Partial, ...]:
        """Let the device take tasks as long as there are any."""
        self._taken = []
        try:
            self._deal(step)
            self.device.begin()
            while (task := self.queue.take(DEVICE)) is not None:
                self.device.run(step, self.selector, task)
                self._taken.append(task)
            self.device.end()
        except BaseException:
            self.queue.close()
            raise
        self._device_ended = time.perf_counter()
        return (Partial(self.device.out, self.device.lse),)

    def partial(self) -> HostPartial:
        found = super().partial()
        ended = self._device_ended - self._began, self._ended - self._began
        self._counts.count_shares(len(self._taken), self._all, *ended, self._busy, self.queue.threads)
        volumes, pace = self.selector.volumes, self.queue.pace
        device = float(volumes[self._taken].sum())
        if self._tried or not self._taken:
            pace.learn(DEVICE, device, self._device_ended - self._began)
        self._tried = self._tried or bool(self._taken)
        pace.learn(CPU, float(volumes.sum()) - device, self._busy)
        return found


def selected_part(layer: HybridLayer, query: torch.Tensor, schedule: str | None) -> SelectedPart:
    """The part for a layer's queries `[B, Hq, D]`, by a schedule; None: `"priority"` on a GPU, `"none"` without one."""
    schedule = schedule or ("priority" if layer.device.type == "cuda" else "none")
    return SelectedPart(layer, query) if schedule == "none" else ScheduledPart(layer, query, schedule)
