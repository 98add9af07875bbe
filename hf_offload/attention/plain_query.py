"""The query of a plain decoder layer, from its input: one launch, which goes along with the first of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_offload.attention.host_kernels import HostKernels
from hf_offload.cpu.project import Layer, project
from hf_offload.cpu.standing import ANYWHERE, Standing

MOST_ROWS = 8
"""More rows are multiplied sooner by torch."""
_ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""How far from the modules' queries those of the launch may be, as a share of the largest number."""

Adapter = Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]


@dataclass(slots=True)
class Foreseen:
    """A query that the first launch of a step computes.

    Args:
        plain: the layer's weights.
        hidden: `[B, 1, W]`; cos, sin: `[1 or B, 1, D]`.
        shape: (B, Hq, 1, D).
    """

    plain: PlainQuery
    hidden: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    shape: torch.Size

    def bring(self, kernels: HostKernels) -> tuple[Standing, tuple[int, ...], Any]:
        """The launch that writes it into the layer's buffer, its numbers, and what it reads."""
        numbers = self.weights
        standing = kernels.foreseeing.find((self.plain,), numbers)
        if standing is None:
            launch = project(self.plain.layer(), self.hidden, self.cos, self.sin, kernels.query)
            anywhere = {"hidden": ANYWHERE, "cos": ANYWHERE, "sin": ANYWHERE}
            standing = kernels.foreseeing.keep(launch, (self.plain,), numbers, **anywhere)
        return standing, self.places, self

    @property
    def weights(self) -> tuple[int, ...]:
        """What a launch is made for: rows of the positions, and where the weights are."""
        return len(self.cos), *self.plain.addresses()

    @property
    def places(self) -> tuple[int, int, int]:
        """Where the input and the positions are."""
        return self.hidden.data_ptr(), self.cos.data_ptr(), self.sin.data_ptr()


class PlainQuery:
    """What makes the queries of a decoder layer of the Llama kind whose parts are plain (`plain_query` says of which).

    Args:
        norm, project, head_norm: its modules.
        dim: of a head.
    """

    def __init__(self, norm: nn.Module, project: nn.Linear, head_norm: nn.Module | None, dim: int) -> None:
        self._norm, self._project = norm._parameters, project._parameters
        self._head_norm: dict[str, Any] = {"weight": None} if head_norm is None else head_norm._parameters
        self._eps, self._head_eps = _eps(norm), 0.0 if head_norm is None else _eps(head_norm)
        self._dtype, self._width, self._dim = project.weight.dtype, project.in_features, dim
        self._heads = project.out_features // dim
        self._shapes = [None if part is None else part.shape for part in self._weights()]

    def _weights(self) -> tuple[torch.Tensor | None, ...]:
        project = self._project
        return self._norm["weight"], project["weight"], project["bias"], self._head_norm["weight"]

    def layer(self) -> Layer:
        """The weights as they are now."""
        norm, weight, bias, head_norm = self._weights()
        return Layer(norm, self._eps, weight, bias, head_norm, self._head_eps)  # type: ignore[arg-type]

    def addresses(self) -> tuple[int, ...]:
        """Where the weights are now; 0 for what there is not."""
        return tuple([0 if part is None else part.data_ptr() for part in self._weights()])

    def _fit(self) -> bool:
        """Whether the weights are of the shapes, dtype and layout that the launch reads; others may replace them."""
        for part, shape in zip(self._weights(), self._shapes, strict=True):
            if part is None:
                if shape is not None:
                    return False
            elif part.shape != shape or part.dtype is not self._dtype or not part.is_contiguous():
                return False
        return True

    def foresee(self, hidden: torch.Tensor, kwargs: dict[str, Any]) -> Foreseen | None:
        """The query for an input `[B, 1, W]`; None for inputs that the launch does not cover."""
        cos, sin = kwargs["position_embeddings"]
        batch, length, width = hidden.shape
        shape, dtype = cos.shape, self._dtype
        fits = length == 1 and batch <= MOST_ROWS and width == self._width and shape == sin.shape
        fits = fits and (shape[0] == 1 or shape[0] == batch) and shape[1] == 1 and shape[2] == self._dim
        if not fits or hidden.dtype is not dtype or cos.dtype is not dtype or sin.dtype is not dtype:
            return None
        if not (hidden.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and cos.is_cpu and self._fit()):
            return None
        # A copy: the layer goes on with its input, maybe in place, while the query is computed.
        return Foreseen(self, hidden.clone(), cos, sin, torch.Size((batch, self._heads, 1, self._dim)))

    def agrees(self, modules: Adapter, hidden: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether it gives the modules' queries, but for rounding, for this input and for random ones like it."""
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)).to(hidden.dtype)
        for source in (hidden, noise):
            foreseen = self.foresee(source, kwargs)
            if foreseen is None:
                return False
            batch, heads, _, dim = foreseen.shape
            mine = np.empty((batch, heads, dim), np.float32)
            project(self.layer(), source, foreseen.cos, foreseen.sin, mine).run("a predicted query")
            want = modules(source, kwargs)[:, :, 0].float()
            far = (torch.from_numpy(mine) - want).abs().max()
            if not bool(far <= _ROUNDING[self._dtype] * want.abs().max()):
                return False
        return True


def plain_query(layer: nn.Module) -> PlainQuery | None:
    """What computes a layer's queries on the CPU in one launch; None unless its parts are plain.

    Args:
        layer: a decoder layer of the Llama kind: RMS norm, `nn.Linear`, maybe a norm of each head, rotary positions.
    """
    attention: Any = layer._modules.get("self_attn")
    inside = {} if attention is None else attention._modules
    norm, project, head_norm = layer._modules.get("input_layernorm"), inside.get("q_proj"), inside.get("q_norm")
    dim = getattr(attention, "head_dim", None)
    if norm is None or type(project) is not nn.Linear or not isinstance(dim, int) or dim % 16:
        return None
    parts = [part for part in (norm, project, head_norm) if part is not None]
    if not all(map(_is_plain, parts)) or len({part._parameters["weight"].dtype for part in parts}) != 1:  # type: ignore[union-attr]
        return None
    if project.in_features % 16 or project.out_features % dim or len(norm._parameters["weight"]) != project.in_features:  # type: ignore[arg-type]
        return None
    if head_norm is not None and len(head_norm._parameters["weight"]) != dim:
        return None
    return PlainQuery(norm, project, head_norm, dim)


def _eps(norm: nn.Module) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", None)) or 0.0)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module does nothing but compute with its one weight (and a bias), in a dtype that is covered."""
    weight = module._parameters.get("weight")
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    names = {"weight", "bias"} if type(module) is nn.Linear else {"weight"}
    return (
        weight is not None
        and weight.dtype in _ROUNDING
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and set(module._parameters) <= names
        and not any(hooks)
        and "forward" not in module.__dict__
    )
