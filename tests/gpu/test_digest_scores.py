"""Log masses on the device against float64: both kinds of digest, ragged and poisoned."""

from __future__ import annotations

import math

import pytest
import torch
from references import cpu as reference
from unpacking import unpack_codes, unpack_halves, unpack_levels

from hf_offload.blocks.digests import DIGESTS
from hf_offload.gpu.digest_scores import score_submeans, score_vectors
from hf_offload.gpu.seal import pack_codes, pack_halves, pack_levels
from hf_offload.scores import Scores

from ._forms import device_of, every_form

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes under masks too


def tables(batch: int, physical: int, blocks: int, sealed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of `blocks` entries, garbage from `sealed` on, and the limits."""
    table = torch.stack([torch.randperm(physical)[:blocks] for _ in range(batch)]).int()
    table[:, sealed:] = torch.tensor([-1, 10**9])[torch.arange(blocks - sealed) % 2]
    return table, torch.tensor([sealed * 8 + 3, sealed], dtype=torch.int32)


def poison(table: torch.Tensor, sealed: int, *digests: torch.Tensor) -> None:
    """Fill with NaN what belongs to no sealed block."""
    unused = torch.ones(len(digests[0]), dtype=torch.bool)
    unused[table[:, :sealed].flatten().long()] = False
    for digest in digests:
        digest[unused] = math.nan


def check(masses: torch.Tensor, want: torch.Tensor, atol: float) -> None:
    """Compare, with -inf behind the sealed blocks that `want` has."""
    got, sealed = masses.cpu(), want.shape[2]
    assert got.dtype == torch.float32
    assert (got[:, :, sealed:] == -math.inf).all()
    assert torch.equal(got[:, :, :sealed] == -math.inf, want == -math.inf)
    torch.testing.assert_close(got[:, :, :sealed].double(), want, rtol=1e-5, atol=atol)


@every_form
@pytest.mark.parametrize(
    ("group", "width", "blocks", "sealed"),
    [
        (1, 16, 1, 1),
        (3, 80, 37, 33),
        (7, 128, 70, 70),
        (16, 256, 66, 1),
        (4, 512, 5, 0),
        (2, 64, 300, 280),
        (20, 32, 9, 8),
        (33, 16, 9, 8),
    ],
)
def test_vectors(form: str, group: int, width: int, blocks: int, sealed: int, request: pytest.FixtureRequest) -> None:
    device, softcap = device_of(form, request), 2.0 if width % 32 else None
    torch.manual_seed(group)
    ready, vectors, bias = torch.randn(2, 2 * group, width), torch.randn(2 * blocks, 2, width), torch.randn(2 * blocks)
    table, limits = tables(2, 2 * blocks, blocks, sealed)
    poison(table, sealed, vectors, bias)
    if sealed > 1:
        dead = int(table[0, 1])
        bias[dead], vectors[dead] = -math.inf, math.nan
    want = reference.score_vectors(ready, vectors, bias, table, sealed, softcap)
    masses = score_vectors(*(x.to(device) for x in (ready, vectors, bias, table, limits)), softcap=softcap)
    assert masses.shape == (2, 2 * group, blocks)
    check(masses, want, 1e-5 * width**0.5)


def truth(
    query: torch.Tensor, means: torch.Tensor, swings: torch.Tensor, bias: torch.Tensor, table: torch.Tensor,
    scale: float, softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """Log masses [B, Hq, n], float64, of pairs means ± swings [P, Hkv, S, D]."""
    ids = table.long()
    grouped = query.double().unflatten(1, (means.shape[1], -1))
    mean, swing = (torch.einsum("bhgd,bnhsd->bhgns", grouped, x[ids]) for x in (means, swings))
    pair = [Scores(scale, softcap).of(key) for key in (mean + swing, mean - swing)]
    score = torch.logaddexp(*pair) - math.log(2) + bias[ids][:, None, None].double()
    return torch.where(bias[ids][:, None, None] > -math.inf, score, -math.inf).logsumexp(-1).flatten(1, 2)


@pytest.mark.one_in(3)
@every_form
@pytest.mark.parametrize(
    ("pairs", "dim", "group", "blocks", "sealed"),
    [
        (4, 16, 3, 41, 37),
        (4, 96, 1, 33, 33),
        (8, 64, 7, 20, 18),
        (16, 80, 4, 19, 17),
        (16, 128, 5, 9, 0),
        (16, 128, 16, 7, 7),
        (4, 16, 2, 300, 290),
        (64, 256, 2, 3, 3),
        (32, 64, 3, 5, 4),
        (8, 32, 35, 9, 8),
        (4, 16, 17, 9, 8),
    ],
)
def test_submeans(
    form: str, pairs: int, dim: int, group: int, blocks: int, sealed: int, request: pytest.FixtureRequest
) -> None:
    device, softcap = device_of(form, request), 2.0 if group % 2 else None
    torch.manual_seed(pairs + dim)
    physical = 2 * blocks
    codes = torch.randint(-7, 8, (physical, 2, pairs, dim), dtype=torch.int8)
    levels = torch.randint(0, 4, codes.shape, dtype=torch.int8)
    scales, sizes = ((torch.rand(physical, 2, pairs) * 0.3).bfloat16().float() for _ in range(2))
    bias = torch.randint(0, 3, (physical, pairs)).float().log()  # some pairs have no token
    center, sigma = torch.randn(2, 2, dim), torch.rand(2, 2, dim) + 0.5
    table, limits = tables(2, physical, blocks, sealed)
    if sealed:
        bias[table[1, 0].long()] = -math.inf
    empty = (bias == -math.inf)[:, None].expand(scales.shape)
    query, scale = torch.randn(2, 2 * group, dim) * 2, dim**-0.5
    query[0, 0] = 0.0
    query[1, -1] *= 1e-6
    want = []
    for row in range(2):
        middle, spread = center[row, :, None].double(), sigma[row, :, None].double()
        means = middle + spread * codes * scales[..., None]
        swings = spread * sizes[..., None] * (levels - 1.5).double()
        mine = slice(row, row + 1)
        want.append(truth(query[mine], means, swings, bias, table[mine, :sealed], scale, softcap))
    scales[empty], sizes[empty] = math.nan, math.inf
    poison(table, sealed, scales, sizes, bias)
    digest = (pack_codes(codes), pack_levels(levels), pack_halves(scales, sizes), bias, center, sigma)
    masses = score_submeans(*(x.to(device) for x in (query, *digest, table, limits)), scale=scale, softcap=softcap)
    assert masses.shape == (2, 2 * group, blocks)
    check(masses, torch.cat(want), 3e-5)


@every_form
def test_the_digests_of_real_keys(form: str, request: pytest.FixtureRequest) -> None:
    """The tensors that a digest store keeps are what the operation takes, and mean the same."""
    device = device_of(form, request)
    torch.manual_seed(0)
    keys, valid = torch.randn(11, 2, 32, 64) + torch.randn(64), torch.rand(11, 32) > 0.2
    store = DIGESTS["submean"](2, 64, 32, torch.device("cpu"))
    store.reserve(13)
    store.freeze(lambda: [(keys.transpose(0, 1).reshape(1, 2, -1, 64), valid.reshape(1, -1))])
    store.seal(torch.arange(11), keys, valid)
    query, table = torch.randn(1, 6, 64), torch.randperm(11).int()[None]
    kept = tuple(tensor.cpu() for tensor in store.held())[:6]
    limits = torch.tensor([11 * 32, 11], dtype=torch.int32)
    masses = score_submeans(*(x.to(device) for x in (query, *kept, table, limits)), scale=0.125)
    scales, sizes = (x.double()[table[0]] for x in unpack_halves(kept[2]))
    codes, levels = unpack_codes(kept[0], 16, 64)[table[0]].double(), unpack_levels(kept[1])[table[0]].double() - 1.5
    center, sigma = (x.double()[0, :, None] for x in kept[4:])
    grouped = query.double().view(2, 3, 64)
    middle, swing = (
        0.125 * torch.einsum("hgd,nhsd->hgns", grouped, x)
        for x in (center + sigma * scales[..., None] * codes, sigma * sizes[..., None] * levels)
    )
    want = (middle + swing.cosh().log() + kept[3].double()[table[0]]).logsumexp(-1).flatten(0, 1)[None]
    torch.testing.assert_close(masses.cpu().double(), want, rtol=1e-5, atol=1e-4)


def test_refusals() -> None:
    zeros, table, limits = torch.zeros(1, 2, 32), torch.zeros(1, 3).int(), torch.zeros(2).int()
    with pytest.raises(ValueError, match="2 query heads are not a multiple of 3"):
        score_vectors(zeros, torch.zeros(3, 3, 32), torch.zeros(3), table, limits)
    with pytest.raises(ValueError, match=r"vectors has shape \(3, 1, 16\)"):
        score_vectors(zeros, torch.zeros(3, 1, 16), torch.zeros(3), table, limits)
    with pytest.raises(TypeError, match=r"table has dtype torch\.int64"):
        score_vectors(zeros, torch.zeros(3, 1, 32), torch.zeros(3), table.long(), limits)
    rest = (torch.zeros(3, 1, 2, 6).int(), torch.zeros(3, 1, 6).int(), torch.zeros(3, 6), *torch.zeros(2, 1, 1, 32))
    with pytest.raises(ValueError, match="6 pairs"):
        score_submeans(zeros, torch.zeros(3, 1, 96).byte(), *rest, table, limits, scale=1.0)
