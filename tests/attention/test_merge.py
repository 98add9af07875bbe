"""The merge of partials by log-sum-exp."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from hf_offload.attention.merge import merge_partials

NONE = torch.zeros(2, 3, 8), torch.full((2, 3), -math.inf)


@pytest.mark.parametrize("sinks", [None, torch.tensor([3.0, -1.0, 30.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("cuts", [[0, 50], [0, 1, 50], [0, 7, 30, 49, 50]], ids=len)
def test_parts_of_the_keys_add_up_to_all_of_them(cuts: list[int], sinks: torch.Tensor | None) -> None:
    """Empty parts have no weight; sinks take weight and give nothing."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 50, generator=generator) * 20 - 200
    values = torch.randn(50, 8, generator=generator)
    parts = [NONE]
    for first, stop in itertools.pairwise(cuts):
        some = scores[..., first:stop]
        parts += [(some.softmax(-1) @ values[first:stop], some.logsumexp(-1)), NONE]
    sink = None if sinks is None else sinks - 200
    out, lse = merge_partials(parts, sink)
    whole = scores if sink is None else torch.cat([scores, sink[None, :, None].expand(2, 3, 1)], -1)
    assert torch.allclose(out, whole.softmax(-1)[..., :50] @ values, atol=1e-5)
    assert torch.allclose(lse, whole.logsumexp(-1), atol=1e-4)


def test_nothing_is_zero() -> None:
    out, lse = merge_partials([NONE, NONE])
    assert torch.equal(out, NONE[0])
    assert torch.equal(lse, NONE[1])
