"""Refusal of models whose steps cannot be captured as CUDA graphs, with models that claim to be on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, Llama4TextConfig, LlamaConfig, PreTrainedConfig

from hf_offload import Scout
from hf_offload.graph.graph_support import obstacle

SIZES: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
LLAMA = LlamaConfig(**SIZES)


def on(*devices: str, forward: Any = lambda input_ids, position_ids=None: None) -> Any:
    """Stands for a model whose weights lie on these devices."""
    weights = [SimpleNamespace(device=torch.device(device)) for device in devices]
    return SimpleNamespace(parameters=lambda: weights, forward=forward)


def rope(kind: str, **numbers: Any) -> PreTrainedConfig:
    config = LlamaConfig(**SIZES)
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, **numbers}
    return config


@pytest.mark.parametrize(
    ("model", "config", "named"),
    [
        (on("cuda:0", "cuda:1"), LLAMA, "on one CUDA device, but this one is on cuda:0, cuda:1"),
        (on("cuda:0", "meta"), LLAMA, "but this one is on cuda:0, the host, offloaded"),
        (on("cuda:0"), Llama4TextConfig(**SIZES, attention_chunk_size=64), "attention in chunks"),
        (on("cuda:0"), rope("dynamic", factor=2.0), "has rotary positions of type dynamic"),
        (on("cuda:0"), rope("longrope", factor=2.0), "has rotary positions of type longrope"),
        (on("cuda:0", forward=lambda input_ids: None), LLAMA, "takes no position_ids"),
        (on("cuda:0"), LLAMA, None),
        (on("cuda:0"), rope("llama3", factor=8.0), None),
        (on("cuda:0"), Gemma3TextConfig(**SIZES, layer_types=["sliding_attention", "full_attention"] * 2), None),
    ],
)
def test_what_cannot_be_captured_is_named(model: Any, config: Any, named: str | None) -> None:
    found = obstacle(model, Scout(), config)
    assert found is None if named is None else named in found
