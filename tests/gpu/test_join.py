"""Joined scores against float64: heads and blocks without mass, poison after the sealed blocks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from references import cpu as reference

from hf_offload.gpu.digest_scores import JOINS, join_heads

from ._forms import device_of, every_form

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes under masks too


def check(device: str, masses: torch.Tensor, tail: torch.Tensor, sealed: int, kv_heads: int, join: str) -> None:
    limits = torch.tensor([sealed * 8 + 1, sealed], dtype=torch.int32)
    score = join_heads(masses.to(device), tail.to(device), limits.to(device), kv_heads=kv_heads, join=join).cpu()
    assert score.shape == (masses.shape[0], kv_heads, masses.shape[2])
    assert (score[:, :, sealed:] == -math.inf).all()
    want = reference.join_scores(masses[:, :, :sealed], tail, kv_heads, join=join)
    assert torch.equal(score[:, :, :sealed] == -math.inf, want == -math.inf)
    torch.testing.assert_close(score[:, :, :sealed].double(), want, rtol=5e-5, atol=1e-5 if join == "raw" else 1e-30)


SIZES = [(1, 1, 1), (3, 37, 33), (7, 300, 256), (16, 700, 650), (4, 1100, 1025), (2, 9, 0), (35, 70, 65), (17, 9, 8)]


@every_form
@pytest.mark.parametrize(
    ("sizes", "join"), list(zip([*SIZES, (3, 37, 33)], itertools.cycle(JOINS), strict=False)), ids=str
)
def test_join(form: str, sizes: tuple[int, int, int], join: str, request: pytest.FixtureRequest) -> None:
    group, blocks, sealed = sizes
    device = device_of(form, request)
    torch.manual_seed(group)
    masses, tail = torch.randn(2, 3 * group, blocks) * 8, torch.randn(2, 3 * group)
    masses[:, :, ::3] = -math.inf  # blocks without tokens
    masses[0, :group, sealed // 2 :] += 80  # exponentials that overflow without the peak
    tail[0, group] = 60  # a head whose blocks vanish beside its tail
    tail[1, 0] = -math.inf
    masses[1, group : 2 * group], tail[1, group : 2 * group] = -math.inf, -math.inf  # a group without tokens
    masses[:, :, sealed:] = math.nan
    check(device, masses, tail, sealed, 3, join)
    check(device, masses, torch.full_like(tail, -math.inf), sealed, 3, join)


@every_form
@pytest.mark.parametrize("join", JOINS)
def test_a_head_without_mass(form: str, join: str, request: pytest.FixtureRequest) -> None:
    """One head of a group that sees nothing does not take the block from the others."""
    device = device_of(form, request)
    masses, tail = torch.randn(1, 4, 10), torch.randn(1, 4)
    masses[0, 1], tail[0, 1] = -math.inf, -math.inf
    masses[0, 2, 4] = -math.inf
    check(device, masses, tail, 10, 2, join)
    masses, tail = torch.randn(2, 40, 10), torch.randn(2, 40)
    masses[0, :18], tail[0, :18] = -math.inf, -math.inf  # more than go into one launch
    check(device, masses, tail, 10, 1, join)


def test_refusals() -> None:
    masses, tail, limits = torch.zeros(1, 4, 3), torch.zeros(1, 4), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="join 'sum'"):
        join_heads(masses, tail, limits, kv_heads=2, join="sum")
    with pytest.raises(ValueError, match="4 query heads are not a multiple of 3"):
        join_heads(masses, tail, limits, kv_heads=3, join="max")
    with pytest.raises(ValueError, match=r"tail has shape \(1, 3\)"):
        join_heads(masses, tail[:, :3], limits, kv_heads=2, join="max")
