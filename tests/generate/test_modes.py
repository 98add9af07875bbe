"""Every mode of `generate()`: DynamicCache's tokens with a covering budget, defined tokens with a small one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generate._modes import BLOCK, DRAFTED, LENGTH, MODES, NEW, ONE_ROW, POLICIES, SMALL, TIERS
from tiny import tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HybridCache

MATRIX = [
    (mode, policy, tier, batch)
    for mode in MODES
    for policy in POLICIES
    for tier in (("split",) if policy == "scout, select" else TIERS)
    for batch in (1, 3)
    if batch == 1 or mode not in ONE_ROW
]


@pytest.fixture(scope="module")
def ours() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return tiny_model("llama", "sdpa")


@pytest.fixture(scope="module")
def wanted() -> dict[Any, torch.Tensor]:
    """Tokens of stock caches, by mode and rows."""
    return {}


def few(rows: list[Any], each: int) -> list[Any]:
    """Of every mode `each` rows, further and further apart, so that all that is varied meets all modes in turn."""
    kept = []
    for number, mode in enumerate(MODES):
        mine = [row for row in rows if row[0] == mode]
        kept += [mine[(5 * number + i * (len(mine) // each + 1)) % len(mine)] for i in range(each if mine else 0)]
    return kept


WITH_KEPT = ("beams kept", "assistant", "turns, padded", "chunked prefill")
"""Modes that policies which keep single tokens meet in any case."""


def marked(rows: list[Any], each: int) -> list[Any]:
    """All rows, those that are not among the few marked slow."""
    quick = few(rows, each) + few([row for row in rows if row[1] == "hgca" and row[0] in WITH_KEPT], each)
    return [row if row in quick else pytest.param(*row, marks=pytest.mark.slow) for row in rows]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("mode", "policy", "tier", "batch"), marked(MATRIX, 1))
def test_a_covering_budget_gives_the_tokens_of_dynamic_cache(
    ours: PreTrainedModel, stock: PreTrainedModel, wanted: dict[Any, torch.Tensor],
    mode: str, policy: str, tier: str, batch: int,
) -> None:  # fmt: skip
    # What comes in one piece is right in all versions.
    oracle = "turns, all ids" if mode == "turns, chunked" else mode
    if (oracle, batch) not in wanted:
        wanted[oracle, batch] = MODES[oracle](stock, DynamicCache(config=stock.config), batch)
    name, knobs = POLICIES[policy]
    cache = HybridCache(ours, name, block_size=BLOCK, prefill_tile=32, **(TIERS[tier] | knobs))
    assert torch.equal(MODES[mode](ours, cache, batch), wanted[oracle, batch])


SMALL_MATRIX = [(mode, policy, batch) for mode in MODES for policy in SMALL for batch in (1, 3)]
SMALL_MATRIX = [row for row in SMALL_MATRIX if row[2] == 1 or row[0] not in ONE_ROW]
SAME = {
    **dict.fromkeys(DRAFTED, "greedy"),
    "streamer": "greedy",
    "embeddings": "greedy",
    "turns, new ids": "turns, all ids",
}
"""Modes that differ in how tokens are asked for, not in which come."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("mode", "policy", "batch"), marked(SMALL_MATRIX, 1))
def test_a_small_budget_gives_what_the_policy_defines(
    ours: PreTrainedModel, mode: str, policy: str, batch: int
) -> None:
    name, knobs = SMALL[policy]

    def run(which: str, tier: str, **memory: Any) -> torch.Tensor:
        cache = HybridCache(ours, name, block_size=8, **(TIERS[tier] | knobs | memory))
        return MODES[which](ours, cache, batch)

    tokens = run(mode, "split")
    turns = 2 * 9 + 3 * 6 if mode.startswith("turns") else 7 if mode == "stopping" else NEW
    kept = {"beams kept": 2, "sequences": 2}.get(mode, 1)
    assert tokens.shape == (batch * kept, turns + (0 if mode == "embeddings" else LENGTH))
    assert ((tokens >= 0) & (tokens < 160)).all()
    if mode in SAME:
        assert torch.equal(tokens, run(SAME[mode], "split")[:, -tokens.shape[1] :])
    elif policy == "select":  # every block meets the real query, wherever it lies
        assert torch.equal(tokens, run(mode, "split", resident=512))
    elif policy != "attend":
        assert torch.equal(tokens, run(mode, "one"))
