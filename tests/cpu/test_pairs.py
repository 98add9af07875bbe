"""`draw_pairs` against float64: what is drawn, with which weight; `test_decode_attention.py` attends to it."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from pools import bits, for_python, make_case, random_submeans, run
from references import cpu as reference

from hf_offload.cpu.kernels import draw_pairs as drawing
from hf_offload.cpu.kernels.digest_scores import CHUNK_BLOCKS
from hf_offload.cpu.kernels.draw_pairs import (
    MASSES,
    Always,
    Kept,
    PairLists,
    Resident,
    Thresholds,
    draw_pairs,
    kept_masses,
    most_pairs,
    order_of,
)
from hf_offload.cpu.kernels.submean_scores import SubMeans

draw_head, finish_weights = for_python(drawing.draw_head, drawing.finish_weights)

POSITION, LAYER = 12_345, 3
SMALL_KIND, LARGE_KIND = (2, 8), (3, 16)
"""Query heads of a KV head, and pairs of a block: those of the tiny models, and of SmolLM2."""


def thresholds(numbers: range, position: int = POSITION) -> torch.Tensor:
    return torch.tensor([reference.threshold(i, position, LAYER) for i in numbers])


def shift_of(position: int) -> int:
    return 0x9E3779B9 * position + Thresholds.of(LAYER, np.zeros(1, np.int32), 1).layer


SMALL = thresholds(range(1021)).argsort()[:200]  # pairs of small thresholds
EVERY = torch.arange(1024)
SHARES = {
    "random": lambda: torch.rand(1024) * 2.0 ** -torch.randint(0, 9, (1024,)),
    "all where thresholds are small": lambda: torch.zeros(1024).index_fill(0, SMALL + 3, 1 / 200),
    "equal": lambda: torch.full((1024,), 1 / 1024),
    "one pair": lambda: (EVERY == 500).float(),
    "none": lambda: torch.zeros(1024),
    "NaN": lambda: torch.where(EVERY % 3 == 0, math.nan, 1 / 1024),
    **{f"a period of {n}": lambda n=n: (EVERY % n == 1).float() * n / 1024 for n in (2, 4, 8)},
}


@pytest.mark.parametrize("kind", SHARES)
def test_the_rule(kind: str) -> None:
    """In two calls for the two halves of a range, some of which is padding."""
    group, chunk, begins = 3, 512, 3
    ranges = ((0, 1024), (3, 1021), (16, 17), (500, 530), (7, 7))
    for samples, (first, last) in itertools.product((1, 8, 64, 4096), ranges):
        torch.manual_seed(samples)
        shares = SHARES[kind]() * 2**9 * torch.rand(group, 1).clamp(min=0.5)
        masses = torch.cat([shares, torch.ones(group, 16)], 1).bfloat16()
        factors = np.full((group, 2), 2.0**-9, np.float32)
        x = (masses[:, :1024].float() * 2.0**-9 * samples).amax(0)
        pairs, weights = np.full(1024, -1, np.int32), np.full(1024, 7, np.float32)
        count = 0
        for begin, end in itertools.pairwise((first, (first + last) // 2, last)):
            count = draw_head(
                bits(masses), factors, 0, float(samples), chunk, begin, end, order_of(1040), begins,
                shift_of(POSITION), pairs, weights, count, 1024,
            )  # fmt: skip
        finish_weights(weights, count)
        start = max(first, begins)
        want = [(i, w) for i, w in reference.draw_pairs(x[begins:last], POSITION, LAYER) if i + begins >= start]
        assert pairs[:count].tolist() == [begins + i for i, _ in want]
        np.testing.assert_allclose(weights[:count], [weight for _, weight in want], rtol=1e-5, atol=1e-6)
        total = math.ceil(float(x[start:last].nansum()) / samples)
        assert count <= most_pairs(samples, max(total, 1), last - first)


def test_of_256_pairs_thresholds_are_even() -> None:
    """Whatever the position, so that no more pairs are drawn than lists have room for."""
    draw, found = random.Random(0), torch.from_numpy(order_of(1 << 16)[: 1 << 16].astype(np.int64))
    for position in (0, 1, 2, 77, 10**6):
        v = (found + shift_of(position)) % 2**32
        u = ((v >> 9).float() + 0.5) * 2.0**-23
        torch.testing.assert_close(u[:200], thresholds(range(200), position))
        rows = u.view(-1, 256).sort(1).values
        torch.testing.assert_close(rows.diff(dim=1), torch.full((256, 255), 1 / 256), rtol=0, atol=1e-6)
        for pairs in (16, 64, 250, 1000, 5000, 1 << 16):
            first = draw.randint(0, (1 << 16) - pairs)
            smallest = u[first : first + pairs].sort().values.double().cumsum(0)  # the most that a total can draw
            for samples in (1, 8, 64, 512, 1 << 14):
                assert int((smallest < 65 / 64 * samples).sum()) <= most_pairs(samples, 1, pairs)


def _digests(physical: int, count: int, dim: int, outliers: float = 0.01) -> tuple[SubMeans, tuple[torch.Tensor, ...]]:
    """Sub-means of two rows, and the tensors for `reference.score_submeans` with each pair as a block."""
    digest, (*parts, bias, center, sigma) = random_submeans(2, physical, count, dim, outliers)
    single = (x.transpose(1, 2).flatten(0, 1)[:, :, None] for x in parts)
    return digest, (*single, bias.view(-1, 1), center, sigma)


def _outliers(digest: SubMeans, table: torch.Tensor, head: int, known: torch.Tensor | None = None) -> torch.Tensor:
    """Which pairs of a row `[N · S]` are outliers of a KV head and not known: of a chunk no more than one in 64."""
    marked = torch.from_numpy(digest.sizes)[table.long(), head] & 0x8000 != 0
    chunk, marked = CHUNK_BLOCKS * marked.shape[1], marked.flatten()
    if known is not None:
        marked &= ~known
    return torch.cat([part & (part.cumsum(0) <= -(-len(part) // 64)) for part in marked.split(chunk)])


def check_drawn(
    listed: torch.Tensor, weights: torch.Tensor, shares: torch.Tensor, outliers: torch.Tensor, among: torch.Tensor,
    samples: int, begins: int, position: int,
) -> None:  # fmt: skip
    """Of pairs `among` a row's, outliers and those whose share exceeds its threshold are listed, in order.

    Where a share is as near to its threshold as rounding, either way. Masses are rounded to 8 bits.
    """
    assert (listed.diff() > 0).all()
    there = torch.zeros_like(among).index_fill(0, listed[listed < len(among)], True)
    u = torch.cat([torch.full((begins,), math.inf), thresholds(range(len(among) - begins), position)])
    assert there[among & (outliers | (shares * samples > 1.02 * u))].all()
    assert not there[among & ~outliers & (shares * samples < 0.98 * u)].any()
    drawn = (listed < len(among)) & among[listed.clamp(max=len(among) - 1)]
    pairs = listed[drawn]
    want = (1 / samples / shares[pairs]).log().clamp(min=0).masked_fill(outliers[pairs], 0)
    torch.testing.assert_close(weights[drawn].double(), want, rtol=0, atol=0.02)


class Drawn:
    """A draw of two rows, one of them padded, of 150 blocks or more where there are chunks; and what it should be."""

    def __init__(
        self, kind: tuple[int, int], blocks: int, samples: int, join: str = "max", dim: int = 64, nan: bool = False,
        outliers: float = 0.01, threads: int = 2,
    ) -> None:  # fmt: skip
        torch.manual_seed(blocks)
        group, count = kind
        batch, kv_heads, size, recent = 2, 2, 2 * count, 2 * count - 3
        self.length = length = blocks * size + 5
        case = make_case(batch, kv_heads, dim, size, length, torch.float32, (0, size + 3), 0.01)
        digest, parts = _digests(len(case.clean), count, dim, outliers)
        query = torch.randn(batch, kv_heads * group, dim)
        low = np.array([0, (size + 3) // 2], np.int32)  # of the first valid tokens; unaligned, as is `high`
        high = low + 3
        room = min(3 + recent + count + most_pairs(samples, group, blocks * count), (blocks + 1) * count)
        if nan:
            query[:] = math.nan
        whole = torch.full((batch * kv_heads * room + 1000,), -1, dtype=torch.int32)  # nothing is written at its end
        self.pairs = whole[:-1000].view(batch, kv_heads, room)
        self.weights = torch.full(self.pairs.shape, math.nan)
        self.counts = torch.zeros(batch, kv_heads, dtype=torch.int32)
        masses = np.empty((batch, kv_heads * group, kept_masses(blocks, count)), MASSES)
        tally = np.zeros(4, np.int64)
        launch = draw_pairs(
            query.numpy(), digest, case.table.numpy(), Always(low, high, recent),
            Thresholds.of(LAYER, 2 * low, blocks * count), masses,
            PairLists(self.pairs.numpy(), self.weights.numpy(), self.counts.numpy()), n_sealed=blocks, length=length,
            samples=samples, join=join, scale=dim**-0.5, softcap=None, unsealed=case.host_blocks, tally=tally,
        )  # fmt: skip
        run(launch, threads)
        tokens = int((2 * self.counts).clamp(max=length).sum())
        assert tally.tolist() == [tokens, batch * kv_heads, batch * kv_heads * length, 0]
        assert (whole[-1000:] == -1).all()
        assert (self.counts <= room).all()
        table = (case.table[:, :, None] * count + torch.arange(count)).flatten(1)
        logmass = reference.score_submeans(query, *parts, table, blocks * count, scale=dim**-0.5)
        tail = reference.tail_lse(query, case.clean, case.table, blocks, length, case.valid, scale=dim**-0.5)
        self.shares = reference.join_scores(logmass, tail, kv_heads, join=join).clamp(min=0)
        self.begins, self.first, self.last = low, high, blocks * count - recent
        self.outliers = [[_outliers(digest, row, h) for h in range(kv_heads)] for row in case.table[:, :blocks]]
        self.always = [{*range(int(low[b]), int(high[b])), *range(self.last, -(-length // 2))} for b in range(batch)]


@pytest.mark.parametrize(
    ("kind", "blocks", "samples", "join", "dim", "outliers"),
    [
        (LARGE_KIND, 300, 200, "max", 64, 0.01),
        (LARGE_KIND, 17, 32, "max", 64, 0.01),
        (SMALL_KIND, 129, 64, "mean", 64, 0.01),
        (SMALL_KIND, 17, 10**8, "max", 64, 0.01),  # every pair with tokens
        (SMALL_KIND, 300, 200, "max", 64, 1.0),  # more outliers than lists have room for
        pytest.param((5, 4), 257, 100, "max", 80, 0.01, marks=pytest.mark.slow),
        pytest.param((1, 32), 140, 500, "mean", 16, 0.01, marks=pytest.mark.slow),
    ],
)
def test_a_draw(kind: tuple[int, int], blocks: int, samples: int, join: str, dim: int, outliers: float) -> None:
    found = Drawn(kind, blocks, samples, join, dim, outliers=outliers)
    for b, h in np.ndindex(2, 2):
        n, first, begins = int(found.counts[b, h]), int(found.first[b]), int(found.begins[b])
        pairs, weights = found.pairs[b, h, :n].long(), found.weights[b, h, :n]
        between = (pairs >= first) & (pairs < found.last)
        assert {*pairs.tolist()} - {*pairs[between].tolist()} == found.always[b]
        assert (weights[~between] == 0).all()
        among = torch.zeros(found.shares.shape[2], dtype=torch.bool)
        among[first : found.last] = True
        marked = torch.nn.functional.pad(found.outliers[b][h], (0, len(among) - len(found.outliers[b][h])))
        position = found.length - 1 - 2 * begins
        check_drawn(pairs, weights, found.shares[b, h], marked, among, samples, begins, position)
    again = Drawn(kind, blocks, samples, join, dim, outliers=outliers, threads=4)
    for name in ("pairs", "weights", "counts"):
        torch.testing.assert_close(getattr(found, name), getattr(again, name), rtol=0, atol=0, equal_nan=True)


def test_a_query_of_nan_lists_no_more_pairs_than_there_is_room_for() -> None:
    found = Drawn(SMALL_KIND, 300, 20, nan=True)
    assert found.counts.tolist() == [[len(row)] * 2 for row in found.always]


@pytest.mark.parametrize("marked", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "blocks", "samples", "join"),
    [
        (SMALL_KIND, 300, 200, "max"),
        pytest.param((3, 4), 129, 64, "mean", marks=pytest.mark.slow),
        pytest.param(LARGE_KIND, 9, 10**8, "max", marks=pytest.mark.slow),
    ],
)
def test_a_draw_beside_resident_blocks(
    kind: tuple[int, int], blocks: int, samples: int, join: str, marked: bool
) -> None:
    """With ragged lists of resident blocks, and a table that has room for more blocks than there are."""
    torch.manual_seed(blocks)
    (group, count), dim, shape = kind, 64, (2, 2)
    physical, width, heads = 2 * blocks + 3, blocks + 140, (2, 2 * group)
    digest, parts = _digests(physical, count, dim)
    table = torch.full((2, width), 2**30, dtype=torch.int32)
    table[:, :blocks] = torch.randperm(physical)[: 2 * blocks].view(2, blocks)
    query, tail = torch.randn(*heads, dim), torch.randn(heads) + 3
    tail[0, 0] = -math.inf
    held = torch.full((*shape, 40), 2**30, dtype=torch.int32)
    numbers = torch.tensor([[1, 8], [min(40, blocks), 2]], dtype=torch.int32)
    for b, h in np.ndindex(shape):
        n = int(numbers[b, h])
        held[b, h, :n] = torch.cat([torch.randperm(blocks)[: n - 1].sort().values, torch.tensor([blocks])]).int()
    most = width * count
    first, limits = np.array([0, 2 * count + 2], np.int32), np.array([blocks * 2 * count + 3, 7], np.int32)
    kept, marks = None, torch.zeros(*shape, width * 2 * count, dtype=torch.uint8)
    if marked:
        marks = (torch.rand(marks.shape) < 0.6).byte()
        kept = Kept(marks.numpy(), np.array([5, 0, 1, 2], np.int64))
    both = marks.view(*shape, -1, 2).amin(3).bool()[:, :, : blocks * count]
    found = []
    for threads in (1, 3):
        lists = PairLists.of(*shape, most_pairs(samples, group, most))
        pairs, weights, counts = (torch.from_numpy(part) for part in (lists.pairs, lists.weights, lists.counts))
        score, portion = torch.zeros(*shape, -(-width // 16) * 16), torch.zeros(heads)
        tally = np.zeros(4, np.int64)
        launch = draw_pairs(
            query.numpy(), digest, table.numpy(),
            Resident(held.numpy(), numbers.numpy(), score.numpy(), portion.numpy()),
            Thresholds.of(LAYER, first, most, limits), np.empty((*heads, kept_masses(width, count)), MASSES), lists,
            n_sealed=width, length=0, samples=samples, join=join, scale=dim**-0.5, softcap=None, tail=tail.numpy(),
            kept=kept, tally=tally,
        )  # fmt: skip
        run(launch, threads)
        unused = torch.arange(pairs.shape[2]) >= counts[..., None]
        written = pairs.masked_fill(unused, 0), weights.masked_fill(unused, 0)
        found.append((*written, counts, score[:, :, :blocks], portion))
        listed = 2 * (int(counts.sum()) + int(numbers.sum()) * count)
        if kept is not None:  # of a listed pair one token at most
            listed += int(kept.counts.sum())
            there = marks.view(*shape, -1, 2)
            listed -= sum(int(there[b, h, pairs[b, h, : counts[b, h]].long()].sum()) for b, h in np.ndindex(shape))
        assert tally.tolist() == [listed, 4, 4 * (blocks + 1) * 2 * count, 0]
    assert all(map(torch.equal, *found))
    wide = (table[:, :blocks, None] * count + torch.arange(count)).flatten(1)
    masses = reference.score_submeans(query, *parts, wide, blocks * count, scale=dim**-0.5)
    shares = reference.join_scores(masses, tail.double(), 2, join=join).clamp(min=0)
    whole = masses.unflatten(2, (blocks, count)).logsumexp(3)
    want_score = reference.join_scores(whole, tail.double(), 2, join=join)
    torch.testing.assert_close(score[:, :, :blocks].double(), want_score, rtol=5e-3, atol=1e-6)
    total = torch.logsumexp(torch.cat([masses, tail.double()[..., None]], 2), 2)
    for b, h in np.ndindex(shape):
        here = held[b, h, : int(numbers[b, h]) - 1].long()
        resident = torch.zeros(blocks, dtype=torch.bool).index_fill(0, here, True).repeat_interleave(count)
        resident |= both[b, h]
        outliers = _outliers(digest, table[b, :blocks], h, both[b, h]) & ~resident
        each = slice(h * group, (h + 1) * group)
        part = (masses[b, each] - total[b, each, None]).exp()[:, ~resident].sum(1)
        torch.testing.assert_close(portion[b, each].double(), part, rtol=1e-2, atol=1e-4)
        n, begins = int(counts[b, h]), int(first[b]) // 2
        listed_pairs = pairs[b, h, :n].long()
        assert not resident[listed_pairs].any()
        among = ~resident
        among[:begins] = False
        assert among[listed_pairs].all()
        position = int(limits[0]) - 1 - int(first[b])
        check_drawn(listed_pairs, weights[b, h, :n], shares[b, h], outliers, among, samples, begins, position)


def test_what_is_resident_changes_no_other_decision() -> None:
    """Of pairs that are resident in neither of two draws, and of those of any number of rows."""
    torch.manual_seed(0)
    (group, count), blocks, samples, dim = SMALL_KIND, 300, 150, 64
    digest, _ = _digests(2 * blocks, count, dim)
    table, heads = torch.arange(2 * blocks).view(2, blocks).int(), (2, 2 * group)
    query, tail, found = torch.randn(*heads, dim), torch.randn(heads) + 3, []
    for resident in ([5, 6, 290], [], list(range(100, 200))):
        held = torch.tensor([*resident, blocks - 1], dtype=torch.int32).expand(2, 2, -1).contiguous()
        lists = PairLists.of(2, 2, most_pairs(samples, group, blocks * count))
        counts, portion = np.full((2, 2), held.shape[2], np.int32), np.zeros(heads, np.float32)
        draw_pairs(
            query.numpy(), digest, table.numpy(),
            Resident(held.numpy(), counts, np.zeros((2, 2, 304), np.float32), portion),
            Thresholds.of(LAYER, np.array([0, 64], np.int32), blocks * count),
            np.empty((*heads, kept_masses(blocks, count)), MASSES), lists, n_sealed=blocks,
            length=2 * count * blocks - 7, samples=samples, join="max", scale=dim**-0.5, softcap=None,
            tail=tail.numpy(),
        ).run()  # fmt: skip
        for b, h in np.ndindex(2, 2):
            pairs, weights = (x[b, h, : lists.counts[b, h]].tolist() for x in (lists.pairs, lists.weights))
            found.append(dict(zip(pairs, weights, strict=True)))
            assert not {pair // count for pair in pairs} & set(resident)
    left_out = {5, 6, 290, *range(100, 200)}
    for some, others in itertools.combinations(range(0, 12, 4), 2):
        for one, other in zip(found[some : some + 4], found[others : others + 4], strict=True):
            one, other = ({p: w for p, w in x.items() if p // count not in left_out} for x in (one, other))
            assert one == pytest.approx(other, rel=1e-5)
            assert len(one) > 20
