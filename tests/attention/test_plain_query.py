"""The compiled short cut to a query: the bits of the modules, for what it covers, and the modules for the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_model
from torch import nn

from hf_offload.attention.hooks import find_layers
from hf_offload.attention.lookahead import make_adapter
from hf_offload.attention.plain_query import plain_query


def make(family: str, dtype: torch.dtype) -> tuple[Any, Any, list[torch.Tensor]]:
    model = tiny_model(family).to(dtype)
    layer: Any = find_layers(model)[1][1]
    for part in (layer.input_layernorm, getattr(layer.self_attn, "q_norm", None)):
        if part is not None:
            part.weight.data.normal_(1.0, 0.3)
    calls: list[torch.Tensor] = []
    modules = make_adapter(layer)
    assert modules is not None

    def otherwise(hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        calls.append(hidden)
        return modules(hidden, kwargs)

    return layer, otherwise, calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("batch", "length", "tables"), [(1, 1, 1), (3, 1, 3), (2, 4, 1), (2, 4, 2)])
@torch.no_grad()
def test_the_bits_of_the_modules(family: str, dtype: torch.dtype, batch: int, length: int, tables: int) -> None:
    layer, otherwise, calls = make(family, dtype)
    adapter = plain_query(layer, otherwise)
    assert adapter is not None
    dim, width = layer.self_attn.head_dim, layer.self_attn.q_proj.in_features
    kwargs = {"position_embeddings": tuple(torch.randn(2, tables, length, dim).to(dtype))}
    hidden = torch.randn(batch, length, width).to(dtype)
    got = adapter(hidden, kwargs)
    assert not calls
    assert torch.equal(got, otherwise(hidden, kwargs))


@torch.no_grad()
def test_other_inputs_go_to_the_modules() -> None:
    layer, otherwise, calls = make("llama", torch.float32)
    adapter = plain_query(layer, otherwise)
    assert adapter is not None
    dim, width = layer.self_attn.head_dim, layer.self_attn.q_proj.in_features
    tables = torch.randn(2, 1, 2, dim)
    hidden = torch.randn(1, 2, 2 * width)[..., ::2]
    assert torch.equal(adapter(hidden, {"position_embeddings": tuple(tables)}), adapter(hidden.contiguous(), {
        "position_embeddings": tuple(tables)
    }))  # fmt: skip
    assert len(calls) == 1
    wide = tuple(tables.double())
    assert adapter(hidden.contiguous(), {"position_embeddings": wide}).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        adapter(hidden.contiguous(), {"position_embeddings": tuple(tables)})
    assert len(calls) == 3


@torch.no_grad()
def test_parts_that_are_not_plain_have_none() -> None:
    layer, otherwise, _ = make("gemma3", torch.float32)  # its norm adds 1 to the weight
    assert plain_query(layer, otherwise) is None
    layer, otherwise, _ = make("llama", torch.float32)
    handle = layer.input_layernorm.register_forward_hook(lambda *args: None)
    assert plain_query(layer, otherwise) is None
    handle.remove()
    assert plain_query(layer, otherwise) is not None
    layer.self_attn.q_proj = nn.Sequential(layer.self_attn.q_proj)
    assert plain_query(layer, otherwise) is None
