"""The moving average of attention weights against float64 loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_offload.policies.hgca.kernels.resident_weights import update_weights

from ._listings import FORMS, choose_form, make_listing, true_scores

SHAPES = [
    {"heads": 2, "group": 1, "dim": 16, "size": 8, "width": 9},
    {"heads": 1, "group": 3, "dim": 80, "size": 16, "width": 5},
    {"heads": 2, "group": 5, "dim": 32, "size": 32, "width": 3},
    {"heads": 1, "group": 16, "dim": 128, "size": 128, "width": 2},
    {"heads": 2, "group": 17, "dim": 16, "size": 8, "width": 5},
    {"heads": 1, "group": 35, "dim": 16, "size": 8, "width": 5},
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("peak", [{}, {"share": 0.5, "after": 9}], ids=["mean", "peak"])
@pytest.mark.parametrize("extra", [{}, {"padded": True, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_averages_move(
    request: pytest.FixtureRequest, form: str, dtype: torch.dtype, shape: dict[str, Any], extra: dict[str, Any],
    peak: dict[str, Any],
) -> None:  # fmt: skip
    device = choose_form(form, request)
    listing = make_listing(device, dtype, **shape, padded="padded" in extra)
    generator = torch.Generator().manual_seed(1)
    heads, size = listing.query.shape[1], shape["size"]
    before = torch.rand(2, heads, listing.pool.shape[2], size, generator=generator)
    scores = true_scores(listing, 0.3, extra.get("softcap"))
    lse = scores.flatten(2).logsumexp(2)
    truth = before.double()
    for row, head, kv_head in listing.heads():
        count = int(listing.counts[row, kv_head])
        for entry, slot in enumerate(listing.slots[row, kv_head, :count].tolist()):
            weight = (scores[row, head, slot] - lse[row, head]).exp()
            first = int(listing.blocks[row, kv_head, entry]) * size
            age = (int(listing.limits[0]) - torch.arange(first, first + size)).clamp(min=1)
            if peak:
                moved = torch.maximum(0.75 * truth[row, head, slot], 0.5 * weight * (age > 9))
            else:
                rate = (1 / age.double()).clamp(min=0.25)
                moved = (1 - rate) * truth[row, head, slot] + rate * weight
            truth[row, head, slot] = moved.where(listing.seen[row, kv_head, slot].cpu(), 0.0)
    average = before.clone().to(device)
    update_weights(
        average, *listing.tensors, lse.float().to(device), scale=0.3, softcap=extra.get("softcap"), alpha=0.25,
        **peak,
    )  # fmt: skip
    torch.testing.assert_close(average.double().cpu(), truth, atol=1e-5, rtol=1e-5)
    free = (average.cpu() == before).all(3)
    assert (free.sum(2) >= 2).all()  # there are two slots more than blocks
    assert not free[1].all(1).any()  # and every head of this row lists something


@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_averages_approach_the_weights_of_a_query_that_stays(
    request: pytest.FixtureRequest, form: str, dtype: torch.dtype
) -> None:
    device = choose_form(form, request)
    listing = make_listing(device, dtype, heads=1, group=2, dim=16, size=16, width=3)
    lse = true_scores(listing, 0.3, None).flatten(2).logsumexp(2).float().to(device)
    average = torch.zeros(2, 2, 5, 16, device=device)
    for _ in range(12):
        update_weights(average, *listing.tensors, lse, scale=0.3, alpha=0.5)
    torch.testing.assert_close(average[1].sum((1, 2)).cpu(), torch.full((2,), 1 - 0.5**12), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("average", torch.zeros(1, 2, 3, 16), ValueError, "average has shape \\(1, 2, 3, 16\\)"),
        ("average", torch.zeros(1, 2, 3, 8).half(), TypeError, "average has dtype torch.float16"),
        ("lse", torch.zeros(1, 1), ValueError, "lse has shape \\(1, 1\\)"),
        ("counts", torch.zeros(2, 1, dtype=torch.int32), ValueError, "counts has shape \\(2, 1\\)"),
        ("alpha", 0.0, ValueError, "alpha 0.0"),
        ("alpha", 1.5, ValueError, "alpha 1.5"),
        ("softcap", 0.0, ValueError, "softcap 0.0"),
    ],
)
def test_bad_arguments_are_refused(name: str, value: Any, error: type[Exception], message: str) -> None:
    integers = {"dtype": torch.int32}
    good = {
        "average": torch.zeros(1, 2, 3, 8), "query": torch.zeros(1, 2, 16), "pool": torch.zeros(1, 1, 3, 2, 8, 16),
        "slots": torch.zeros(1, 1, 2, **integers), "blocks": torch.zeros(1, 1, 2, **integers),
        "counts": torch.zeros(1, 1, **integers), "limits": torch.zeros(2, **integers), "valid": None,
        "lse": torch.zeros(1, 2), "scale": 1.0, "alpha": 0.5,
    }  # fmt: skip
    update_weights(**good)
    with pytest.raises(error, match=message):
        update_weights(**{**good, name: value})
