"""Launches, alone and in sequences: on torch's OpenMP team, with new arguments, after failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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


class Parts(NamedTuple):
    numbers: tuple[int, int]
    none: None
    share: float
    empty: tuple[()]
    row: Array


@kernel
def read_kernel(ticket: Array, tasks: int, flag: int, parts: Parts, plane: Array, last: float, out: Array) -> None:
    """Write all that the arguments hold to `out`."""
    out[0], out[1], out[2], out[3] = flag, parts.numbers[0], parts.numbers[1], parts.share
    out[4], out[5], out[6] = len(parts.empty), last, parts.none is None
    out[7], out[8], out[9] = plane.shape[0], plane.shape[1], parts.row.size
    for i in range(plane.shape[0]):
        for j in range(plane.shape[1]):
            out[10 + i * plane.shape[1] + j] = plane[i, j] + parts.row[j]
    count_up(ticket, 0)
    count_up(ticket, 1)


def test_a_kernel_reads_the_arguments_that_it_was_given(tmp_path: Path) -> None:
    numbers = np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::2]
    row = np.memmap(tmp_path / "row", np.int64, "w+", shape=(3,))
    row[:] = 100, 200, 300
    want = np.concatenate([[1, -5, 7, 0.25, 0, -0.0, 1, 2, 3, 3], (numbers + row).ravel()])
    for plane in (numbers, numbers.copy(), np.asfortranarray(numbers)):
        out = np.full(16, np.nan)
        Launch(read_kernel, 1, (True, Parts((-5, np.int64(7)), None, np.float64(0.25), (), row), plane, -0.0, out), 0)()
        assert out.tobytes() == want.tobytes()
    for wrong in ("text", np.int32(1), 1j, (True,)):
        with pytest.raises(TypeError, match="a kernel takes arrays, ints, floats, None and tuples of such, not"):
            Launch(add_kernel, 1, (1, wrong, zeros(1), zeros(1)), 0)()
    with pytest.raises(OverflowError):
        Launch(add_kernel, 1, (2**63, 1, zeros(1), zeros(1)), 0)()


@kernel
def returning_kernel(ticket: Array, tasks: int, number: int) -> int | None:
    return number if number > 3 else None


def test_a_kernel_that_returns_something_is_refused() -> None:
    with pytest.raises(TypeError, match=r"returning_kernel returns .*; a kernel writes"):
        Launch(returning_kernel, 1, (2,), 0)()
