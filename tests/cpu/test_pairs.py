"""`draw_pairs` and `attend_pairs` against float64: what is drawn, with which weight, and attention to it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pools import Case, bits, make_case, packed_pool, run

from hf_offload.cpu import reference
from hf_offload.cpu.kernels.digest_scores import vectors
from hf_offload.cpu.kernels.draw_pairs import MASSES, draw_head, draw_pairs, most_pairs
from hf_offload.cpu.kernels.int8_blocks import Int8Records, packed_bytes
from hf_offload.cpu.kernels.pair_decode import STEP, attend_pairs
from hf_offload.cpu.kernels.submean_scores import SubMeans, submeans
from hf_offload.cpu.launch import Launch
from hf_offload.gpu.seal import pack_codes, pack_halves, pack_levels


@pytest.mark.parametrize("samples", [1, 8, 64, 4096])
@pytest.mark.parametrize(("first", "last"), [(0, 1024), (3, 1021), (16, 17), (500, 530), (7, 7)])
def test_the_rule(first: int, last: int, samples: int) -> None:
    generator = torch.Generator().manual_seed(samples)
    group, chunk = 3, 512
    masses = (torch.randint(0, 9, (group, 1024), generator=generator) * 2.0 ** -torch.randint(0, 5, (1024,))).bfloat16()
    masses[:, 40:200] = 0
    factors = 2.0 ** -torch.randint(6, 13, (group, 2), generator=generator).float()  # sums are exact in float32
    shares = (masses.float() * factors.repeat_interleave(chunk, 1)).amax(0)[first:last]
    pairs, weights = np.full(1024, -1, np.int32), np.full(1024, 7, np.float32)
    count = draw_head(
        bits(masses).ctypes.data,
        2048,
        group,
        factors.numpy(),
        0,
        chunk,
        first,
        last,
        1 / samples,
        pairs,
        weights,
        0,
        1024,
    )
    want = reference.draw_pairs(shares, samples)
    assert pairs[:count].tolist() == [first + i for i, _ in want]
    np.testing.assert_allclose(weights[:count], [weight for _, weight in want], rtol=1e-6)
    assert count <= most_pairs(samples, 1) * max(1, math.ceil(float(shares.sum())))


def _digests(physical: int, count: int, dim: int) -> tuple[SubMeans, tuple[torch.Tensor, ...]]:
    """Sub-means of two KV heads, and the tensors for `reference.score_submeans` with each pair as a block."""
    codes = torch.randint(-7, 8, (physical, 2, count, dim), dtype=torch.int8)
    levels = torch.randint(0, 4, codes.shape, dtype=torch.int8)
    scales, sizes = ((torch.rand(physical, 2, count) * 0.3).bfloat16().float() for _ in range(2))
    bias = torch.randint(0, 3, (physical, count)).float().log()  # some pairs have no token
    center, sigma = torch.randn(2, dim), torch.rand(2, dim) + 0.5
    arrays = (pack_codes(codes), pack_levels(levels), pack_halves(scales, sizes), bias, center, sigma)
    single = (x.transpose(1, 2).flatten(0, 1)[:, :, None] for x in (codes, levels, scales, sizes))
    return submeans(*(x.numpy() for x in arrays)), (*single, bias.view(-1, 1), center, sigma)


class Drawn:
    """A draw, of 150 blocks or more where there are chunks, and what it is to be compared with."""

    def __init__(
        self, group: int, count: int, dim: int, blocks: int, samples: int, join: str, threads: int, nan: bool = False
    ) -> None:
        torch.manual_seed(blocks)
        batch, kv_heads, size, recent = 2, 2, 2 * count, 2
        length = blocks * size + 5
        self.case = case = make_case(batch, kv_heads, dim, size, length, torch.float32, (0, size + 3), 0.01)
        digest, parts = _digests(len(case.clean), count, dim)
        self.query = query = torch.randn(batch, kv_heads * group, dim)
        low = np.array([0, 1], np.int32)
        most = (3 + recent + 1) * count + most_pairs(samples, group)
        room = min(most, (blocks + 1) * count)
        if nan:
            query[:] = math.nan
        whole = torch.full((batch * kv_heads * room + 1000,), -1, dtype=torch.int32)  # nothing is written at its end
        self.pairs = whole[:-1000].view(batch, kv_heads, room)
        self.weights, self.counts = (
            torch.full(self.pairs.shape, math.nan),
            torch.zeros(batch, kv_heads, dtype=torch.int32),
        )
        masses = np.empty((batch, kv_heads * group, -(-blocks // 16) * 16 * count), MASSES)
        launch = draw_pairs(
            query.numpy(), digest, case.block_ptr, case.table.numpy(), case.holes.numpy(), case.valid.numpy(), blocks,
            length, masses, low, low + 2, recent, self.pairs.numpy(), self.weights.numpy(), self.counts.numpy(),
            samples=samples, join=join, block_size=size, scale=dim**-0.5, softcap=None, kv_dtype=torch.float32,
        )  # fmt: skip
        run(launch, threads)
        assert (whole[-1000:] == -1).all()
        assert (self.counts <= room).all()
        table = (case.table[:, :, None] * count + torch.arange(count)).flatten(1)
        logmass = reference.score_submeans(query, *parts, table, blocks * count, scale=dim**-0.5)
        tail = reference.tail_lse(query, case.clean, case.table, blocks, length, case.valid, scale=dim**-0.5)
        self.shares = reference.join_scores(logmass, tail, kv_heads, join=join).clamp(min=0)
        self.first, self.last = (low + 2) * count, (blocks - recent) * count
        self.whole = [
            {*range(int(low[b]) * count, int(low[b] + 2) * count), *range(self.last, -(-length // 2))}
            for b in range(batch)
        ]


@pytest.mark.parametrize(
    ("group", "count", "dim", "blocks", "samples", "join"),
    [
        (3, 16, 64, 300, 200, "max"),
        (3, 8, 64, 129, 64, "mean"),
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
            assert found.whole[b] <= listed
            first, last = int(found.first[b]), int(found.last)
            between = (pairs >= first) & (pairs < last)
            assert listed - found.whole[b] == set(pairs[between].tolist())
            assert (weights[~between] == 0).all()
            share = found.shares[b, h]
            assert {first + i for i in (share[first:last] > 1.02 * tau).nonzero().flatten().tolist()} <= listed
            # The weight of a drawn pair tells its share; masses are rounded to 8 bits.
            expected = (tau / share[pairs[between]]).log().clamp(min=0)
            torch.testing.assert_close(weights[between], expected, rtol=0, atol=0.02)
            # What lies between two drawn pairs adds up to the distance of two points.
            small = torch.where(share[first:last] < tau, share[first:last], 0).cumsum(0)
            drawn = pairs[between & (weights > 0)] - first
            steps = small[drawn]
            points = tau * (torch.arange(len(steps)).double() + 0.5)
            assert len(steps) >= small[-1] / tau - 2
            torch.testing.assert_close(steps, points, rtol=0.02, atol=1.02 * tau)


def test_a_query_of_nan_lists_no_more_pairs_than_there_is_room_for() -> None:
    found = Drawn(3, 16, 64, 300, 20, "max", threads=1, nan=True)
    assert (found.pairs[-1, -1, -1] >= 300 * 16).all()  # the list ends with the newest tokens


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


def test_arguments_that_do_not_fit() -> None:
    case = make_case(1, 1, 32, 16, 40, torch.float32, (0,))
    digest, _ = _digests(len(case.clean), 8, 32)
    one = digest._replace(
        codes=digest.codes[:, :1].copy(), levels=digest.levels[:, :1].copy(), sizes=digest.sizes[:, :1].copy(),
        center=digest.center[:1], sigma=digest.sigma[:1],
    )  # fmt: skip

    def make(digest: Any = one, room: int = 24, samples: int = 4, join: str = "max", masses: int = 128) -> Launch:
        ends = np.zeros(1, np.int32)
        return draw_pairs(
            np.zeros((1, 1, 32), np.float32), digest, case.block_ptr, case.table.numpy(), case.holes.numpy(),
            case.valid.numpy(), 2, 40, np.empty((1, 1, masses), MASSES), ends, ends, 0,
            np.empty((1, 1, room), np.int32), np.empty((1, 1, room), np.float32), np.empty((1, 1), np.int32),
            samples=samples, join=join, block_size=16, scale=0.2, softcap=None, kv_dtype=torch.float32,
        )  # fmt: skip

    make()
    means = vectors(
        np.zeros((1, 1, 32), np.float32), np.zeros((8, 1, 32), np.float32), np.zeros(8, np.float32), dtype=torch.float32
    )
    for wrong, why in (
        ({"digest": means}, "scores for blocks of 8 pairs"),
        ({"room": 10}, "up to 14 may be drawn"),
        ({"samples": 0}, "samples 0"),
        ({"join": "raw"}, "join 'raw'"),
        ({"masses": 127}, "masses"),
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
            weights[b, h, :n] = torch.rand(n) * 3
    return pairs, weights, counts


@pytest.mark.one_in(3)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("group", "dim", "block_size", "dtype", "room"),
    [
        (3, 64, 32, torch.bfloat16, 2 * STEP + 5),
        (3, 96, 8, torch.bfloat16, 30),
        (3, 16, 128, torch.bfloat16, 400),
        (1, 128, 16, torch.float32, STEP),
        (5, 64, 64, torch.float16, 700),
        pytest.param(7, 80, 32, torch.bfloat16, 77, marks=pytest.mark.slow),
        pytest.param(12, 256, 8, torch.float16, 23, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attention(group: int, dim: int, block_size: int, dtype: torch.dtype, room: int, softcap: float | None) -> None:
    torch.manual_seed(group)
    batch, kv_heads, length = 3, 2, 12 * block_size + 3
    case: Case = make_case(
        batch, kv_heads, dim, block_size, length, dtype, padding=(0, block_size + 3, length), scattered=0.05
    )
    query = torch.randn(batch, kv_heads * group, dim) * 3
    pairs, weights, counts = _lists(13, block_size, kv_heads, batch, room)
    found = []
    for threads in (1, 3):
        out, lse = torch.full_like(query, 7), torch.full(query.shape[:2], 7.0)
        launch = attend_pairs(
            query.numpy(), case.block_ptr, case.table.numpy(), pairs.numpy(), weights.numpy(), counts.numpy(),
            case.holes.numpy(), case.valid.numpy(), length, out.numpy(), lse.numpy(), kv_dtype=dtype,
            block_size=block_size, scale=dim**-0.5, softcap=softcap,
        )  # fmt: skip
        run(launch, threads)
        found.append((out, lse))
    assert all(map(torch.equal, *found))
    want = reference.attend_pairs(
        query, case.clean, case.table, pairs, weights, counts, case.valid, length, scale=dim**-0.5, softcap=softcap
    )
    bound = 1e-5 * (1 + want[1][want[1].isfinite()].abs().max().item())
    torch.testing.assert_close(out.double(), want[0], rtol=0, atol=bound)
    torch.testing.assert_close(lse.double(), want[1], rtol=0, atol=bound)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("dim", "block_size", "dtype"), [(64, 32, torch.bfloat16), (96, 8, torch.bfloat16), (16, 128, torch.float32)]
)
def test_attention_over_packed_and_plain_blocks(dim: int, block_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    blocks, kv_heads, group = 6, 2, 3
    pool, held = packed_pool(kv_heads, dim, block_size, blocks, dtype, large=2.0)
    length = blocks * block_size
    table = torch.randperm(blocks).view(1, -1).int()
    valid, holes = torch.ones(1, length, dtype=torch.uint8), torch.zeros(1, blocks, dtype=torch.uint8)
    valid[0, 3], holes[0, 0] = 0, 1
    query = torch.randn(1, kv_heads * group, dim)
    pairs, weights, counts = _lists(blocks, block_size, kv_heads, 1, 90)
    counts[0] = counts[0].clamp(min=5)
    pairs, weights = pairs[:, -1:].repeat(1, 2, 1), weights[:, -1:].repeat(1, 2, 1)
    out, lse = torch.full_like(query, 7), torch.full(query.shape[:2], 7.0)
    attend_pairs(
        query.numpy(), pool.block_ptr, table.numpy(), pairs.numpy(), weights.numpy(), counts.numpy(), holes.numpy(),
        valid.numpy(), length, out.numpy(), lse.numpy(), kv_dtype=dtype, block_size=block_size, scale=dim**-0.5,
        softcap=None, packed=Int8Records(packed_bytes(dim, block_size)),
    ).run()  # fmt: skip
    want = reference.attend_pairs(
        query, held, table, pairs, weights, counts, valid, length, scale=dim**-0.5, softcap=None
    )
    torch.testing.assert_close(out.double(), want[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(lse.double(), want[1], rtol=0, atol=1e-4)
