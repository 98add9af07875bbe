"""Attention over blocks in slots against float64 loops, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_offload.gpu.paged_attention import count_splits, paged_attention

from ._listings import FORMS, choose_form, make_listing, true_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SHAPES = [  # chosen so that tiles join blocks, are blocks, or cut them, and that there are several shares
    {"heads": 2, "group": 1, "dim": 16, "size": 8, "width": 40},
    {"heads": 1, "group": 3, "dim": 80, "size": 16, "width": 17},
    {"heads": 2, "group": 5, "dim": 32, "size": 32, "width": 9},
    {"heads": 3, "group": 7, "dim": 128, "size": 64, "width": 5},
    {"heads": 1, "group": 16, "dim": 64, "size": 128, "width": 3},
    {"heads": 2, "group": 35, "dim": 16, "size": 16, "width": 20},
    {"heads": 2, "group": 17, "dim": 16, "size": 16, "width": 20},  # a head that is left over
    {"heads": 1, "group": 20, "dim": 16, "size": 16, "width": 40},
]


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "extra",
    [
        {},
        pytest.param({"padded": True}, marks=pytest.mark.slow),
        {"padded": True, "softcap": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_shares_add_up_to_attention(
    request: pytest.FixtureRequest, form: str, dtype: torch.dtype, shape: dict[str, Any], extra: dict[str, Any]
) -> None:
    device = choose_form(form, request)
    softcap = extra.get("softcap")
    listing = make_listing(device, dtype, **shape, padded="padded" in extra)
    out, lse = paged_attention(*listing.tensors, scale=0.3, softcap=softcap)
    if form != "torch":
        assert out.shape[2] == count_splits(2 * shape["heads"], shape["width"] * shape["size"]) > 1
    assert torch.equal(out[lse == float("-inf")], torch.zeros_like(out[lse == float("-inf")]))
    truth, true_lse = true_attention(listing, 0.3, softcap)
    lse = lse.double().cpu()
    total = lse.logsumexp(2)
    weights = (lse - total.nan_to_num(neginf=0.0).unsqueeze(2)).exp()
    tolerance = TOLERANCE[dtype] if form != "torch" else 1e-5
    torch.testing.assert_close(total, true_lse, atol=tolerance, rtol=tolerance)
    merged = (weights.unsqueeze(3) * out.double().cpu()).sum(2)
    torch.testing.assert_close(merged, truth, atol=tolerance, rtol=tolerance)
    assert (true_lse == float("-inf")).any()  # the head that lists nothing


@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_a_query_in_fp32_is_taken_too(request: pytest.FixtureRequest, form: str, dtype: torch.dtype) -> None:
    listing = make_listing(choose_form(form, request), dtype, heads=1, group=2, dim=16, size=16, width=3)
    out, lse = paged_attention(*listing.tensors, scale=0.3)
    again, lse_again = paged_attention(listing.query.float(), *listing.tensors[1:], scale=0.3)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


def test_splits_fill_a_gpu_and_no_more() -> None:
    assert count_splits(8, 2048) == 16  # shares of 128 tokens
    assert count_splits(8, 10**6) == 33  # 264 programs
    assert count_splits(1, 10**6) == 64
    assert count_splits(300, 10**6) == 1
    assert count_splits(8, 16) == 1
    assert count_splits(64 * 8, 32 << 10) == 1  # a large batch fills it by itself
    assert all(lines * count_splits(lines, 10**6) < 264 + lines for lines in range(5, 1000))  # partials stay few


def _arguments() -> dict[str, Any]:
    integers = {"dtype": torch.int32}
    return {
        "query": torch.zeros(2, 4, 16), "pool": torch.zeros(2, 2, 3, 2, 8, 16),
        "slots": torch.zeros(2, 2, 3, **integers), "blocks": torch.zeros(2, 2, 3, **integers),
        "counts": torch.zeros(2, 2, **integers), "limits": torch.zeros(2, **integers),
        "valid": torch.ones(2, 24, dtype=torch.uint8), "scale": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("query", torch.zeros(2, 3, 16), ValueError, "does not fit a pool"),
        ("query", torch.zeros(2, 16, 4).transpose(1, 2), ValueError, "query must be contiguous"),
        ("query", torch.zeros(2, 4, 16).half(), TypeError, "query has dtype torch.float16"),
        ("pool", torch.zeros(2, 2, 3, 2, 12, 16), ValueError, "block_size 12"),
        ("pool", torch.zeros(2, 2, 3, 8, 16), ValueError, "expected \\[B, Hkv, R, 2, block_size, D\\]"),
        ("pool", torch.zeros(2, 2, 3, 2, 8, 16).double(), TypeError, "pool has dtype torch.float64"),
        ("slots", torch.zeros(2, 2, 3).long(), TypeError, "slots has dtype torch.int64"),
        ("blocks", torch.zeros(2, 2, 4).int(), ValueError, "blocks has shape \\(2, 2, 4\\)"),
        ("counts", torch.zeros(2, 3).int(), ValueError, "counts has shape \\(2, 3\\)"),
        ("limits", torch.zeros(2, dtype=torch.int32, device="meta"), ValueError, "limits lies on meta"),
        ("valid", torch.ones(2, 24).bool(), TypeError, "valid has dtype torch.bool"),
        ("softcap", -1.0, ValueError, "softcap -1.0"),
    ],
)
def test_bad_arguments_are_refused(name: str, value: Any, error: type[Exception], message: str) -> None:
    paged_attention(**_arguments())
    with pytest.raises(error, match=message):
        paged_attention(**{**_arguments(), name: value})
