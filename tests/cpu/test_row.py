"""`Row`: launches one after the other, in one call."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_offload.cpu.join import count_choice, join_parts
from hf_offload.cpu.launch import Launch, kernel, new_ticket
from hf_offload.cpu.memory import count_up
from hf_offload.cpu.retrieve import TALLIES
from hf_offload.cpu.row import Row
from hf_offload.cpu.standing import Standing


@kernel
def add_kernel(ticket: np.ndarray, tasks: int, number: int, total: np.ndarray) -> None:
    """One task = one entry."""
    while True:
        i = count_up(ticket, 0)
        if i >= tasks:
            break
        total[i] = 10 * total[i] + number
        if number != 13:  # a thread that did not do its task
            count_up(ticket, 1)


def adding(total: np.ndarray, cost: int = 0) -> Standing:
    return Standing(Launch(add_kernel, len(total), (0, total), new_ticket(), cost), "adding", number=20)


def test_launches_follow_each_other_with_one_number() -> None:
    total, spans, runs = np.zeros(3), np.ones((1, 1), np.int32), np.ones((1, 2), np.int32)
    granularities, totals = np.array([1], np.int32), np.zeros(TALLIES + 1)
    first = np.zeros(1, np.int32)
    counting = Standing(count_choice(spans, runs, np.ones((1, 1), np.int32), first, 4, granularities, totals), "count")
    one, two, row = adding(total), adding(total, cost=1 << 30), Row(3)
    row.run((one, counting, two), 2)
    assert total.tolist() == [22, 22, 22]
    assert totals.tolist() == [1, 0, 2, 0, 0.5, 1, 4, 1]
    row.run((one, counting, two), 3)
    assert total.tolist() == [2233, 2233, 2233]
    row.run((two,), 4)
    assert total.tolist() == [22334, 22334, 22334]
    assert totals[0] == 2


def test_what_goes_wrong_is_said_and_ends_the_row() -> None:
    total, after = np.zeros(2), np.zeros(2)
    row, launches = Row(2), (adding(total, cost=1 << 30), adding(after))
    with pytest.raises(ValueError, match=r"adding: number 21 is not within 0\.\.20"):
        row.run(launches, 21)
    assert not total.any()
    if torch.get_num_threads() and launches[0].shared:
        with pytest.raises(MemoryError, match="adding: only 0 of 2 tasks were done"):
            row.run(launches, 13)
    assert not after.any()
    out, lse = np.ones((1, 1, 16), np.float32), np.zeros((1, 1), np.float32)
    join = Standing(join_parts(out, lse, (out.copy(), lse.copy()), (out.copy(), lse.copy())), "a join")
    row.run((join,), 99)  # it has no number
    assert out == pytest.approx(np.ones((1, 1, 16)))
    assert lse[0, 0] == pytest.approx(np.log(3))
