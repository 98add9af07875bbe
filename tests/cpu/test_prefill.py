"""The prefill kernel against float64, on odd sizes, ragged rows, poisoned memory; its error beside torch's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pools import DTYPES, make_case, run

from hf_offload.cpu.kernels import prefill
from hf_offload.cpu.kernels.prefill import ROWS, TILE, prefill_attention

TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-6, torch.bfloat16: 6e-3}
"""Keys and values are those of the dtype; in bfloat16 the weights may be rounded, too."""


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float,
    softcap: float | None = None, sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Out `[B, Q, Hq, D]` and lse `[B, Hq, Q]` in float64; `seen`: `[B, 1, Q, T]`."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        lse = torch.cat((scores, column), -1).logsumexp(-1)
    else:
        lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return (weights @ value).transpose(1, 2), lse


def prefill_alone(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **change: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of queries and tokens of which none is in blocks."""
    batch, heads, length, dim = query.shape
    out, lse = torch.empty(batch, length, heads, dim), torch.empty(batch, heads, length)
    given: dict[str, Any] = {
        "valid": None, "out": out, "lse": lse, "block_size": 32, "cached": 0, "fresh_first": 0, "position": 0,
        "scale": dim**-0.5, "softcap": None, "sinks": None, "block_ptr": np.zeros(1, np.int64),
        "table": np.zeros((1, 1), np.int32), "query": query, "key": key, "value": value,
    }  # fmt: skip
    prefill_attention(**(given | change)).run()
    return out, lse


@pytest.fixture(params=["products", "pairs"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """bfloat16 by dot products of pairs, whatever is faster here, or by products of float32."""
    if request.param == "pairs" and not prefill.has_feature("avx512bf16"):
        pytest.skip("this CPU has no AVX512_BF16")
    monkeypatch.setattr(prefill, "_dots_are_fast", lambda: request.param == "pairs")
    return str(request.param)


CASES = [  # rows, query heads, KV heads, head size, block size, cached, new, padding, share of holes
    (1, 1, 1, 16, 8, 0, 1, 0, 0.0),
    (1, 9, 3, 64, 32, 0, 300, 0, 0.0),
    (2, 6, 2, 48, 16, 75, 33, 20, 0.0),
    (3, 4, 4, 80, 8, 200, 17, 60, 0.1),
    (2, 8, 1, 256, 64, TILE + 5, TILE + 1, 300, 0.2),
    (1, 28, 4, 128, 128, 0, 3 * ROWS // 7 + 1, 0, 0.0),
    (2, 5, 5, 112, 32, 511, 2, 0, 0.3),
]


# Each dtype, with a softcap and without, is compiled anew: the quick set has float32 with, bfloat16 without.
every_dtype = pytest.mark.parametrize(
    "dtype", [dtype if dtype != torch.float16 else pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES]
)


@every_dtype
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_attention_in_float64(case: tuple[Any, ...], dtype: torch.dtype, way: str) -> None:
    batch, heads, kv_heads, dim, size, cached, new, padding, holes = case
    if way == "pairs" and dtype != torch.bfloat16:
        pytest.skip("pairs are of bfloat16")
    torch.manual_seed(cached + new)
    total, paddings = cached + new, tuple(padding * b for b in range(batch))
    pool = make_case(batch, kv_heads, dim, size, max(cached, 1), dtype, paddings, holes)
    key, value = (torch.randn(batch, new, kv_heads, dim).to(dtype).transpose(1, 2) for _ in range(2))
    query = torch.randn(batch, new, heads, dim).to(dtype).transpose(1, 2)
    valid = torch.ones(batch, total + 3, dtype=torch.uint8)
    valid[:, :cached] = pool.valid[:, :cached]
    for b in range(batch):
        valid[b, : paddings[b]] = 0
    valid[:, cached + new // 2] = 0  # of which the values are NaN, as padding may be
    for x in (key, value):
        x.masked_fill_((valid[:, cached:total] == 0)[:, None, :, None], math.nan)
    if not (padding or holes):
        valid[:], key, value = 1, key.nan_to_num(0.5), value.nan_to_num(0.5)
    blocks = pool.clean[pool.table.long()]  # [B, n, Hkv, 2, size, D]
    old = blocks.permute(3, 0, 2, 1, 4, 5).flatten(3, 4)[:, :, :, :cached]
    seen = (torch.arange(total) <= torch.arange(cached, total)[:, None]) & (valid[:, None, None, :total] != 0)
    out, lse = torch.full((batch, new, heads, dim), math.nan), torch.full((batch, heads, new), math.nan)
    for softcap, sinks in ((None, None), (3.0 if dtype != torch.bfloat16 else None, torch.randn(heads))):
        for first, count in ((0, new // 3), (new // 3, new - new // 3)):
            piece = slice(first, first + count)
            sums, masses = torch.full((batch, count, heads, dim), math.nan), torch.full((batch, heads, count), math.nan)
            launch = prefill_attention(
                query[:, :, piece], key, value, pool.block_ptr, pool.table.numpy(),
                valid.numpy() if padding or holes else None, sums, masses, block_size=size, cached=cached,
                fresh_first=cached, position=cached + first, scale=dim**-0.5, softcap=softcap,
                sinks=None if sinks is None else sinks.numpy(),
            )  # fmt: skip
            run(launch, threads=3)
            out[:, piece], lse[:, :, piece] = sums, masses
        keys, values = (torch.cat((o, n.nan_to_num(0.0)), 2) for o, n in zip(old, (key, value), strict=True))
        want = reference(query, keys, values, seen, dim**-0.5, softcap, sinks)
        assert torch.equal(lse == -math.inf, want[1] == -math.inf)
        some = want[1] > -math.inf
        torch.testing.assert_close(lse[some].double(), want[1][some], atol=2e-5, rtol=1e-6)
        error = (out.double() - want[0]).abs().max().item()
        assert error <= TOLERANCE[dtype] * max(1.0, want[0].abs().max().item()), error


@pytest.mark.parametrize("position", [500, 150, 90])
def test_tokens_in_tensors_alone_of_which_the_first_has_a_position(position: int) -> None:
    """A tile of unpacked tokens: all of them are earlier than the queries, or some are later."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 20, 32), torch.randn(1, 2, 70, 32), torch.randn(1, 2, 70, 32)
    out, lse = prefill_alone(query, key, value, fresh_first=100, position=position, scale=0.2)
    seen = torch.arange(100, 170) <= torch.arange(position, position + 20)[:, None]
    want = reference(query, key, value, seen[None, None], 0.2)
    torch.testing.assert_close(out.double(), want[0], atol=3e-6, rtol=0)
    torch.testing.assert_close(lse.double(), want[1], atol=1e-5, rtol=1e-6)


@every_dtype
@pytest.mark.parametrize(
    ("heads", "dim", "length", "size"), [(9, 64, 700, 1.0), (4, 128, 400, 8.0), (2, 256, 500, 1.0), (2, 64, 300, 1e6)]
)
def test_the_error_is_no_larger_than_torchs(
    heads: int, dim: int, length: int, size: float, dtype: torch.dtype, way: str
) -> None:
    """Of values of both signs and of one, and of queries with large logits."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, heads, length, dim) for _ in range(3))
    v[:, 1:] = v[:, 1:].abs() + 1
    q, k, v = (q * min(size, 1e4) if dtype == torch.float16 else q * size).to(dtype), k.to(dtype), v.to(dtype)
    want = reference(q, k, v, torch.ones(length, length, dtype=torch.bool).tril()[None, None], dim**-0.5)[0]
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    mine, other = (
        (x.to(dtype).double() - want).square().mean().sqrt().item() for x in (prefill_alone(q, k, v)[0], theirs)
    )
    assert mine <= 1.05 * other + 1e-12


def test_a_sink_that_weighs_nothing_changes_nothing() -> None:
    """Also where a row sees no key in its first tiles."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 2 * TILE + 40, 16) for _ in range(3))
    valid = np.ones((1, q.shape[2]), np.uint8)
    valid[0, : TILE + 7] = 0
    found = [prefill_alone(q, k, v, valid=valid, sinks=sinks) for sinks in (None, np.full(2, -np.inf, np.float32))]
    assert found[0][0].isfinite().all()
    assert all(map(torch.equal, *found))


def test_what_is_not_finite_spreads_to_those_that_see_it() -> None:
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    k[0, 0, 10, 3], v[0, 1, 20, 5] = math.nan, math.inf
    out, _ = prefill_alone(q, k, v)
    assert out[0, :10, 0].isfinite().all()
    assert out[0, 10:, 0].isnan().all()
    assert out[0, :12, 1].isfinite().all()  # as with torch, an infinite value may reach queries just before it: 0 · ∞
    assert not out[0, 20:, 1, 5].isfinite().any()


def test_what_does_not_fit_is_refused() -> None:
    q, k = torch.randn(1, 4, 8, 32), torch.randn(1, 2, 8, 32)
    wrong: list[dict[str, Any]] = [
        {"value": k[:, :, :4]}, {"query": q.double()}, {"block_size": 24}, {"cached": 33}, {"scale": 0.0},
        {"valid": np.ones((1, 4), np.uint8)}, {"key": k.transpose(2, 3)},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises((ValueError, TypeError)):
            prefill_alone(q, k, k, **change)
