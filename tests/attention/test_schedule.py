"""The queue of tasks: every task once, in any hands; dynamic against static schedules on a simulated clock; errors."""

from __future__ import annotations

import heapq
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest

from hf_offload.attention.schedule import Queue, Tasks
from hf_offload.policies.base import SCHEDULES

STATIC = ("none", "uniform", "length")


@dataclass
class Load:
    """The tasks of one step of a batch of mixed lengths.

    Attributes:
        ranked: the tasks, the largest first, by what is read; lengths: of their rows.
        seconds: by worker and task; the last worker is the device. No schedule knows them.
    """

    ranked: np.ndarray
    lengths: np.ndarray
    seconds: np.ndarray


def draw(rng: np.random.Generator) -> Load:
    """A batch of 4 to 16 rows whose lengths differ up to eightfold, some threads, and a device about as fast as one.

    How long a task takes differs from what was estimated, and one in twenty is delayed.
    """
    rows, heads, threads = int(rng.integers(4, 17)), int(rng.choice([4, 8])), int(rng.integers(1, 5))
    count = rows * heads
    length = np.repeat(rng.integers(1_000, 8_001, rows), heads)
    volume = length * rng.uniform(0.01, 0.4, count)
    tasks = np.flatnonzero(rng.random(count) > 0.3).astype(np.int32)  # the others stream
    ranked = tasks[np.argsort(-volume[tasks], kind="stable")]
    late = rng.lognormal(0.0, 0.3, count) + rng.exponential(1.0, count) * (rng.random(count) < 0.05)
    speed = np.ones((threads + 1, 1))
    speed[-1] = rng.uniform(0.7, 1.5)
    return Load(ranked, length[ranked], volume * late / speed)


def simulate(load: Load, schedule: str) -> tuple[float, list[int]]:
    """Let workers take tasks whenever they are free, on a clock of its own: when all have ended, and what was taken."""
    queue = Queue(load.seconds.shape[1], schedule)
    queue.fill(load.ranked, load.lengths)
    assert queue.count == len(load.ranked)
    device, last, taken = len(load.seconds) - 1, 0.0, []
    free = [(0.0, worker) for worker in range(device + 1)]
    while free:
        now, worker = heapq.heappop(free)
        task = (queue.device if worker == device else queue.cpu).take()
        if task is not None:
            taken.append(task)
            last = max(last, now + load.seconds[worker][task])
            heapq.heappush(free, (now + load.seconds[worker][task], worker))
    return last, taken


def test_a_thousand_random_steps() -> None:
    rng, ratios = np.random.default_rng(0), []
    for _ in range(1000):
        load, ends = draw(rng), {}
        for schedule in SCHEDULES:
            ends[schedule], taken = simulate(load, schedule)
            assert sorted(taken) == sorted(load.ranked.tolist()), schedule
        ratios.append(ends["priority"] / max(min(ends[name] for name in STATIC), 1e-9))
    assert max(ratios) <= 1.15
    assert np.mean(ratios) < 0.95


def work(tasks: Tasks, delays: list[float], taken: list[int], fault: int | None = None) -> None:
    """Take tasks until there are none, each with its delay in seconds."""
    while (task := tasks.take()) is not None:
        if task == fault:
            raise RuntimeError("fault")
        time.sleep(delays[task])
        taken.append(task)


def test_threads_with_delays_take_every_task_once() -> None:
    rng = np.random.default_rng(1)
    queues = {schedule: Queue(64, schedule) for schedule in SCHEDULES}
    for number in range(200):
        queue = queues[SCHEDULES[number % 4]]
        tasks = rng.permutation(64)[: rng.integers(0, 65)].astype(np.int32)
        queue.fill(tasks, rng.integers(1, 100, len(tasks)))
        delays, taken = rng.choice([0.0, 0.0, 0.0, 2e-4], 64).tolist(), []
        threads = [threading.Thread(target=work, args=(queue.cpu, delays, taken)) for _ in range(3)]
        for thread in threads:
            thread.start()
        work(queue.device, [0.0] * 64, taken)
        for thread in threads:
            thread.join()
        assert sorted(taken) == sorted(tasks.tolist())


def test_a_closed_queue_gives_nothing_more() -> None:
    queue, taken = Queue(64, "priority"), []
    queue.fill(np.arange(64, dtype=np.int32), np.ones(64))
    with pytest.raises(RuntimeError, match="fault"):
        work(queue.device, [0.0] * 64, taken, fault=5)
    queue.close()
    assert queue.cpu.take() is None
    assert taken == [0, 1, 2, 3, 4]
    queue.fill(np.arange(2, dtype=np.int32), np.ones(2))
    assert [queue.device.take(), queue.cpu.take(), queue.cpu.take()] == [0, 1, None]


def test_static_shares_by_hand() -> None:
    # Task = row · 2 + head; rows of 10, 1, 5 and 4 tokens. By length: 10 | 10, then 5s and so on to the lighter side.
    tasks = np.array([0, 1, 4, 5, 6, 7, 2, 3], np.int32)
    lengths = np.array([10, 10, 5, 5, 4, 4, 1, 1])
    told = {}
    for schedule in SCHEDULES:
        queue = Queue(8, schedule)
        queue.fill(tasks, lengths)
        order = queue.device.order[: queue.device.count].tolist()
        told[schedule] = None if queue.device is queue.cpu else order
    assert told == {"priority": None, "none": [], "uniform": [1, 5, 7, 3], "length": [1, 5, 7, 3]}
    uneven = Queue(3, "length")
    uneven.fill(np.array([2, 0, 1], np.int32), np.array([3, 9, 5]))
    assert uneven.cpu.order[: uneven.cpu.count].tolist() == [0]
    assert uneven.device.order[: uneven.device.count].tolist() == [2, 1]
    with pytest.raises(ValueError, match="schedule='fast' is not known; use one of priority, none"):
        Queue(1, "fast")
