"""Tasks of choice and attention: as the two launches one after the other, in any lists; and their order."""

from __future__ import annotations

import threading

import numpy as np
import torch
from pools import make_case, random_submeans, run

from hf_offload.cpu.kernels.decode_attention import decode_attention
from hf_offload.cpu.launch import LaunchSequence
from hf_offload.policies.fluxion.kernels.scheduler import TaskLists, make_task_lists, take_task, whole_tasks
from hf_offload.policies.fluxion.kernels.selector import Budgets, Chosen, rank_tasks, retrieve_blocks

KV_HEADS, GROUP, DIM, BLOCK, DTYPE = 2, 2, 32, 16, torch.float32


class Work:
    """A choice and the attention to it, over a pool with poisoned tokens; `length` tokens in each of three rows."""

    def __init__(self, seed: int, length: int) -> None:
        torch.manual_seed(seed)
        case = make_case(3, KV_HEADS, DIM, BLOCK, length, DTYPE, (0, 37, length - 40), scattered=0.02)
        heads, end = KV_HEADS * GROUP, length // BLOCK - 1
        self.first, self.end = np.array([1, 3, end], np.int32), end  # the last row has nothing on the host
        query = torch.randn(3, heads, DIM).numpy()
        digest, _ = random_submeans(3, len(case.block_ptr), BLOCK // 2, DIM)
        streaming = np.zeros((3, heads), np.uint8)
        streaming[1, :GROUP] = 1
        self.budgets = Budgets(
            torch.rand(3, heads).numpy() * 0.6, np.full((3, heads), 0.02, np.float32), streaming,
            np.array([1, 2, 4], np.int32), BLOCK, 8.0, 128.0,
        )  # fmt: skip
        self.spans, self.runs = np.zeros((3, KV_HEADS), np.int32), np.zeros((3, heads), np.int32)
        self.blocks, self.counts = np.zeros((3, KV_HEADS, end), np.int32), np.zeros((3, KV_HEADS), np.int32)
        self.out, self.lse = np.zeros((3, heads, DIM), np.float32), np.full((3, heads), -np.inf, np.float32)
        self.order, self.volumes = np.full(3 * KV_HEADS, -1, np.int32), np.zeros(3 * KV_HEADS)
        self.choice = retrieve_blocks(
            query, digest, case.table.numpy(), self.budgets,
            np.full((3, heads, (end + 15) // 16 * 16), np.nan, np.float32),
            Chosen(self.first, end, self.spans, self.runs, self.blocks, self.counts), sums=True, scale=1.0,
            softcap=None,
        )  # fmt: skip
        self.attention = decode_attention(
            query, case.host_blocks, self.blocks, self.counts, length, self.out, self.lse, scale=0.2, softcap=None
        )
        self.keep = case

    def lists(self) -> TaskLists:
        """All tasks in the CPU's list."""
        lists, found = make_task_lists(3 * KV_HEADS), self.rank()
        lists.order[0, :found], lists.counts[0] = self.order[:found], found
        return lists

    def rank(self) -> int:
        return int(rank_tasks(self.budgets, self.first, self.end, self.spans, self.volumes, self.order))


def test_tasks_give_what_the_two_launches_give() -> None:
    one, other = Work(3, 170), Work(3, 170)
    run(one.choice)
    run(one.attention)
    lists = other.lists()
    assert sorted(lists.order[0, : lists.counts[0]].tolist()) == [0, 1, 3]  # row 1's first heads stream, row 2 is short
    launch = whole_tasks(other.choice, other.attention, lists)
    run(launch, threads=3)
    assert launch.ticket[1] == 3
    for name in ("spans", "runs", "counts"):
        assert np.array_equal(getattr(one, name)[:2], getattr(other, name)[:2]), name
    assert one.counts[:2].sum() > 0
    for each in np.ndindex(2, KV_HEADS):
        assert np.array_equal(one.blocks[each][: one.counts[each]], other.blocks[each][: one.counts[each]])
    there = one.lse > -np.inf
    assert np.array_equal(one.lse, other.lse)
    assert np.array_equal(one.out[there], other.out[there])
    assert np.isfinite(one.out[there]).all()


def test_what_another_hand_takes_is_left_alone_and_launches_behind_run() -> None:
    work, behind = Work(5, 300), Work(3, 170)
    lists = work.lists()
    launch, mine = whole_tasks(work.choice, work.attention, lists), take_task(lists, 0)
    LaunchSequence([launch, behind.choice, behind.attention]).run()
    assert launch.ticket[1] == launch.ticket[0] == lists.counts[0] - 1
    b, h = divmod(mine, KV_HEADS)
    assert work.counts[b, h] == 0
    assert (work.lse[b, h * GROUP : (h + 1) * GROUP] == -np.inf).all()
    assert (work.lse > -np.inf).sum() == GROUP * (lists.counts[0] - 1)
    assert (behind.lse[0] > -np.inf).all()


def test_a_task_is_taken_once_from_both_ends() -> None:
    lists, taken = make_task_lists(3000), []
    lists.order[0], lists.before[0] = np.arange(3000), np.arange(3001.0)
    lists.counts[0], lists.seconds[:] = 3000, 1.0

    def work(side: int) -> None:
        mine = []
        while (task := take_task(lists, side)) >= 0:
            mine.append(task)
        taken.append((side, mine))

    threads = [threading.Thread(target=work, args=(side,)) for side in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(task for _, mine in taken for task in mine) == list(range(3000))
    for side, mine in taken:
        assert mine == sorted(mine, reverse=side == 1)


def test_the_order_by_hand() -> None:
    # Eq. 3 a block at one granularity: 8 + 128 · Σ budgets; rows of 10, 4 and 0 blocks, two KV heads of one query head.
    budget = np.array([[0.5, 0.25], [1.0, 0.25], [1.0, 1.0]], np.float32)
    streaming = np.array([[0, 0], [0, 1], [0, 0]], np.uint8)
    order, spans, volumes = np.full(6, -1, np.int32), np.full((3, 2), -1, np.int32), np.zeros(6)
    single, first = np.array([1], np.int32), np.array([2, 8, 12], np.int32)
    budgets = Budgets(budget, np.zeros_like(budget), streaming, single, 16, 8.0, 128.0)
    found = rank_tasks(budgets, first, 12, spans, volumes, order)
    assert volumes.tolist() == [10 * 72.0, 10 * 40.0, 4 * 136.0, 0.0, 0.0, 0.0]
    assert found == 3
    assert order[:3].tolist() == [0, 2, 1]
    assert spans.tolist() == [[1, 1], [1, 0], [1, 1]]
