"""The query of a plain decoder layer, from its input: one multiplication by torch, the rest in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_offload.cpu.plain_layer import normalize, rotate

_KINDS = {torch.float32: False, torch.bfloat16: True}
_PROBES = 64
"""Rows of random numbers on which a norm is compared with the module."""

Adapter = Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]


class _Norm:
    """An RMS norm with a weight, computed as its module does (`agrees` tells)."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters, self.module = module._parameters, module
        self.eps = float(getattr(module, "variance_epsilon", getattr(module, "eps", None)) or 0.0)
        weight = self.parameters["weight"]
        assert weight is not None
        self.width, self.short = len(weight), _KINDS[weight.dtype]

    def __call__(self, source: torch.Tensor, target: torch.Tensor, rows: int) -> None:
        """Of contiguous `[rows, width]` in the weight's dtype; the target may be the source."""
        weight: Any = self.parameters["weight"]
        normalize(self.short, source.data_ptr(), weight.data_ptr(), target.data_ptr(), rows, self.width, self.eps)

    def agrees(self) -> bool:
        """Whether it gives the module's very bits."""
        generator, weight = torch.Generator().manual_seed(0), self.parameters["weight"]
        assert weight is not None
        with torch.no_grad():
            rows = torch.randn(_PROBES, self.width, generator=generator) * torch.logspace(-2, 2, _PROBES)[:, None]
            rows = rows.to(weight.dtype)
            mine = torch.empty_like(rows)
            self(rows, mine, _PROBES)
            return torch.equal(mine, self.module(rows))


def plain_query(layer: nn.Module, otherwise: Adapter) -> Adapter | None:
    """The quickest way to the query of a layer on the CPU; None unless its parts are plain.

    Args:
        layer: a decoder layer of the Llama kind: RMS norm, `nn.Linear`, maybe a norm of each head, rotary positions.
        otherwise: for inputs that the compiled code does not cover.
    """
    attention: Any = layer._modules.get("self_attn")
    inside = {} if attention is None else attention._modules
    norm, project, query_norm = layer._modules.get("input_layernorm"), inside.get("q_proj"), inside.get("q_norm")
    dim = getattr(attention, "head_dim", None)
    if norm is None or type(project) is not nn.Linear or not isinstance(dim, int) or dim % 2:
        return None
    norms = [part for part in (norm, query_norm) if part is not None]
    if not all(map(_is_plain, (*norms, project))) or len({part.weight.dtype for part in (*norms, project)}) != 1:
        return None
    before, after = _Norm(norm), None if query_norm is None else _Norm(query_norm)
    if not before.agrees() or (after is not None and not (after.width == dim and after.agrees())):
        return None
    owned, dtype, short = project._parameters, norm.weight.dtype, before.short

    def adapter(hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        cos, sin = kwargs["position_embeddings"]
        batch, length, width = hidden.shape
        tables = cos.shape
        covered = hidden.dtype is dtype and cos.dtype is dtype and sin.dtype is dtype and hidden.is_cpu and cos.is_cpu
        fits = width == before.width and tables == sin.shape and tables[1:] == (length, dim) and tables[0] in (1, batch)
        if not (covered and fits and hidden.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
            return otherwise(hidden, kwargs)
        query = torch.empty_like(hidden)
        before(hidden, query, batch * length)
        query = nn.functional.linear(query, owned["weight"], owned["bias"])  # type: ignore[arg-type]
        if query.dtype is not dtype:  # autocast
            return otherwise(hidden, kwargs)
        heads = query.shape[2] // dim
        if after is not None:
            after(query, query, batch * length * heads)
        rotate(short, query.data_ptr(), cos.data_ptr(), sin.data_ptr(), batch * length, tables[0] * length, heads, dim)
        return query.view(batch, length, heads, dim).transpose(1, 2)

    return adapter


def _is_plain(module: nn.Module) -> bool:
    """Whether a module does nothing but compute with its one weight (and a bias), in a dtype that is covered."""
    weight = module._parameters.get("weight")
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    names = {"weight", "bias"} if type(module) is nn.Linear else {"weight"}
    return (
        weight is not None
        and weight.dtype in _KINDS
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and set(module._parameters) <= names
        and not any(hooks)
        and "forward" not in module.__dict__
    )
