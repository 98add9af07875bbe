"""The hand-over of query, blocks and counts to the host, and its flag."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pairwise import covering

from hf_offload.cpu.host_signals import Doorbell, Item
from hf_offload.cpu.launch import Array, Launch, kernel
from hf_offload.cpu.memory import count_up
from hf_offload.gpu.handover import Inbox, hand_over, wait_for_flag

from ._forms import device_of, every_form

GARBAGE = -(10**8)
EPOCHS = (1, 70_000, 2**31 - 1, -(2**31))
SIZES = [(1, 1, 1, 16, 1), (2, 3, 5, 80, 7), (3, 2, 4, 128, 130), (1, 8, 16, 64, 300), (5, 1, 2, 256, 128)]


def inbox(device: str, like: tuple[torch.Tensor, ...], *, by_copies: bool = False) -> Inbox:
    """Host memory for such tensors, full of what nobody may read."""
    pinned = device == "cuda"
    query, blocks, counts, *more = (torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned) for part in like)
    arrived = None if by_copies else torch.zeros(1, dtype=torch.int32, device=device)
    return Inbox(query.fill_(math.nan), blocks.fill_(GARBAGE), counts.fill_(GARBAGE), arrived, *more)


def given(device: str, batch: int, heads: int, group: int, dim: int, width: int) -> tuple[torch.Tensor, ...]:
    """A query, ragged lists of blocks with garbage behind their counts, and the counts."""
    counts = torch.randint(0, width + 1, (batch, heads), dtype=torch.int32)
    counts[0, 0], counts[-1, -1] = 0, width
    blocks = torch.randint(0, 10**6, (batch, heads, width), dtype=torch.int32)
    blocks[torch.arange(width) >= counts[..., None]] = GARBAGE
    return tuple(part.to(device) for part in (torch.randn(batch, heads * group, dim), blocks, counts))


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def assert_there(to: Inbox, sent: tuple[torch.Tensor, ...]) -> None:
    query, blocks, counts, *more = (part.cpu() for part in sent)
    assert torch.equal(to.query, query)
    assert torch.equal(to.counts, counts)
    if more:
        assert to.tail is not None
        assert to.limits is not None
        assert torch.equal(to.tail, more[0])
        assert torch.equal(to.limits, more[1])
    meant = torch.arange(blocks.shape[2]) < counts[..., None]
    assert torch.equal(to.blocks[meant], blocks[meant])


@every_form
@pytest.mark.parametrize(("sizes", "with_tail", "by_copies"), covering(SIZES, [False, True], [False, True]), ids=str)
def test_all_of_it_arrives(
    form: str, with_tail: bool, by_copies: bool, sizes: Any, request: pytest.FixtureRequest
) -> None:
    device = device_of(form, request)
    torch.manual_seed(sizes[3])

    def given_all() -> tuple[torch.Tensor, ...]:
        sent = given(device, *sizes)
        if not with_tail:
            return sent
        limits = torch.randint(0, 10**6, (2,), dtype=torch.int32)
        return (*sent, torch.randn(sent[0].shape[:2]).to(device), limits.to(device))

    to = inbox(device, given_all(), by_copies=by_copies)
    flag = torch.zeros(3, 16, dtype=torch.int32, pin_memory=device == "cuda")
    for before, epoch in zip((0, *EPOCHS), EPOCHS, strict=False):  # into the same memory, with a flag and without
        sent = given_all()
        hand_over(to, *sent)
        settle(device)
        assert_there(to, sent)
        assert int(flag[1, 0]) == before
        sent = given_all()
        hand_over(to, *sent, flag=flag[1, :1], epoch=torch.tensor([epoch], dtype=torch.int32, device=device))
        settle(device)
        assert_there(to, sent)
        assert flag[:, 0].tolist() == [0, epoch, 0]


@kernel
def sum_kernel(ticket: Array, tasks: int, query: Array, blocks: Array, counts: Array, answer: Array) -> None:
    """Each task adds up what one row was given."""
    while True:
        task = count_up(ticket, 0)
        if task >= tasks:
            break
        total = 0.0
        for head in range(counts.shape[1]):
            for i in range(counts[task, head]):
                total += blocks[task, head, i]
        for head in range(query.shape[1]):
            for d in range(query.shape[2]):
                total += query[task, head, d]
        answer[task] = total
        count_up(ticket, 1)


@every_form
def test_whoever_sees_the_flag_sees_all_of_it(form: str, request: pytest.FixtureRequest) -> None:
    device = device_of(form, request)
    sizes = (16, 8, 4, 128, 64) if form == "cuda" else (3, 2, 2, 16, 5)
    batch, _, _, dim, width = sizes
    pinned = device == "cuda"
    to = inbox(device, given(device, *sizes))
    answer = torch.zeros(batch, dtype=torch.float64, pin_memory=pinned)
    flags = torch.zeros(3, 16, dtype=torch.int32, pin_memory=pinned)
    arrays = (*(part.numpy() for part in (to.query, to.blocks, to.counts)), answer.numpy())
    bell = Doorbell(threads=2, spin_seconds=1e-4)
    launch = Launch(sum_kernel, batch, arrays, 0)
    bell.replace([Item(*(int(line.data_ptr()) for line in flags), launch, "work", (flags,))])
    for step in range(1, 60):
        bell.delay = 1e-3 * (step % 6 == 0)
        epoch = torch.tensor([step], dtype=torch.int32, device=device)
        query = torch.full((batch, sizes[1] * sizes[2], dim), float(step), device=device)
        counts = torch.full((batch, sizes[1]), width, dtype=torch.int32, device=device)
        blocks = torch.full((batch, sizes[1], width), step, dtype=torch.int32, device=device)
        hand_over(to, query, blocks, counts, flag=flags[0, :1], epoch=epoch)
        late = torch.zeros(1, dtype=torch.int32, device=device)
        wait_for_flag(flags[1, :1], epoch, late, spins=5_000_000)
        got = answer.to(device, non_blocking=True)
        settle(device)
        assert not late.item()
        assert (got == step * sizes[1] * (width + sizes[2] * dim)).all()
    bell.check()
    bell.stop()


def test_wrong_arguments_are_named() -> None:
    query, blocks, counts = given("cpu", 2, 2, 2, 16, 3)
    to = inbox("cpu", (query, blocks, counts))
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"query has dtype torch\.float16"):
        hand_over(to, query.half(), blocks, counts)
    with pytest.raises(ValueError, match=r"blocks has shape \(1, 2, 3\)"):
        hand_over(to, query, blocks[:1], counts)
    with pytest.raises(ValueError, match=r"blocks has shape \(2, 2, 2\); expected \(2, 2, 3\)"):
        hand_over(to, query, blocks[:, :, :2].contiguous(), counts)
    with pytest.raises(ValueError, match=r"query \(2, 3, 16\) does not fit"):
        inbox("cpu", (query[:, :3], blocks, counts))
    with pytest.raises(ValueError, match=r"tail and to\.tail belong together"):
        hand_over(to, query, blocks, counts, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="flag and epoch belong together"):
        hand_over(to, query, blocks, counts, flag=one)
    with pytest.raises(TypeError, match=r"flag has dtype torch\.int64"):
        hand_over(to, query, blocks, counts, flag=one.long(), epoch=one)
    with pytest.raises(ValueError, match=r"epoch has shape \(2,\)"):
        hand_over(to, query, blocks, counts, flag=one, epoch=one.expand(2))
