"""`append.mark_above` against plain torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from references import hgca as reference

from hf_offload.policies.hgca.append import Rule, mark_above


def _averages(batch: int, heads: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Averages, some of them 0, and valid tokens; the averages of the others are NaN."""
    average = torch.rand(batch, heads, tokens)
    average[..., ::5] = 0.0
    valid = (torch.rand(batch, tokens) < 0.9).to(torch.uint8)
    average[(valid[:, None] == 0).expand_as(average)] = math.nan
    return average, valid


@pytest.mark.parametrize("rule", ["any", "mean"])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize(
    ("border", "first", "stop"), [(0, 0, 333), (333, 0, 333), (100, 17, 300), (20, 21, 22), (9, 8, 8), (5, 3, 19)]
)
def test_what_is_kept(border: int, first: int, stop: int, group: int, rule: Rule) -> None:
    torch.manual_seed(group)
    batch, kv_heads = 3, 2
    average, valid = _averages(batch, kv_heads * group, 333)
    old, new = torch.tensor([0.5, -math.inf, 2.0]), torch.tensor([-math.inf, 0.6, 0.3])
    bars = torch.where(torch.arange(first, stop) < border, old[:, None], new[:, None])
    marks = mark_above(
        average[..., first:stop].numpy(), valid[:, first:stop].numpy(), bars.numpy(), kv_heads, rule
    )  # fmt: skip
    want = reference.mark_retained(average, valid, old, new, border, first, stop, kv_heads=kv_heads, rule=rule)
    assert torch.equal(torch.from_numpy(marks), want)


def test_an_average_at_the_threshold_is_not_kept() -> None:
    average, bars = np.full((1, 2, 20), 0.25, np.float32), np.full((1, 20), 0.25, np.float32)
    average[0, 1, 3] = 0.26
    marks = mark_above(average, np.ones((1, 20), np.uint8), bars, 1, "any")
    assert marks[0, 0].nonzero()[0].tolist() == [3]
