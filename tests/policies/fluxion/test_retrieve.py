"""`retrieve_blocks` against loops and sorts: budgets, granularities, runs and blocks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pools import given_masses, run
from references import fluxion as reference

from hf_offload.policies.fluxion.kernels.selector import TALLIES, Budgets, Chosen, retrieve_blocks, tally


def retrieve(
    masses: torch.Tensor, first: list[int], end: int, needs: tuple[Any, Any, Any], spans: tuple[int, ...], *, sums: bool
) -> tuple[list[list[list[int]]], Chosen, Budgets]:
    """Blocks of two KV heads in each row."""
    batch, heads, _ = masses.shape
    kinds = zip(needs, (np.float32, np.float32, np.uint8), strict=True)
    properties = (np.broadcast_to(np.asarray(value, dtype), (batch, heads)).copy() for value, dtype in kinds)
    budgets = Budgets(*properties, np.array(spans, np.int32), 16, 8.0, 128.0)
    scratch = np.full((batch, heads, (end + 15) // 16 * 16), np.nan, np.float32)
    shapes = (batch, 2), (batch, heads), (batch, 2, end + 2), (batch, 2)
    chosen = Chosen(np.array(first, np.int32), end, *(np.full(shape, -1, np.int32) for shape in shapes))
    query, (digest, table) = np.zeros((batch, heads, 16), np.float32), given_masses(masses, 2)
    given = query, digest, table.numpy(), budgets, scratch, chosen
    run(retrieve_blocks(*given, sums=sums, scale=1.0, softcap=None), threads=2)
    lists = [(chosen.blocks[each], chosen.counts[each]) for each in np.ndindex(batch, 2)]
    assert all((blocks[count:] == -1).all() for blocks, count in lists)
    found = [blocks[:count].tolist() for blocks, count in lists]
    return [found[2 * b : 2 * b + 2] for b in range(batch)], chosen, budgets


@pytest.mark.parametrize(
    ("seed", "group"),
    [*((s, 2) for s in range(12)), *(pytest.param(s, 1 + s % 4, marks=pytest.mark.slow) for s in range(16, 20))],
)
def test_runs_are_those_of_a_sort(seed: int, group: int) -> None:
    rng = np.random.default_rng(seed)
    end, heads = int(rng.integers(1, 300)), (3, 2 * group)
    masses = torch.from_numpy(rng.standard_normal((*heads, end)).astype(np.float32)) * 3
    if seed % 3 == 0:
        masses = masses.round()  # many ties
    if seed % 4 == 0:
        masses[0, :, ::2], masses[1, :, : end // 2] = -math.inf, -math.inf
    needs = rng.uniform(-0.2, 1.1, heads), rng.uniform(-0.05, 0.1, heads), rng.integers(0, 2, heads)
    first = rng.integers(0, max(end // 2, 1) + 1, 3).tolist()
    sums = seed % 2 == 0 and seed % 3 != 0  # sums of ties differ in the last bit
    spans = ((1, 2, 4, 8), (2,), (8, 3), (1,))[seed // 2 % 4]
    got, chosen, budgets = retrieve(masses, first, end, needs, spans, sums=sums)
    properties = (torch.from_numpy(x) for x in (budgets.budget0, budgets.slope, budgets.streaming))
    want = reference.retrieve_blocks(
        masses, torch.tensor(first), end, *properties, list(spans), 2, block_size=16, digest_bytes=8.0,
        block_bytes=128.0, sums=sums,
    )  # fmt: skip
    assert (got, chosen.spans.tolist(), chosen.runs.tolist()) == want


def test_whole_budget_takes_all_and_streaming_groups_nothing() -> None:
    got, chosen, budgets = retrieve(
        torch.randn(2, 4, 40), [3, 40], 40, (1.0, 0.0, [1, 1, 1, 0]), (1, 2, 4, 8), sums=True
    )
    assert got == [[[], list(range(3, 40))], [[], []]]
    assert chosen.spans.tolist() == [[0, 8], [0, 8]]
    assert chosen.runs.tolist() == [[0, 0, 0, 5], [0, 0, 0, 0]]
    totals = np.zeros(TALLIES + 4)
    tally(chosen, budgets.granularities, totals)
    assert totals.tolist() == [2, 1, 4, 3, 1, 37, 74, 37, 0, 0, 0, 1]
