"""Launches, alone and in sequences: on torch's OpenMP team, with new arguments, after failures."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hf_offload.cpu.launch import SHARE_BYTES, Array, Launch, LaunchSequence, kernel
from hf_offload.cpu.memory import count_up

MANY = 10**9


@kernel
def add_kernel(ticket: Array, tasks: int, number: int, limit: int, total: Array, counters: Array) -> None:
    """A task appends a digit to its entry; from `limit` on it fails."""
    while True:
        i = count_up(ticket, 0)
        if i >= tasks:
            break
        if i >= limit:
            raise ValueError("no such task")
        count_up(counters, 0)
        total[i] = 10 * total[i] + number
        count_up(ticket, 1)


def adding(total: Array, number: int = 1, cost: int = 0, limit: int = MANY) -> Launch:
    counters = np.full(2, 7, np.int64)
    return Launch(add_kernel, len(total), (number, limit, total, counters), cost, counters=counters, label="adding")


def zeros(count: int) -> Array:
    return np.zeros(count, np.int64)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Torch's number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_launches_follow_each_other_with_new_numbers(threads: int) -> None:
    """What one has written the next one finds, whether a team runs it or the caller; counters begin at 0."""
    total = zeros(40)
    launches = [adding(total, cost=cost) for cost in (SHARE_BYTES, 0, SHARE_BYTES)]
    assert [launch.shared for launch in launches] == [True, False, True]
    sequence, places = LaunchSequence(launches), [launch.word("number") for launch in launches]
    for numbers in ((1, 2, 3), (4, 5, 6)):
        for (words, i), number in zip(places, numbers, strict=True):
            words[i] = number
        sequence.run()
        assert [int(launch.counters[0]) for launch in launches] == [40] * 3
        assert {int(launch.ticket[2]) for launch in launches} <= {threads, 1}  # 1: torch has no OpenMP runtime
    assert total.tolist() == [123456] * 40


def test_a_failure_ends_the_sequence_and_is_told(threads: int) -> None:
    for cost in (0, SHARE_BYTES):
        before, total, after = zeros(2), zeros(9), zeros(2)
        launches = [adding(before, 3), adding(total, 3, cost, limit=4), adding(after, 3)]
        sequence = LaunchSequence(launches)
        with pytest.raises(MemoryError, match=r"^adding: only \d of 9 tasks were done; is memory left\?$"):
            sequence.run()
        assert before.tolist() == [3, 3]
        assert total.tolist()[4:] == [0] * 5
        assert not after.any()
        words, i = launches[1].word("limit")
        words[i] = 9
        sequence.run()  # the team is as good as before
        assert after.tolist() == [3, 3]


def test_a_launch_of_one_thread_does_all_tasks_or_says_so() -> None:
    total = zeros(5)
    launch = adding(total, 2, SHARE_BYTES)
    for _ in range(2):
        launch()
    assert total.tolist() == [22] * 5
    assert launch.counters[0] == 5  # they begin at 0
    with pytest.raises(MemoryError, match="adding: only 3 of 5"):
        adding(zeros(5), limit=3)()
    with pytest.raises(MemoryError, match="an append: only 1 of 2 tasks were done"):
        adding(zeros(2), limit=1).run("an append")
