"""`project`: a plain layer's query, against the modules in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hf_offload.cpu.project import Layer, project
from hf_offload.cpu.standing import ANYWHERE, Standing

DTYPES = (torch.float32, torch.bfloat16)


def make(dtype: torch.dtype, heads: int, dim: int, width: int, *, bias: bool, head_norm: bool) -> Layer:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    norm, last = 1 + 0.3 * torch.randn(width), 1 + 0.3 * torch.randn(dim)
    return Layer(
        norm.to(dtype), 1e-5, random(heads * dim, width), random(heads * dim) if bias else None,
        last.to(dtype) if head_norm else None, 1e-6,
    )  # fmt: skip


def reference(layer: Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dim: int) -> torch.Tensor:
    def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        module = LlamaRMSNorm(len(weight), eps).double()
        module.weight.data.copy_(weight)
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * module.weight.detach()

    query = normed(hidden.double(), layer.norm, layer.eps) @ layer.weight.double().T
    query = query if layer.bias is None else query + layer.bias.double()
    query = query.view(*hidden.shape[:2], -1, dim)
    query = query if layer.head_norm is None else normed(query, layer.head_norm, layer.head_eps)
    query = query.transpose(1, 2)
    return apply_rotary_pos_emb(query, query, cos.double(), sin.double())[0][:, :, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "tables", "heads", "dim", "width", "bias", "head_norm"),
    [
        (1, 1, 9, 64, 576, False, False),
        (3, 3, 2, 16, 16, True, False),
        (2, 1, 5, 96, 48, False, True),
        (1, 1, 3, 128, 4096, True, True),
    ],
)
def test_the_query_of_a_layer(
    dtype: torch.dtype, batch: int, tables: int, heads: int, dim: int, width: int, bias: bool, head_norm: bool
) -> None:
    torch.manual_seed(0)
    layer = make(dtype, heads, dim, width, bias=bias, head_norm=head_norm)
    query = np.full((batch, heads, dim), np.nan, np.float32)
    standing = None
    for scale in (1e-3, 1.0, 1e3):
        hidden = (scale * torch.randn(batch, 1, width)).to(dtype)
        cos, sin = torch.randn(2, tables, 1, dim).to(dtype)
        if standing is None:
            launch = project(layer, hidden, cos, sin, query)
            standing = Standing(launch, "a query", hidden=ANYWHERE, cos=ANYWHERE, sin=ANYWHERE)
        query[:] = np.nan
        standing.run(hidden.data_ptr(), cos.data_ptr(), sin.data_ptr())
        want = reference(layer, hidden, cos, sin, dim)
        assert torch.from_numpy(query).double() == pytest.approx(want, rel=1e-4, abs=1e-4 * float(want.abs().max()))


def test_nan_stays_nan() -> None:
    layer = make(torch.bfloat16, 2, 32, 32, bias=False, head_norm=False)
    hidden = torch.full((1, 1, 32), float("nan"), dtype=torch.bfloat16)
    cos = sin = torch.ones(1, 1, 32, dtype=torch.bfloat16)
    query = np.zeros((1, 2, 32), np.float32)
    project(layer, hidden, cos, sin, query).run()
    assert np.isnan(query).all()


def test_what_does_not_fit_is_refused() -> None:
    layer = make(torch.float32, 2, 32, 32, bias=True, head_norm=True)
    hidden, cos, sin = torch.zeros(1, 1, 32), torch.zeros(1, 1, 32), torch.zeros(1, 1, 32)
    query = np.zeros((1, 2, 32), np.float32)
    with pytest.raises(TypeError, match=r"sin has dtype torch\.float64"):
        project(layer, hidden, cos, sin.double(), query)
    with pytest.raises(TypeError, match=r"hidden has dtype torch\.float16"):
        project(layer, hidden.half(), cos, sin, query)
    with pytest.raises(ValueError, match=r"weight has shape \(64, 32\).*expected \(96, 32\)"):
        project(layer, hidden, cos, sin, np.zeros((1, 3, 32), np.float32))
    with pytest.raises(ValueError, match="use 1 or as many"):
        project(layer, hidden, torch.zeros(2, 1, 32), torch.zeros(2, 1, 32), query)
    with pytest.raises(ValueError, match="hidden has shape"):
        project(layer, torch.zeros(1, 1, 64)[..., ::2], cos, sin, query)
    with pytest.raises(ValueError, match=r"dimension 40.* is not a multiple of 16"):
        project(layer, hidden, cos, sin, np.zeros((1, 2, 40), np.float32))
