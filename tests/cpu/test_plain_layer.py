"""`plain_layer`: the bits of torch's operators, for norms and rotary positions."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hf_offload.cpu.plain_layer import normalize, rotate

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 16, 40, 64, 127, 576, 1030, 4096])
def test_norm_has_the_bits_of_the_module(dtype: torch.dtype, width: int) -> None:
    norm = LlamaRMSNorm(width, 1e-5).to(dtype)
    norm.weight.data.normal_(1.0, 0.3)
    rows = (torch.randn(30, width) * torch.logspace(-3, 3, 30)[:, None]).to(dtype)
    rows[3] = 0
    out = torch.full_like(rows, float("nan"))
    normalize(dtype == torch.bfloat16, rows.data_ptr(), norm.weight.data_ptr(), out.data_ptr(), 30, width, 1e-5)
    with torch.no_grad():
        assert torch.equal(out, norm(rows))
    normalize(dtype == torch.bfloat16, rows.data_ptr(), norm.weight.data_ptr(), rows.data_ptr(), 30, width, 1e-5)
    assert torch.equal(out, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 48, 128])
@pytest.mark.parametrize("tables", [1, 2])
def test_rotary_positions_have_the_bits_of_torch(dtype: torch.dtype, dim: int, tables: int) -> None:
    batch, heads, length = 2, 5, 3
    query = torch.randn(batch, heads, length, dim).to(dtype)
    cos, sin = torch.randn(2, tables, length, dim).to(dtype)
    want = apply_rotary_pos_emb(query, query, cos, sin)[0]
    mine = query.transpose(1, 2).contiguous()
    sizes = batch * length, tables * length, heads, dim
    rotate(dtype == torch.bfloat16, mine.data_ptr(), cos.data_ptr(), sin.data_ptr(), *sizes)
    assert torch.equal(mine.transpose(1, 2), want)


def test_nan_stays_nan_in_bfloat16() -> None:
    rows, weight = torch.full((1, 16), float("nan"), dtype=torch.bfloat16), torch.ones(16, dtype=torch.bfloat16)
    normalize(True, rows.data_ptr(), weight.data_ptr(), rows.data_ptr(), 1, 16, 1e-5)
    assert rows.isnan().all()
