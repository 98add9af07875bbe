"""Sequences of launches: repeated runs with new arguments, and errors that name the failed launch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hf_offload.cpu.kernels.merge import join_parts
from hf_offload.cpu.kernels.move_records import write_tokens
from hf_offload.cpu.launch import SHARE_BYTES, Array, Launch, LaunchSequence, kernel
from hf_offload.cpu.memory import count_up
from hf_offload.policies.hgca.kernels.moving_average import move_averages

SIZE = 8


@kernel
def add_kernel(ticket: Array, tasks: int, number: int, total: Array, limit: int) -> None:
    """One task = one entry; those from `limit` on are never done."""
    while True:
        i = count_up(ticket, 0)
        if i >= tasks:
            break
        if i >= limit:
            raise ValueError("no such task")
        total[i] = 10 * total[i] + number
        count_up(ticket, 1)


@kernel
def counting_kernel(ticket: Array, tasks: int, counters: Array, seen: Array) -> None:
    """One task = one entry, in which it says what its counter was, and how many take part."""
    while True:
        i = count_up(ticket, 0)
        if i >= tasks:
            break
        seen[i] = 100 * count_up(counters, i) + ticket[2]
        count_up(ticket, 1)


def adding(total: Array, cost: int = 0, limit: int = 1 << 30) -> Launch:
    return Launch(add_kernel, len(total), (0, total, limit), cost, label="adding")


def add(launch: Launch, number: int) -> None:
    words, i = launch.word("number")
    words[i] = number


def test_a_launch_that_is_open_lies_where_it_lies() -> None:
    """Threads that take part at the same moment read the same place, which nobody frees."""
    launch = adding(np.zeros(4, np.int64))
    launch.open(2)
    place = launch._bound
    assert place is not None
    launch.take_part()
    launch.take_part()
    launch.check()
    assert launch._bound is place


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_a_number_of_a_launch_changes_from_run_to_run() -> None:
    pool = torch.zeros(2, 1, 2, SIZE, 16)
    block_ptr = pool.data_ptr() + np.arange(2, dtype=np.int64) * pool[0].nbytes
    tokens = torch.randn(3, 2, 1, 1, 1, 16)
    launch = write_tokens(*tokens[0], block_ptr, np.array([[0, 1]], np.int32), 0, SIZE)
    sequence = LaunchSequence([launch])
    places = [launch.word(name) for name in ("keys", "values", "start")]
    for (k, v), start in zip(tokens, (0, 7, 15), strict=True):
        for (words, i), number in zip(places, (k.data_ptr(), v.data_ptr(), start), strict=True):
            words[i] = number
        sequence.run()
        assert torch.equal(pool[start // SIZE, 0, :, start % SIZE], torch.stack([k, v]).view(2, 16))


def test_launches_of_many_kinds_follow_each_other(threads: int) -> None:
    """What one writes the next one reads, on teams of any size, and the kinds of arguments may all differ."""
    heads, tokens, first = 40, 8192, 100
    torch.manual_seed(0)
    one, two = (np.zeros((1, heads, tokens), np.float32) for _ in range(2))
    scores = torch.randn(1, heads, tokens - first).numpy()
    lse = torch.logsumexp(torch.from_numpy(scores), -1).numpy()
    launches = [
        move_averages(one, scores, lse, first, tokens, alpha=0.5),
        move_averages(two, one, np.zeros_like(lse), first, tokens, alpha=0.5),
    ]
    out, total = np.ones((1, 2, 16), np.float32), np.zeros((1, 2), np.float32)
    launches.append(join_parts(out, total, (out.copy(), total.copy()), (out.copy(), total.copy())))
    assert [launch.shared for launch in launches] == [True, True, False]
    sequence = LaunchSequence(launches)
    for length in (tokens, tokens - 7):
        one[:], two[:], total[:] = 0.0, 0.0, 0.0
        for words, i in [launch.word("length") for launch in launches[:2]]:
            words[i] = length
        sequence.run()
        age = np.maximum(0.5, 1 / np.arange(length - first, 0, -1))
        want = np.exp(scores - lse[..., None])[..., : length - first] * age
        np.testing.assert_allclose(one[..., first:length], want, rtol=1e-5)
        assert not one[..., length:].any()
        np.testing.assert_allclose(two[..., first:length], np.exp(one[..., : length - first]) * age, rtol=1e-5)
        np.testing.assert_allclose(total, np.log(3.0), rtol=1e-6)


def test_tickets_and_counters_begin_anew(threads: int) -> None:
    counters, seen = np.full(3, 7, np.int64), np.zeros(3, np.int64)
    for cost, team in ((0, 1), (SHARE_BYTES, threads)):
        launch = Launch(counting_kernel, 3, (counters, seen), cost, counters=counters)
        sequence = LaunchSequence([launch])
        for _ in range(2):
            seen[:] = -1
            sequence.run()
            assert set(seen.tolist()) <= {team, 1}  # 1: where torch has no OpenMP runtime


def test_what_fails_ends_the_sequence_and_is_said(threads: int) -> None:
    for cost in (0, SHARE_BYTES):
        before, total, after = np.zeros(2), np.zeros(9), np.zeros(2)
        launches = [adding(before), adding(total, cost, limit=4), adding(after)]
        for launch in launches:
            add(launch, 3)
        sequence = LaunchSequence(launches)
        with pytest.raises(MemoryError, match=r"^adding: only \d of 9 tasks were done; is memory left\?$"):
            sequence.run()
        assert before.tolist() == [3, 3]
        assert total[:4].all()
        assert not total[4:].any()
        assert not after.any()
        words, i = launches[1].word("limit")
        words[i] = 9
        sequence.run()  # the team is as good as before
        assert after.tolist() == [3, 3]


def test_a_single_launch_says_what_it_was() -> None:
    with pytest.raises(MemoryError, match="an append: only 1 of 2 tasks were done"):
        adding(np.zeros(2), limit=1).run("an append")


def test_a_thread_alone_does_all_tasks_or_says_so() -> None:
    total = np.zeros(5)
    launch = adding(total, SHARE_BYTES)
    add(launch, 2)
    for _ in range(2):
        launch()
    assert total.tolist() == [22] * 5
    assert launch.ticket[2] == 1
    with pytest.raises(MemoryError, match="adding: only 3 of 5"):
        adding(np.zeros(5), limit=3)()
    launch.open(1)
    with pytest.raises(MemoryError, match="adding: only 0 of 5"):
        launch.check()


def test_what_others_take_need_not_be_done_here() -> None:
    launch = Launch(add_kernel, 5, (1, np.zeros(5), 2), 0, dealt=True, label="tasks")
    launch.open(1)
    launch.ticket[:2] = 2, 2
    launch.check()
    launch.ticket[:2] = 3, 2
    with pytest.raises(MemoryError, match="tasks: only 2 of 3"):
        launch.check()


def test_a_function_that_is_no_kernel_is_refused() -> None:
    with pytest.raises(TypeError, match=r"print.* is not a compiled kernel"):
        Launch(print, 1, (), 0).run()


def test_arrays_live_as_long_as_the_launch_and_no_longer() -> None:
    total = np.zeros(3)
    launch, seen = adding(total), weakref.ref(total)
    sequence = LaunchSequence([launch])
    del total, launch
    gc.collect()
    assert seen() is not None
    sequence.run()
    del sequence
    gc.collect()
    assert seen() is None
