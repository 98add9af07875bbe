"""Queries that are kept: joined only where no token came between them, cropped with their tokens."""

from __future__ import annotations

import torch
from tiny import DEVICE, tiny_model

from hf_offload import HybridCache
from hf_offload.attention import function
from hf_offload.cache.queries import joined


def numbered(first: int, end: int) -> torch.Tensor:
    """Queries `[1, 1, end - first, 1]` that are their tokens' numbers."""
    return torch.arange(first, end, dtype=torch.float32).view(1, 1, -1, 1)


def test_chunks_are_joined_and_turns_are_not() -> None:
    kept = joined(None, numbered(0, 5), 0, 8)
    kept = joined(kept, numbered(5, 11), 5, 8)
    assert (kept.start, kept.end) == (3, 11)
    assert torch.equal(kept.values, numbered(3, 11))
    kept = joined(kept, numbered(14, 16), 14, 8)  # three tokens were decoded in between
    assert (kept.start, kept.end) == (14, 16)
    assert torch.equal(kept.values, numbered(14, 16))
    kept = joined(kept, numbered(16, 30), 16, 8)
    assert torch.equal(kept.values, numbered(22, 30))


def test_they_go_with_their_tokens() -> None:
    kept = joined(None, numbered(0, 20), 0, 8)
    assert kept.cropped(25) is kept
    fewer = kept.cropped(15)
    assert fewer is not None
    assert (fewer.start, fewer.end) == (12, 15)
    assert torch.equal(fewer.values, numbered(12, 15))
    assert torch.equal(joined(fewer, numbered(15, 18), 15, 8).values, numbered(12, 18))
    assert kept.cropped(12) is None


def test_rows_are_selected() -> None:
    kept = joined(None, numbered(0, 3).repeat(3, 1, 1, 1) + 10 * torch.arange(3).view(3, 1, 1, 1), 0, 8)
    selected = kept.select_rows(torch.tensor([2, 0]))
    assert selected.end == 3
    assert selected.values[:, 0, :, 0].tolist() == [[20, 21, 22], [0, 1, 2]]


def test_layers_that_share_keys_keep_the_queries_of_the_first() -> None:
    """In chunks as in one prompt."""
    model = tiny_model("llama")
    module = model.model.layers[0].self_attn
    layer = HybridCache(model, "h2o", tier="split", block_size=16).layers[0]
    generator = torch.Generator().manual_seed(0)
    own, other = (torch.randn(1, 4, 60, 16, generator=generator).to(DEVICE) for _ in range(2))
    k, v = (torch.randn(1, 2, 60, 16, generator=generator).to(DEVICE) for _ in range(2))
    for chunk in (slice(0, 25), slice(25, 60)):
        tagged = layer.update(k[:, :, chunk], v[:, :, chunk])
        for query in (own, other):
            function.hybrid_sparse_attention(module, query[:, :, chunk], *tagged, None)
    assert layer.last_queries.end == 60
    assert torch.equal(layer.last_queries.values, own)
