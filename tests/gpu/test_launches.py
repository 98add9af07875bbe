"""What a captured step launches for each layer, counted on the simulated device."""

from __future__ import annotations

import os
from typing import Any

import pretended
import pytest
import torch
from tiny import prompt
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from hf_offload import HybridCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(pretended.KERNELS not in os.environ, reason="a graph of CUDA does not tell its nodes"),
]
FULL, SCOUT = 61, 131
"""With the model's own; in float32, without conversions."""


def launches_of(layers: int, policy: str, batch: int, **knobs: Any) -> int:
    config = Qwen3Config(
        vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="hybrid_sparse")
    model.eval().cuda()
    cache = HybridCache(model, policy, block_size=16, **knobs)
    ids = prompt(1, 210)[0].cuda().expand(batch, -1)
    with torch.no_grad():
        model(ids[:, :200], past_key_values=cache)
        for i in range(200, 204):
            model(ids[:, i : i + 1], past_key_values=cache)
    assert cache.graph is not None
    return len(cache.graph._recorded._graph.calls)


@pytest.mark.parametrize(
    ("policy", "knobs", "most"),
    [
        ("full", {"resident": 512}, FULL),
        ("scout", {"budget": 96, "sinks": 16, "recent": 16, "synchronous_layers": (0,)}, SCOUT),
    ],
)
def test_a_layer_launches_so_much(policy: str, knobs: dict[str, Any], most: int) -> None:
    few, more, rows = (launches_of(layers, policy, batch, **knobs) for layers, batch in ((2, 1), (4, 1), (4, 3)))
    assert (more - few) / 2 <= most
    assert more == rows
