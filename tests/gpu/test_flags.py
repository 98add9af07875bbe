"""Flags between a stream and the host, and the threads that they wake."""

from __future__ import annotations

import pytest
import torch

from hf_offload.cpu.host_signals import Doorbell, Item
from hf_offload.cpu.launch import Array, Launch, kernel
from hf_offload.cpu.memory import count_up
from hf_offload.gpu.flags import signal, wait

HOW = ["torch", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)]
LAST = 2**31 - 1


@pytest.fixture
def device(request: pytest.FixtureRequest, how: str) -> str:
    """Where the epoch lies; with "interpreted", kernels run on CPU tensors."""
    if how == "interpreted":
        request.getfixturevalue("interpreted")
    return "cuda" if how == "cuda" else "cpu"


def numbers(device: str, *values: int) -> torch.Tensor:
    """int32 that both sides reach: 64 bytes apart, in pinned memory for a GPU."""
    spread = torch.zeros(len(values), 16, dtype=torch.int32, pin_memory=device == "cuda")
    spread[:, 0] = torch.tensor(values, dtype=torch.int32)
    return spread[:, :1]


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("epoch", [1, 70_000, LAST, -LAST - 1])
def test_signal_stores_the_epoch(device: str, epoch: int) -> None:
    flags = numbers(device, 5, 6, 7)
    signal(flags[1], torch.tensor([epoch], dtype=torch.int32, device=device))
    settle(device)
    assert flags[:, 0].tolist() == [5, epoch, 7]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("flag", "epoch", "in_time"),
    [(3, 3, True), (4, 3, True), (2, 3, False), (-5, 3, False), (LAST, -LAST - 1, False), (-LAST - 1, LAST, True)],
)
def test_wait_ends_at_the_flag_or_at_its_bound(device: str, flag: int, epoch: int, in_time: bool) -> None:
    there, late = numbers(device, flag, 0)
    want = torch.tensor([epoch], dtype=torch.int32, device=device)
    wait(there, want, late, spins=0 if in_time else 50)
    settle(device)
    assert late.item() == (0 if in_time else epoch)
    assert there.item() == flag
    wait(there, want - 3, late, spins=0)  # in time: leaves `late` as it is
    settle(device)
    assert late.item() == (0 if in_time else epoch)


@kernel
def answer_kernel(ticket: Array, tasks: int, question: Array, answer: Array) -> None:
    """Each task doubles one number."""
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        answer[task] = 2 * question[task]
        count_up(ticket, 1)


@pytest.mark.parametrize("how", HOW)
def test_a_doorbell_answers_the_stream(device: str) -> None:
    pinned = device == "cuda"
    question, answer = (torch.zeros(1000, dtype=torch.int32, pin_memory=pinned) for _ in range(2))
    flags = numbers(device, 0, 0, 0)
    launch = Launch(answer_kernel, 1000, (question.numpy(), answer.numpy()), 0)
    bell = Doorbell(threads=2, spin_seconds=1e-4)
    bell.replace([Item(*(flag.data_ptr() for flag in flags), launch, "work", (flags,))])
    (late,) = numbers(device, 0)
    for step in range(1, 30):
        bell.delay = 1e-3 * (step % 3 == 0)
        epoch = torch.tensor([step], dtype=torch.int32, device=device)
        numbers_now = torch.arange(step, 1000 + step, dtype=torch.int32, device=device)
        question.copy_(numbers_now, non_blocking=True)
        signal(flags[0], epoch)
        wait(flags[1], epoch, late, spins=5_000_000)
        got = answer.to(device, non_blocking=True)
        settle(device)
        assert torch.equal(got, 2 * numbers_now)
    bell.check()
    bell.stop()
    assert not late.item()


@pytest.mark.parametrize("how", HOW)
def test_a_stream_that_nobody_answers_goes_on(device: str) -> None:
    flag, late = numbers(device, 0, 0)
    wait(flag, torch.ones(1, dtype=torch.int32, device=device), late, spins=2000)
    settle(device)
    assert late.item() == 1


@pytest.mark.parametrize("how", HOW)
def test_nothing_is_waited_for_once_a_flag_was_late(device: str) -> None:
    """A step has a wait for each layer: with as many looks as here, each of them would take an hour."""
    flag, late = numbers(device, 0, 7)
    for epoch in (8, 9):
        wait(flag, torch.tensor([epoch], dtype=torch.int32, device=device), late, spins=2**31 - 1)
    settle(device)
    assert late.item() == 7


@pytest.mark.gpu
def test_a_captured_wait_follows_the_epoch() -> None:
    flags, late = numbers("cuda", 0, 0), numbers("cuda", 0)[0]
    epoch = torch.ones(1, dtype=torch.int32, device="cuda")
    signal(flags[0], epoch)
    wait(flags[0], epoch, late, spins=10)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        epoch += 1
        signal(flags[0], epoch)
        wait(flags[1], epoch, late, spins=10)
    flags[1] = 3
    for want, missed in ((2, 0), (3, 0), (4, 4), (5, 4)):
        graph.replay()
        torch.cuda.synchronize()
        assert (flags[0].item(), late.item()) == (want, missed)


def test_wrong_arguments_are_named() -> None:
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"flag has dtype torch\.int64"):
        signal(one.long(), one)
    with pytest.raises(ValueError, match=r"epoch has shape \(2,\)"):
        signal(one, one.expand(2))
    with pytest.raises(TypeError, match=r"late has dtype torch\.bool"):
        wait(one, one, one.bool(), spins=1)
    with pytest.raises(ValueError, match="spins=-1"):
        wait(one, one, one, spins=-1)
