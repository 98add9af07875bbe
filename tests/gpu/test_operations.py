"""The GPU operations in torch, in Triton's interpreter and on a GPU: what they compute and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairwise import covering
from references import fluxion as reference_retrieve
from torch import Tensor

from hf_offload.gpu.block_topk import choose_runs
from hf_offload.gpu.digest_scores import JOINS
from hf_offload.gpu.kv_copy import PackedLayout
from hf_offload.gpu.paged_attention import count_splits

from . import operations as of
from .operations import Case

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes under masks too

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RECORDS = [(2, 2, 32, 64), (1, 1, 8, 80), (1, 2, 128, 16), (2, 1, 8, 256)]
TOKENS = [
    ((2, 3, 32, 64), "turned", 0, 97),
    ((2, 3, 32, 64), "contiguous", 5, 7),  # within one block
    ((3, 2, 16, 96), "fused", 31, 34),
    ((1, 1, 8, 80), "contiguous", 13, 27),
    ((1, 2, 128, 16), "turned", 127, 2),
    ((2, 2, 16, 32), "mixed", 18, 40),
    ((1, 2, 8, 16), "contiguous", 9, 0),  # no new token
]
LISTINGS = [  # (KV heads, group, D, block size, width): tiles join blocks, are blocks, or cut them; several shares
    (2, 1, 16, 8, 40), (1, 3, 80, 16, 17), (2, 5, 32, 32, 9), (1, 16, 64, 128, 3), (1, 33, 16, 16, 20),
]  # fmt: skip
AVERAGES = [(2, 1, 16, 8, 9), (1, 3, 80, 16, 5), (1, 16, 64, 128, 2), (2, 17, 16, 8, 5)]
KEYS = [(8, 16), (16, 80), (64, 32)]  # tokens of a block, D
VECTORS = [  # group, width, blocks, sealed
    (1, 16, 1, 1), (3, 80, 37, 33), (7, 128, 70, 70), (16, 256, 20, 1), (4, 512, 5, 0), (33, 16, 9, 8),
]  # fmt: skip
SUBMEANS = [  # pairs, D, group, blocks, sealed
    (4, 16, 3, 41, 37), (8, 64, 7, 20, 18), (16, 80, 4, 19, 17), (16, 128, 5, 9, 0), (32, 256, 2, 3, 3),
    (4, 16, 17, 9, 8),
]  # fmt: skip
JOINED = [(1, 1, 1), (3, 37, 33), (7, 300, 256), (4, 1100, 1025), (2, 9, 0), (18, 9, 8)]

close_scores = 1 + torch.randint(0, 50, (1, 1, 16384), generator=torch.Generator().manual_seed(0)) * 2**-23
SELECTED: list[tuple[Any, ...]] = [  # score, sealed, length, low, high, recent, k
    (torch.tensor([[[0.0, -0.0, 0.0, -0.0, -1.0]]]), 5, 40, [0], [0], 0, 2),
    (torch.full((1, 1, 41), 0.25), 40, 321, [0], [1], 1, 17),
    (torch.tensor([[[math.inf, 1.0, math.inf, -math.inf]]]), 4, 32, [0], [0], 0, 1),
    (torch.full((2, 3, 33), -math.inf), 33, 33 * 8, [0, 4], [2, 5], 3, 20),
    (torch.tensor([[[1e-45, -1e-45, 3e38, -3e38, 0.0]]]), 5, 40, [0], [0], 0, 3),  # subnormal numbers
    (torch.full((2, 1, 7), math.nan), 0, 0, [0, 0], [1, 1], 3, 4),
    (torch.full((1, 2, 7), math.nan), 0, 13, [0], [1], 3, 4),  # a prompt shorter than a block
    (close_scores, 16383, 16384 * 8 - 3, [0], [2], 4, 512),  # neighbouring floats, hundreds of each
    (torch.zeros(1, 1, 10), 10, 80, [0], [6], 0, 3, 0, 4),  # two more than the capacity
    (close_scores[:, :, :4099] * 3, 4099, 4099 * 8, [0], [2], 4, 4000),
]
ODD_WORTH: list[dict[str, Any]] = [{"worth": x} for x in (0.0, -0.0, math.inf, -math.inf, 1e-45)]
ODD_WORTH += [{"scored": 0}, {"scored": 0, "sealed": 0}, {"sealed": 3}]


def select_odd(row: int) -> Case:
    return of.select_blocks(*SELECTED[row])


def exchange_odd(row: int) -> Case:
    """Both zeros, infinities, all scored or nothing: blocks of one worth go by their number."""
    given = {"scored": 30, "sealed": 30, "high": (2,), "free": 0.2, "ties": True, **ODD_WORTH[row]}
    least = int(given.get("worth", -math.inf) > -math.inf)
    return of.exchange_blocks(of.resident_set(3, 9, 33, **given), sealed=given["sealed"], recent=2, least=least)


def exchange_if(due: int) -> Case:
    at = of.resident_set(0, 9, 50, sealed=50, low=(0, 0), high=(1, 2), free=0.2)
    return of.exchange_blocks(at, sealed=50, recent=2, due=due, least=due)


def exchange_many(sizes: tuple[int, int]) -> Case:
    slots, blocks = sizes
    at = of.resident_set(slots, *sizes, scored=blocks - 2, sealed=blocks - 1, free=0.1, ties=slots > 100)
    return of.exchange_blocks(at, sealed=blocks - 1, recent=4, least=21)


def open_among_many(free: float) -> Case:
    """Among more slots than an exchange can sort."""
    return of.open_block(of.resident_set(0, 2100, 2103, sealed=2100, free=free), sealed=2100, recent=3)


def open_none(length: int) -> Case:
    """In the middle of a block, and where every slot must keep what it has."""
    recent = 40 if length % 8 == 0 else 0
    return of.open_block(of.resident_set(0, 9, 50, sealed=40), sealed=40, recent=recent, length=length, opens=False)


def pairs(make: Callable[..., Case], *choices: Any, slow: bool = False) -> list[Any]:
    """Cases in which any two of the choices meet, and each of them is there."""
    given = enumerate(covering(*choices, [0]))
    marks = [pytest.mark.slow] * slow
    return [pytest.param(make, each[:-1], id=f"{make.__name__}-{number}", marks=marks) for number, each in given]


CASES = [
    *pairs(of.select_drawn, range(6)),
    *pairs(select_odd, range(len(SELECTED))),
    *pairs(of.split_blocks, [(1, 1), (13, 40), (300, 301), (2500, 2500)]),
    *pairs(of.score_vectors, VECTORS, [None, 2.0]),
    *pairs(of.score_submeans, SUBMEANS, [None, 2.0]),
    *pairs(of.join_heads, JOINED, JOINS, [True, False]),
    *pairs(of.exchange_drawn, range(4)),
    *pairs(exchange_odd, range(len(ODD_WORTH))),
    *pairs(exchange_if, [0, 1]),
    *pairs(exchange_many, [(500, 2100), (63, 4097)], slow=True),
    *pairs(of.open_drawn, range(5)),
    *pairs(open_among_many, [0.0, 0.001]),
    *pairs(open_none, [321, 320]),
    *pairs(of.fetch, DTYPES, RECORDS, [False, True]),
    *pairs(of.fetch, [torch.float16], RECORDS[:2], [True]),  # which rounding alone carries beyond its range
    *pairs(of.write_token, DTYPES, RECORDS, range(6)),
    *pairs(of.store_block, DTYPES, RECORDS),
    *pairs(of.store_tokens, DTYPES, TOKENS),
    *pairs(of.attend, DTYPES, LISTINGS, [False, True], [None, 2.0], ["as the pool", "fp32"]),
    *pairs(
        of.merge_parts, DTYPES, [(1, 2, 16), (3, 5, 80), (33, 2, 48)], ["no host", "host", "corrected"], [False, True]
    ),
    *pairs(of.move_averages, DTYPES, AVERAGES, [False, True], [None, 2.0], [False, True]),
    *pairs(of.seal_vectors, DTYPES, KEYS, [False, True]),
    *pairs(of.seal_submeans, DTYPES, KEYS),
]


every_case = pytest.mark.parametrize(("make", "given"), CASES)


@every_case
def test_operations_compute_what_loops_do(
    make: Callable[..., Case], given: tuple[Any, ...], request: pytest.FixtureRequest
) -> None:
    """In torch and in Triton's interpreter."""
    case = make(*given)
    if not case.like_torch:
        case.run("cpu")
    request.getfixturevalue("interpreted")
    if torch.bfloat16 == given[0] and (make in (of.attend, of.move_averages) or (make is of.fetch and given[2])):
        given = torch.float16, *given[1:]  # of which the interpreter takes the bits for integers, or cuts them
    make(*given).run("cpu")


@pytest.mark.gpu
@every_case
def test_a_gpu_computes_what_loops_do(make: Callable[..., Case], given: tuple[Any, ...]) -> None:
    make(*given).run("cuda")


F32, RECORD, LISTING = torch.float32, (1, 2, 8, 16), (2, 1, 16, 8, 40)
REFUSED: list[tuple[Any, ...]] = [  # a case, what is changed, what is told
    (of.select_blocks, (torch.zeros(1, 1, 10), 10, 80, [0], [0], 0, 3), {"capacity": 2}, "capacity 2 is too small"),
    (of.select_blocks, (torch.zeros(1, 1, 10), 10, 80, [0], [0], 0, 3), {"limits": Tensor.long}, "limits has dtype"),
    (exchange_if, (1,), {"block_of": torch.zeros(2, 2, 1025).int()}, "1025 slots a KV head are more than the 1024"),
    (of.score_vectors, ((1, 32, 3, 3), None), {"vectors": torch.zeros(6, 3, 32)}, "2 query heads are not a multiple"),
    (of.join_heads, ((1, 3, 3), "max", True), {"join": "sum"}, "join 'sum'"),
    (of.fetch, (F32, RECORD, False), {"packed": PackedLayout(1000, 256, 288)}, "not aligned"),
    (of.store_block, (F32, RECORD), {"block": 5}, "block 5 is beyond"),
    (of.store_tokens, (F32, (RECORD, "contiguous", 0, 9)), {"first": 24}, r"tokens 24\.\.33 exceed the table's 24"),
    (of.attend, (F32, LISTING, True, None), {"query": torch.zeros(2, 16, 2).mT}, "query must be contiguous"),
    (of.attend, (F32, LISTING, True, None), {"pool": torch.zeros(2, 2, 3, 2, 12, 16)}, "block_size 12"),
    (of.attend, (F32, LISTING, True, None), {"limits": lambda x: x.to("meta")}, "limits lies on meta"),
    (of.attend, (F32, LISTING, True, None), {"softcap": -1.0}, r"softcap -1\.0"),
    (of.merge_parts, (F32, (1, 2, 16), "no host", True), {"dtype": torch.int32}, r"cannot merge into torch\.int32"),
    (of.move_averages, (F32, LISTING, False, None, False), {"alpha": 1.5}, r"alpha 1\.5"),
    (of.seal_vectors, (F32, (8, 16), False), {"k": lambda x: x.mT}, "last stride 1"),
]


@pytest.mark.parametrize(("make", "given", "changes", "told"), REFUSED, ids=[row[3].split()[0] for row in REFUSED])
def test_wrong_arguments_are_named(
    make: Callable[..., Case], given: tuple[Any, ...], changes: dict[str, Any], told: str
) -> None:
    case = make(*given)
    changed = {key: change(case.arguments[key]) if callable(change) else change for key, change in changes.items()}
    with pytest.raises((TypeError, ValueError), match=told):
        case.operation(**case.arguments | changed)


def test_splits_fill_a_gpu_and_no_more() -> None:
    assert [count_splits(lines, 10**6) for lines in (1, 8, 300)] == [64, 33, 1]  # 264 programs
    assert [count_splits(8, tokens) for tokens in (16, 2048)] == [1, 16]  # shares of 128 tokens


@pytest.mark.parametrize("seed", range(12))
def test_runs_are_those_of_the_reference(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads, blocks = 1 + seed % 4, (1, 16, 61, 200)[seed // 3]
    masses = torch.randn(heads, blocks, generator=generator) * 3
    span, sums = (1, 2, 4, 8)[seed % 4], seed % 2 == 0
    if not sums:
        masses = masses.round()  # many ties
    masses[0, ::2] = -math.inf
    budgets = torch.rand(1, heads, generator=generator)
    found, _, runs = reference_retrieve.retrieve_blocks(
        masses[None], torch.zeros(1, dtype=torch.int32), blocks, budgets, torch.zeros(1, heads),
        torch.zeros(1, heads, dtype=torch.bool), [span], 1, block_size=16, digest_bytes=8.0, block_bytes=128.0,
        sums=sums,
    )  # fmt: skip
    capacity = min(sum(runs[0]) * span, blocks)
    chosen, count = choose_runs(masses, runs[0], span=span, sums=sums, capacity=capacity)
    assert chosen[: int(count)].tolist() == found[0][0]
