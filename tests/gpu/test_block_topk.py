"""Block choice and split on the device, equal to the CPU reference block for block."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from references import cpu as reference

from hf_offload.gpu.block_topk import select_blocks, split_blocks

from ._forms import device_of, every_form


def lists(blocks: torch.Tensor, counts: torch.Tensor) -> list[list[list[int]]]:
    """The meant entries of every row and head."""
    return [[blocks[b, h, : counts[b, h]].tolist() for h in range(counts.shape[1])] for b in range(counts.shape[0])]


def check(
    device: str, score: torch.Tensor, sealed: int, length: int, low: list[int], high: list[int], recent: int, k: int,
    block_size: int = 8, spare: int = 0,
) -> None:  # fmt: skip
    num_blocks = -(-length // block_size)
    lo, hi = (torch.tensor(x, dtype=torch.int32) for x in (low, high))
    want = reference.select_blocks(score, sealed, num_blocks, lo, hi, recent, k)
    limits = torch.tensor([length, sealed], dtype=torch.int32)
    capacity = max([1, min(k, score.shape[2]), *(len(x) for row in want for x in row)]) + spare
    blocks, counts = select_blocks(
        score.to(device), limits.to(device), lo.to(device), hi.to(device), block_size=block_size, recent=recent, k=k,
        capacity=capacity,
    )  # fmt: skip
    assert blocks.shape == (*score.shape[:2], capacity)
    assert blocks.dtype == counts.dtype == torch.int32
    assert lists(blocks.cpu(), counts.cpu()) == want


@every_form
@pytest.mark.parametrize("seed", range(12))
def test_select(form: str, seed: int, request: pytest.FixtureRequest) -> None:
    device = device_of(form, request)
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    num_blocks = number(0, 150)
    sealed = max(0, num_blocks - number(0, 3))
    length = max(0, num_blocks * 8 - number(0, 8))
    score = torch.randn(3, 2, num_blocks + number(1, 5), generator=draw)
    if seed % 3 == 0:
        score = (score * 2).round()  # many ties, and both zeros
    if seed % 4 == 0:
        score[0, :, ::2], score[1, :, ::3] = -math.inf, math.nan
    score[:, :, sealed:] = math.nan if seed % 2 else math.inf
    low = [number(0, num_blocks + 3) for _ in range(3)] if seed % 2 else [0, 0, num_blocks // 2]
    high = [x + number(0, 4) for x in low]
    check(device, score, sealed, length, low, high, number(0, 5), number(0, num_blocks + 3), spare=number(0, 3))


@every_form
def test_odd_scores(form: str, request: pytest.FixtureRequest) -> None:
    device = device_of(form, request)
    check(device, torch.tensor([[[0.0, -0.0, 0.0, -0.0, -1.0]]]), 5, 40, [0], [0], 0, 2)
    check(device, torch.full((1, 1, 41), 0.25), 40, 321, [0], [1], 1, 17)
    check(device, torch.tensor([[[math.inf, 1.0, math.inf, -math.inf]]]), 4, 32, [0], [0], 0, 1)
    check(device, torch.full((2, 3, 33), -math.inf), 33, 33 * 8, [0, 4], [2, 5], 3, 20)
    check(device, torch.tensor([[[1e-45, -1e-45, 3e38, -3e38, 0.0]]]), 5, 40, [0], [0], 0, 3)  # subnormal numbers
    check(device, torch.full((2, 1, 7), math.nan), 0, 0, [0, 0], [1, 1], 3, 4)
    check(device, torch.full((1, 2, 7), math.nan), 0, 13, [0], [1], 3, 4)  # a prompt shorter than a block


@every_form
def test_many_blocks(form: str, request: pytest.FixtureRequest) -> None:
    device = device_of(form, request)
    draw = torch.Generator().manual_seed(0)
    close = 1 + torch.randint(0, 50, (1, 1, 16384), generator=draw) * 2**-23  # neighbouring floats, hundreds of each
    check(device, close, 16383, 16384 * 8 - 3, [0], [2], 4, 512)
    check(device, torch.randn(1, 2, 4099, generator=draw), 4099, 4099 * 8, [0], [2], 4, 4000)


@every_form
def test_choices_beyond_the_capacity_are_lost(form: str, request: pytest.FixtureRequest) -> None:
    device = device_of(form, request)
    limits, bounds = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([80, 10], [0]))
    blocks, counts = select_blocks(
        torch.zeros(1, 1, 10, device=device), limits, bounds, bounds + 6, block_size=8, recent=0, k=3, capacity=4
    )
    assert lists(blocks, counts) == [[[0, 1, 2, 3]]]


@every_form
@pytest.mark.parametrize(("capacity", "blocks"), [(1, 1), (13, 40), (300, 301), (2500, 2500)])
def test_split(form: str, capacity: int, blocks: int, request: pytest.FixtureRequest) -> None:
    device = device_of(form, request)
    draw = torch.Generator().manual_seed(capacity)
    counts = torch.randint(0, capacity + 1, (3, 2), generator=draw).int()
    counts[0, 0], counts[0, 1] = capacity, 0
    chosen = torch.stack([torch.randperm(blocks, generator=draw)[:capacity].sort().values for _ in range(6)])
    chosen = chosen.view(3, 2, capacity).int()
    slot_of = torch.randint(-1, 2, (3, 2, blocks), generator=draw).clamp(max=0).int()
    slot_of = torch.where(slot_of < 0, -1, torch.randint(0, 500, slot_of.shape, generator=draw)).int()
    slot_of[1, 0], slot_of[1, 1] = -1, 7
    near, far = {}, {}
    for line in itertools.product(range(3), range(2)):
        meant = chosen[line][: counts[line]].tolist()
        found = slot_of[line].tolist()
        near[line] = [(block, found[block]) for block in meant if found[block] >= 0]
        far[line] = [block for block in meant if found[block] < 0]
    behind = torch.arange(capacity) >= counts[..., None]
    chosen = torch.where(behind, torch.tensor([-1, 10**9])[torch.arange(capacity) % 2], chosen).int()
    split = split_blocks(chosen.to(device), counts.to(device), slot_of.to(device))
    split = type(split)(*(x.cpu() for x in split))
    for line, pairs in near.items():
        count = int(split.near_counts[line])
        assert (
            list(zip(split.near[line][:count].tolist(), split.near_slots[line][:count].tolist(), strict=True)) == pairs
        )
        assert split.far[line][: split.far_counts[line]].tolist() == far[line]


def test_refusals() -> None:
    score, limits, zeros = torch.zeros(1, 1, 10), torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="capacity 2 is too small: up to 3"):
        select_blocks(score, limits, zeros, zeros, block_size=8, recent=0, k=3, capacity=2)
    with pytest.raises(ValueError, match="recent -1"):
        select_blocks(score, limits, zeros, zeros, block_size=8, recent=-1, k=3, capacity=3)
    with pytest.raises(ValueError, match=r"high has shape \(2,\)"):
        select_blocks(score, limits, zeros, zeros.repeat(2), block_size=8, recent=0, k=3, capacity=3)
    with pytest.raises(TypeError, match=r"limits has dtype torch\.int64"):
        select_blocks(score, limits.long(), zeros, zeros, block_size=8, recent=0, k=3, capacity=3)
    with pytest.raises(ValueError, match="16385 blocks"):
        select_blocks(torch.zeros(1, 1, 16385), limits, zeros, zeros, block_size=8, recent=0, k=3, capacity=3)
    with pytest.raises(ValueError, match=r"counts has shape \(1, 2\)"):
        split_blocks(zeros.view(1, 1, 1), zeros.new_zeros(1, 2), zeros.view(1, 1, 1))
