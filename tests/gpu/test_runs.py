"""The device's choice of runs against the CPU reference."""

from __future__ import annotations

import math

import pytest
import torch
from references import fluxion as reference_retrieve

from hf_offload.gpu.block_topk import choose_runs


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
    wanted = runs[0]
    capacity = min(sum(wanted) * span, blocks)
    chosen, count = choose_runs(masses, wanted, span=span, sums=sums, capacity=capacity)
    assert chosen.dtype == count.dtype == torch.int32
    assert chosen[: int(count)].tolist() == found[0][0]


def test_nothing_is_taken_where_nothing_is_valid() -> None:
    chosen, count = choose_runs(torch.full((2, 5), -math.inf), [2, 3], span=2, sums=True, capacity=5)
    assert int(count) == 0
    assert chosen.shape == (5,)


def test_needs_of_other_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="3 numbers of runs of 2 blocks for 2 heads"):
        choose_runs(torch.zeros(2, 5), [1, 1, 1], span=2, sums=True, capacity=5)
