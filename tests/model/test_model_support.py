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
SLIDING = ["sliding_attention", "full_attention"] * 2


class Elsewhere:
    """Stands for a model whose weights lie on these devices."""

    def __init__(self, *devices: str) -> None:
        self.devices = devices

    def parameters(self) -> list[Any]:
        return [SimpleNamespace(device=torch.device(device)) for device in self.devices]

    def forward(self, input_ids: Any, position_ids: Any = None) -> None: ...


class WithoutPositions(Elsewhere):
    def forward(self, input_ids: Any) -> None: ...  # type: ignore[override]


def rope(kind: str, **numbers: Any) -> PreTrainedConfig:
    config = LlamaConfig(**SIZES)
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, **numbers}
    return config


@pytest.mark.parametrize(
    ("model", "config", "named"),
    [
        (Elsewhere("cuda:0", "cuda:1"), LlamaConfig(**SIZES), "on one CUDA device, but this one is on cuda:0, cuda:1"),
        (Elsewhere("cuda:0", "meta"), LlamaConfig(**SIZES), "but this one is on cuda:0, the host, offloaded"),
        (Elsewhere("cuda:0"), Llama4TextConfig(**SIZES, attention_chunk_size=64), "attention in chunks"),
        (Elsewhere("cuda:0"), rope("dynamic", factor=2.0), "has rotary positions of type dynamic"),
        (Elsewhere("cuda:0"), rope("longrope", factor=2.0), "has rotary positions of type longrope"),
        (WithoutPositions("cuda:0"), LlamaConfig(**SIZES), "takes no position_ids"),
    ],
)
def test_what_cannot_be_captured_is_named(model: Any, config: Any, named: str) -> None:
    assert named in (obstacle(model, Scout(), config) or "")


def test_other_models_are_taken() -> None:
    windows = Gemma3TextConfig(**SIZES, layer_types=SLIDING)
    for config in (LlamaConfig(**SIZES), rope("llama3", factor=8.0), windows):
        assert obstacle(Elsewhere("cuda:0"), Scout(), config) is None
