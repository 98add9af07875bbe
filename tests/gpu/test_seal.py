"""Digests of full blocks against float64: padded, poisoned, with any strides."""

from __future__ import annotations

import math

import pytest
import torch
from unpacking import unpack_codes, unpack_halves, unpack_levels

from hf_offload.gpu import seal
from hf_offload.gpu.seal import OFFSET

from ._forms import device_of, every_form

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes under masks too

SIZES = [(8, 16, torch.float32), (16, 80, torch.float16), (32, 64, torch.float32), (128, 96, torch.float16)]
PHYSICAL = 9


def blocks_of_keys(tokens: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers `[4]`, keys `[4, 2, T, D]` with a stride between tokens, and which of them count; the rest is NaN."""
    torch.manual_seed(tokens + dim)
    wide = torch.randn(4, tokens, 2, dim) * torch.rand(dim).exp() + torch.randn(dim)
    valid = torch.rand(4, tokens) > 0.3
    valid[0], valid[2] = True, False
    wide.masked_fill_(~valid[:, :, None, None], math.nan)
    return torch.tensor([7, 0, 3, 5]), wide.to(dtype).transpose(1, 2), valid


def untouched(*kept: torch.Tensor, ids: torch.Tensor) -> bool:
    """Whether blocks that were not named are as they were: all 1."""
    others = torch.ones(PHYSICAL, dtype=torch.bool)
    others[ids] = False
    return all(bool((tensor.cpu()[others] == 1).all()) for tensor in kept)


@every_form
@pytest.mark.parametrize("bounds", [True, False])
@pytest.mark.parametrize(("tokens", "dim", "dtype"), SIZES)
def test_vectors(
    form: str, bounds: bool, tokens: int, dim: int, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    device = device_of(form, request)
    ids, k, valid = (x.to(device) for x in blocks_of_keys(tokens, dim, dtype))
    vectors = torch.ones(PHYSICAL, 2, (1 + bounds) * dim, device=device)
    bias = torch.ones(PHYSICAL, device=device)
    seal.seal_vectors(ids, k, valid, vectors, bias, bounds=bounds)
    for n, block in enumerate(ids.tolist()):
        some = k[n, :, valid[n]].double()
        if not some.shape[1]:
            assert bias[block] == -math.inf
        elif bounds:
            want = torch.cat([some.amax(1), some.amin(1)], -1)
            assert torch.equal(vectors[block].double(), want)
            assert bias[block] == 0
        else:
            torch.testing.assert_close(vectors[block].double(), some.mean(1), rtol=1e-5, atol=1e-5)
            assert math.isclose(bias[block], math.log(some.shape[1]), abs_tol=1e-6)
    assert untouched(vectors, bias, ids=ids.cpu())


@every_form
@pytest.mark.parametrize(("tokens", "dim", "dtype"), SIZES)
def test_submeans(form: str, tokens: int, dim: int, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    device = device_of(form, request)
    ids, k, valid = (x.to(device) for x in blocks_of_keys(tokens, dim, dtype))
    k[1, 0, 0], k[1, 0, 1] = 3.0, 3.0  # a pair of equal keys
    k[0, 1, 2, 0] = 300.0  # of an outlier
    pairs, numbers = tokens // 2, {"dtype": torch.int32, "device": device}
    center, sigma = torch.randn(4, 2, dim, device=device), torch.rand(4, 2, dim, device=device) + 0.5
    codes = torch.ones(PHYSICAL, 2, pairs * dim // 2, dtype=torch.uint8, device=device)
    levels, sizes = torch.ones(PHYSICAL, 2, dim // 16, pairs, **numbers), torch.ones(PHYSICAL, 2, pairs, **numbers)
    bias, error = torch.ones(PHYSICAL, pairs, device=device), torch.tensor([[0.5, 2.0]] * 4, device=device)
    seal.seal_submeans(ids, k, valid, codes, levels, sizes, bias, center, sigma, error)
    assert untouched(codes, levels, sizes, bias, ids=ids.cpu())

    count = valid.view(4, pairs, 2).sum(-1).double()
    torch.testing.assert_close(bias[ids].double(), count.log(), rtol=1e-6, atol=1e-6)
    keys = k.double().masked_fill(~valid[:, None, :, None], 0).unflatten(2, (pairs, 2))
    mean = keys.sum(3) / count.clamp(min=1)[:, None, :, None]
    half = (keys[:, :, :, 0] - keys[:, :, :, 1]) / 2 * (count == 2)[:, None, :, None]
    middle, spread = center.double()[:, :, None], sigma.double()[:, :, None]
    standard, half = (mean - middle) / spread, half / spread
    scale, size = (x[ids].double() for x in unpack_halves(sizes))
    outlier, size = size.signbit(), size.abs()
    torch.testing.assert_close(scale, standard.abs().amax(-1) / seal.LEVELS, rtol=2**-8, atol=1e-12)
    torch.testing.assert_close(size, seal.STEP * half.square().mean(-1).sqrt(), rtol=2**-8, atol=1e-12)
    code = unpack_codes(codes[ids], pairs, dim).double()
    assert code.abs().max() < OFFSET
    rounding = (standard - code * scale[..., None]).abs() / scale[..., None]
    assert (rounding <= 0.5 + 2**-5).all()  # the largest code times a scale that was rounded down
    level = unpack_levels(levels[ids]).double()
    cell = (half / size.clamp(min=seal.LEAST)[..., None]).floor().clamp(-2, 1) + 2
    assert (level == cell).double().mean() > 0.999  # fp32 puts what lies on an edge on either side of it
    missed = (standard - code * scale[..., None]).square() + (half - (level - 1.5) * size[..., None]).square()
    above = missed.mean(-1) / (seal.OUTLIER * error.double()[..., None])
    there = (count > 0)[:, None].expand_as(above)
    assert (outlier == (there & (above > 1)))[(above - 1).abs() > 1e-4].all()
    assert outlier[0, 1, 1]
    assert not outlier[2].any()  # no token counts


def test_refusals() -> None:
    ids, k, valid = torch.zeros(1).long(), torch.zeros(1, 2, 8, 16), torch.ones(1, 8).bool()
    vectors, bias = torch.zeros(3, 2, 16), torch.zeros(3)
    with pytest.raises(ValueError, match=r"last stride 1"):
        seal.seal_vectors(ids, k.transpose(2, 3), valid, vectors, bias, bounds=False)
    with pytest.raises(TypeError, match=r"k has dtype torch\.float64"):
        seal.seal_vectors(ids, k.double(), valid, vectors, bias, bounds=False)
    with pytest.raises(ValueError, match=r"vectors has shape \(3, 2, 16\)"):
        seal.seal_vectors(ids, k, valid, vectors, bias, bounds=True)
    with pytest.raises(TypeError, match=r"valid has dtype torch\.uint8"):
        seal.seal_vectors(ids, k, valid.byte(), vectors, bias, bounds=False)
    rest = (
        torch.zeros(3, 2, 48).byte(),
        *torch.zeros(2, 3, 2, 6).int(),
        torch.zeros(3, 6),
        *torch.zeros(2, 1, 2, 16),
        torch.ones(1, 2),
    )
    with pytest.raises(ValueError, match="12 tokens a block a power of two"):
        seal.seal_submeans(ids, torch.zeros(1, 2, 12, 16), torch.ones(1, 12).bool(), *rest)
