"""`decode_attention` to blocks against float64; `test_pairs.py` has that to pairs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pools import Case, for_python, make_case, run
from references import cpu as reference

from hf_offload.cpu.kernels import parts as splitting
from hf_offload.cpu.kernels.block import STEP_TOKENS
from hf_offload.cpu.kernels.decode_attention import Pairs, decode_attention
from hf_offload.cpu.kernels.parts import PART_TOKENS
from hf_offload.cpu.kernels.record import HostBlocks
from hf_offload.cpu.launch import tag_of

most_part_items, part_items = for_python(splitting.most_part_items, splitting.part_items)


def _choose(case: Case, kv_heads: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, logical = case.table.shape
    blocks = torch.full((batch, kv_heads, capacity), 2**30, dtype=torch.int32)  # garbage beyond the count
    counts = torch.randint(0, min(capacity, logical) + 1, (batch, kv_heads), dtype=torch.int32)
    counts[0, 0], counts[-1, -1] = 0, min(capacity, logical)
    for b in range(batch):
        for h in range(kv_heads):
            count = int(counts[b, h])
            picked = torch.randperm(logical)[:count].int()
            if count and logical - 1 not in picked:
                picked[0] = logical - 1  # the partly filled block
            blocks[b, h, :count] = picked
    return blocks, counts


def _check(
    case: Case, group: int, dtype: torch.dtype, softcap: float | None, kbar: bool, threads: int, scores: bool
) -> None:
    batch, kv_heads, dim = len(case.table), case.clean.shape[1], case.clean.shape[4]
    block_size, scale = case.clean.shape[3], dim**-0.5
    query = torch.randn(batch, kv_heads * group, dim) * 3
    blocks, counts = _choose(case, kv_heads, capacity=9)
    out, means = torch.full_like(query, 7), torch.full_like(query, 7)
    lse, raw = torch.full(query.shape[:2], 7.0), torch.full((*query.shape[:2], 9 * block_size), 7.0)
    launch = decode_attention(
        query.numpy(), case.host_blocks(dtype), blocks.numpy(), counts.numpy(), case.length, out.numpy(), lse.numpy(),
        means.numpy() if kbar else None, scale=scale, softcap=softcap, scores=raw.numpy() if scores else None,
    )  # fmt: skip
    assert launch.tasks % (batch * kv_heads) == 0
    assert launch.cost > 0
    run(launch, threads)
    want = reference.attend_blocks(
        query, case.clean, case.table, blocks, counts, case.valid, case.length, scale=scale, softcap=softcap
    )
    bound = 1e-5 * (1 + want[1][want[1].isfinite()].abs().max().item())
    torch.testing.assert_close(out.double(), want[0], rtol=0, atol=bound)
    torch.testing.assert_close(lse.double(), want[1], rtol=0, atol=bound)
    if kbar:
        torch.testing.assert_close(means.double(), want[2], rtol=0, atol=bound)
    if scores:
        expected = reference.listed_scores(
            query, case.clean, case.table, blocks, counts, case.valid, case.length, scale=scale, softcap=softcap
        )
        torch.testing.assert_close(raw.double(), expected.nan_to_num(7.0, neginf=-math.inf), rtol=0, atol=bound)


# Head tiles compile separately: the sizes are spread over dtypes so that every one is met, few of them twice.
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("group", "dim", "block_size", "dtype"),
    [
        (3, 64, 32, torch.bfloat16),
        (3, 96, 8, torch.bfloat16),
        (3, 16, 128, torch.bfloat16),
        (3, 80, 32, torch.bfloat16),
        (1, 128, 16, torch.float32),
        (5, 64, 64, torch.float16),
        pytest.param(7, 80, 32, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(12, 128, 8, torch.float16, marks=pytest.mark.slow),
        pytest.param(12, 64, 32, torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_decode(group: int, dim: int, block_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(group)
    length = 5 * block_size + 3
    case = make_case(3, 2, dim, block_size, length, dtype, padding=(0, block_size + 3, length), scattered=0.05)
    _check(case, group, dtype, softcap=None, kbar=True, threads=1, scores=True)


@pytest.mark.parametrize("softcap", [None, 5.0, 50.0])
@pytest.mark.parametrize("kbar", [False, True])
def test_decode_softcap(softcap: float | None, kbar: bool) -> None:
    torch.manual_seed(1)
    for block_size in (8, 32):
        case = make_case(2, 3, 64, block_size, 4 * block_size, torch.bfloat16, padding=(0, block_size // 2))
        _check(case, 3, torch.bfloat16, softcap, kbar, threads=1, scores=not kbar)


def test_decode_shared_by_threads() -> None:
    torch.manual_seed(2)
    case = make_case(16, 4, 64, 32, 32 * 9 + 1, torch.bfloat16, padding=(5,) * 16)
    for _ in range(5):
        _check(case, 3, torch.bfloat16, None, True, threads=4, scores=True)


def test_few_blocks_in_wide_room_are_shared_and_keep_every_bit() -> None:
    torch.manual_seed(6)
    case = make_case(1, 2, 32, 16, 2400, torch.float32, (0,), scattered=0.0)
    query, counts = torch.randn(1, 4, 32), torch.tensor([[149, 70]], dtype=torch.int32)
    found = []
    for capacity in (150, 1500):
        blocks = torch.full((1, 2, capacity), 2**30, dtype=torch.int32)
        for h in range(2):
            blocks[0, h, : counts[0, h]] = torch.arange(counts[0, h], dtype=torch.int32)
        out, lse = torch.empty_like(query), torch.empty(1, 4)
        launch = decode_attention(
            query.numpy(), case.host_blocks(torch.float32), blocks.numpy(), counts.numpy(), case.length, out.numpy(),
            lse.numpy(), scale=0.2, softcap=None,
        )  # fmt: skip
        run(launch, threads=2)
        found.append((launch.tasks, out, lse))
    assert found[0][0] < found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][2], found[1][2])


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 170, 600, 2048])
def test_parts_are_even_and_no_more_than_there_are_tokens_for(count: int) -> None:
    share = part_items(count, 21, 16, 2)
    assert share <= most_part_items(2048, 21, 16, 2)
    used = -(-count // share)
    assert share % 2 == 0
    assert used <= min(21, max(-(-count * 16 // 512), 1))
    assert used * share - count < 2 * max(used, 1)  # the last part is as large as the others, but for a step of each


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_no_count_makes_larger_parts_than_there_is_room_for(block_size: int) -> None:
    step = max(1, STEP_TOKENS // block_size)
    for capacity in (*range(1, 70), 200, 1000):
        for parts in {1, 2, 21, min(-(-capacity * block_size // PART_TOKENS), 64)}:
            room = most_part_items(capacity, parts, block_size, step)
            assert max(part_items(count, parts, block_size, step) for count in range(capacity + 1)) <= room
            assert part_items(capacity, parts, block_size, step) * parts >= capacity


def test_large_scores_stay_finite() -> None:
    torch.manual_seed(3)
    case = make_case(1, 1, 64, 8, 40, torch.bfloat16, padding=(0,))
    query = torch.randn(1, 3, 64) * 1e4
    blocks, counts = torch.arange(5).int().view(1, 1, 5), torch.tensor([[5]]).int()
    out, lse = torch.empty_like(query), torch.empty(1, 3)
    decode_attention(
        query.numpy(), case.host_blocks(torch.bfloat16), blocks.numpy(), counts.numpy(), 40, out.numpy(), lse.numpy(),
        scale=1.0, softcap=None,
    )()  # fmt: skip
    want = reference.attend_blocks(
        query, case.clean, case.table, blocks, counts, case.valid, 40, scale=1.0, softcap=None
    )
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-6, atol=0)
    torch.testing.assert_close(out.double(), want[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"query": np.zeros((1, 3, 60), np.float32)}, ValueError, "60"),
        ({"query": np.zeros((1, 3, 64), np.float64)}, TypeError, "float64"),
        ({"out": np.zeros((1, 64, 3), np.float32).transpose(0, 2, 1)}, ValueError, "contiguous"),
        ({"items": np.zeros((1, 2, 4), np.int32)}, ValueError, "3 query heads"),
        ({"holes": np.zeros((1, 3), np.uint8)}, ValueError, "holes"),
        ({"length": 129}, ValueError, "129"),
        ({"block_size": 24}, ValueError, "24"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"scores": np.zeros((1, 3, 127), np.float32)}, ValueError, "scores"),
        ({"scores": np.zeros((1, 3, 128), np.float32), "pairs": True}, ValueError, "scores=None with pairs"),
    ],
)
def test_decode_refuses(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    given: dict[str, Any] = {
        "query": np.zeros((1, 3, 64), np.float32),
        "tag": tag_of(torch.bfloat16),
        "block_ptr": np.zeros(4, np.int64),
        "table": np.zeros((1, 4), np.int32),
        "holes": np.zeros((1, 4), np.uint8),
        "valid": np.zeros((1, 128), np.uint8),
        "block_size": 32,
        "items": np.zeros((1, 1, 4), np.int32),
        "counts": np.zeros((1, 1), np.int32),
        "length": 128,
        "out": np.zeros((1, 3, 64), np.float32),
        "lse": np.zeros((1, 3), np.float32),
        "scale": 1.0,
        "softcap": None,
        "pairs": None,
    }
    given |= changes
    given["blocks"] = HostBlocks(**{name: given.pop(name) for name in HostBlocks._fields if name in given})
    if given["pairs"]:
        given["pairs"] = Pairs.of(np.zeros((1, 1, 4), np.float32), 3)
    with pytest.raises(error, match=text):
        decode_attention(**given)


def test_a_dtype_without_kernels_is_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        tag_of(torch.float64)
