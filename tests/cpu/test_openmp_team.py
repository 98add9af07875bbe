"""Launches on torch's OpenMP threads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from forks import in_fork

from hf_offload.cpu.launch import SHARE_BYTES, Array, Launch, kernel
from hf_offload.cpu.memory import count_up
from hf_offload.cpu.openmp_team import ALONE, team


@kernel
def meet_kernel(ticket: Array, tasks: int, met: Array, patience: int) -> None:
    """Each task waits, for a bounded time, until another one has begun."""
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        count_up(met, 0)
        turns = 0
        while met[0] < tasks and turns < patience:
            turns += 1
            count_up(met, 1)
        count_up(ticket, 1)


@kernel
def broken_kernel(ticket: Array, tasks: int, limit: int) -> None:
    """Fails at the tasks from `limit` on."""
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        if task >= limit:
            raise ValueError("no such task")
        count_up(ticket, 1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def runtime() -> None:
    if not team()[0]:
        pytest.skip("torch has no OpenMP runtime here")


@pytest.mark.usefixtures("two_threads", "runtime")
def test_a_large_launch_is_shared() -> None:
    met = np.zeros(2, np.int64)
    Launch(meet_kernel, 2, (met, 10**9), SHARE_BYTES).run()
    assert met[0] == 2
    assert met[1] < 10**9


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("tasks", "cost"), [(2, SHARE_BYTES - 1), (1, SHARE_BYTES)])
def test_a_small_launch_is_run_by_the_caller_alone(tasks: int, cost: int) -> None:
    met = np.zeros(2, np.int64)
    Launch(meet_kernel, tasks, (met, 1000), cost).run()
    assert met[0] == tasks
    assert met[1] == 1000 * (tasks - 1)  # the first of two waited in vain


def test_the_number_of_threads_is_that_of_torch() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert team()[1] == 1
        launch = Launch(meet_kernel, 3, (np.zeros(2, np.int64), 10), SHARE_BYTES)
        launch.run()
        assert launch.ticket[1] == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads", "runtime")
def test_a_failure_in_the_team_is_an_error_that_says_of_what() -> None:
    with pytest.raises(MemoryError, match=r"attention of layer 3: only 4 of 9 tasks were done"):
        Launch(broken_kernel, 9, (4,), SHARE_BYTES).run("attention of layer 3")
    Launch(broken_kernel, 9, (9,), SHARE_BYTES).run()  # the team is as good as before


def test_a_failure_of_the_caller_alone_is_the_same_error() -> None:
    with pytest.raises(MemoryError, match="a kernel: only 1 of 2 tasks were done"):
        Launch(broken_kernel, 2, (1,), 0).run()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_runs_alone() -> None:
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)  # the parent has a team

    def run() -> None:
        launch = Launch(meet_kernel, 2, (np.zeros(2, np.int64), 10), SHARE_BYTES)
        launch.run()
        assert team()[0] == ALONE[0]
        assert launch.ticket[1] == 2

    assert in_fork(run) == 0
