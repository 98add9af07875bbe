"""`retrieve_blocks` against loops and sorts; V(blk) and the budgets against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pools import for_python, given_masses, run
from references import cpu as reference
from references import fluxion as reference_retrieve

from hf_offload.cpu.kernels.digest_scores import Digest, vectors
from hf_offload.policies.fluxion.kernels import selector
from hf_offload.policies.fluxion.kernels.selector import (
    TALLIES,
    Budgets,
    Chosen,
    budget_of,
    retrieve_blocks,
    runs_wanted,
    tally,
)

choose_granularity, sum_budgets = for_python(selector.choose_granularity, selector.sum_budgets)


def make_budgets(
    budget0: object = 0.3, slope: object = 0.02, streaming: object = 0, spans: object = (1, 2, 4, 8),
    shape: tuple[int, int] = (1, 2), block_bytes: float = 128.0,
) -> Budgets:  # fmt: skip
    kinds = (budget0, np.float32), (slope, np.float32), (streaming, np.uint8)
    heads = (np.broadcast_to(np.asarray(value, dtype), shape).copy() for value, dtype in kinds)
    return Budgets(*heads, np.array(spans, np.int32), 16, block_bytes * 8.0 / 128.0, block_bytes)


def retrieve(
    query: torch.Tensor, digest: Digest, table: torch.Tensor, first: list[int], end: int, budgets: Budgets, *,
    sums: bool,
) -> tuple[list[list[list[int]]], Chosen]:  # fmt: skip
    (batch, heads, _), kv_heads = query.shape, 2
    masses = np.full((batch, heads, (end + 15) // 16 * 16), np.nan, np.float32)
    shapes = (batch, kv_heads), (batch, heads), (batch, kv_heads, end + 2), (batch, kv_heads)
    chosen = Chosen(np.array(first, np.int32), end, *(np.full(shape, -1, np.int32) for shape in shapes))
    given = query.numpy(), digest, table.numpy(), budgets, masses, chosen
    run(retrieve_blocks(*given, sums=sums, scale=1.0, softcap=None), threads=2)
    lists = [(chosen.blocks[each], chosen.counts[each]) for each in np.ndindex(batch, kv_heads)]
    assert all((blocks[count:] == -1).all() for blocks, count in lists)
    found = [blocks[:count].tolist() for blocks, count in lists]
    return [found[b * kv_heads : (b + 1) * kv_heads] for b in range(batch)], chosen


def check(
    query: torch.Tensor, digest: Digest, masses: torch.Tensor, table: torch.Tensor, first: list[int], end: int,
    budgets: Budgets, *, sums: bool,
) -> None:  # fmt: skip
    got, chosen = retrieve(query, digest, table, first, end, budgets, sums=sums)
    want, spans, runs = reference_retrieve.retrieve_blocks(
        masses, torch.tensor(first), end,
        *(torch.from_numpy(x) for x in (budgets.budget0, budgets.slope, budgets.streaming)),
        budgets.granularities.tolist(), 2, block_size=16, digest_bytes=budgets.digest_bytes,
        block_bytes=budgets.block_bytes, sums=sums,
    )  # fmt: skip
    assert chosen.spans.tolist() == spans
    assert chosen.runs.tolist() == runs
    assert got == want


@pytest.mark.parametrize(
    ("seed", "group"),
    [*((s, 2) for s in range(12)), *(pytest.param(s, 1 + s % 4, marks=pytest.mark.slow) for s in range(16, 20))],
)
def test_log_masses(seed: int, group: int) -> None:
    rng = np.random.default_rng(seed)
    end, heads = int(rng.integers(1, 300)), (3, 2 * group)
    masses = torch.from_numpy(rng.standard_normal((*heads, end)).astype(np.float32)) * 3
    if seed % 3 == 0:
        masses = masses.round()  # many ties
    if seed % 4 == 0:
        masses[0, :, ::2], masses[1, :, : end // 2] = -math.inf, -math.inf
    spans = ((1, 2, 4, 8), (2,), (8, 3), (1,))[seed // 2 % 4]
    values = rng.uniform(-0.2, 1.1, heads), rng.uniform(-0.05, 0.1, heads), rng.integers(0, 2, heads)
    budgets = make_budgets(*values, spans, heads)
    first = rng.integers(0, max(end // 2, 1) + 1, 3).tolist()
    query, (digest, table) = torch.zeros(*heads, 16), given_masses(masses, 2)
    sums = seed % 2 == 0 and seed % 3 != 0  # sums of ties differ in the last bit
    check(query, digest, masses, table, first, end, budgets, sums=sums)


@pytest.mark.parametrize(("dim", "blocks"), [(64, 131), (16, 5)])
def test_quest(dim: int, blocks: int) -> None:
    torch.manual_seed(2)
    query, digests, bias = torch.randn(2, 4, 2 * dim), torch.randn(blocks + 3, 2, 2 * dim), torch.zeros(blocks + 3)
    table = torch.stack([torch.randperm(blocks + 3)[:blocks] for _ in range(2)]).int()
    last = int(table[0, blocks - 1])
    bias[last], digests[last] = -math.inf, math.nan
    masses = reference.score_vectors(query, digests, bias, table, blocks)
    digest = vectors(query.numpy(), digests.numpy(), bias.numpy(), dtype=torch.float32)
    budgets = make_budgets(0.1, [0.02, 0.02, 0.0, 0.0], shape=(2, 4))
    real = query[..., :dim].contiguous()
    check(real, digest, masses, table, [4 if blocks > 5 else 1, 0], blocks - 1, budgets, sums=False)


def test_granularity_by_hand() -> None:
    # One block: digest 64 bytes, K and V 256. V(16) = 64 + 256·(0.1 + 4·0.05) = 140.8; V(32) = 32 + 256·0.35 = 121.6;
    # V(64) = 16 + 256·0.4 = 118.4; V(128) = 8 + 256·0.45 = 123.2.
    def made(heads: int, budget0: float = 0.1, slope: float = 0.05, streaming: object = 0) -> Budgets:
        return make_budgets(budget0, slope, streaming, shape=(1, heads), block_bytes=256.0)._replace(digest_bytes=64.0)

    assert sum_budgets(made(1), 0, 0, 1, 1) == pytest.approx(0.3)
    assert sum_budgets(made(1), 0, 0, 1, 2) == pytest.approx(0.35)
    assert choose_granularity(made(1), 0, 0, 1) == 4
    # A second head that streams costs nothing; one that retrieves doubles what coarse runs cost: 64 + 2·76.8 = 217.6;
    # 32 + 2·89.6 = 211.2; 16 + 2·102.4 = 220.8.
    assert choose_granularity(made(2, streaming=[0, 1]), 0, 0, 2) == 4
    assert choose_granularity(made(2), 0, 0, 2) == 2
    assert choose_granularity(made(2, streaming=[1, 1]), 0, 0, 2) == 0
    # Without slope the coarsest has the least to choose among; without a budget nothing is read.
    assert choose_granularity(made(1, slope=0.0), 0, 0, 1) == 8
    assert choose_granularity(made(1, 0.0, 0.0), 0, 0, 1) == 0


def test_budgets_by_hand() -> None:
    given = ((0.1, 0.05, 0), 0.4), ((0.9, 0.05, 0), 1.0), ((-0.5, 0.05, 0), 0.0), ((0.9, 0.05, 1), 0.0)
    assert [budget_of(*need, 64.0) for need, _ in given] == pytest.approx([want for _, want in given])
    wanted = (float(np.float32(0.05)), 100, 1), (0.051, 100, 1), (0.05, 100, 8), (1.0, 17, 8), (0.0, 17, 8)
    assert [runs_wanted(*each) for each in wanted] == [5, 6, 1, 3, 0]


def test_whole_budget_takes_all_and_streaming_groups_nothing() -> None:
    masses = torch.randn(2, 4, 40)
    query, (digest, table) = torch.zeros(2, 4, 16), given_masses(masses, 2)
    budgets = make_budgets(1.0, 0.0, [1, 1, 1, 0], shape=(2, 4))
    got, chosen = retrieve(query, digest, table, [3, 40], 40, budgets, sums=True)
    assert got == [[[], list(range(3, 40))], [[], []]]
    assert chosen.spans.tolist() == [[0, 8], [0, 8]]
    assert chosen.runs.tolist() == [[0, 0, 0, 5], [0, 0, 0, 0]]
    totals = np.zeros(TALLIES + 4)
    tally(chosen, budgets.granularities, totals)
    assert totals.tolist() == [2, 1, 4, 3, 1, 37, 74, 37, 0, 0, 0, 1]
