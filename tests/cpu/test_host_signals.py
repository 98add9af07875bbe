"""The doorbell, which serves work announced by flags: answers, races, errors, exit, forks."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from forks import in_fork
from pools import make_case

from hf_offload.cpu.host_signals import Doorbell, Item
from hf_offload.cpu.kernels.decode_attention import decode_attention
from hf_offload.cpu.launch import Array, Launch
from hf_offload.cpu.thread_pool import WorkerError

from ._ringing import (
    DONE,
    READY,
    STATUS,
    address,
    answering,
    await_flag,
    fail_kernel,
    flags,
    item,
    ring,
    stuck_kernel,
    tell,
)

PATIENT = 6_000_000  # naps that a test waits before it gives up


@pytest.fixture
def bell() -> Iterator[Doorbell]:
    doorbell = Doorbell(threads=2, spin_seconds=1e-5, timeout=300)
    yield doorbell
    doorbell.stop()


def serve(row: Array, epoch: int) -> None:
    """Announce an epoch of one item and wait for it."""
    tell(address(row, READY), epoch)
    assert await_flag(address(row, DONE), epoch, PATIENT)


def gated() -> tuple[Launch, Array]:
    """A launch that ends when its gate is opened."""
    gate = np.zeros(1, np.int64)
    return Launch(stuck_kernel, 1, (gate,), 0), gate


class Crowd:
    """Three items of answers, and their announcer."""

    def __init__(self) -> None:
        self.rows = flags(3)
        works = [answering(tasks) for tasks in (1, 7, 2)]
        self.items = [item(row, launch) for row, (launch, _, _) in zip(self.rows, works, strict=True)]
        self.questions, self.answers = tuple(work[1] for work in works), tuple(work[2] for work in works)

    def ring(self, first: int, epochs: int, in_turn: bool = False) -> int:
        ready, done = (np.array([address(row, flag) for row in self.rows]) for flag in (READY, DONE))
        return int(ring(ready, done, self.questions, self.answers, first, epochs, in_turn))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("spin", [0.0, 2e-5])
@pytest.mark.parametrize("in_turn", [False, True])
def test_thousands_of_epochs(threads: int, spin: float, in_turn: bool) -> None:
    bell, crowd = Doorbell(threads, spin), Crowd()
    bell.replace(crowd.items)
    epochs = 3000 if spin else 500
    assert crowd.ring(1, epochs, in_turn) == epochs
    bell.check()
    bell.stop()
    assert not crowd.rows[:, STATUS].any()


@pytest.mark.parametrize("threads", [1, 3])
def test_slow_hand_overs_change_nothing(threads: int) -> None:
    bell, crowd = Doorbell(threads, 1e-5), Crowd()
    bell.replace(crowd.items)
    for step, delay in enumerate((1e-3, 0.0, 3e-4, 5e-5)):
        bell.delay = delay
        assert bell.delay == pytest.approx(delay)
        begin = time.monotonic()
        assert crowd.ring(1 + 20 * step, 20) == 20
        assert time.monotonic() - begin >= 20 * delay
    bell.stop()


def test_epochs_wrap_around(bell: Doorbell) -> None:
    crowd = Crowd()
    bell.replace(crowd.items, epoch=2**31 - 5)
    assert crowd.ring(2**31 - 4, 20) == 20
    assert (crowd.rows[:, DONE] == -(2**31) + 15).all()


def test_an_item_may_wait_for_the_one_before(bell: Doorbell) -> None:
    rows, (slow, gate), (quick, question, answer) = flags(2), gated(), answering(2)
    bell.replace([item(rows[0], slow), item(rows[1], quick, ready=address(rows[0], DONE))])
    tell(address(rows[0], READY), 1)
    question[:] = 5
    assert not await_flag(address(rows[1], DONE), 1, 100)
    gate[0] = 1
    assert await_flag(address(rows[1], DONE), 1, PATIENT)
    assert answer.tolist() == [16, 16, 2]


def test_nothing_runs_before_it_is_announced(bell: Doorbell) -> None:
    rows, (launch, _, answer) = flags(1), answering(1)
    bell.replace([item(rows[0], launch)], epoch=7)
    assert rows[0, DONE] == 7
    assert not await_flag(address(rows[0], DONE), 8, 100)
    assert not answer.any()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_is_marked_answered_and_raised_with_its_label(threads: int) -> None:
    bell, rows, question = Doorbell(threads, 1e-5), flags(2), np.zeros(3, np.int64)
    broken = Launch(fail_kernel, 3, (question,), 0)
    sound, _, answer = answering(2)
    bell.replace([item(rows[0], broken, "attention of layer 3"), item(rows[1], sound, ready=address(rows[0], DONE))])
    for epoch in range(1, 7):
        question[1] = -(epoch % 2)
        answer[:] = -1
        tell(address(rows[0], READY), epoch)
        assert await_flag(address(rows[1], DONE), epoch, PATIENT)  # nothing hangs
        assert answer[2] == 2
        assert rows[0, STATUS] == epoch % 2
        if epoch % 2:
            with pytest.raises(WorkerError, match=r"attention of layer 3 failed: .* tasks were not done") as caught:
                bell.check()
            assert isinstance(caught.value.__cause__, MemoryError)
        bell.check()
        assert not rows[:, STATUS].any()
    bell.stop()


def test_an_error_that_nobody_asked_for_is_raised_at_the_end(bell: Doorbell) -> None:
    rows, question = flags(1), np.full(1, -1)
    bell.replace([item(rows[0], Launch(fail_kernel, 1, (question,), 0))])
    serve(rows[0], 1)
    with pytest.raises(WorkerError, match="1 of 1 tasks were not done"):
        bell.stop()
    bell.stop()


def test_who_waits_for_an_announcement_can_be_stopped() -> None:
    for spin in (0.0, 1.0):
        bell, (launch, _, _) = Doorbell(2, spin, timeout=3600), answering(1)
        bell.replace([item(flags(1)[0], launch)])
        time.sleep(0.02)
        threads = list(bell._crew._threads)
        assert len(threads) == 2
        bell.stop()
        assert not any(thread.is_alive() for thread in threads)


def test_items_are_replaced_between_epochs(bell: Doorbell) -> None:
    epoch = 0
    for _ in range(5):
        crowd = Crowd()
        bell.replace(crowd.items, epoch)
        assert crowd.ring(epoch + 1, 20) == 20
        epoch += 20


def test_replace_waits_for_what_was_announced(bell: Doorbell) -> None:
    rows, (slow, gate), crowd = flags(1), gated(), Crowd()
    bell.replace([item(rows[0], slow)])
    tell(address(rows[0], READY), 1)
    opener = threading.Timer(0.1, gate.fill, (1,))
    opener.start()
    bell.replace(crowd.items, 1)
    assert gate[0] == 1
    assert rows[0, DONE] == 1
    assert crowd.ring(2, 5) == 5


def test_what_is_not_done_in_time_is_an_error() -> None:
    bell, rows, (slow, gate) = Doorbell(1, timeout=0.05), flags(1), gated()
    bell.replace([item(rows[0], slow, "attention of layer 1")])
    tell(address(rows[0], READY), 1)
    with pytest.raises(WorkerError, match="attention of layer 1: not done in time"):
        bell.replace([item(rows[0], slow)])
    with pytest.raises(WorkerError, match="goes on and on"):
        bell.stop()
    gate[0] = 1
    assert await_flag(address(rows[0], DONE), 1, PATIENT)
    bell.stop()


def test_threads_end_with_the_doorbell() -> None:
    bell, (launch, _, _) = Doorbell(3), answering(1)
    bell.replace([item(flags(1)[0], launch)])
    threads = list(bell._crew._threads)
    assert len(threads) == 3
    del bell
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)


def test_replaced_items_are_not_kept(bell: Doorbell) -> None:
    class Owner:
        gone = False

        def __del__(self) -> None:
            Owner.gone = True

    rows, (launch, _, _) = flags(2), answering(1)
    bell.replace([Item(*(address(rows[0], flag) for flag in (READY, DONE, STATUS)), launch, "work", (Owner(),))])
    serve(rows[0], 1)
    assert not Owner.gone
    bell.replace([item(rows[1], launch)])
    gc.collect()
    assert Owner.gone


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_gets_threads_of_its_own(bell: Doorbell) -> None:
    rows, (slow, gate), (quick, _, answer) = flags(2), gated(), answering(3)
    bell.replace([item(rows[0], slow), item(rows[1], quick)])
    tell(address(rows[0], READY), 1)
    time.sleep(0.01)  # a thread of the parent is inside

    def serve_both() -> None:
        gate[0] = 1
        bell.check()
        for epoch in (1, 2, 3):
            tell(address(rows[0], READY), epoch)
            tell(address(rows[1], READY), epoch)
            assert await_flag(address(rows[0], DONE), epoch, PATIENT)
            assert await_flag(address(rows[1], DONE), epoch, PATIENT)
            assert answer[3] == 3
        bell.stop()

    try:
        assert in_fork(serve_both) == 0
    finally:
        gate[0] = 1  # parent and child have a gate each
    tell(address(rows[1], READY), 1)
    assert await_flag(address(rows[1], DONE), 1, PATIENT)


@pytest.mark.parametrize("threads", [1, 3])
def test_attention_epoch_after_epoch(threads: int) -> None:
    torch.manual_seed(0)
    kv_heads, group, dim, size, length = 2, 3, 32, 8, 8 * 160  # several parts a head, merged by whoever is last
    case = make_case(1, kv_heads, dim, size, length, torch.float32, (3,))
    query = np.zeros((1, kv_heads * group, dim), np.float32)
    blocks = np.tile(np.arange(160, dtype=np.int32), (1, kv_heads, 1))
    counts = np.full((1, kv_heads), 160, np.int32)

    def attend(out: Array, lse: Array) -> Launch:
        return decode_attention(
            query, case.host_blocks(torch.float32), blocks, counts, length, out, lse, scale=0.2, softcap=None
        )

    out, want = np.zeros_like(query), np.zeros_like(query)
    lse, want_lse = np.zeros(query.shape[:2], np.float32), np.zeros(query.shape[:2], np.float32)
    bell, rows, launch = Doorbell(threads, 1e-5), flags(1), attend(out, lse)
    assert launch.tasks > kv_heads
    launch.run()  # has counted once before it is served
    bell.replace([item(rows[0], launch)])
    for epoch in range(1, 30):
        query[:] = np.random.default_rng(epoch).normal(size=query.shape)
        counts[:] = 160 - epoch
        serve(rows[0], epoch)
        attend(want, want_lse).run()
        assert np.array_equal(out, want)
        assert np.array_equal(lse, want_lse)
    bell.check()
    bell.stop()


def test_a_launch_that_was_served_is_not_kept() -> None:
    bell, rows, (launch, question, answer) = Doorbell(2), flags(1), answering(2)
    held = [weakref.ref(array) for array in (question, answer)]
    bell.replace([item(rows[0], launch)])
    for epoch in range(1, 50):
        serve(rows[0], epoch)
    del launch, question, answer
    gc.collect()
    assert all(array() is not None for array in held)
    bell.stop()
    gc.collect()
    assert not any(array() is not None for array in held)


def test_wrong_arguments_are_named(bell: Doorbell) -> None:
    for knobs, named in (({"threads": 0}, "threads=0"), ({"spin_seconds": -1.0}, "spin_seconds=-1"),
                         ({"timeout": 0.0}, "timeout=0")):  # fmt: skip
        with pytest.raises(ValueError, match=named):
            Doorbell(**knobs)  # type: ignore[arg-type]
    launch, _, _ = answering(1)
    with pytest.raises(ValueError, match=r"layer 2: done=0x7"):
        Item(8, 7, 8, launch, "layer 2")
    with pytest.raises(ValueError, match="at least one item"):
        bell.replace([])
    row = flags(1)[0]
    bell.replace([item(row, launch)])
    with pytest.raises(TypeError, match="not a compiled kernel"):
        bell.replace([item(flags(1)[0], Launch(print, 1, (), 0))])
    serve(row, 1)  # the others are still there
