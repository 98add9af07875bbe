"""The query of a plain layer by one launch: that of the modules but for rounding, for what it covers, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_model
from torch import nn

from hf_offload.attention.hooks import find_layers
from hf_offload.attention.host_kernels import HostKernels
from hf_offload.attention.lookahead import make_adapter
from hf_offload.attention.plain_query import MOST_ROWS, Adapter, plain_query


def make(family: str, dtype: torch.dtype) -> tuple[Any, Adapter]:
    model = tiny_model(family).to(dtype)
    layer: Any = find_layers(model)[1][1]
    for part in (layer.input_layernorm, getattr(layer.self_attn, "q_norm", None)):
        if part is not None:
            part.weight.data.normal_(1.0, 0.3)
    modules = make_adapter(layer)
    assert modules is not None
    return layer, modules


def inputs(layer: Any, batch: int, tables: int, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, Any]]:
    dim, width = layer.self_attn.head_dim, layer.self_attn.q_proj.in_features
    kwargs = {"position_embeddings": tuple(torch.randn(2, tables, 1, dim).to(dtype))}
    return torch.randn(batch, 1, width).to(dtype), kwargs


def taken(plain: Any, hidden: torch.Tensor, kwargs: dict[str, Any], kernels: HostKernels | None = None) -> torch.Tensor:
    foreseen = plain.foresee(hidden, kwargs)
    batch, heads, _, dim = foreseen.shape
    kernels = kernels or HostKernels(0, (batch, heads, dim))
    kernels.query[:] = float("nan")
    standing, numbers, _ = foreseen.bring(kernels)
    standing.run(*numbers)
    return torch.from_numpy(kernels.query.copy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("batch", "tables"), [(1, 1), (3, 3), (2, 1)])
@torch.no_grad()
def test_the_queries_of_the_modules(family: str, dtype: torch.dtype, batch: int, tables: int) -> None:
    layer, modules = make(family, dtype)
    plain = plain_query(layer)
    assert plain is not None
    hidden, kwargs = inputs(layer, batch, tables, dtype)
    assert plain.agrees(modules, hidden, kwargs)
    want = modules(hidden, kwargs)
    assert plain.foresee(hidden, kwargs).shape == want.shape  # type: ignore[union-attr]
    far = (taken(plain, hidden, kwargs) - want[:, :, 0].float()).abs().max()
    assert far <= (1e-5 if dtype == torch.float32 else 1e-2) * want.abs().max()


@torch.no_grad()
def test_the_weights_are_those_of_the_moment() -> None:
    layer, modules = make("llama", torch.float32)
    plain = plain_query(layer)
    hidden, kwargs = inputs(layer, 1, 1, torch.float32)
    kernels = HostKernels(0, modules(hidden, kwargs)[:, :, 0].shape)
    for replace in (False, True):
        if replace:
            layer.self_attn.q_proj.weight = nn.Parameter(2 * layer.self_attn.q_proj.weight)
        want = modules(hidden, kwargs)[:, :, 0]
        assert torch.allclose(taken(plain, hidden, kwargs, kernels), want, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_other_inputs_have_none() -> None:
    layer, modules = make("llama", torch.float32)
    plain = plain_query(layer)
    assert plain is not None
    hidden, kwargs = inputs(layer, 1, 1, torch.float32)
    cos, sin = kwargs["position_embeddings"]
    assert plain.foresee(hidden, kwargs) is not None
    assert plain.foresee(hidden.expand(1, 2, -1).contiguous(), kwargs) is None
    assert plain.foresee(hidden.expand(MOST_ROWS + 1, -1, -1).contiguous(), kwargs) is None
    assert plain.foresee(torch.cat([hidden, hidden], -1)[..., ::2], kwargs) is None
    assert plain.foresee(hidden.bfloat16(), kwargs) is None
    assert plain.foresee(hidden, {"position_embeddings": (cos.double(), sin.double())}) is None
    assert plain.foresee(hidden, {"position_embeddings": (cos[..., ::2], sin[..., ::2])}) is None
    assert plain.agrees(modules, hidden, kwargs)
    assert not plain.agrees(lambda hidden, kwargs: 1.001 * modules(hidden, kwargs), hidden, kwargs)


@torch.no_grad()
def test_parts_that_are_not_plain_have_none() -> None:
    layer, modules = make("gemma3", torch.float32)  # its norm adds 1 to the weight
    plain = plain_query(layer)
    assert plain is None or not plain.agrees(modules, *inputs(layer, 1, 1, torch.float32))
    layer, _ = make("llama", torch.float32)
    handle = layer.input_layernorm.register_forward_hook(lambda *args: None)
    assert plain_query(layer) is None
    handle.remove()
    assert plain_query(layer) is not None
    layer.self_attn.q_proj = nn.Sequential(layer.self_attn.q_proj)
    assert plain_query(layer) is None
