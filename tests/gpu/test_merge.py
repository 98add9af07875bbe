"""The merge against float64 softmax attention over all keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pairwise import covering
from torch import Tensor

from hf_offload.gpu.merge import HostResult, merge
from hf_offload.gpu.paged_attention import paged_attention

from ._listings import FORMS, choose_form, make_listing, true_attention

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def make_parts(splits: int, heads: int, dim: int) -> dict[str, Tensor]:
    """Random parts of three rows: nothing of the device's in row 1's first head, nothing at all in its second."""
    generator = torch.Generator().manual_seed(splits * dim)
    out = torch.randn(3, heads, splits, dim, generator=generator)
    lse = torch.randn(3, heads, splits, generator=generator) * 10
    lse[2, 0, splits // 2] = -math.inf
    lse[1, :2] = -math.inf
    out[lse == -math.inf] = 0.0
    vectors = torch.randn(4, 3, heads, dim, generator=generator)
    host_lse = torch.randn(3, heads, generator=generator) * 10
    host_lse[1, 1] = host_lse[2, 1] = -math.inf
    for tensor in vectors[:2]:
        tensor[host_lse == -math.inf] = math.nan
    return {
        "out": out, "lse": lse, "host_out": vectors[0], "kbar": vectors[1], "predicted": vectors[2],
        "query": vectors[3], "host_lse": host_lse, "sinks": torch.randn(heads, generator=generator) * 10,
    }  # fmt: skip


def true_merge(parts: dict[str, Tensor], kind: str, sinks: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Merged and lse float64, head by head, from sums of exponentials."""
    part = {name: tensor.double().cpu() for name, tensor in parts.items()}
    merged, total = torch.zeros_like(part["query"]), torch.full(part["host_lse"].shape, -math.inf).double()
    for row in range(3):
        for head in range(part["lse"].shape[1]):
            met = [
                (float(logit), out) for logit, out in zip(part["lse"][row, head], part["out"][row, head], strict=True)
            ]
            logit = float(part["host_lse"][row, head])
            if kind != "no host" and logit > -math.inf:
                if kind == "corrected":
                    drift = part["query"][row, head] - part["predicted"][row, head]
                    logit += scale * float(drift @ part["kbar"][row, head])
                met.append((logit, part["host_out"][row, head]))
            if sinks:
                met.append((float(part["sinks"][head]), torch.zeros_like(merged[row, head])))
            mass = sum(math.exp(logit) for logit, _ in met)
            if mass > 0:
                merged[row, head] = sum(math.exp(logit) / mass * out for logit, out in met)
                total[row, head] = math.log(mass)
    return merged, total


@pytest.mark.parametrize(
    ("shape", "kind", "sinks"),
    covering([(1, 2, 16), (3, 5, 80), (33, 3, 128)], ["no host", "host", "corrected"], [False, True]),
    ids=str,
)
@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_parts_add_up(
    request: pytest.FixtureRequest, form: str, dtype: torch.dtype, shape: tuple[int, int, int], kind: str, sinks: bool
) -> None:
    device = choose_form(form, request)
    parts = make_parts(*shape)
    parts["query"] = parts["query"].to(dtype)
    given = {name: tensor.to(device) for name, tensor in parts.items()}
    correction = (given["kbar"], given["predicted"]) if kind == "corrected" else ()
    host = None if kind == "no host" else HostResult(given["host_out"], given["host_lse"], *correction)
    merged, lse = merge(
        given["out"], given["lse"], host, given["query"], given["sinks"] if sinks else None, scale=0.3, dtype=dtype
    )
    truth, true_lse = true_merge(parts, kind, sinks, 0.3)
    assert merged.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(merged.double().cpu(), truth, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), true_lse, atol=1e-5, rtol=1e-5)
    if not sinks:
        assert math.isinf(lse[1, 1])
        assert not merged[1, 1].any()


@pytest.mark.parametrize(("form", "dtype"), FORMS)
def test_shares_of_paged_attention_merge(request: pytest.FixtureRequest, form: str, dtype: torch.dtype) -> None:
    device = choose_form(form, request)
    listing = make_listing(device, dtype, heads=2, group=3, dim=32, size=32, width=9, padded=True)
    out, lse = paged_attention(*listing.tensors, scale=0.3)
    merged, total = merge(out, lse, None, listing.query, None, scale=0.3, dtype=dtype)
    truth, true_total = true_attention(listing, 0.3, None)
    tolerance = 2 * TOLERANCE[dtype]
    torch.testing.assert_close(merged.double().cpu(), truth, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(total.double().cpu(), true_total, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
def test_the_hosts_part_is_read_from_pinned_memory() -> None:
    parts = make_parts(3, 5, 80)
    given = {name: tensor.cuda() for name, tensor in parts.items()}
    host = HostResult(*(parts[name].pin_memory() for name in ("host_out", "host_lse", "kbar", "predicted")))
    merged, lse = merge(
        given["out"], given["lse"], host, given["query"], given["sinks"], scale=0.3, dtype=torch.float32
    )
    truth, true_lse = true_merge(parts, "corrected", True, 0.3)
    torch.testing.assert_close(merged.double().cpu(), truth, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), true_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"out": torch.zeros(3, 2, 16)}, ValueError, "expected \\[B, Hq, S, D\\]"),
        ({"lse": torch.zeros(3, 2, 2)}, ValueError, "lse has shape \\(3, 2, 2\\)"),
        ({"lse": torch.zeros(3, 2, 1).double()}, TypeError, "lse has dtype torch.float64"),
        ({"sinks": torch.zeros(3)}, ValueError, "sinks has shape \\(3,\\)"),
        ({"query": torch.zeros(3, 4, 16)}, ValueError, "query has shape"),
        ({"host": HostResult(torch.zeros(3, 2, 8), torch.zeros(3, 2))}, ValueError, "host.out has shape"),
        ({"host": HostResult(torch.zeros(3, 2, 16), torch.zeros(3, 2).half())}, TypeError, "host.lse has dtype"),
        ({"dtype": torch.int32}, TypeError, "cannot merge into torch.int32"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    parts = make_parts(1, 2, 16)
    good = {name: parts[name] for name in ("out", "lse", "query", "sinks")} | {"host": None, "dtype": torch.float32}
    merge(**good, scale=1.0)
    with pytest.raises(error, match=message):
        merge(**{**good, **change}, scale=1.0)


def test_a_correction_needs_both_of_its_tensors() -> None:
    parts = make_parts(1, 2, 16)
    given = {name: parts[name] for name in ("out", "lse", "query", "sinks")}
    host = HostResult(parts["host_out"], parts["host_lse"], kbar=parts["kbar"])
    with pytest.raises(ValueError, match="belong together"):
        merge(**given, host=host, scale=1.0, dtype=torch.float32)
