"""Last queries of layers that share keys and values."""

from __future__ import annotations

import torch
from tiny import DEVICE, tiny_model

from hf_offload import HybridCache
from hf_offload.attention import interface as function


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
