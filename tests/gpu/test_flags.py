"""The wait of a stream for a flag of the host."""

from __future__ import annotations

import pytest
import torch

from hf_offload.gpu.handover import Inbox, hand_over, wait_for_flag

from ._forms import device_of, every_form

LAST = 2**31 - 1


def numbers(device: str, *values: int) -> torch.Tensor:
    """int32 that both sides reach: 64 bytes apart, in pinned memory for a GPU."""
    spread = torch.zeros(len(values), 16, dtype=torch.int32, pin_memory=device == "cuda")
    spread[:, 0] = torch.tensor(values, dtype=torch.int32)
    return spread[:, :1]


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@every_form
@pytest.mark.parametrize(
    ("flag", "epoch", "in_time"),
    [(3, 3, True), (4, 3, True), (2, 3, False), (-5, 3, False), (LAST, -LAST - 1, False), (-LAST - 1, LAST, True)],
)
def test_wait_ends_at_the_flag_or_at_its_bound(
    form: str, flag: int, epoch: int, in_time: bool, request: pytest.FixtureRequest
) -> None:
    device = device_of(form, request)
    there, late = numbers(device, flag, 0)
    want = torch.tensor([epoch], dtype=torch.int32, device=device)
    wait_for_flag(there, want, late, spins=0 if in_time else 50)
    settle(device)
    assert late.item() == (0 if in_time else epoch)
    assert there.item() == flag
    wait_for_flag(there, want - 3, late, spins=0)  # in time: leaves `late` as it is
    settle(device)
    assert late.item() == (0 if in_time else epoch)


@every_form
def test_a_stream_that_nobody_answers_goes_on(form: str, request: pytest.FixtureRequest) -> None:
    device = device_of(form, request)
    flag, late = numbers(device, 0, 0)
    wait_for_flag(flag, torch.ones(1, dtype=torch.int32, device=device), late, spins=2000)
    settle(device)
    assert late.item() == 1


@every_form
def test_nothing_is_waited_for_once_a_flag_was_late(form: str, request: pytest.FixtureRequest) -> None:
    """A step has a wait for each layer: with as many looks as here, each of them would take an hour."""
    device = device_of(form, request)
    flag, late = numbers(device, 0, 7)
    for epoch in (8, 9):
        wait_for_flag(flag, torch.tensor([epoch], dtype=torch.int32, device=device), late, spins=2**31 - 1)
    settle(device)
    assert late.item() == 7


@pytest.mark.gpu
def test_captured_flags_follow_the_epoch() -> None:
    flags, late = numbers("cuda", 0, 0), numbers("cuda", 0)[0]
    epoch = torch.ones(1, dtype=torch.int32, device="cuda")
    sent = torch.zeros(1, 1, 16, device="cuda"), epoch.new_zeros(1, 1, 4), epoch.new_zeros(1, 1)
    inbox = Inbox(*(torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in sent), epoch.new_zeros(1))
    hand_over(inbox, *sent, flag=flags[0], epoch=epoch)
    wait_for_flag(flags[0], epoch, late, spins=10)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        epoch += 1
        hand_over(inbox, *sent, flag=flags[0], epoch=epoch)
        wait_for_flag(flags[1], epoch, late, spins=10)
    flags[1] = 3
    for want, missed in ((2, 0), (3, 0), (4, 4), (5, 4)):
        graph.replay()
        torch.cuda.synchronize()
        assert (flags[0].item(), late.item()) == (want, missed)


def test_wrong_arguments_are_named() -> None:
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"flag has dtype torch\.int64"):
        wait_for_flag(one.long(), one, one, spins=1)
    with pytest.raises(ValueError, match=r"epoch has shape \(2,\)"):
        wait_for_flag(one, one.expand(2), one, spins=1)
    with pytest.raises(TypeError, match=r"late has dtype torch\.bool"):
        wait_for_flag(one, one, one.bool(), spins=1)
    with pytest.raises(ValueError, match="spins=-1"):
        wait_for_flag(one, one, one, spins=-1)
