"""`mark_retained` and `compact_tokens` against plain torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pairwise import covering
from pools import bits, run
from references import hgca as reference

from hf_offload.policies.hgca.kernels.compact import Rule, compact_tokens, mark_retained


def _averages(batch: int, heads: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Averages, some of them 0, and valid tokens; the averages of the others are NaN."""
    average = torch.rand(batch, heads, tokens)
    average[..., ::5] = 0.0
    valid = (torch.rand(batch, tokens) < 0.9).to(torch.uint8)
    average[(valid[:, None] == 0).expand_as(average)] = math.nan
    return average, valid


@pytest.mark.parametrize(
    ("span", "threads", "group", "rule"),
    covering(
        [(0, 0, 333), (333, 0, 333), (100, 17, 300), (20, 21, 22), (9, 8, 8), (5, 3, 19)],
        [1, 3],
        [1, 3, 4, 7],
        ["any", "mean"],
    ),
    ids=str,
)
def test_what_is_kept(span: tuple[int, int, int], threads: int, group: int, rule: Rule) -> None:
    border, first, stop = span
    torch.manual_seed(group)
    batch, kv_heads = 3, 2
    average, valid = _averages(batch, kv_heads * group, 333)
    old, new = torch.tensor([0.5, -math.inf, 2.0]), torch.tensor([-math.inf, 0.6, 0.3])
    kept, counts = torch.full((batch, kv_heads, 340), 7, dtype=torch.uint8), torch.full((batch, kv_heads), -1)
    run(
        mark_retained(
            average.numpy(), valid.numpy(), old.numpy(), new.numpy(), border, first, stop, kept.numpy(),
            counts.numpy(), kv_heads=kv_heads, rule=rule,
        ),
        threads,
    )  # fmt: skip
    want = reference.mark_retained(average, valid, old, new, border, first, stop, kv_heads=kv_heads, rule=rule)
    assert torch.equal(kept[..., first:stop], want.to(torch.uint8))
    assert torch.equal(counts, want.sum(-1))
    assert (kept[..., :first] == 7).all()
    assert (kept[..., stop:] == 7).all()


def test_an_average_at_the_threshold_is_not_kept() -> None:
    average, bar = torch.full((1, 2, 20), 0.25), np.array([0.25], np.float32)
    average[0, 1, 3] = 0.26
    kept, counts = np.zeros((1, 1, 20), np.uint8), np.zeros((1, 1), np.int64)
    marks = np.ones((1, 20), np.uint8)
    mark_retained(average.numpy(), marks, bar, bar, 0, 0, 20, kept, counts, kv_heads=1, rule="any")()
    assert kept[0, 0].nonzero()[0].tolist() == [3]
    assert counts.tolist() == [[1]]


@pytest.mark.parametrize(
    ("dim", "block_size", "dtype", "threads"),
    [(64, 32, torch.bfloat16, 1), (64, 32, torch.bfloat16, 4), (80, 8, torch.float16, 1), (128, 16, torch.float32, 3)],
    ids=str,
)
def test_what_is_kept_is_appended(dim: int, block_size: int, dtype: torch.dtype, threads: int) -> None:
    torch.manual_seed(dim)
    batch, kv_heads, first, tokens, room = 2, 3, 11, 150, 6 * 32
    lists, blocks = batch * kv_heads, room // block_size
    marks = torch.rand(batch, kv_heads, tokens) < torch.tensor([0.4, 0.9])[:, None, None]
    kept = torch.ones(batch, kv_heads, first + tokens, dtype=torch.uint8)
    kept[..., first:] = marks
    k, v = torch.randn(2, batch, tokens, kv_heads, dim).to(dtype).transpose(2, 3)
    pool = torch.full((lists * blocks, 2, block_size, dim), 7.0, dtype=dtype)
    block_ptr = pool.data_ptr() + pool[0].nbytes * np.arange(len(pool))
    table = torch.randperm(len(pool)).view(lists, blocks).int()
    begin = torch.tensor([0, 1, block_size, block_size - 1, 3, 5])
    positions = torch.full((lists, room), -1, dtype=torch.int32)
    for source in ((k, v), (bits(k), bits(v))):
        run(
            compact_tokens(
                *source, kept.numpy(), first, block_ptr, table.numpy(), begin.numpy(), positions.numpy(),
                block_size=block_size, kv_dtype=dtype,
            ),
            threads,
        )  # fmt: skip
        for i in range(lists):
            b, h = divmod(i, kv_heads)
            found = marks[b, h].nonzero()[:, 0]
            low, high = int(begin[i]), int(begin[i]) + len(found)
            entries = pool[table[i].long()].transpose(0, 1).flatten(1, 2)  # [2, room, D]
            assert torch.equal(entries[0, low:high], k[b, h, found])
            assert torch.equal(entries[1, low:high], v[b, h, found])
            assert (entries[:, :low] == 7).all()
            assert (entries[:, high:] == 7).all()
            assert torch.equal(positions[i, low:high].long(), first + found)
            assert (positions[i, :low] == -1).all()
            assert (positions[i, high:] == -1).all()
        pool.fill_(7.0)


def _count_arguments() -> dict[str, Any]:
    return {
        "average": np.zeros((1, 4, 40), np.float32),
        "valid": np.zeros((1, 40), np.uint8),
        "threshold_old": np.zeros(1, np.float32),
        "threshold_new": np.zeros(1, np.float32),
        "border": 0,
        "first": 0,
        "stop": 40,
        "kept": np.zeros((1, 2, 40), np.uint8),
        "counts": np.zeros((1, 2), np.int64),
        "kv_heads": 2,
        "rule": "any",
    }


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"kv_heads": 3}, ValueError, "4 query heads"),
        ({"kept": np.zeros((1, 4, 40), np.uint8)}, ValueError, "kept"),
        ({"threshold_old": np.zeros(2, np.float32)}, ValueError, "threshold_old"),
        ({"counts": np.zeros((1, 2), np.int32)}, TypeError, "int32"),
        ({"stop": 41}, ValueError, "41"),
        ({"first": -1}, ValueError, "-1"),
        ({"rule": "all"}, ValueError, "all"),
    ],
)
def test_counting_refuses_what_does_not_fit(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        mark_retained(**{**_count_arguments(), **changes})


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"v": torch.zeros(1, 2, 7, 16)}, ValueError, "agree"),
        ({"kv_dtype": torch.bfloat16}, TypeError, "bfloat16"),
        ({"k": torch.zeros(1, 2, 16, 8).mT, "v": torch.zeros(1, 2, 16, 8).mT}, ValueError, "contiguous"),
        ({"block_size": 12}, ValueError, "12"),
        ({"first": 33}, ValueError, "33"),
        ({"begin": np.array([0, 25])}, ValueError, "33 entries"),
        ({"begin": np.array([0, -1])}, ValueError, "-1"),
        ({"positions": np.zeros((2, 7), np.int32)}, ValueError, "hold 7"),
    ],
)
def test_copying_refuses_what_does_not_fit(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {
        "k": torch.zeros(1, 2, 8, 16),
        "v": torch.zeros(1, 2, 8, 16),
        "kept": np.ones((1, 2, 40), np.uint8),
        "first": 32,
        "block_ptr": np.zeros(8, np.int64),
        "table": np.zeros((2, 4), np.int32),
        "begin": np.zeros(2, np.int64),
        "positions": np.zeros((2, 40), np.int32),
        "block_size": 8,
        "kv_dtype": torch.float32,
    }
    with pytest.raises(error, match=text):
        compact_tokens(**{**arguments, **changes})
