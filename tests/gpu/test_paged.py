"""Attention over resident slots against dense attention."""

from __future__ import annotations

import pytest
import torch

from hf_offload.gpu.paged import paged_attention


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (2, 3), (3, 5)])
def test_equals_dense_attention(heads: int, group: int, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    batch, slots, size, dim, width = 2, 6, 8, 16, 4
    pool = torch.randn(batch, heads, slots, 2, size, dim, generator=generator)
    query = torch.randn(batch, heads * group, dim, generator=generator)
    chosen = torch.stack([torch.randperm(slots, generator=generator)[:width] for _ in range(batch * heads)])
    chosen = chosen.view(batch, heads, width)
    mask = torch.rand(batch, heads, width, size, generator=generator) > 0.3
    mask[0, 0] = False  # this head attends nothing
    for b in range(batch):
        for h in range(heads):
            for c in range(width):
                pool[b, h, chosen[b, h, c], :, ~mask[b, h, c]] = float("nan")
    out, lse = paged_attention(query, pool, chosen, mask, scale=0.3, softcap=softcap)
    for b in range(batch):
        for head in range(heads * group):
            h = head // group
            seen = mask[b, h]
            k, v = (pool[b, h, chosen[b, h], part][seen].double() for part in (0, 1))
            scores = k @ query[b, head].double() * 0.3
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            assert torch.allclose(lse[b, head].double(), scores.logsumexp(-1), atol=1e-5)
            assert torch.allclose(out[b, head].double(), scores.softmax(-1) @ v, atol=1e-5)
    assert torch.equal(out[0, :group], torch.zeros(group, dim))


def test_wrong_shapes_are_refused() -> None:
    pool = torch.zeros(1, 2, 3, 2, 8, 16)
    with pytest.raises(ValueError, match="does not fit a pool"):
        paged_attention(
            torch.zeros(1, 3, 16), pool, torch.zeros(1, 2, 1, dtype=torch.long), torch.ones(1, 2, 1, 8).bool(), scale=1
        )
