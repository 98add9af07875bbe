"""`query_lse` and `weigh_tokens` against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pools import Case, make_case, run
from references import hgca as reference
from references.cpu import pack_block

from hf_offload.cpu.kernels.int8_blocks import Int8Records, pack_records, packed_bytes
from hf_offload.cpu.kernels.record import HostBlocks
from hf_offload.cpu.launch import tag_of
from hf_offload.policies.hgca.kernels.query_weights import Queries, query_lse, weigh_tokens


def _check(
    case: Case, group: int, queries: int, first: int, stop: int, start: int, dtype: torch.dtype,
    softcap: float | None = None, skipped: int = 0, largest: bool = False, threads: int = 1, packed: Any = None,
) -> None:  # fmt: skip
    """Both kernels, one after the other."""
    kv_heads, dim = case.clean.shape[1], case.clean.shape[4]
    batch = len(case.table)
    query = torch.randn(batch, kv_heads * group, queries, dim) * 2
    at = case.valid[:, start : start + queries] == 0
    query[at[:, None].expand(-1, kv_heads * group, -1)] = math.nan
    lse = torch.full(query.shape[:3], 7.0)
    pool = case.host_blocks(dtype, packed)
    asked = Queries(query.numpy(), kv_heads, start, first, stop, dim**-0.5, softcap)
    run(query_lse(pool, asked, lse.numpy()), threads)
    scores = reference.query_scores(
        query, case.clean, case.table, case.valid, first, stop, start, scale=dim**-0.5, softcap=softcap
    )
    want = scores.logsumexp(-1)
    assert ((want == -math.inf) | want.isfinite()).all()
    digits = 1e-4 if packed else 1e-5  # a query that meets codes is rounded to 16 bits
    bound = digits * (1 + want[want.isfinite()].abs().max().item()) if want.isfinite().any() else 0
    torch.testing.assert_close(lse.double(), want, rtol=0, atol=bound)
    lse[0, 0, queries // 2] = -math.inf
    width = case.valid.shape[1]
    average = torch.rand(batch, kv_heads * group, width + 5)
    average[..., first:stop] = math.nan
    average[..., :first] = 7.0
    average[..., stop:] = 7.0
    coefficient = None if largest else torch.rand(queries) / queries
    expected = reference.weigh_tokens(scores, lse, coefficient, average, case.valid, first, stop, start, skipped)
    joining = None if coefficient is None else coefficient.numpy()
    launch = weigh_tokens(pool, asked, lse.numpy(), joining, average.numpy(), skipped=skipped)
    run(launch, threads)
    assert launch.cost > 0
    torch.testing.assert_close(average.double(), expected, rtol=3 * digits, atol=digits / 10)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("group", "dim", "block_size", "dtype", "queries", "softcap", "skipped", "largest"),
    [
        (3, 64, 32, torch.bfloat16, 37, None, 9, False),
        (3, 64, 32, torch.bfloat16, 37, None, 0, True),
        (1, 128, 16, torch.bfloat16, 1, 20.0, 1, False),
        (7, 64, 128, torch.bfloat16, 20, 5.0, 30, True),
        pytest.param(4, 80, 8, torch.float16, 33, None, 0, False, marks=pytest.mark.slow),
        pytest.param(1, 16, 64, torch.float16, 150, None, 64, True, marks=pytest.mark.slow),
        (4, 80, 8, torch.float32, 33, None, 0, False),
        (1, 16, 64, torch.bfloat16, 150, None, 64, True),
        (7, 128, 8, torch.float32, 5, None, 5, False),
    ],
    ids=str,
)
def test_weights(
    group: int, dim: int, block_size: int, dtype: torch.dtype, queries: int, softcap: float | None, skipped: int,
    largest: bool,
) -> None:  # fmt: skip
    torch.manual_seed(group * dim)
    length = 9 * 32 + 133  # the last block is not full
    case = make_case(3, 2, dim, block_size, length, dtype, padding=(0, 200, length - 2), scattered=0.05)
    case.valid[2, :length] = 0  # a row in which nothing is valid
    _check(case, group, queries, 0, length, length - queries, dtype, softcap, skipped, largest)
    # A middle part that the queries see all of; one that none sees.
    _check(case, group, queries, 128, 256, length - queries, dtype, softcap, skipped, largest)
    _check(case, group, queries, 256, length, 256 - queries, dtype, softcap, skipped, largest)


@pytest.mark.parametrize("largest", [False, True])
def test_parts_and_rows_are_shared_by_threads(largest: bool) -> None:
    torch.manual_seed(4)
    case = make_case(2, 2, 64, 32, 3000, torch.bfloat16, padding=(0, 700), scattered=0.01)
    for queries, threads in ((100, 3), (1, 4)):
        _check(case, 3, queries, 0, 3000, 3000 - queries, torch.bfloat16, largest=largest, threads=threads)


def test_nothing_depends_on_the_number_of_threads() -> None:
    torch.manual_seed(5)
    case = make_case(1, 2, 64, 32, 2500, torch.bfloat16, padding=(0,), scattered=0.01)
    query = torch.randn(1, 6, 50, 64)
    found = []
    for threads in (1, 4):
        lse, average = torch.empty(1, 6, 50), torch.zeros(1, 6, 2500)
        pool = case.host_blocks(torch.bfloat16)
        asked = Queries(query.numpy(), 2, 2450, 0, 2500, 0.125, None)
        run(query_lse(pool, asked, lse.numpy()), threads)
        run(weigh_tokens(pool, asked, lse.numpy(), np.full(50, 0.02, np.float32), average.numpy()), threads)
        found.append((lse, average))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.slow
def test_packed_blocks() -> None:
    torch.manual_seed(6)
    case = make_case(2, 2, 64, 32, 200, torch.bfloat16, padding=(0, 40))
    case.clean = case.clean.double()  # what codes stand for has more digits than the pool's dtype
    odd, size = np.arange(1, len(case.block_ptr) - 1, 2), 32 * 64
    record = 2 * size * 2
    records = np.zeros((len(odd), 2, record), np.uint8)
    for i, place in enumerate(odd):
        keys = case.block_ptr[place] + record * np.arange(2)
        packed = records[i].ctypes.data + packed_bytes(64, 32) * np.arange(2)
        pack_records(keys, keys + record // 2, 128, 128, packed, kv_dtype=torch.bfloat16, dim=64, block_size=32).run()
        case.clean[place, :, 0], case.clean[place, :, 1] = pack_block(
            case.clean[place, :, 0].double(), case.clean[place, :, 1].double()
        )
        case.block_ptr[place] = records[i].ctypes.data + 1
    _check(case, 3, 21, 0, 200, 179, torch.bfloat16, packed=Int8Records(packed_bytes(64, 32)))


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"query": np.zeros((1, 3, 5, 60), np.float32)}, ValueError, "60"),
        ({"query": np.zeros((1, 3, 5, 64))}, TypeError, "float64"),
        ({"kv_heads": 2}, ValueError, "3 query heads"),
        ({"first": 16}, ValueError, "16"),
        ({"stop": 129}, ValueError, "129"),
        ({"start": 124}, ValueError, "124"),
        ({"softcap": 0.0}, ValueError, "softcap"),
        ({"lse": np.zeros((1, 3, 4), np.float32)}, ValueError, "lse"),
        ({"coefficient": np.zeros(4, np.float32)}, ValueError, "coefficient"),
        ({"skipped": -1}, ValueError, "skipped"),
        ({"joined": np.zeros((1, 3, 99), np.float32)}, ValueError, "99"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {
        "query": np.zeros((1, 3, 5, 64), np.float32),
        "start": 96,
        "first": 32,
        "stop": 100,
        "scale": 1.0,
        "softcap": None,
        "tag": tag_of(torch.bfloat16),
        "block_ptr": np.zeros(4, np.int64),
        "table": np.zeros((1, 4), np.int32),
        "holes": np.zeros((1, 4), np.uint8),
        "valid": np.zeros((1, 128), np.uint8),
        "kv_heads": 1,
        "block_size": 32,
        "lse": np.zeros((1, 3, 5), np.float32),
        "coefficient": None,
        "joined": np.zeros((1, 3, 100), np.float32),
        "skipped": 0,
    }
    given = {**arguments, **changes}
    parts = [{name: given.pop(name) for name in kind._fields if name in given} for kind in (HostBlocks, Queries)]
    pool, asked = HostBlocks(**parts[0]), Queries(**parts[1])
    with pytest.raises(error, match=text):
        weigh_tokens(pool, asked, **given)
