"""`decode_attention` gives the bits of the two kernels that it replaced (`references/replaced`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pools import make_case, packed_pool, run
from references.replaced.block_decode import sparse_decode
from references.replaced.pair_decode import ERROR_BINS, attend_pairs

from hf_offload.cpu.kernels.decode_attention import Pairs, decode_attention
from hf_offload.cpu.kernels.int8_blocks import Int8Records, packed_bytes
from hf_offload.cpu.kernels.record import HostBlocks
from hf_offload.cpu.launch import tag_of

FORMS = [
    # group, head dimension, block size, dtype, softcap, k̄
    (3, 64, 32, torch.bfloat16, None, True),
    pytest.param((5, 80, 8, torch.float16, 5.0, False), marks=pytest.mark.slow),
    pytest.param((1, 128, 16, torch.float32, 5.0, True), marks=pytest.mark.slow),
    pytest.param((4, 16, 128, torch.bfloat16, None, False), marks=pytest.mark.slow),
]


def request(
    group: int, dim: int, size: int, dtype: torch.dtype, packed: bool
) -> tuple[HostBlocks, torch.Tensor, int, list[Any]]:
    """Blocks of three rows, the first of which is whole and the last of which is padding, and queries."""
    torch.manual_seed(group + size)
    length = 11 * size + 3
    case = make_case(3, 2, dim, size, length, dtype, (0, size + 3, length), scattered=0.05)
    ptr, format, keep = case.block_ptr, None, [case]
    if packed:
        pool, _ = packed_pool(2, dim, size, len(case.clean), dtype)
        ptr, format = pool.block_ptr, Int8Records(packed_bytes(dim, size))
        case.table[:, -1] = case.table[:, -1] // 2 * 2  # the open block of a row is not packed
        keep.append(pool)
    blocks = HostBlocks(tag_of(dtype), ptr, case.table.numpy(), case.holes.numpy(), case.valid.numpy(), size, format)
    return blocks, torch.randn(3, 2 * group, dim) * 3, length, keep


def results(query: torch.Tensor) -> list[np.ndarray[Any, Any]]:
    return [np.full(shape, 7, np.float32) for shape in (query.shape, query.shape[:2], query.shape)]


def lists(count: int, room: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Lists of the last one of so many items and others, one of them empty and one of all."""
    counts = torch.randint(1, count, (3, 2), dtype=torch.int32)
    counts[0, 0], counts[0, 1] = count, 0
    items = torch.full((3, 2, room), 2**30, dtype=torch.int32)
    for b in range(3):
        for h in range(2):
            chosen = torch.randperm(count - 1)[: max(int(counts[b, h]) - 1, 0)]
            items[b, h, : counts[b, h]] = torch.cat([chosen, torch.tensor([count - 1])])[: counts[b, h]]
    return items.numpy(), counts.numpy()


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_blocks(form: tuple[Any, ...], packed: bool) -> None:
    group, dim, size, dtype, softcap, wants = form
    blocks, query, length, keep = request(group, dim, size, dtype, packed)
    items, counts = lists(12, 200)
    old, new, model = results(query), results(query), {"scale": dim**-0.5, "softcap": softcap}
    scores = [np.full((*query.shape[:2], 200 * size), 7, np.float32) for _ in range(2)]
    before = sparse_decode(
        query.numpy(), blocks.block_ptr, blocks.table, items, counts, blocks.holes, blocks.valid, length, *old[:2],
        old[2] if wants else None, kv_dtype=dtype, block_size=size, packed=blocks.packed, scores=scores[0], **model,
    )  # fmt: skip
    after = decode_attention(
        query.numpy(), blocks, items, counts, length, *new[:2], new[2] if wants else None, scores=scores[1], **model
    )
    assert before.tasks == after.tasks
    run(before)
    run(after, threads=2)
    for one, other in zip([*old, scores[0]], [*new, scores[1]], strict=True):
        assert one.tobytes() == other.tobytes()
    assert np.isfinite(new[0]).all()
    del keep


@pytest.mark.parametrize("skips", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_pairs(form: tuple[Any, ...], packed: bool, skips: bool) -> None:
    group, dim, size, dtype, softcap, wants = form
    blocks, query, length, keep = request(group, dim, size, dtype, packed)
    items, counts = lists(math.ceil(length / 2), 1000)
    weights = (torch.rand(items.shape) * 4 - 2).clamp(min=0).numpy()
    skipped = (torch.rand(3, 2, length) < 0.2).to(torch.uint8).numpy() if skips else None
    portion = torch.rand(3, 2 * group).numpy()
    old, new, model = results(query), results(query), {"scale": dim**-0.5, "softcap": softcap}
    errors = [np.zeros((3, 2 * group), np.float32) for _ in range(2)]
    tallies = [np.zeros(2 + ERROR_BINS, np.int64) for _ in range(2)]
    before = attend_pairs(
        query.numpy(), blocks.block_ptr, blocks.table, items, weights, counts, blocks.holes, blocks.valid, length,
        *old[:2], old[2] if wants else None, kv_dtype=dtype, block_size=size, packed=blocks.packed, skipped=skipped,
        portion=portion, errors=errors[0], tally=tallies[0], **model,
    )  # fmt: skip
    pairs = Pairs.of(weights, 2 * group, skipped=skipped, portion=portion, errors=errors[1], tally=tallies[1])
    after = decode_attention(
        query.numpy(), blocks, items, counts, length, *new[:2], new[2] if wants else None, pairs=pairs, **model
    )
    assert before.tasks == after.tasks
    run(before)
    run(after, threads=2)
    for one, other in zip([*old, errors[0], tallies[0]], [*new, errors[1], tallies[1]], strict=True):
        assert one.tobytes() == other.tobytes()
    assert np.isfinite(new[0]).all()
    assert (errors[1] > 0).any()
    del keep
