"""The exchange of resident blocks against loops: the same moves in the same order."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_offload.gpu.exchange import exchange, open_block

from ._forms import device_of, every_form

SIZE = 8


def state(
    seed: int, slots: int, blocks: int, *, known: int, sealed: int, high: list[int], free: float, ties: bool,
    low: list[int] | None = None,
) -> SimpleNamespace:  # fmt: skip
    """A random resident set of 2 KV heads, as arrays; what `worth` does not know is NaN."""
    rng = np.random.default_rng(seed)
    rows = len(high)
    worth = rng.standard_normal((rows, 2, blocks)).astype(np.float32)
    if ties:
        worth = np.round(worth)
    worth[rng.random(worth.shape) < 0.1] = -np.inf
    worth[:, :, known:] = np.nan
    block_of, slot_of = np.full((rows, 2, slots), -1, np.int32), np.full((rows, 2, blocks), -1, np.int32)
    for b, h in np.ndindex(rows, 2):
        held = rng.permutation(max(sealed, 1))[:slots]
        places = rng.permutation(slots)[: len(held)]
        keep = rng.random(len(held)) >= free
        block_of[b, h, places[keep]], slot_of[b, h, held[keep]] = held[keep], places[keep]
    return SimpleNamespace(
        worth=worth, known=known, block_of=block_of, slot_of=slot_of, high=np.array(high, np.int32), sealed=sealed,
        low=np.array([0] * rows if low is None else low, np.int32),
    )  # fmt: skip


def may_move(at: SimpleNamespace, recent: int, b: int, blocks: np.ndarray) -> np.ndarray:
    """Neither sinks nor among the newest sealed blocks nor unsealed."""
    found: np.ndarray = (blocks >= at.high[b]) & (blocks < at.sealed - recent)
    return found


def given_up(at: SimpleNamespace, recent: int, b: int, h: int) -> np.ndarray:
    """Slots that may change hands in the order in which they are given up: free ones, then by rising worth."""
    held = at.block_of[b, h]
    slots = np.flatnonzero((held < at.low[b]) | may_move(at, recent, b, held))  # free, or padding
    held = held[slots]
    known = (held >= 0) & (held < at.known)
    worth = np.where(held < 0, -np.inf, np.inf)
    worth[known] = at.worth[b, h, held[known]]
    return slots[np.lexsort((held, worth))]


def assign(at: SimpleNamespace, b: int, h: int, slot: int, block: int) -> None:
    old = at.block_of[b, h, slot]
    if old >= 0:
        at.slot_of[b, h, old] = -1
    at.block_of[b, h, slot], at.slot_of[b, h, block] = block, slot


def exchanged(at: SimpleNamespace, recent: int) -> tuple[list[tuple[int, ...]], SimpleNamespace]:
    """The moves (row, head, slot, block) and what is resident after them, by loops."""
    after = copy.deepcopy(at)
    moves = []
    for b, h in np.ndindex(at.block_of.shape[:2]):
        slots = given_up(at, recent, b, h)
        worth = at.worth[b, h, : at.known]
        ranked = np.argsort(-worth, kind="stable")
        ranked = ranked[(worth[ranked] > -np.inf) & may_move(at, recent, b, ranked)][: len(slots)]
        missing = ranked[at.slot_of[b, h, ranked] < 0]
        victims = slots[~np.isin(at.block_of[b, h, slots], ranked)]
        for slot, block in zip(victims, missing, strict=False):
            assign(after, b, h, int(slot), int(block))
            moves.append((b, h, int(slot), int(block)))
    return moves, after


def tensors(at: SimpleNamespace, device: str, length: int) -> list[torch.Tensor]:
    numbers = [torch.tensor(x, dtype=torch.int32) for x in ([at.known], [length, at.sealed])]
    arrays = [torch.from_numpy(x.copy()) for x in (at.worth, at.block_of, at.slot_of, at.low, at.high)]
    worth, block_of, slot_of, low, high = arrays
    return [x.to(device) for x in (worth, numbers[0], block_of, slot_of, low, high, numbers[1])]


def check_exchange(at: SimpleNamespace, recent: int, device: str, due: int | None = None) -> int:
    """Compare the moves and what is resident then; returns the number of moves."""
    want, after = exchanged(at, recent)
    given = tensors(at, device, at.sealed * SIZE + 3)
    flag = None if due is None else torch.tensor([due], dtype=torch.int32, device=device)
    slots, blocks, counts = (x.cpu() for x in exchange(*given, recent=recent, due=flag))
    assert slots.shape == blocks.shape == at.block_of.shape
    found = [
        (b, h, int(slots[b, h, i]), int(blocks[b, h, i]))
        for b, h in np.ndindex(*counts.shape)
        for i in range(int(counts[b, h]))
    ]
    assert found == want
    assert np.array_equal(given[2].cpu().numpy(), after.block_of)
    assert np.array_equal(given[3].cpu().numpy(), after.slot_of)
    return len(found)


@pytest.mark.one_in(3)
@every_form
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 20))])
def test_exchange(form: str, seed: int, request: pytest.FixtureRequest) -> None:
    device = device_of(form, request)
    rng = np.random.default_rng(seed)
    slots, blocks = int(rng.integers(1, 40)), int(rng.integers(3, 200))
    sealed = int(rng.integers(0, blocks + 1))
    known = max(0, sealed - int(rng.integers(0, 4)))
    low = rng.integers(0, 20, 3).tolist()
    high = [first + int(rng.integers(0, 6)) for first in low]
    at = state(
        seed, slots, blocks, known=known, sealed=sealed, high=high, free=0.3 * (seed % 3), ties=seed % 2 == 0, low=low
    )
    for row, first in enumerate(low):  # what is padding is never wanted
        at.worth[row, :, :first] = -np.inf
    check_exchange(at, int(rng.integers(0, 5)), device)


@pytest.mark.slow
@every_form
def test_many_slots(form: str, request: pytest.FixtureRequest) -> None:
    device = device_of(form, request)
    for seed, slots, blocks in ((0, 500, 2100), (1, 63, 4097)):
        at = state(seed, slots, blocks, known=blocks - 2, sealed=blocks - 1, high=[1], free=0.1, ties=seed == 0)
        assert check_exchange(at, 4, device) > 20


@every_form
def test_odd_worth(form: str, request: pytest.FixtureRequest) -> None:
    device = device_of(form, request)
    common = {"known": 30, "sealed": 30, "high": [2, 0], "free": 0.2, "ties": True}
    for worth in (0.0, -0.0, math.inf, -math.inf, 1e-45):
        at = state(3, 9, 33, **common)
        at.worth[:, :, : at.known] = worth
        moves = check_exchange(at, 2, device)
        assert (moves == 0) == (worth == -math.inf)
    at = state(4, 9, 33, **common)
    at.worth[:, :, ::2], at.worth[:, :, 1::2] = 0.0, -0.0
    check_exchange(at, 2, device)
    for known, sealed in ((0, 30), (0, 0), (30, 3)):
        check_exchange(state(5, 9, 33, **(common | {"known": known, "sealed": sealed})), 4, device)


@every_form
def test_nothing_moves_unless_it_is_due(form: str, request: pytest.FixtureRequest) -> None:
    device = device_of(form, request)
    at = state(0, 9, 50, known=50, sealed=50, high=[1, 2], free=0.2, ties=False)
    assert check_exchange(at, 2, device, due=1) > 0
    given = tensors(at, device, 403)
    counts = exchange(*given, recent=2, due=torch.zeros(1, dtype=torch.int32, device=device))[2]
    assert not counts.any()
    assert np.array_equal(given[2].cpu().numpy(), at.block_of)
    assert np.array_equal(given[3].cpu().numpy(), at.slot_of)


@every_form
@pytest.mark.parametrize("seed", range(12))
def test_open_block(form: str, seed: int, request: pytest.FixtureRequest) -> None:
    device = device_of(form, request)
    rng = np.random.default_rng(seed)
    sealed, slots = int(rng.integers(5, 100)), int(rng.integers(8, 40))
    high, recent = rng.integers(0, 2, 3).tolist(), int(rng.integers(0, 4))
    known = max(0, sealed - int(rng.integers(0, 3))) if seed % 4 else 0
    low = [max(end - 1, 0) for end in high]
    at = state(
        seed, slots, sealed + 3, known=known, sealed=sealed, high=high, free=0.15 * (seed % 3), ties=seed % 2 == 0,
        low=low,
    )  # fmt: skip
    after = copy.deepcopy(at)
    for b, h in np.ndindex(at.block_of.shape[:2]):
        assign(after, b, h, int(given_up(at, recent, b, h)[0]), sealed)
    given = tensors(at, device, sealed * SIZE)
    open_block(*given, block_size=SIZE, recent=recent)
    assert np.array_equal(given[2].cpu().numpy(), after.block_of)
    assert np.array_equal(given[3].cpu().numpy(), after.slot_of)
    assert (given[3][:, :, sealed] >= 0).all()


@every_form
def test_a_block_is_opened_among_more_slots_than_are_sorted(form: str, request: pytest.FixtureRequest) -> None:
    device = device_of(form, request)
    for seed, free in ((0, 0.0), (1, 0.001)):
        at = state(seed, 2100, 2103, known=2100, sealed=2100, high=[1], free=free, ties=False)
        after = copy.deepcopy(at)
        for b, h in np.ndindex(at.block_of.shape[:2]):
            assign(after, b, h, int(given_up(at, 3, b, h)[0]), 2100)
        given = tensors(at, device, 2100 * SIZE)
        open_block(*given, block_size=SIZE, recent=3)
        assert np.array_equal(given[2].cpu().numpy(), after.block_of)
        assert np.array_equal(given[3].cpu().numpy(), after.slot_of)
        with pytest.raises(ValueError, match="more than the 1024 that are sorted"):
            exchange(*given, recent=3)


@every_form
def test_no_block_is_opened(form: str, request: pytest.FixtureRequest) -> None:
    """In the middle of a block, and where every slot must keep what it has."""
    device = device_of(form, request)
    at = state(0, 9, 50, known=40, sealed=40, high=[1], free=0.0, ties=False)
    for length, recent in ((321, 0), (320, 40)):
        given = tensors(at, device, length)
        open_block(*given, block_size=SIZE, recent=recent)
        assert np.array_equal(given[2].cpu().numpy(), at.block_of)
        assert np.array_equal(given[3].cpu().numpy(), at.slot_of)


def test_refusals() -> None:
    at = state(0, 9, 50, known=40, sealed=40, high=[1], free=0.0, ties=False)
    worth, known, block_of, slot_of, low, high, limits = tensors(at, "cpu", 320)
    with pytest.raises(ValueError, match="recent -1"):
        exchange(worth, known, block_of, slot_of, low, high, limits, recent=-1)
    with pytest.raises(TypeError, match=r"due has dtype torch\.bool"):
        exchange(worth, known, block_of, slot_of, low, high, limits, recent=0, due=torch.zeros(1).bool())
    with pytest.raises(ValueError, match=r"slot_of has shape \(1, 2, 49\)"):
        exchange(worth, known, block_of, slot_of[:, :, 1:], low, high, limits, recent=0)
    with pytest.raises(ValueError, match="1025 slots"):
        exchange(worth, known, torch.zeros(1, 2, 1025).int(), slot_of, low, high, limits, recent=0)
    with pytest.raises(ValueError, match="block_size 0"):
        open_block(worth, known, block_of, slot_of, low, high, limits, block_size=0, recent=0)
