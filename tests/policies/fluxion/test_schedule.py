"""Tasks of choice and attention: as the two launches one after the other; who takes which, and in what order."""

from __future__ import annotations

import heapq
import threading

import numpy as np
import pytest
import torch
from pools import make_case, random_submeans, run

from hf_offload.cpu.kernels.decode_attention import decode_attention
from hf_offload.policies.fluxion.kernels.scheduler import TaskLists, make_task_lists, take_task, whole_tasks
from hf_offload.policies.fluxion.kernels.selector import Budgets, Chosen, rank_tasks, retrieve_blocks
from hf_offload.policies.fluxion.scheduler import CPU, DEVICE, Pace, TaskQueue

KV_HEADS, GROUP, DIM, BLOCK = 2, 2, 32, 16
STATIC = ("none", "uniform", "length")


class Work:
    """A choice and the attention to it, over a pool with poisoned tokens, of three rows."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        length = 170
        case = make_case(3, KV_HEADS, DIM, BLOCK, length, torch.float32, (0, 37, length - 40), scattered=0.02)
        heads, end = KV_HEADS * GROUP, length // BLOCK - 1
        first = np.array([1, 3, end], np.int32)  # the last row has nothing on the host
        query, (digest, _) = (
            torch.randn(3, heads, DIM).numpy(),
            random_submeans(3, len(case.block_ptr), BLOCK // 2, DIM),
        )
        streaming = np.zeros((3, heads), np.uint8)
        streaming[1, :GROUP] = 1
        budgets = Budgets(
            torch.rand(3, heads).numpy() * 0.6, np.full((3, heads), 0.02, np.float32), streaming,
            np.array([1, 2, 4], np.int32), BLOCK, 8.0, 128.0,
        )  # fmt: skip
        shapes = (3, KV_HEADS), (3, heads), (3, KV_HEADS, end), (3, KV_HEADS)
        self.chosen = Chosen(first, end, *(np.zeros(shape, np.int32) for shape in shapes))
        self.out, self.lse = np.zeros((3, heads, DIM), np.float32), np.full((3, heads), -np.inf, np.float32)
        masses = np.full((3, heads, (end + 15) // 16 * 16), np.nan, np.float32)
        given = {"scale": 0.2, "softcap": None}
        self.choice = retrieve_blocks(
            query, digest, case.table.numpy(), budgets, masses, self.chosen, sums=True, **given
        )
        self.attention = decode_attention(
            query, case.host_blocks, self.chosen.blocks, self.chosen.counts, length, self.out, self.lse, **given
        )
        self.keep, self.ranked = case, (budgets, first, end, self.chosen.spans)

    def lists(self) -> TaskLists:
        """All tasks in the CPU's list."""
        count = 3 * KV_HEADS
        lists, order, volumes = make_task_lists(count), np.full(count, -1, np.int32), np.zeros(count)
        found = rank_tasks(*self.ranked, volumes, order)
        assert (np.diff(volumes[order[:found]]) <= 0).all()  # the largest first
        lists.order[0, :found], lists.counts[0] = order[:found], found
        return lists


def test_tasks_give_what_the_two_launches_give() -> None:
    one, other = Work(), Work()
    run(one.choice)
    run(one.attention)
    lists = other.lists()
    assert sorted(lists.order[0, : lists.counts[0]].tolist()) == [0, 1, 3]  # row 1's first heads stream, row 2 is short
    run(whole_tasks(other.choice, other.attention, lists), threads=3)
    for name in ("spans", "runs", "counts"):
        assert np.array_equal(getattr(one.chosen, name)[:2], getattr(other.chosen, name)[:2]), name
    assert one.chosen.counts[:2].sum() > 0
    for each in np.ndindex(2, KV_HEADS):
        mine, theirs = (work.chosen.blocks[each][: one.chosen.counts[each]] for work in (one, other))
        assert np.array_equal(mine, theirs)
    there = one.lse > -np.inf
    assert np.array_equal(one.lse, other.lse)
    assert np.array_equal(one.out[there], other.out[there])
    assert np.isfinite(one.out[there]).all()


def test_a_task_is_taken_once_from_both_ends() -> None:
    lists, taken = make_task_lists(3000), []
    lists.order[0], lists.before[0] = np.arange(3000), np.arange(3001.0)
    lists.counts[0], lists.seconds[:] = 3000, 1.0

    def work(side: int) -> None:
        taken.append((side, list(iter(lambda: take_task(lists, side), -1))))

    threads = [threading.Thread(target=work, args=(side,)) for side in (CPU, DEVICE, CPU, DEVICE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(task for _, mine in taken for task in mine) == list(range(3000))
    assert all(mine == sorted(mine, reverse=side == DEVICE) for side, mine in taken)


# --- who takes which task --------------------------------------------------------------------------------------------


def draw(rng: np.random.Generator, ratio: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The tasks of 4 to 16 rows whose lengths differ up to eightfold, and workers, of which the last is the device.

    Args:
        ratio: the device's pace, in that of a thread.

    Returns:
        Tasks, the largest first, by what is read; lengths of their rows; what each reads; seconds by worker and task.
    """
    rows, heads, threads = int(rng.integers(4, 17)), int(rng.choice([4, 8])), int(rng.integers(1, 5))
    length = np.repeat(rng.integers(1_000, 8_001, rows), heads)
    volume = length * rng.uniform(0.01, 0.4, len(length))
    tasks = np.flatnonzero(rng.random(len(length)) > 0.3).astype(np.int32)  # the others stream
    ranked = tasks[np.argsort(-volume[tasks], kind="stable")]
    return ranked, length[ranked], volume[ranked], volume / np.array([1.0] * threads + [ratio])[:, None]


def simulate(schedule: str, ranked: np.ndarray, lengths: np.ndarray, volumes: np.ndarray, seconds: np.ndarray) -> float:
    """When all tasks have ended that workers take whenever they are free, with a known pace, on a clock of its own."""
    queue, device, last, taken = TaskQueue(seconds.shape[1], schedule, len(seconds) - 1), len(seconds) - 1, 0.0, []
    for side, worker in ((CPU, 0), (DEVICE, device)):
        queue.pace.learn(side, volumes.sum(), seconds[worker][ranked].sum())
    queue.fill(ranked, lengths, volumes)
    free = [(0.0, worker) for worker in range(device + 1)]
    while free:
        now, worker = heapq.heappop(free)
        task = queue.take(DEVICE if worker == device else CPU)
        if task is not None:
            taken.append(task)
            last = max(last, now + seconds[worker][task])
            heapq.heappush(free, (now + seconds[worker][task], worker))
    assert sorted(taken) == sorted(ranked.tolist()), schedule
    return last


@pytest.mark.parametrize("ratio", [0.05, 0.3, 1.0, 4.0])
def test_as_good_as_the_best_that_is_settled_beforehand(ratio: float) -> None:
    rng, ratios = np.random.default_rng(0), []
    for _ in range(60):
        load = draw(rng, ratio)
        ratios.append(simulate("priority", *load) / max(min(simulate(name, *load) for name in STATIC), 1e-9))
    assert np.max(ratios) <= 1.15
    assert np.mean(ratios) < (1.0 if ratio < 0.5 else 0.9)


def test_a_side_that_got_no_task_is_tried_again() -> None:
    pace = Pace()
    pace.learn(CPU, 100.0, 2.0)
    assert pace.seconds == pytest.approx((0.02, 0.02))  # nothing is known of the device
    pace.learn(DEVICE, 10.0, 4.0)
    assert pace.seconds == pytest.approx((0.02, 0.4))
    for _ in range(100):
        pace.learn(DEVICE, 0.0, 0.0)
    assert pace.seconds[1] < pace.seconds[0]


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
    assert [uneven.take(side) for side in (CPU, CPU, DEVICE, DEVICE, DEVICE)] == [0, None, 2, 1, None]
