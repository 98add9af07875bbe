"""`draw_pairs`, and `decode_attention` to pairs, against float64: what is drawn, with which weight, and attention."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from pools import Case, bits, for_python, make_case, packed_pool, run
from references import cpu as reference

from hf_offload.cpu.kernels import draw_pairs as drawing
from hf_offload.cpu.kernels.block import STEP_TOKENS
from hf_offload.cpu.kernels.decode_attention import ERROR_BINS, ERROR_STEPS, LEAST_ERROR, Pairs, decode_attention
from hf_offload.cpu.kernels.digest_scores import CHUNK_BLOCKS, vectors
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
from hf_offload.cpu.kernels.int8_blocks import Int8Records, packed_bytes
from hf_offload.cpu.kernels.record import HostBlocks
from hf_offload.cpu.kernels.submean_scores import SubMeans, submeans
from hf_offload.cpu.launch import Launch, tag_of
from hf_offload.gpu.seal import pack_codes, pack_halves, pack_levels

draw_head, finish_weights = for_python(drawing.draw_head, drawing.finish_weights)


POSITION, LAYER = 12_345, 3
STEP = STEP_TOKENS // 2


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


@pytest.mark.parametrize("samples", [1, 8, 64, 4096])
@pytest.mark.parametrize(("first", "last"), [(0, 1024), (3, 1021), (16, 17), (500, 530), (7, 7)])
@pytest.mark.parametrize("kind", SHARES)
def test_the_rule(kind: str, first: int, last: int, samples: int) -> None:
    torch.manual_seed(samples)
    group, chunk, begins = 3, 512, 3
    masses = torch.cat(
        [SHARES[kind]() * 2**9 * torch.rand(group, 1).clamp(min=0.5), torch.ones(group, 16)], 1
    ).bfloat16()
    factors = torch.full((group, 2), 2.0**-9)
    x = (masses[:, :1024].float() * 2.0**-9 * samples).amax(0)
    pairs, weights = np.full(1024, -1, np.int32), np.full(1024, 7, np.float32)
    count = 0
    for begin, end in ((first, (first + last) // 2), ((first + last) // 2, last)):
        count = draw_head(
            bits(masses), factors.numpy(), 0, float(samples), chunk, begin, end, order_of(1040), begins,
            shift_of(POSITION), pairs, weights, count, 1024,
        )  # fmt: skip
    finish_weights(weights, count)
    start = max(first, begins)  # before that there is padding
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


@pytest.mark.parametrize(("first", "last", "begins"), [(0, 40, 200), (0, 40, 40), (30, 30, 0)])
def test_nothing_is_drawn_of_padding(first: int, last: int, begins: int) -> None:
    """Memory before and behind is left alone: the scratch of a draw has no room for fewer than no pairs."""
    masses, pairs, weights = (
        torch.ones(1, 80, dtype=torch.bfloat16),
        np.full(64, -1, np.int32),
        np.zeros(64, np.float32),
    )
    for _ in range(200):
        count = draw_head(
            bits(masses), np.ones((1, 1), np.float32), 0, 1.0, 64, first, last, order_of(80), begins, 0, pairs, weights,
            3, 64,
        )  # fmt: skip
        assert count == 3
    assert (pairs == -1).all()


def test_a_list_without_room_is_reported() -> None:
    masses, weights = torch.ones(1, 80, dtype=torch.bfloat16), np.zeros(64, np.float32)
    pairs = np.full(64, -1, np.int32)
    arguments = (
        bits(masses), np.ones((1, 1), np.float32), 0, 1.0, 64, 0, 64, order_of(80), 0, 0, pairs, weights,
    )  # fmt: skip
    assert draw_head(*arguments, 10, 40) == 74
    assert (pairs[40:] == -1).all()


def _digests(physical: int, count: int, dim: int, outliers: float = 0.01) -> tuple[SubMeans, tuple[torch.Tensor, ...]]:
    """Sub-means of two rows and KV heads, and the tensors for `reference.score_submeans` with each pair as a block.

    Of the pairs with tokens such a share are outliers.
    """
    codes = torch.randint(-7, 8, (physical, 2, count, dim), dtype=torch.int8)
    levels = torch.randint(0, 4, codes.shape, dtype=torch.int8)
    scales, sizes = ((torch.rand(physical, 2, count) * 0.3).bfloat16().float() for _ in range(2))
    bias = torch.randint(0, 3, (physical, count)).float().log()  # some pairs have no token
    center, sigma = torch.randn(2, 2, dim), torch.rand(2, 2, dim) + 0.5
    marked = (torch.rand(sizes.shape) < outliers) & (bias[:, None] >= 0)
    packed = pack_halves(scales, torch.where(marked, -sizes, sizes))
    arrays = (pack_codes(codes), pack_levels(levels), packed, bias, center, sigma)
    single = (x.transpose(1, 2).flatten(0, 1)[:, :, None] for x in (codes, levels, scales, sizes))
    return submeans(*(x.numpy() for x in arrays)), (*single, bias.view(-1, 1), center, sigma)


def _outliers(digest: SubMeans, table: torch.Tensor, head: int, known: torch.Tensor | None = None) -> torch.Tensor:
    """Which pairs of a row `[N · S]` are outliers of a KV head and not known: of a chunk no more than one in 64."""
    marked = torch.from_numpy(digest.sizes)[table.long(), head] & 0x8000 != 0
    chunk, marked = CHUNK_BLOCKS * marked.shape[1], marked.flatten()
    if known is not None:
        marked &= ~known
    return torch.cat([part & (part.cumsum(0) <= -(-len(part) // 64)) for part in marked.split(chunk)])


class Drawn:
    """A draw, of 150 blocks or more where there are chunks, and what it is to be compared with."""

    def __init__(
        self, group: int, count: int, dim: int, blocks: int, samples: int, join: str, threads: int, nan: bool = False,
        outliers: float = 0.01,
    ) -> None:  # fmt: skip
        torch.manual_seed(blocks)
        batch, kv_heads, size, recent = 2, 2, 2 * count, 2 * count - 3
        length = blocks * size + 5
        self.case = case = make_case(batch, kv_heads, dim, size, length, torch.float32, (0, size + 3), 0.01)
        digest, parts = _digests(len(case.clean), count, dim, outliers)
        self.query = query = torch.randn(batch, kv_heads * group, dim)
        low = np.array([0, (size + 3) // 2], np.int32)  # of the first valid tokens; unaligned, as is `high`
        high = low + 3
        most = 3 + recent + count + most_pairs(samples, group, blocks * count)
        room = min(most, (blocks + 1) * count)
        thresholds_of = lambda low: Thresholds.of(LAYER, 2 * low, blocks * count)  # noqa: E731
        if nan:
            query[:] = math.nan
        whole = torch.full((batch * kv_heads * room + 1000,), -1, dtype=torch.int32)  # nothing is written at its end
        self.pairs = whole[:-1000].view(batch, kv_heads, room)
        self.weights, self.counts = (
            torch.full(self.pairs.shape, math.nan),
            torch.zeros(batch, kv_heads, dtype=torch.int32),
        )
        masses = np.empty((batch, kv_heads * group, kept_masses(blocks, count)), MASSES)
        self.tally = np.zeros(4, np.int64)
        launch = draw_pairs(
            query.numpy(), digest, case.table.numpy(), Always(low, high, recent), thresholds_of(low), masses,
            PairLists(self.pairs.numpy(), self.weights.numpy(), self.counts.numpy()), n_sealed=blocks, length=length,
            samples=samples, join=join, scale=dim**-0.5, softcap=None, unsealed=case.host_blocks(torch.float32),
            tally=self.tally,
        )  # fmt: skip
        run(launch, threads)
        tokens = int((2 * self.counts).clamp(max=length).sum())
        assert self.tally.tolist() == [tokens, batch * kv_heads, batch * kv_heads * length, 0]
        assert (whole[-1000:] == -1).all()
        assert (self.counts <= room).all()
        table = (case.table[:, :, None] * count + torch.arange(count)).flatten(1)
        logmass = reference.score_submeans(query, *parts, table, blocks * count, scale=dim**-0.5)
        tail = reference.tail_lse(query, case.clean, case.table, blocks, length, case.valid, scale=dim**-0.5)
        self.shares = reference.join_scores(logmass, tail, kv_heads, join=join).clamp(min=0)
        self.begins, self.length = low, length
        self.first, self.last = high, blocks * count - recent
        self.outliers = [[_outliers(digest, row, h) for h in range(kv_heads)] for row in case.table[:, :blocks]]
        self.always = [{*range(int(low[b]), int(high[b])), *range(self.last, -(-length // 2))} for b in range(batch)]


@pytest.mark.parametrize(
    ("group", "count", "dim", "blocks", "samples", "join"),
    [
        (3, 16, 64, 300, 200, "max"),
        pytest.param(3, 8, 64, 129, 64, "mean", marks=pytest.mark.slow),
        (3, 16, 64, 17, 32, "max"),
        pytest.param(5, 4, 80, 257, 100, "max", marks=pytest.mark.slow),
        pytest.param(1, 32, 16, 140, 500, "mean", marks=pytest.mark.slow),
    ],
)
def test_a_draw(group: int, count: int, dim: int, blocks: int, samples: int, join: str) -> None:
    found = Drawn(group, count, dim, blocks, samples, join, threads=2)
    tau = 1 / samples
    for b in range(2):
        for h in range(2):
            n = int(found.counts[b, h])
            pairs, weights = found.pairs[b, h, :n].long(), found.weights[b, h, :n].double()
            assert (pairs.diff() > 0).all()
            listed = set(pairs.tolist())
            assert found.always[b] <= listed
            first, last = int(found.first[b]), int(found.last)
            between = (pairs >= first) & (pairs < last)
            assert listed - found.always[b] == set(pairs[between].tolist())
            assert (weights[~between] == 0).all()
            share, outlier = found.shares[b, h], found.outliers[b][h]
            sure = (share > 1.02 * tau) | outlier
            assert {first + i for i in sure[first:last].nonzero().flatten().tolist()} <= listed
            assert (weights[between & outlier[pairs.clamp(max=len(outlier) - 1)]] == 0).all()
            between &= ~outlier[pairs.clamp(max=len(outlier) - 1)]
            # The weight of a drawn pair tells its share; masses are rounded to 8 bits.
            expected = (tau / share[pairs[between]]).log().clamp(min=0)
            torch.testing.assert_close(weights[between], expected, rtol=0, atol=0.02)
            assert_drawn(share * samples, outlier, range(first, last), found, b, set(pairs.tolist()))


def assert_drawn(
    x: torch.Tensor, outlier: torch.Tensor, numbers: range, found: Drawn, b: int, listed: set[int]
) -> None:
    """A pair is listed if x exceeds its threshold; where it is as near as rounding, either way."""
    begins = int(found.begins[b])
    for j in numbers:
        u = reference.threshold(j - begins, found.length - 1 - 2 * begins, LAYER)
        if outlier[j] or float(x[j]) > 1.02 * u:
            assert j in listed
        elif float(x[j]) < 0.98 * u:
            assert j not in listed


def test_a_query_of_nan_lists_no_more_pairs_than_there_is_room_for() -> None:
    found = Drawn(3, 16, 64, 300, 20, "max", threads=1, nan=True)
    assert found.counts.tolist() == [[len(row)] * 2 for row in found.always]


def test_of_many_outliers_one_pair_in_64_is_listed() -> None:
    """The lists have room for no more; the others are drawn as they would be."""
    found = Drawn(3, 16, 64, 300, 200, "max", threads=2, outliers=1.0)
    for b in range(2):
        for h in range(2):
            pairs = found.pairs[b, h, : found.counts[b, h]].long()
            assert {*found.outliers[b][h].nonzero().flatten().tolist()} <= {*pairs.tolist(), *range(found.first[b])}


def test_threads_do_not_change_a_draw() -> None:
    one, other = (Drawn(3, 16, 64, 300, 200, "max", threads) for threads in (1, 4))
    assert torch.equal(one.pairs, other.pairs)
    assert torch.equal(one.weights.nan_to_num(), other.weights.nan_to_num())
    assert torch.equal(one.counts, other.counts)


def test_with_many_samples_every_pair_with_tokens_is_listed() -> None:
    found = Drawn(3, 16, 64, 17, 10**8, "max", threads=1)
    for b in range(2):
        for h in range(2):
            n = int(found.counts[b, h])
            assert (found.weights[b, h, :n] == 0).all()
            first, last = int(found.first[b]), int(found.last)
            there = {first + i for i in (found.shares[b, h, first:last] > 1e-7).nonzero().flatten().tolist()}
            assert there <= set(found.pairs[b, h, :n].tolist())


@pytest.mark.parametrize("marked", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("group", "count", "dim", "blocks", "samples", "join"),
    [
        (2, 8, 64, 300, 200, "max"),
        pytest.param(3, 4, 64, 129, 64, "mean", marks=pytest.mark.slow),
        pytest.param(3, 16, 64, 9, 10**8, "max", marks=pytest.mark.slow),
    ],
)
def test_a_draw_beside_resident_blocks(
    group: int, count: int, dim: int, blocks: int, samples: int, join: str, marked: bool
) -> None:
    """With ragged lists of resident blocks, and a table that has room for more blocks than there are."""
    torch.manual_seed(blocks)
    batch, kv_heads, physical, width = 2, 2, 2 * blocks + 3, blocks + 140
    digest, parts = _digests(physical, count, dim)
    table = torch.full((batch, width), 2**30, dtype=torch.int32)
    table[:, :blocks] = torch.randperm(physical)[: batch * blocks].view(batch, blocks)
    query, tail = torch.randn(batch, kv_heads * group, dim), torch.randn(batch, kv_heads * group) + 3
    tail[0, 0] = -math.inf
    held = torch.full((batch, kv_heads, 40), 2**30, dtype=torch.int32)
    numbers = torch.tensor([[1, 8], [min(40, blocks), 2]], dtype=torch.int32)
    for b in range(batch):
        for h in range(kv_heads):
            n = int(numbers[b, h])
            held[b, h, :n] = torch.cat([torch.randperm(blocks)[: n - 1].sort().values, torch.tensor([blocks])]).int()
    most = width * count
    room, first = most_pairs(samples, group, most), np.array([0, 2 * count + 2], np.int32)
    limits = np.array([blocks * 2 * count + 3, 7], np.int32)
    kept, marks = None, torch.zeros(batch, kv_heads, width * 2 * count, dtype=torch.uint8)
    if marked:
        marks = (torch.rand(marks.shape) < 0.6).byte()
        kept = Kept(marks.numpy(), np.array([5, 0, 1, 2], np.int64))
    both = marks.view(batch, kv_heads, -1, 2).amin(3).bool()[:, :, : blocks * count]
    found = []
    for threads in (1, 3):
        pairs, weights = torch.full((batch, kv_heads, room), -1, dtype=torch.int32), torch.zeros(batch, kv_heads, room)
        counts, score = (
            torch.zeros(batch, kv_heads, dtype=torch.int32),
            torch.zeros(batch, kv_heads, -(-width // 16) * 16),
        )
        tally, portion = np.zeros(4, np.int64), np.zeros((batch, kv_heads * group), np.float32)
        launch = draw_pairs(
            query.numpy(), digest, table.numpy(), Resident(held.numpy(), numbers.numpy(), score.numpy(), portion),
            Thresholds.of(LAYER, first, most, limits),
            np.empty((batch, kv_heads * group, kept_masses(width, count)), MASSES),
            PairLists(pairs.numpy(), weights.numpy(), counts.numpy()), n_sealed=width, length=0, samples=samples,
            join=join, scale=dim**-0.5, softcap=None, tail=tail.numpy(), kept=kept, tally=tally,
        )  # fmt: skip
        run(launch, threads)
        found.append((pairs, weights, counts, score[:, :, :blocks], torch.from_numpy(portion)))
        listed = 2 * (int(counts.sum()) + int(numbers.sum()) * count)
        if marked:  # of a listed pair one token at most
            listed += int(kept.counts.sum())
            for b, h in np.ndindex(batch, kv_heads):
                listed -= int(marks.view(batch, kv_heads, -1, 2)[b, h, pairs[b, h, : counts[b, h]].long()].sum())
        assert tally.tolist() == [listed, batch * kv_heads, batch * kv_heads * (blocks + 1) * 2 * count, 0]
    assert all(map(torch.equal, *found))
    wide = (table[:, :blocks, None] * count + torch.arange(count)).flatten(1)
    masses = reference.score_submeans(query, *parts, wide, blocks * count, scale=dim**-0.5)
    shares = reference.join_scores(masses, tail.double(), kv_heads, join=join).clamp(min=0)
    whole = masses.unflatten(2, (blocks, count)).logsumexp(3)
    want_score = reference.join_scores(whole, tail.double(), kv_heads, join=join)
    torch.testing.assert_close(score[:, :, :blocks].double(), want_score, rtol=5e-3, atol=1e-6)
    tau, total = 1 / samples, torch.logsumexp(torch.cat([masses, tail.double()[..., None]], 2), 2)
    for b in range(batch):
        for h in range(kv_heads):
            n, here = int(counts[b, h]), held[b, h, : int(numbers[b, h]) - 1].long()
            resident = torch.zeros(blocks, dtype=torch.bool).index_fill(0, here, True).repeat_interleave(count)
            resident |= both[b, h]
            drawn, share = pairs[b, h, :n].long(), shares[b, h].masked_fill(resident, 0)
            outlier = _outliers(digest, table[b, :blocks], h, both[b, h]) & ~resident
            heads = slice(h * group, (h + 1) * group)
            part = (masses[b, heads] - total[b, heads, None]).exp()[:, ~resident].sum(1)
            torch.testing.assert_close(torch.from_numpy(portion[b, heads]).double(), part, rtol=1e-2, atol=1e-4)
            assert (drawn.diff() > 0).all()
            assert not resident[drawn].any()
            listed_pairs = set(drawn.tolist())
            want = (tau / share[drawn]).log().clamp(min=0).masked_fill(outlier[drawn], 0)
            torch.testing.assert_close(weights[b, h, :n].double(), want, rtol=0, atol=0.02)
            begins = int(first[b]) // 2
            for j in range(begins, blocks * count):
                u = reference.threshold(j - begins, int(limits[0]) - 1 - int(first[b]), LAYER)
                if not resident[j] and not 0.98 * u < float(share[j]) * samples < 1.02 * u:
                    assert (j in listed_pairs) == bool(outlier[j] or float(share[j]) * samples > u)


def test_what_is_resident_changes_no_other_decision() -> None:
    """Of pairs that are resident in neither of two draws, and of those of any number of rows."""
    torch.manual_seed(0)
    count, blocks, samples, group, dim = 16, 300, 150, 3, 64
    digest, _ = _digests(2 * blocks, count, dim)
    table, query, tail = torch.arange(2 * blocks).view(2, blocks).int(), torch.randn(2, 6, dim), torch.randn(2, 6) + 3
    room, found = most_pairs(samples, group, blocks * count), []
    for resident in ([5, 6, 290], [], list(range(100, 200))):
        held = torch.tensor([*resident, blocks - 1], dtype=torch.int32).expand(2, 2, -1).contiguous()
        lists = PairLists.of(2, 2, room)
        counts, portion = np.full((2, 2), held.shape[2], np.int32), np.zeros((2, 6), np.float32)
        draw_pairs(
            query.numpy(), digest, table.numpy(),
            Resident(held.numpy(), counts, np.zeros((2, 2, 304), np.float32), portion),
            Thresholds.of(LAYER, np.array([0, 64], np.int32), blocks * count),
            np.empty((2, 6, kept_masses(blocks, count)), MASSES), lists, n_sealed=blocks,
            length=2 * count * blocks - 7, samples=samples, join="max", scale=dim**-0.5, softcap=None,
            tail=tail.numpy(),
        ).run()  # fmt: skip
        for b, h in np.ndindex(2, 2):
            pairs, weights = (x[b, h, : lists.counts[b, h]].tolist() for x in (lists.pairs, lists.weights))
            found.append(dict(zip(pairs, weights, strict=True)))
            assert not {pair // count for pair in pairs} & set(resident)
    for some, others in itertools.combinations(range(3), 2):
        for one, other in zip(found[4 * some : 4 * some + 4], found[4 * others : 4 * others + 4], strict=True):
            left_out = {5, 6, 290, *range(100, 200)}
            one, other = ({p: w for p, w in x.items() if p // count not in left_out} for x in (one, other))
            assert one == pytest.approx(other, rel=1e-5)
            assert len(one) > 20


def test_arguments_that_do_not_fit() -> None:
    case = make_case(1, 1, 32, 16, 40, torch.float32, (0,))
    digest, _ = _digests(len(case.clean), 8, 32)
    one = digest._replace(
        codes=digest.codes[:, :1].copy(), levels=digest.levels[:, :1].copy(), sizes=digest.sizes[:, :1].copy(),
        center=digest.center[:1, :1].copy(), sigma=digest.sigma[:1, :1].copy(),
    )  # fmt: skip

    def make(
        digest: Any = one, room: int = 24, samples: int = 4, join: str = "max", masses: int = 144, sinks: int = 0,
        recent: int = 0, tail: np.ndarray[Any, Any] | None = None,
    ) -> Launch:  # fmt: skip
        low, high = np.zeros(1, np.int32), np.full(1, sinks, np.int32)
        return draw_pairs(
            np.zeros((1, 1, 32), np.float32), digest, case.table.numpy(), Always(low, high, recent),
            Thresholds.of(0, low, 16), np.empty((1, 1, masses), MASSES), PairLists.of(1, 1, room), n_sealed=2,
            length=40, samples=samples, join=join, scale=0.2, softcap=None,
            unsealed=case.host_blocks(torch.float32), tail=tail,
        )  # fmt: skip

    make()
    means = vectors(
        np.zeros((1, 1, 32), np.float32), np.zeros((8, 1, 32), np.float32), np.zeros(8, np.float32), dtype=torch.float32
    )
    for wrong, why in (
        ({"digest": means}, "pairs need a digest with a score for each"),
        ({"room": 23}, "up to 24 may be drawn"),
        ({"samples": 0}, "samples 0"),
        ({"join": "raw"}, "join 'raw'"),
        ({"masses": 143}, "masses"),
        ({"tail": np.zeros((1, 1), np.float32)}, "one of unsealed and tail"),
    ):
        with pytest.raises(ValueError, match=why):
            make(**wrong)


def _lists(case_blocks: int, size: int, kv_heads: int, batch: int, room: int) -> tuple[torch.Tensor, ...]:
    total = case_blocks * size // 2
    counts = torch.randint(0, min(room, total) + 1, (batch, kv_heads), dtype=torch.int32)
    counts[0, 0], counts[-1, -1] = 0, min(room, total)
    pairs = torch.full((batch, kv_heads, room), 2**30, dtype=torch.int32)  # garbage beyond the count
    weights = torch.full(pairs.shape, math.nan)
    for b in range(batch):
        for h in range(kv_heads):
            n = int(counts[b, h])
            pairs[b, h, :n] = torch.randperm(total)[:n].sort().values.int()
            weights[b, h, :n] = torch.rand(n) * 3 * (torch.rand(n) < 0.8)
    return pairs, weights, counts


@pytest.mark.one_in(3)
@pytest.mark.parametrize("skips", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("group", "dim", "block_size", "dtype", "room"),
    [
        (3, 64, 32, torch.bfloat16, 2 * STEP + 5),
        (3, 96, 8, torch.bfloat16, 30),
        (1, 128, 16, torch.float32, STEP),
        (3, 16, 128, torch.bfloat16, 400),
        (5, 64, 64, torch.float16, 700),
        pytest.param(7, 80, 32, torch.bfloat16, 77, marks=pytest.mark.slow),
        pytest.param(12, 256, 8, torch.float16, 23, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attention(
    group: int, dim: int, block_size: int, dtype: torch.dtype, room: int, softcap: float | None, skips: bool
) -> None:
    torch.manual_seed(group)
    batch, kv_heads, length = 3, 2, 12 * block_size + 3
    case: Case = make_case(
        batch, kv_heads, dim, block_size, length, dtype, padding=(0, block_size + 3, length), scattered=0.05
    )
    query = torch.randn(batch, kv_heads * group, dim) * 3
    pairs, weights, counts = _lists(13, block_size, kv_heads, batch, room)
    portion = torch.rand(query.shape[:2])
    skipped = (torch.rand(batch, kv_heads, 13 * block_size) < 0.3).byte() if skips else None
    found = []
    for threads in (1, 3):
        out, kbar = torch.full_like(query, 7), torch.full_like(query, 7)
        lse, errors = torch.full(query.shape[:2], 7.0), torch.full(query.shape[:2], 7.0)
        tally = np.zeros(2 + ERROR_BINS, np.int64)
        more = Pairs.of(
            weights.numpy(), kv_heads * group, skipped=None if skipped is None else skipped.numpy(),
            portion=portion.numpy(), errors=errors.numpy(), tally=tally,
        )  # fmt: skip
        launch = decode_attention(
            query.numpy(), case.host_blocks(dtype), pairs.numpy(), counts.numpy(), length, out.numpy(), lse.numpy(),
            kbar.numpy(), scale=dim**-0.5, softcap=softcap, pairs=more,
        )  # fmt: skip
        run(launch, threads)
        found.append((out, lse, kbar, errors))
        assert tally[0] == tally[2:].sum() == errors.numel()
        assert tally[1] / 2**32 == pytest.approx(float(errors.double().sum()), rel=1e-5, abs=1e-6)
        bins = (ERROR_STEPS * (errors.double().clamp(min=1e-30).log2() - LEAST_ERROR)).floor().clamp(0, ERROR_BINS - 1)
        assert (np.bincount(bins.long().flatten(), minlength=ERROR_BINS) == tally[2:]).all()
    assert all(map(torch.equal, *found))
    want = reference.attend_pairs(
        query, case.clean, case.table, pairs, weights, counts, case.valid, length, portion, skipped,
        scale=dim**-0.5, softcap=softcap,
    )  # fmt: skip
    bound = 1e-5 * (1 + want[1][want[1].isfinite()].abs().max().item())
    for got, right in zip(found[0][:3], want, strict=False):
        torch.testing.assert_close(got.double(), right, rtol=0, atol=bound)
    torch.testing.assert_close(errors.double(), want[3], rtol=1e-3, atol=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("group", "dim", "block_size", "blocks", "dtype", "softcap"),
    [
        (3, 64, 32, 6, torch.bfloat16, None),
        (3, 96, 8, 6, torch.bfloat16, None),
        (2, 16, 128, 6, torch.float32, 20.0),
        pytest.param(5, 80, 16, 90, torch.float16, 20.0, marks=pytest.mark.slow),  # several parts
    ],
)
@pytest.mark.parametrize("skips", [False, True])
def test_attention_over_packed_and_plain_blocks(
    group: int, dim: int, block_size: int, blocks: int, dtype: torch.dtype, softcap: float | None, skips: bool
) -> None:
    torch.manual_seed(dim)
    kv_heads = 2
    pool, held = packed_pool(kv_heads, dim, block_size, 2 * blocks, dtype, large=2.0)
    length = blocks * block_size - 3
    table = torch.randperm(2 * blocks).view(2, blocks).int()
    valid = (torch.rand(2, blocks * block_size) < 0.97).to(torch.uint8)
    holes = (valid.view(2, blocks, block_size) == 0).any(-1).to(torch.uint8)
    seen = (valid.bool() & (torch.arange(blocks * block_size) < length)).view(2 * blocks, block_size)
    for block, here in zip(table.flatten().tolist(), seen, strict=True):
        if block % 2 == 0:  # plain
            pool.slabs[0][block, :, :, ~here] = math.nan
    skipped = (torch.rand(2, kv_heads, blocks * block_size) < 0.2).to(torch.uint8) if skips else None
    query = torch.randn(2, kv_heads * group, dim)
    pairs, weights, counts = _lists(blocks, block_size, kv_heads, 2, blocks * block_size // 2 - 5)
    for threads in (1, 3):
        out, lse, kbar = torch.full_like(query, 7), torch.full(query.shape[:2], 7.0), torch.full_like(query, 7)
        packed = Int8Records(packed_bytes(dim, block_size))
        mixed = HostBlocks(
            tag_of(dtype), pool.block_ptr, table.numpy(), holes.numpy(), valid.numpy(), block_size, packed
        )
        errors = torch.full(query.shape[:2], 7.0)
        more = Pairs.of(
            weights.numpy(), kv_heads * group, skipped=None if skipped is None else skipped.numpy(),
            errors=errors.numpy(),
        )  # fmt: skip
        launch = decode_attention(
            query.numpy(), mixed, pairs.numpy(), counts.numpy(), length, out.numpy(), lse.numpy(), kbar.numpy(),
            scale=dim**-0.5, softcap=softcap, pairs=more,
        )  # fmt: skip
        run(launch, threads)
        want = reference.attend_pairs(
            query, held, table, pairs, weights, counts, valid, length, torch.ones(query.shape[:2]),
            scale=dim**-0.5, softcap=softcap, skipped=skipped,
        )  # fmt: skip
        torch.testing.assert_close(out.double(), want[0], rtol=0, atol=1e-4)
        torch.testing.assert_close(lse.double(), want[1], rtol=0, atol=1e-4)
        torch.testing.assert_close(kbar.double(), want[2], rtol=0, atol=1e-4)
        torch.testing.assert_close(errors.double(), want[3], rtol=1e-3, atol=1e-5)
