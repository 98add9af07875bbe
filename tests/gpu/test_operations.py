"""The GPU operations in torch, in Triton's interpreter and on a GPU: what they compute and what they refuse."""

from __future__ import annotations

import math
import re
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
from hf_offload.gpu.merge import HostResult
from hf_offload.gpu.paged_attention import count_splits

from . import operations as of
from .operations import Case

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes under masks too

FORMS = ("torch", "interpreted", "cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
RECORDS = [(2, 3, 32, 64), (1, 1, 8, 80), (3, 2, 16, 96), (1, 2, 128, 16), (2, 1, 8, 256)]
TOKENS = [
    ((2, 3, 32, 64), "turned", 0, 97),
    ((2, 3, 32, 64), "contiguous", 5, 7),  # within one block
    ((3, 2, 16, 96), "fused", 31, 34),
    ((1, 1, 8, 80), "contiguous", 13, 27),
    ((1, 2, 128, 16), "turned", 127, 2),
    ((2, 1, 8, 256), "fused", 8, 16),
    ((2, 2, 64, 128), "mixed", 70, 155),
    ((1, 2, 8, 16), "contiguous", 9, 0),  # no new token
]
LISTINGS = [  # (KV heads, group, D, block size, width): tiles join blocks, are blocks, or cut them; several shares
    (2, 1, 16, 8, 40),
    (1, 3, 80, 16, 17),
    (2, 5, 32, 32, 9),
    (3, 7, 128, 64, 5),
    (1, 16, 64, 128, 3),
    (2, 35, 16, 16, 20),
    (2, 17, 16, 16, 20),  # a head that is left over
    (1, 20, 16, 16, 40),
]
AVERAGES = [
    (2, 1, 16, 8, 9),
    (1, 3, 80, 16, 5),
    (2, 5, 32, 32, 3),
    (1, 16, 128, 128, 2),
    (2, 17, 16, 8, 5),
    (1, 35, 16, 8, 5),
]
KEYS = [(8, 16), (16, 80), (32, 64), (128, 96)]  # tokens of a block, D
VECTORS = [  # group, width, blocks, sealed
    (1, 16, 1, 1), (3, 80, 37, 33), (7, 128, 70, 70), (16, 256, 66, 1), (4, 512, 5, 0), (2, 64, 300, 280),
    (20, 32, 9, 8), (33, 16, 9, 8),
]  # fmt: skip
SUBMEANS = [  # pairs, D, group, blocks, sealed
    (4, 16, 3, 41, 37), (4, 96, 1, 33, 33), (8, 64, 7, 20, 18), (16, 80, 4, 19, 17), (16, 128, 5, 9, 0),
    (16, 128, 16, 7, 7), (4, 16, 2, 300, 290), (64, 256, 2, 3, 3), (32, 64, 3, 5, 4), (8, 32, 35, 9, 8),
    (4, 16, 17, 9, 8),
]  # fmt: skip
JOINED = [(1, 1, 1), (3, 37, 33), (7, 300, 256), (16, 700, 650), (4, 1100, 1025), (2, 9, 0), (35, 70, 65), (18, 9, 8)]

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
    (close_scores[:, :, :4099] * 3, 4099, 4099 * 8, [0], [2], 4, 4000),
]
ODD_WORTH: list[dict[str, Any]] = [{"worth": x} for x in (0.0, -0.0, math.inf, -math.inf, 1e-45)]
ODD_WORTH += [{"scored": 0}, {"scored": 0, "sealed": 0}, {"sealed": 3}]


SELECTED.append((torch.zeros(1, 1, 10), 10, 80, [0], [6], 0, 3, 0, 4))  # two more than the capacity


def select_odd(row: int) -> Case:
    return of.select_blocks(*SELECTED[row])


def exchange_odd(row: int) -> Case:
    """Both zeros, infinities, all scored or nothing: blocks of one worth go by their number."""
    given = {"scored": 30, "sealed": 30, "low": (0, 0), "high": (2, 0), "free": 0.2, "ties": True, **ODD_WORTH[row]}
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
    """Cases in which any two of the choices meet, and each of them and each form."""
    found = []
    for number, (form, *given) in enumerate(covering(FORMS, *choices)):
        if make in (of.attend, of.move_averages) and (form, given[0]) == ("interpreted", torch.bfloat16):
            given[0] = torch.float16  # the interpreter's products take the bits of bfloat16 for integers
        marks = [pytest.mark.gpu] * (form == "cuda") + [pytest.mark.slow] * slow
        found.append(pytest.param(form, make, given, id=f"{make.__name__}-{form}-{number}", marks=marks))
    return found


CASES = [
    *pairs(of.select_drawn, range(8)),
    *pairs(select_odd, range(len(SELECTED))),
    *pairs(of.split_blocks, [(1, 1), (13, 40), (300, 301), (2500, 2500)]),
    *pairs(of.score_vectors, VECTORS, [None, 2.0]),
    *pairs(of.score_submeans, SUBMEANS, [None, 2.0]),
    *pairs(of.join_heads, JOINED, JOINS, [True, False]),
    *pairs(of.exchange_drawn, range(6)),
    *pairs(exchange_odd, range(len(ODD_WORTH))),
    *pairs(exchange_if, [0, 1]),
    *pairs(exchange_many, [(500, 2100), (63, 4097)], slow=True),
    *pairs(of.open_drawn, range(8)),
    *pairs(open_among_many, [0.0, 0.001]),
    *pairs(open_none, [321, 320]),
    *pairs(of.fetch, DTYPES, RECORDS, [False, True]),
    *pairs(of.fetch, [torch.float16], RECORDS[:2], [True]),  # which rounding alone carries beyond its range
    *pairs(of.write_token, DTYPES, RECORDS, range(6)),
    *pairs(of.store_block, DTYPES, RECORDS),
    *pairs(of.store_tokens, DTYPES, TOKENS),
    *pairs(of.attend, DTYPES, LISTINGS, [False, True], [None, 2.0], ["as the pool", "fp32"]),
    *pairs(
        of.merge_parts, DTYPES, [(1, 2, 16), (3, 5, 80), (33, 3, 128)], ["no host", "host", "corrected"], [False, True]
    ),
    *pairs(of.move_averages, DTYPES, AVERAGES, [False, True], [None, 2.0], [False, True]),
    *pairs(of.seal_vectors, DTYPES, KEYS, [False, True]),
    *pairs(of.seal_submeans, DTYPES, KEYS),
]


@pytest.mark.parametrize(("form", "make", "given"), CASES)
def test_operations_compute_what_loops_do(
    form: str, make: Callable[..., Case], given: list[Any], request: pytest.FixtureRequest
) -> None:
    if form == "interpreted":
        request.getfixturevalue("interpreted")
    make(*given).run("cuda" if form == "cuda" else "cpu")


def to_six_pairs(physical: int) -> dict[str, Tensor]:
    """Digests of six pairs of 16 dimensions."""
    return {
        "codes": torch.zeros(physical, 2, 48).byte(), "levels": torch.zeros(physical, 2, 1, 6).int(),
        "sizes": torch.zeros(physical, 2, 6).int(), "bias": torch.zeros(physical, 6),
    }  # fmt: skip


SMALL = {
    "select": lambda: of.select_blocks(torch.zeros(1, 1, 10), 10, 80, [0], [0], 0, 3),
    "split": lambda: of.split_blocks((1, 1)),
    "exchange": lambda: exchange_if(1),
    "open": lambda: open_none(321),
    "vectors": lambda: of.score_vectors((1, 32, 3, 3), None),
    "submeans": lambda: of.score_submeans((4, 16, 1, 3, 3), None),
    "join": lambda: of.join_heads((1, 3, 3), "max", True),
    "fetch": lambda: of.fetch(torch.float32, (1, 2, 8, 16), False),
    "write_token": lambda: of.write_token(torch.float32, (1, 2, 8, 16), 0),
    "store_block": lambda: of.store_block(torch.float32, (1, 2, 8, 16)),
    "store_tokens": lambda: of.store_tokens(torch.float32, ((1, 2, 8, 16), "contiguous", 0, 9)),
    "attend": lambda: of.attend(torch.float32, (2, 1, 16, 8, 40), True, None, "as the pool"),
    "merge": lambda: of.merge_parts(torch.float32, (1, 2, 16), "no host", True),
    "averages": lambda: of.move_averages(torch.float32, (2, 1, 16, 8, 9), False, None, False),
    "seal_vectors": lambda: of.seal_vectors(torch.float32, (8, 16), False),
    "seal_submeans": lambda: of.seal_submeans(torch.float32, (8, 16)),
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [  # what is changed, and how it is called in the message
    ("select", {"capacity": 2}, "capacity 2 is too small: up to 3"),
    ("select", {"recent": -1}, "recent -1"),
    ("select", {"high": torch.zeros(2).int()}, r"high has shape \(2,\)"),
    ("select", {"limits": Tensor.long}, r"limits has dtype torch\.int64"),
    ("select", {"score": torch.zeros(1, 1, 16385)}, "16385 blocks"),
    ("split", {"counts": lambda x: x[:1]}, r"counts has shape \(1, 2\)"),
    ("exchange", {"recent": -1}, "recent -1"),
    ("exchange", {"due": Tensor.bool}, r"due has dtype torch\.bool"),
    ("exchange", {"slot_of": lambda x: x[:, :, 1:]}, r"slot_of has shape \(2, 2, 49\)"),
    (
        "exchange",
        {"block_of": torch.zeros(2, 2, 1025).int()},
        "1025 slots a KV head are more than the 1024 that are sorted",
    ),
    ("open", {"block_size": 0}, "block_size 0"),
    ("vectors", {"vectors": torch.zeros(6, 3, 32)}, "2 query heads are not a multiple of 3"),
    ("vectors", {"vectors": lambda x: x[..., :16]}, r"vectors has shape \(6, 2, 16\)"),
    ("vectors", {"table": Tensor.long}, r"table has dtype torch\.int64"),
    ("submeans", to_six_pairs(6), "6 pairs"),
    ("join", {"join": "sum"}, "join 'sum'"),
    ("join", {"kv_heads": 2}, "3 query heads are not a multiple of 2"),
    ("join", {"tail": lambda x: x[:, :2]}, r"tail has shape \(2, 2\)"),
    ("fetch", {"counts": Tensor.long}, r"counts has dtype torch\.int64"),
    ("fetch", {"blocks": lambda x: x[:, :, :3].contiguous()}, r"blocks has shape \(1, 2, 3\)"),
    ("fetch", {"packed": PackedLayout(1000, 256, 288)}, "not aligned"),
    ("write_token", {"k": Tensor.half}, r"k has dtype torch\.float16"),
    ("write_token", {"v": lambda x: x[..., :8]}, r"v has shape \(1, 2, 8\)"),
    ("store_block", {"pool": torch.zeros(1, 2, 3, 2, 12, 16)}, "block_size 12"),
    ("store_block", {"pool": torch.zeros(1, 2, 3, 2, 8, 20)}, "head dimension 20"),
    ("store_block", {"block": 5}, "block 5 is beyond"),
    ("store_tokens", {"first": 24}, r"tokens 24\.\.33 exceed the table's 24"),
    ("store_tokens", {"v": Tensor.half}, r"v has dtype torch\.float16"),
    ("store_tokens", {"v": lambda x: x[:, :, 1:]}, r"v has shape \(1, 2, 8, 16\)"),
    ("store_tokens", {"k": lambda x: x.mT}, r"k has shape \(1, 2, 16, 9\), strides \(288, 144, 1, 16\)"),
    ("attend", {"query": torch.zeros(2, 3, 16)}, "does not fit a pool"),
    ("attend", {"query": torch.zeros(2, 16, 2).mT}, "query must be contiguous"),
    ("attend", {"query": Tensor.half}, r"query has dtype torch\.float16"),
    ("attend", {"pool": torch.zeros(2, 2, 3, 2, 12, 16)}, "block_size 12"),
    ("attend", {"pool": torch.zeros(2, 2, 3, 8, 16)}, r"expected \[B, Hkv, R, 2, block_size, D\]"),
    ("attend", {"pool": Tensor.double}, r"pool has dtype torch\.float64"),
    ("attend", {"slots": Tensor.long}, r"slots has dtype torch\.int64"),
    ("attend", {"blocks": torch.zeros(2, 2, 4).int()}, r"blocks has shape \(2, 2, 4\)"),
    ("attend", {"counts": torch.zeros(2, 3).int()}, r"counts has shape \(2, 3\)"),
    ("attend", {"limits": lambda x: x.to("meta")}, "limits lies on meta"),
    ("attend", {"valid": Tensor.bool}, r"valid has dtype torch\.bool"),
    ("attend", {"softcap": -1.0}, r"softcap -1\.0"),
    ("merge", {"out": torch.zeros(3, 2, 16)}, r"expected \[B, Hq, S, D\]"),
    ("merge", {"lse": torch.zeros(3, 2, 2)}, r"lse has shape \(3, 2, 2\)"),
    ("merge", {"lse": Tensor.double}, r"lse has dtype torch\.float64"),
    ("merge", {"sinks": torch.zeros(3)}, r"sinks has shape \(3,\)"),
    ("merge", {"query": torch.zeros(3, 4, 16)}, "query has shape"),
    ("merge", {"host": HostResult(torch.zeros(3, 2, 8), torch.zeros(3, 2))}, r"host\.out has shape"),
    ("merge", {"host": HostResult(torch.zeros(3, 2, 16), torch.zeros(3, 2).half())}, r"host\.lse has dtype"),
    ("merge", {"host": HostResult(*[torch.zeros(3, 2, 16)] * 3)}, "kbar and predicted belong together"),
    ("merge", {"dtype": torch.int32}, r"cannot merge into torch\.int32"),
    ("averages", {"average": torch.zeros(2, 2, 11, 16)}, r"average has shape \(2, 2, 11, 16\)"),
    ("averages", {"average": Tensor.half}, r"average has dtype torch\.float16"),
    ("averages", {"lse": lambda x: x[:1]}, r"lse has shape \(1, 2\)"),
    ("averages", {"counts": lambda x: x[:, :1].contiguous()}, r"counts has shape \(2, 1\)"),
    ("averages", {"alpha": 0.0}, r"alpha 0\.0"),
    ("averages", {"alpha": 1.5}, r"alpha 1\.5"),
    ("averages", {"softcap": 0.0}, r"softcap 0\.0"),
    ("seal_vectors", {"k": lambda x: x.mT}, "last stride 1"),
    ("seal_vectors", {"k": Tensor.double}, r"k has dtype torch\.float64"),
    ("seal_vectors", {"bounds": True}, r"vectors has shape \(9, 2, 16\)"),
    ("seal_vectors", {"valid": Tensor.byte}, r"valid has dtype torch\.uint8"),
    (
        "seal_submeans",
        {**to_six_pairs(9), "k": torch.zeros(4, 2, 12, 16), "valid": torch.ones(4, 12).bool()},
        "12 tokens a block a power of two",
    ),
]


@pytest.mark.parametrize(("name", "changes", "told"), REFUSED, ids=[f"{row[0]}-{'-'.join(row[1])}" for row in REFUSED])
def test_wrong_arguments_are_named(name: str, changes: dict[str, Any], told: str) -> None:
    case = SMALL[name]()
    case.run("cpu")
    changed = {key: change(case.arguments[key]) if callable(change) else change for key, change in changes.items()}
    with pytest.raises(TypeError if re.search("dtype|cannot merge", told) else ValueError, match=told):
        case.operation(**case.arguments | changed)


def test_splits_fill_a_gpu_and_no_more() -> None:
    assert count_splits(8, 2048) == 16  # shares of 128 tokens
    assert count_splits(8, 10**6) == 33  # 264 programs
    assert count_splits(1, 10**6) == 64
    assert count_splits(300, 10**6) == 1
    assert count_splits(8, 16) == 1
    assert count_splits(64 * 8, 32 << 10) == 1  # a large batch fills it by itself
    assert all(lines * count_splits(lines, 10**6) < 264 + lines for lines in range(5, 1000))  # partials stay few


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
    assert chosen.dtype == count.dtype == torch.int32
    assert chosen[: int(count)].tolist() == found[0][0]


def test_runs_of_nothing_and_of_other_heads() -> None:
    chosen, count = choose_runs(torch.full((2, 5), -math.inf), [2, 3], span=2, sums=True, capacity=5)
    assert int(count) == 0
    assert chosen.shape == (5,)
    with pytest.raises(ValueError, match="3 numbers of runs of 2 blocks for 2 heads"):
        choose_runs(torch.zeros(2, 5), [1, 1, 1], span=2, sums=True, capacity=5)
