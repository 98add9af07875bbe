"""The hand-over of query, blocks and counts to the host, its flag, and a stream's wait for a flag of the host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pairwise import covering

from hf_offload.gpu.handover import Inbox, hand_over, wait_for_flag

from .operations import numbers

GARBAGE, LAST = -(10**8), 2**31 - 1
EPOCHS = (1, 70_000, LAST, -LAST - 1)
SIZES = [(1, 1, 1, 16, 1), (2, 3, 5, 80, 7), (1, 2, 4, 128, 130), (1, 8, 16, 64, 300), (3, 1, 2, 256, 128)]
FORMS = ["torch", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=FORMS)
def device(request: pytest.FixtureRequest) -> str:
    """Where tensors lie when operations are computed by torch, in Triton's interpreter, or on a GPU."""
    if request.param == "interpreted":
        request.getfixturevalue("interpreted")
    return "cuda" if request.param == "cuda" else "cpu"


def flags(device: str, *values: int) -> torch.Tensor:
    """int32 that both sides reach: 64 bytes apart, in pinned memory for a GPU."""
    spread = torch.zeros(len(values), 16, dtype=torch.int32, pin_memory=device == "cuda")
    spread[:, 0] = numbers(*values)
    return spread[:, :1]


def inbox(device: str, like: tuple[torch.Tensor, ...], *, by_copies: bool = False) -> Inbox:
    """Host memory for such tensors, full of what nobody may read."""
    pinned = device == "cuda"
    query, blocks, counts, *more = (torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned) for part in like)
    arrived = None if by_copies else torch.zeros(1, dtype=torch.int32, device=device)
    return Inbox(query.fill_(math.nan), blocks.fill_(GARBAGE), counts.fill_(GARBAGE), arrived, *more)


def given(
    device: str, batch: int, heads: int, group: int, dim: int, width: int, with_tail: bool = False
) -> tuple[torch.Tensor, ...]:
    """A query, ragged lists of blocks with garbage behind their counts, the counts; with a tail and limits."""
    counts = torch.randint(0, width + 1, (batch, heads), dtype=torch.int32)
    counts[0, 0], counts[-1, -1] = 0, width
    blocks = torch.randint(0, 10**6, (batch, heads, width), dtype=torch.int32)
    blocks[torch.arange(width) >= counts[..., None]] = GARBAGE
    query = torch.randn(batch, heads * group, dim)
    more = (torch.randn(query.shape[:2]), torch.randint(0, 10**6, (2,)).int()) if with_tail else ()
    return tuple(part.to(device) for part in (query, blocks, counts, *more))


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def assert_there(to: Inbox, sent: tuple[torch.Tensor, ...]) -> None:
    query, blocks, counts, *more = (part.cpu() for part in sent)
    assert torch.equal(to.query, query)
    assert torch.equal(to.counts, counts)
    for there, part in zip((to.tail, to.limits), more, strict=False):
        assert torch.equal(there, part)
    meant = torch.arange(blocks.shape[2]) < counts[..., None]
    assert torch.equal(to.blocks[meant], blocks[meant])


@pytest.mark.parametrize(("sizes", "with_tail", "by_copies"), covering(SIZES, [False, True], [False, True]), ids=str)
def test_all_of_it_arrives(device: str, with_tail: bool, by_copies: bool, sizes: Any) -> None:
    torch.manual_seed(sizes[3])
    to = inbox(device, given(device, *sizes, with_tail=with_tail), by_copies=by_copies)
    flag = flags(device, 0, 0, 0)
    for before, epoch in zip((0, *EPOCHS), EPOCHS, strict=False):  # into the same memory, with a flag and without
        for flagged in (False, True):
            sent = given(device, *sizes, with_tail=with_tail)
            announced = {"flag": flag[1], "epoch": numbers(epoch).to(device)} if flagged else {}
            hand_over(to, *sent, **announced)
            settle(device)
            assert_there(to, sent)
            assert flag[:, 0].tolist() == [0, epoch if flagged else before, 0]


@pytest.mark.parametrize(
    ("flag", "epoch", "in_time"),
    [(3, 3, True), (4, 3, True), (2, 3, False), (-5, 3, False), (LAST, -LAST - 1, False), (-LAST - 1, LAST, True)],
)
def test_a_wait_ends_at_the_flag_or_at_its_bound(device: str, flag: int, epoch: int, in_time: bool) -> None:
    there, late = flags(device, flag, 0)
    want = numbers(epoch).to(device)
    wait_for_flag(there, want, late, spins=0 if in_time else 300)
    settle(device)
    assert late.item() == (0 if in_time else epoch)
    assert there.item() == flag
    wait_for_flag(there, want - 3, late, spins=0)  # in time: leaves `late` as it is
    settle(device)
    assert late.item() == (0 if in_time else epoch)


def test_nothing_is_waited_for_once_a_flag_was_late(device: str) -> None:
    """A step has a wait for each layer: with as many looks as here, each of them would take an hour."""
    flag, late = flags(device, 0, 7)
    for epoch in (8, 9):
        wait_for_flag(flag, numbers(epoch).to(device), late, spins=LAST)
    settle(device)
    assert late.item() == 7


def test_wrong_arguments_are_named() -> None:
    query, blocks, counts = sent = given("cpu", 2, 2, 2, 16, 3)
    with pytest.raises(TypeError, match=r"query has dtype torch\.float16"):
        hand_over(inbox("cpu", sent), query.half(), blocks, counts)
    with pytest.raises(ValueError, match="flag and epoch belong together"):
        hand_over(inbox("cpu", sent), *sent, flag=numbers(0))
    with pytest.raises(ValueError, match="spins=-1"):
        wait_for_flag(numbers(0), numbers(0), numbers(0), spins=-1)
