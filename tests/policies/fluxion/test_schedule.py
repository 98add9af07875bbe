"""The queue of a step's tasks: schedules by pace against static ones, on a simulated clock."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import pytest

from hf_offload.policies.fluxion.scheduler import CPU, DEVICE, SCHEDULES, Pace, TaskQueue

STATIC = ("none", "uniform", "length")


@dataclass
class Load:
    """The tasks of one step of a batch of mixed lengths.

    Attributes:
        ranked: the tasks, the largest first, by what is read; lengths: of their rows; volumes: what is read.
        seconds: by worker and task; the last worker is the device. No schedule knows them.
    """

    ranked: np.ndarray
    lengths: np.ndarray
    volumes: np.ndarray
    seconds: np.ndarray


def draw(rng: np.random.Generator, ratio: float, late: bool = True) -> Load:
    """A batch of 4 to 16 rows whose lengths differ up to eightfold, some threads, a device of so many times their pace.

    Args:
        late: whether tasks take more or less than was estimated, and one in twenty is delayed.
    """
    rows, heads, threads = int(rng.integers(4, 17)), int(rng.choice([4, 8])), int(rng.integers(1, 5))
    count = rows * heads
    length = np.repeat(rng.integers(1_000, 8_001, rows), heads)
    volume = length * rng.uniform(0.01, 0.4, count)
    tasks = np.flatnonzero(rng.random(count) > 0.3).astype(np.int32)  # the others stream
    ranked = tasks[np.argsort(-volume[tasks], kind="stable")]
    seconds = volume.copy()
    if late:
        seconds *= rng.lognormal(0.0, 0.3, count) + rng.exponential(1.0, count) * (rng.random(count) < 0.05)
    speed = np.ones((threads + 1, 1))
    speed[-1] = ratio
    return Load(ranked, length[ranked], volume[ranked], seconds / speed)


def simulate(load: Load, schedule: str, before: Load) -> float:
    """When all tasks have ended that workers take whenever they are free, on a clock of its own.

    Args:
        before: a step that the same workers have done before, so that their pace is known.
    """
    queue = TaskQueue(load.seconds.shape[1], schedule, len(load.seconds) - 1)
    for side, worker in ((CPU, 0), (DEVICE, -1)):
        queue.pace.learn(side, before.volumes.sum(), before.seconds[worker][before.ranked].sum())
    queue.fill(load.ranked, load.lengths, load.volumes)
    device, last, taken = len(load.seconds) - 1, 0.0, []
    free = [(0.0, worker) for worker in range(device + 1)]
    while free:
        now, worker = heapq.heappop(free)
        task = queue.take(DEVICE if worker == device else CPU)
        if task is not None:
            taken.append(task)
            last = max(last, now + load.seconds[worker][task])
            heapq.heappush(free, (now + load.seconds[worker][task], worker))
    assert sorted(taken) == sorted(load.ranked.tolist()), schedule
    return last


@pytest.mark.parametrize("ratio", [0.05, 0.3, 1.0, 4.0])
def test_as_good_as_the_best_that_is_settled_beforehand(ratio: float) -> None:
    rng, ratios = np.random.default_rng(0), []
    for _ in range(60):
        load = draw(rng, ratio)
        ends = {schedule: simulate(load, schedule, draw(rng, ratio)) for schedule in SCHEDULES}
        ratios.append(ends["priority"] / max(min(ends[name] for name in STATIC), 1e-9))
        known = draw(rng, ratio, late=False)
        best = min(simulate(known, name, known) for name in STATIC)
        assert simulate(known, "priority", known) <= 1.15 * best + 1e-9
    # What is late cannot be known. Without it, or with a device that is no slower than a thread, nothing is lost.
    assert np.quantile(ratios, 0.95) <= 1.15
    assert np.mean(ratios) < (1.0 if ratio < 0.5 else 0.9)


def test_a_pace_is_learnt() -> None:
    pace = Pace()
    assert pace.seconds == (1.0, 1.0)
    pace.learn(CPU, 100.0, 2.0)
    assert pace.seconds == pytest.approx((0.02, 0.02))  # nothing is known of the device
    pace.learn(DEVICE, 10.0, 4.0)
    pace.learn(DEVICE, 10.0, 2.0)
    assert pace.seconds == pytest.approx((0.02, 0.7 * 0.4 + 0.3 * 0.2))
    for _ in range(100):
        pace.learn(DEVICE, 0.0, 0.0)
    assert pace.seconds[1] < pace.seconds[0]  # it is given a task again


def test_what_is_left_is_taken_by_the_other_side() -> None:
    # Both sides seem alike: the CPU's one thread is dealt 9, 5, 4 and the device 8, 6, 3; but the device is a snail.
    tasks, volumes = np.arange(6, dtype=np.int32), np.array([9.0, 8.0, 6.0, 5.0, 4.0, 3.0])
    queue = TaskQueue(6, "priority")
    queue.fill(tasks, np.ones(6), volumes)
    assert queue.take(DEVICE) == 1
    assert [queue.take(CPU) for _ in range(5)] == [0, 3, 4, 5, 2]  # at last those of the device, from the end
    assert queue.take(CPU) is queue.take(DEVICE) is None
    # A thread that takes ten times as long leaves alone what the device ends sooner.
    queue.pace.learn(CPU, 1.0, 10.0)
    queue.pace.learn(DEVICE, 1.0, 1.0)
    queue.fill(tasks, np.ones(6), volumes)
    assert queue.take(CPU) == 5  # 30 seconds; the device would have ended it after 35
    assert queue.take(CPU) is None  # 40 seconds for the next, and 32 for all that the device has
    assert queue.take(DEVICE) == 0
    queue.close()
    assert queue.take(DEVICE) is None


def test_static_shares_by_hand() -> None:
    # Task = row · 2 + head; rows of 10, 1, 5 and 4 tokens. By length: 10 | 10, then 5s and so on to the lighter side.
    tasks = np.array([0, 1, 4, 5, 6, 7, 2, 3], np.int32)
    for schedule, want in (("none", []), ("uniform", [1, 5, 7, 3]), ("length", [1, 5, 7, 3])):
        queue = TaskQueue(8, schedule)
        queue.fill(tasks, np.array([10, 10, 5, 5, 4, 4, 1, 1]), np.arange(8.0, 0.0, -1.0))
        assert list(iter(lambda queue=queue: queue.take(DEVICE), None)) == want
    uneven = TaskQueue(3, "length")
    uneven.fill(np.array([2, 0, 1], np.int32), np.array([3, 9, 5]), np.ones(3))
    assert [uneven.take(CPU), uneven.take(CPU)] == [0, None]
    assert [uneven.take(DEVICE), uneven.take(DEVICE), uneven.take(DEVICE)] == [2, 1, None]
