"""The priority-based scheduler: CPU threads and the device share the tasks of a step (Fluxion, section 6).

A task is the choice of blocks and the attention to them for one (row, KV head). The device is fed by the model's own
thread, which would otherwise wait for the CPU.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_offload.blocks.copying import bring
from hf_offload.cpu.launch import Launch
from hf_offload.gpu import kv_copy
from hf_offload.gpu.block_topk import choose_runs
from hf_offload.gpu.merge import HostResult, merge
from hf_offload.gpu.paged_attention import paged_attention
from hf_offload.gpu.streams import TASKS, stream_for
from hf_offload.knobs import check_choice
from hf_offload.policies.base import Partial
from hf_offload.policies.fluxion.kernels.scheduler import assign_tasks, make_task_lists, take_task, whole_tasks
from hf_offload.policies.fluxion.selector import Local, Properties, SelectedHostPartial, Selector, digests_of

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.attention.step_split import SplitStep
    from hf_offload.cache.layer import HybridLayer
    from hf_offload.policies.fluxion.predictor import LayerPredictor

SCHEDULES = ("priority", "none", "uniform", "length")
"""How the CPU and the device may share the tasks: `TaskQueue`."""
CPU, DEVICE = 0, 1
_KEPT = 0.7  # weight of the known pace against that of a new step
_FADING = 0.95  # a side without a task seems so much quicker after each step, so that it is tried again


# --- who takes which task --------------------------------------------------------------------------------------------


class Pace:
    """Seconds that a worker of each side takes for a byte of V(blk), learnt from the steps so far."""

    def __init__(self) -> None:
        self._seconds: list[float | None] = [None, None]

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds a byte of a CPU thread and of the device; an unknown side counts as the other."""
        cpu, device = self._seconds
        measured = cpu or device or 1.0
        return cpu or measured, device or measured

    def learn(self, side: int, volume: float, seconds: float) -> None:
        """Take a step into the pace.

        Args:
            side: `CPU` or `DEVICE`.
            volume: bytes of V(blk) of the tasks that it did.
            seconds: that its workers spent on them, all together.
        """
        before = self._seconds[side]
        if volume > 0 and seconds > 0:
            now = seconds / volume
            self._seconds[side] = now if before is None else _KEPT * before + (1 - _KEPT) * now
        elif before is not None:
            self._seconds[side] = _FADING * before


class TaskQueue:
    """The tasks of a step for two sides: the CPU's threads, and one device that is fed by one thread.

    Each side has a list, whose largest task its next free worker takes (section 6.2). With `"priority"` a task is
    assigned to the worker that would end it first, by the pace of both sides. A worker without tasks takes the smallest
    of the other side's that would end too late there. The other schedules are those of section 8.3, and no side takes
    tasks of the other: with `"none"` the CPU has all tasks, with `"uniform"` every other one is the device's, with
    `"length"` rows are assigned so that both sides get equally many tokens.

    Args:
        most: how many tasks there can be.
        schedule: one of `SCHEDULES`.
        threads: of the CPU.

    Raises:
        ValueError: another schedule.
    """

    def __init__(self, most: int, schedule: str, threads: int = 1) -> None:
        check_choice("schedule", schedule, SCHEDULES)
        self.schedule, self.threads, self.pace = schedule, threads, Pace()
        self.lists = make_task_lists(most)
        """Which `whole_tasks` takes from, too."""

    def fill(self, tasks: np.ndarray, lengths: np.ndarray, volumes: np.ndarray) -> None:
        """Assign the tasks of a step; no worker is taking any.

        Args:
            tasks: int32 `[n]`, different from each other, the largest first.
            lengths: `[n]`, of the row that each of them belongs to.
            volumes: float64 `[n]`, bytes that each of them reads, more than 0.
        """
        lists = self.lists
        lists.counts.fill(0)
        lists.taken.fill(0)
        if self.schedule == "priority":
            thread, device = self.pace.seconds
            theirs = np.empty(len(tasks), np.uint8)
            assign_tasks(volumes, self.threads, thread, device, theirs)
            theirs = theirs.astype(bool)
            lists.seconds[:] = (thread, thread / self.threads), (device, device)
        else:
            theirs = _device_share(self.schedule, tasks, lengths)
            lists.seconds[:] = math.inf, 0.0
        for side, of_side in ((CPU, ~theirs), (DEVICE, theirs)):
            count = int(of_side.sum())
            lists.order[side, :count] = tasks[of_side]
            np.cumsum(volumes[of_side], out=lists.before[side, 1 : count + 1])
            lists.counts[side] = count

    def take(self, side: int) -> int | None:
        """Take the next task of a free worker of a side, atomically; None: there is none."""
        task = take_task(self.lists, side)
        return task if task >= 0 else None

    def close(self) -> None:
        """Let no thread take another task."""
        self.lists.counts.fill(0)


def _device_share(schedule: str, tasks: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Which tasks are the device's, bool `[n]`, by a static schedule."""
    theirs = np.zeros(len(tasks), bool)
    if schedule == "uniform":
        theirs[np.argsort(tasks, kind="stable")[1::2]] = True
    elif schedule == "length":
        loads = [0, 0]
        for task in np.argsort(-lengths, kind="stable").tolist():
            side = int(loads[1] < loads[0])
            theirs[task] = side == 1
            loads[side] += int(lengths[task])
    return theirs


# --- a task on the device --------------------------------------------------------------------------------------------


class DeviceTasks:
    """The device's tasks of one layer's step: it fetches digests and chosen blocks, scores, chooses and attends.

    On a CUDA device they run in a stream beside the model's.

    Args:
        layer: the layer.
        query: `[B, Hq, D]`, gives the sizes.
    """

    def __init__(self, layer: HybridLayer, query: torch.Tensor) -> None:
        with torch.inference_mode(False):
            self.out = torch.zeros(query.shape, device=layer.device, dtype=torch.float32)
            self.lse = torch.zeros(query.shape[:2], device=layer.device, dtype=torch.float32)
        self._stream: Any = None
        if layer.device.type == "cuda":
            self._stream = stream_for(TASKS, layer.device)

    def _in_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def begin(self) -> None:
        """Clear the results, behind what the model's stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.lse.device))
        with self._in_stream():
            self.lse.fill_(float("-inf"))

    def run(self, step: SplitStep, selector: Selector, task: int) -> None:
        """Run a task and wait for it.

        Args:
            step: of the layer.
            selector: with ranked tasks; the task's runs and count are written.
            task: row · Hkv + KV head.
        """
        row, head = divmod(task, step.store.num_kv_heads)
        with self._in_stream():
            count = self._attend(step, selector, row, head)
            selector.chosen.counts[row, head] = int(count)  # waits for all that was launched for the task

    def end(self) -> None:
        """Let the model's stream wait for the results."""
        if self._stream is not None:
            torch.cuda.current_stream(self.lse.device).wait_stream(self._stream)

    def _attend(self, step: SplitStep, selector: Selector, row: int, head: int) -> torch.Tensor:
        """Choose and attend for the query heads of a KV head; the number of blocks, int32 `[]` on the device."""
        store, device = step.store, self.lse.device
        low, wanted, span = selector.runs_of(store, row, head)
        group = len(wanted)
        heads = slice(head * group, (head + 1) * group)
        query = step.query[row : row + 1, heads]
        digests, end = digests_of(store), selector.chosen.end
        blocks = end - low
        head_digests = digests.of_head(store.table[row, low:end], row, head, device)
        numbers = torch.arange(blocks, dtype=torch.int32, device=device)[None]
        masses = head_digests.score(query, numbers, numbers.new_full((2,), blocks), step.scores)[0]
        capacity = min(sum(wanted) * span, blocks)
        chosen, count = choose_runs(masses, wanted, span=span, sums=digests.sums, capacity=capacity)
        chosen += low
        slots, listed = numbers[None, :, :capacity], chosen[None, None]
        shape = (1, 1, capacity, 2, store.block_size, store.head_dim)
        pool = torch.empty(shape, dtype=store.dtype, device=device)
        _fetch(step, pool, row, head, slots, listed, count)
        valid = step.layer.mirror.valid()
        limits = step.layer.mirror.limits("step", step.length, store.sealed)
        shares = paged_attention(
            query, pool, slots.contiguous(), listed, count.view(1, 1), limits,
            None if valid is None else valid[row : row + 1], **step.scores._asdict(),
        )  # fmt: skip
        out, lse = merge(*shares, None, query, None, scale=step.scores.scale, dtype=torch.float32)
        self.out[row, heads], self.lse[row, heads] = out[0], lse[0]
        return count


def _fetch(
    step: SplitStep, pool: torch.Tensor, row: int, head: int, slots: torch.Tensor, blocks: torch.Tensor,
    count: torch.Tensor,
) -> None:  # fmt: skip
    """Fetch blocks of a row and KV head into `pool`: by a kernel that reads host memory, or by the CPU."""
    store = step.store
    if not step.resident.read_by_kernels:
        bring(store, pool[0, 0], row, head, blocks[0, 0, : int(count)].cpu().numpy())
        return
    addresses, packed = store.tables.block_ptr()[store.tables.table()[row].long()], store.format.device_layout
    record: int | torch.Tensor = store.pool.record_bytes
    if packed is not None:
        record = torch.where(addresses & 1 == 1, packed.record_bytes, record)
    addresses += head * record
    numbers = torch.arange(len(addresses), dtype=torch.int32, device=pool.device)[None]
    kv_copy.fetch(pool, slots.contiguous(), blocks, count.view(1, 1), addresses, numbers, packed=packed)


# --- the partial that both sides share -------------------------------------------------------------------------------


class ScheduledHostPartial(SelectedHostPartial):
    """A host partial whose tasks, a KV head of a row each, run on the CPU's threads and on the device.

    The model's own thread feeds the device: it launches a task's kernels, waits for them and takes the next. No other
    thread wants the interpreter meanwhile, since kernels of the CPU run without it.

    Args:
        layer: the layer.
        query: `[B, Hq, D]` fp32, gives the sizes.
        schedule: one of `SCHEDULES`.
    """

    def __init__(self, layer: HybridLayer, query: torch.Tensor, schedule: str) -> None:
        super().__init__(layer, query)
        self.queue = TaskQueue(self.selector.chosen.counts.size, schedule, layer.settings.worker.threads)
        self.device = DeviceTasks(layer, query)
        self._lock = threading.Lock()
        self._launch: Launch | None = None
        """Of this step, once its tasks are assigned."""
        self._began = self._device_ended = self._ended = self._busy = 0.0
        """When the queue was filled, and when the device and the CPU had nothing left; seconds of the CPU's threads."""
        self._all = 0
        self._taken: list[int] = []  # by the device
        self._tried = False
        """Whether the device has done a task before: the time of the first is that of compiling and loading kernels."""

    def select(self, step: Step, properties: Properties | LayerPredictor, local: Local | None) -> SelectedHostPartial:
        self._launch = None
        return super().select(step, properties, local)

    def _work(self, step: Step) -> None:
        """The job: the CPU's share of the tasks."""
        self._busy = self.worker.divide(self._assign(step, self.worker.divide))
        self._ended = time.perf_counter()

    def _assign(self, step: Step, run: Callable[[Launch], Any]) -> Launch:
        """Predict the properties, rank and assign the tasks; the first caller does it for both sides.

        Args:
            step: of the layer.
            run: runs the prediction on the caller's threads.
        """
        with self._lock:
            if self._launch is not None:
                return self._launch
            self._predict(step, run)
            store, selector, scores = step.store, self.selector, step.scores
            launches = selector.make_choice(store, scores), selector.make_attention(store, scores)
            launch = whole_tasks(*launches, self.queue.lists)
            tasks = selector.rank(store)
            end = selector.chosen.end
            lengths = (end - selector.chosen.first.clip(max=end))[tasks // store.num_kv_heads]
            self.queue.fill(tasks, lengths, selector.volumes[tasks])
            self._all = len(tasks)
            self._began, self._launch = time.perf_counter(), launch
            return launch

    def assist(self, step: SplitStep) -> tuple[Partial, ...]:
        """Let the device take tasks while there are any; the partial of its tasks."""
        self._taken = []
        try:
            self._assign(step, Launch.run)
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

    def result(self) -> HostResult:
        result = super().result()
        ended = self._device_ended - self._began, self._ended - self._began
        self._counts.count_shares(len(self._taken), self._all, *ended, self._busy, self.queue.threads)
        volumes, pace = self.selector.volumes, self.queue.pace
        device = float(volumes[self._taken].sum())
        if self._tried or not self._taken:
            pace.learn(DEVICE, device, self._device_ended - self._began)
        self._tried = self._tried or bool(self._taken)
        pace.learn(CPU, float(volumes.sum()) - device, self._busy)
        return result
