"""Several launches by one call: in one visit to the threads, or one after the other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_offload.cpu.average import move_averages
from hf_offload.cpu.join import count_choice, join_parts
from hf_offload.cpu.launch import Array, Launch, kernel, new_ticket
from hf_offload.cpu.memory import count_up
from hf_offload.cpu.pool import touch_records
from hf_offload.cpu.retrieve import TALLIES
from hf_offload.cpu.standing import Standing
from hf_offload.cpu.together import Row, run_together

HEADS, TOKENS, FIRST = 40, 8192, 100


def _moving(average: Array, scores: Array, lse: Array, label: str) -> Standing:
    """Large enough for a team, with more tasks than threads."""
    launch = move_averages(average, scores, lse, FIRST, TOKENS, alpha=0.5)
    assert launch.tasks > 8
    return Standing(launch, label, length=TOKENS)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("beside", "then"), [(False, False), (False, True), (True, False), (True, True)])
def test_each_launch_is_done_once_and_the_last_one_after_the_first(beside: bool, then: bool, threads: int) -> None:
    torch.manual_seed(0)
    first, apart = (np.zeros((1, HEADS, TOKENS), np.float32) for _ in range(2))
    scores = torch.randn(1, HEADS, TOKENS - FIRST).numpy()
    lse = torch.logsumexp(torch.from_numpy(scores), -1).numpy()
    # What the first writes is what the last one reads.
    second = np.zeros((1, HEADS, TOKENS), np.float32)
    standings = [
        _moving(first, scores, lse, "first"),
        _moving(apart, scores, lse, "beside") if beside else None,
        _moving(second, first, np.zeros_like(lse), "then") if then else None,
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for length in (TOKENS, TOKENS - 7):
            for array in (first, apart, second):
                array[:] = 0.0
            run_together(*standings, length)  # type: ignore[arg-type]
            weights = np.exp(scores - lse[..., None])
            age = np.arange(length - FIRST, 0, -1)
            want = weights[..., : length - FIRST] * np.maximum(0.5, 1 / age)
            np.testing.assert_allclose(first[..., FIRST:length], want, rtol=1e-5)
            assert not first[..., length:].any()
            if beside:
                assert (apart[..., FIRST:] != 0).any()
            if then:
                read = np.exp(first[..., : length - FIRST]) * np.maximum(0.5, 1 / age)
                np.testing.assert_allclose(second[..., FIRST:length], read, rtol=1e-5)
            else:
                assert not second.any()
    finally:
        torch.set_num_threads(before)


def test_a_number_beyond_the_arrays_is_refused_before_anything_is_done() -> None:
    average, lse = np.zeros((1, HEADS, TOKENS), np.float32), np.zeros((1, HEADS), np.float32)
    scores = np.zeros((1, HEADS, TOKENS - FIRST), np.float32)
    first = _moving(average, scores, lse, "first")
    less = Standing(move_averages(average, scores, lse, FIRST, TOKENS, alpha=0.5), "then", length=TOKENS - 1)
    with pytest.raises(ValueError, match="first: length 8193 is not within"):
        run_together(first, None, None, TOKENS + 1)
    with pytest.raises(ValueError, match="then: length 8192 is not within"):
        run_together(first, None, less, TOKENS)
    assert not average.any()


def test_launches_of_other_kinds_run_beside_each_other() -> None:
    pool = torch.zeros(1, 1, 2, 8, 16)
    reading = Standing(touch_records(np.array([pool.data_ptr()]), pool[0].nbytes), "reading")
    average, lse = np.zeros((1, HEADS, TOKENS), np.float32), np.zeros((1, HEADS), np.float32)
    first = _moving(average, np.zeros((1, HEADS, TOKENS - FIRST), np.float32), lse, "first")
    run_together(first, reading, None, TOKENS)
    assert (average[..., FIRST:] > 0).all()
    assert reading.launch.ticket[1] == reading.tasks


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


def test_launches_follow_each_other_with_the_numbers_of_each() -> None:
    total, spans, runs = np.zeros(3), np.ones((1, 1), np.int32), np.ones((1, 2), np.int32)
    granularities, totals = np.array([1], np.int32), np.zeros(TALLIES + 1)
    first = np.zeros(1, np.int32)
    counting = Standing(count_choice(spans, runs, np.ones((1, 1), np.int32), first, 4, granularities, totals), "count")
    one, two, row = adding(total), adding(total, cost=1 << 30), Row(3)
    row.run((one, counting, two), (2, 5))
    assert total.tolist() == [25, 25, 25]
    assert totals.tolist() == [1, 0, 2, 0, 0.5, 1, 4, 4, 1]
    row.run((one, counting, two), (3, 4))
    assert total.tolist() == [2534, 2534, 2534]
    row.run((two,), (4,))
    assert total.tolist() == [25344, 25344, 25344]
    assert totals[0] == 2


def test_what_goes_wrong_is_said_and_ends_the_row() -> None:
    total, after = np.zeros(2), np.zeros(2)
    row, launches = Row(2), (adding(total, cost=1 << 30), adding(after))
    with pytest.raises(ValueError, match=r"adding: number 21 is not within 0\.\.20"):
        row.run(launches, (21, 1))
    assert not total.any()
    with pytest.raises(ValueError, match=r"adding: number 22 is not within 0\.\.20"):
        row.run((launches[1], launches[0]), (1, 22))
    assert after.tolist() == [1, 1]
    assert not total.any()
    after[:] = 0
    if torch.get_num_threads() and launches[0].shared:
        with pytest.raises(MemoryError, match="adding: only 0 of 2 tasks were done"):
            row.run(launches, (13, 1))
    assert not after.any()
    out, lse = np.ones((1, 1, 16), np.float32), np.zeros((1, 1), np.float32)
    join = Standing(join_parts(out, lse, (out.copy(), lse.copy()), (out.copy(), lse.copy())), "a join")
    row.run((join,), ())  # it has no number
    assert out == pytest.approx(np.ones((1, 1, 16)))
    assert lse[0, 0] == pytest.approx(np.log(3))
