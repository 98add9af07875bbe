"""`decode_attention` to blocks and to pairs of tokens, plain and packed, against float64; the parts of a list."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from pools import HALF, TINY, UNEVEN, Case, attend, make_case, packed_case
from references import cpu as reference

from hf_offload.cpu.kernels import parts
from hf_offload.cpu.kernels.block import STEP_TOKENS
from hf_offload.cpu.kernels.decode_attention import ERROR_BINS, ERROR_STEPS, LEAST_ERROR, Pairs


def draw_lists(shape: tuple[int, int], total: int, room: int, ordered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of some of so many items, always of the last, and counts; one is empty, one full. Behind it is garbage."""
    items, most = torch.full((*shape, room), 2**30, dtype=torch.int32), min(room, total)
    counts = torch.randint(0, most + 1, shape, dtype=torch.int32)
    counts[0, 0], counts[-1, -1] = 0, most
    for b, h in np.ndindex(shape):
        picked = torch.randperm(total)[: int(counts[b, h])].int()
        if len(picked) and total - 1 not in picked:
            picked[0] = total - 1
        items[b, h, : len(picked)] = picked.sort().values if ordered else picked
    return items, counts


def make(dtype: torch.dtype, packed: bool, dim: int, block_size: int, length: int) -> Case:
    """Ragged rows, of which a plain one has no valid token."""
    if packed:
        return packed_case(2, 2, dim, block_size, length, dtype)
    return make_case(3, 2, dim, block_size, length, dtype, padding=(0, block_size + 3, length), scattered=0.05)


def bound_of(lse: torch.Tensor, packed: bool) -> float:
    return 1e-4 if packed else 1e-5 * (1 + lse[lse.isfinite()].abs().max().item())


SLOW = pytest.mark.slow  # tiles and dtypes that no other test compiles
BLOCKS = [  # (dtype, group), packed, head size, block size, softcap
    (TINY, False, 128, 16, None),
    (TINY, False, 80, 32, 50.0),
    (UNEVEN, False, 96, 8, 5.0),
    (UNEVEN, False, 16, 128, None),
    (UNEVEN, False, 64, 64, None),
    (TINY, True, 64, 32, None),
    (TINY, True, 16, 128, 20.0),
    (TINY, True, 96, 8, None),
    pytest.param((torch.float16, 12), False, 128, 8, None, marks=SLOW),
    pytest.param((torch.float16, 4), True, 128, 32, 20.0, marks=SLOW),
    pytest.param((torch.bfloat16, 5), True, 256, 64, None, marks=SLOW),
]
PAIRS = [
    (TINY, False, 128, 16, None),
    (HALF, False, 64, 32, 5.0),
    (HALF, False, 96, 8, None),
    (HALF, False, 16, 128, 50.0),
    (TINY, True, 64, 32, None),
    (TINY, True, 16, 128, 20.0),
    (TINY, True, 96, 8, 20.0),
    pytest.param((torch.bfloat16, 7), False, 80, 32, None, marks=SLOW),
    pytest.param((torch.float16, 12), False, 256, 8, 5.0, marks=SLOW),
    pytest.param((torch.float16, 5), True, 80, 16, 20.0, marks=SLOW),
]
columns = ("kind", "packed", "dim", "block_size", "softcap")


@pytest.mark.parametrize(columns, BLOCKS, ids=str)
def test_blocks(kind: tuple[torch.dtype, int], packed: bool, dim: int, block_size: int, softcap: float | None) -> None:
    dtype, group = kind
    torch.manual_seed(dim)
    length, scale = 5 * block_size + 3, dim**-0.5
    case = make(dtype, packed, dim, block_size, length)
    batch = len(case.table)
    query = torch.randn(batch, 2 * group, dim) * (0.5 if packed else 3)
    blocks, counts = draw_lists((batch, 2), case.table.shape[1], 9, ordered=False)
    given = query, case.host_blocks, blocks, counts, length
    asked = query, case.clean, case.table, blocks, counts, case.valid, length
    want = reference.attend_blocks(*asked, scale=scale, softcap=softcap)
    expected = reference.listed_scores(*asked, scale=scale, softcap=softcap).nan_to_num(7.0, neginf=-math.inf)
    bound = bound_of(want[1], packed)
    one, two = (attend(*given, scale=scale, softcap=softcap, scores=True, threads=threads) for threads in (1, 3))
    assert all(map(torch.equal, one, two))
    out, lse, kbar, scores = attend(*given, scale=scale, softcap=softcap, means=False)
    assert (kbar == 7).all()
    assert (scores == 7).all()
    for got, right in zip((*one, out, lse), (*want, expected, *want[:2]), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=0, atol=bound)


@pytest.mark.parametrize(columns, PAIRS, ids=str)
def test_pairs(kind: tuple[torch.dtype, int], packed: bool, dim: int, block_size: int, softcap: float | None) -> None:
    """Weights of drawn pairs, tokens that are left out, and errors that are told and counted."""
    dtype, group = kind
    torch.manual_seed(dim)
    length, scale = 12 * block_size + 3, dim**-0.5
    case = make(dtype, packed, dim, block_size, length)
    shape = len(case.table), 2
    query = torch.randn(shape[0], 2 * group, dim) * (0.5 if packed else 3)
    total = 13 * block_size // 2
    pairs, counts = draw_lists(shape, total, total - 5, ordered=True)
    weights = torch.rand(pairs.shape) * 3 * (torch.rand(pairs.shape) < 0.8)
    weights[torch.arange(pairs.shape[2]) >= counts[..., None]] = math.nan
    portion = torch.rand(query.shape[:2])
    for skipped in (None, (torch.rand(*shape, 13 * block_size) < 0.3).byte()):
        want = reference.attend_pairs(
            query, case.clean, case.table, pairs, weights, counts, case.valid, length, portion, skipped,
            scale=scale, softcap=softcap,
        )  # fmt: skip
        found = []
        for threads in (1, 3):
            errors, tally = torch.full(query.shape[:2], 7.0), np.zeros(2 + ERROR_BINS, np.int64)
            marks = None if skipped is None else skipped.numpy()
            more = Pairs.of(
                weights.numpy(), 2 * group, skipped=marks, portion=portion.numpy(), errors=errors.numpy(), tally=tally
            )
            given = query, case.host_blocks, pairs, counts, length
            found.append((*attend(*given, scale=scale, softcap=softcap, pairs=more, threads=threads)[:3], errors))
            assert tally[0] == tally[2:].sum() == errors.numel()
            assert tally[1] / 2**32 == pytest.approx(float(errors.double().sum()), rel=1e-5, abs=1e-6)
            octaves = ERROR_STEPS * (errors.double().clamp(min=1e-30).log2() - LEAST_ERROR)
            bins = octaves.floor().clamp(0, ERROR_BINS - 1).long().flatten()
            assert (np.bincount(bins, minlength=ERROR_BINS) == tally[2:]).all()
        assert all(map(torch.equal, *found))
        for got, right in zip(found[0][:3], want[:3], strict=True):
            torch.testing.assert_close(got.double(), right, rtol=0, atol=bound_of(want[1], packed))
        torch.testing.assert_close(found[0][3].double(), want[3], rtol=1e-3, atol=1e-5)


def test_many_rows_are_shared_by_threads() -> None:
    torch.manual_seed(2)
    dtype, group = UNEVEN
    case = make_case(16, 4, 64, 32, 32 * 9 + 1, dtype, padding=(5,) * 16)
    query = torch.randn(16, 4 * group, 64) * 3
    blocks, counts = draw_lists((16, 4), 10, 9, ordered=False)
    asked = query, case.clean, case.table, blocks, counts, case.valid, case.length
    want = reference.attend_blocks(*asked, scale=0.125, softcap=None)
    for _ in range(5):
        found = attend(query, case.host_blocks, blocks, counts, case.length, scale=0.125, threads=4)
        for got, right in zip(found, want, strict=False):
            torch.testing.assert_close(got.double(), right, rtol=0, atol=bound_of(want[1], packed=False))


def test_few_blocks_in_wide_room_are_shared_and_keep_every_bit() -> None:
    torch.manual_seed(6)
    case = make_case(1, 2, 32, 16, 2400, torch.float32, (0,), scattered=0.0)
    query, counts, found = torch.randn(1, 4, 32), torch.tensor([[141, 73]], dtype=torch.int32), []
    for capacity in (150, 1500):
        blocks = torch.full((1, 2, capacity), 2**30, dtype=torch.int32)
        blocks[..., :149] = torch.arange(149, dtype=torch.int32)
        found.append(attend(query, case.host_blocks, blocks, counts, case.length, scale=0.2, threads=2)[:3])
    assert all(map(torch.equal, *found))
    asked = query, case.clean, case.table, blocks, counts, case.valid, case.length
    for got, right in zip(found[0], reference.attend_blocks(*asked, scale=0.2, softcap=None), strict=True):
        torch.testing.assert_close(got.double(), right, rtol=0, atol=1e-5)


def test_parts_cover_a_list_and_have_room() -> None:
    for size, many in itertools.product((8, 16, 128), (1, 2, 21)):
        step = max(1, STEP_TOKENS // size)
        for capacity in (*range(1, 70), 200, 600):
            shares = [parts.part_items.py_func(count, many, size, step) for count in range(capacity + 1)]
            assert all(share * many >= count for count, share in enumerate(shares))
            assert max(shares) <= parts.most_part_items.py_func(capacity, many, size, step)


@pytest.mark.parametrize("packed", [False, True])
def test_a_query_that_is_not_finite_does_not_go_unnoticed(packed: bool) -> None:
    case = packed_case(1, 1, 16, 8, 16, torch.float32) if packed else make_case(1, 1, 16, 8, 16, torch.float32, (0,))
    query = torch.ones(1, 2, 16)
    query[0, :, 5] = math.nan
    for block in (0, 1):
        given = torch.full((1, 1, 1), block, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32)
        out, lse, *_ = attend(query, case.host_blocks, *given, 16, scale=1.0)
        assert lse.isnan().all()
        assert out.isnan().all()
