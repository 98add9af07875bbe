"""References of the kernels in `hf_offload/cpu`: plain torch in float64.

Pools are tensors [P, Hkv, 2 (K, V), block_size, D]; the other arguments are tensors with the shapes of the launchers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_offload.scores import Scores


def attend(
    query: Tensor, pool: Tensor, table: Tensor, tokens: Tensor, scores: Scores, added: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out [D], lse [], kbar [D] and shares [n] of one query head over a row's tokens; 0 and -inf without any.

    Args:
        query: float64 [D].
        pool: [P, 2, block_size, D], of the query head's KV head.
        table: [N], the row's physical blocks.
        tokens: [n], numbers of the row's tokens.
        added: [n], added to the scores after the softcap.
    """
    if not len(tokens):
        return torch.zeros_like(query), query.new_tensor(-math.inf), torch.zeros_like(query), query.new_zeros(0)
    size = pool.shape[2]
    keys, values = pool[table.long()[tokens // size], :, tokens % size].double().unbind(1)
    raw = scores.of(keys @ query)
    total = raw if added is None else raw + added.double()
    shares = total.softmax(0)
    slope = 1.0 if scores.softcap is None else 1 - (raw / scores.softcap) ** 2
    return shares @ values, total.logsumexp(0), (shares * slope) @ keys, shares


def are_seen(tokens: Tensor, valid: Tensor, length: int) -> Tensor:
    """Which of a row's tokens are valid and before its end."""
    return (tokens < length) & valid[tokens.clamp(max=len(valid) - 1)].bool()


def tokens_of(blocks: Tensor, size: int) -> Tensor:
    """Numbers of the tokens of logical blocks [n]."""
    return (blocks.long()[:, None] * size + torch.arange(size, device="cpu")).flatten()


def attend_blocks(
    query: Tensor, pool: Tensor, table: Tensor, blocks: Tensor, counts: Tensor, valid: Tensor, length: int, *,
    scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return out [B, Hq, D], lse [B, Hq] and kbar [B, Hq, D], float64, of `decode_attention` to blocks."""
    group, rows = query.shape[1] // pool.shape[1], []
    for b, heads in enumerate(query.double()):
        for hq, vector in enumerate(heads):
            h = hq // group
            tokens = tokens_of(blocks[b, h, : int(counts[b, h])], pool.shape[3])
            tokens = tokens[are_seen(tokens, valid[b], length)]
            rows.append(attend(vector, pool[:, h], table[b], tokens, Scores(scale, softcap))[:3])
    out, lse, kbar = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return out.view(query.shape), lse.view(query.shape[:2]), kbar.view(query.shape)


def attend_pairs(
    query: Tensor, pool: Tensor, table: Tensor, pairs: Tensor, weights: Tensor, counts: Tensor, valid: Tensor,
    length: int, portion: Tensor, skipped: Tensor | None = None, *, scale: float, softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return out [B, Hq, D], lse [B, Hq], kbar [B, Hq, D] and errors [B, Hq] of `decode_attention` to pairs."""
    group, rows = query.shape[1] // pool.shape[1], []
    for b, heads in enumerate(query.double()):
        for hq, vector in enumerate(heads):
            h = hq // group
            added = weights[b, h, : int(counts[b, h])].double()
            tokens = tokens_of(pairs[b, h, : len(added)], 2)
            there = are_seen(tokens, valid[b], length)
            if skipped is not None:
                there &= skipped[b, h, tokens.clamp(max=skipped.shape[2] - 1)] == 0
            more, scores = added.repeat_interleave(2), Scores(scale, softcap)
            *sums, shares = attend(vector, pool[:, h], table[b], tokens[there], scores, more[there])
            masses = torch.zeros_like(more).masked_scatter(there, shares).view(-1, 2).sum(1)
            error = (0.75 * (1 - (-added).exp()) * masses**2).sum().sqrt() * portion[b, hq].double()
            rows.append((*sums, error))
    out, lse, kbar, errors = (torch.stack(parts) for parts in zip(*rows, strict=True))
    return out.view(query.shape), lse.view(query.shape[:2]), kbar.view(query.shape), errors.view(query.shape[:2])


def threshold(i: int, position: int, layer: int) -> float:
    """Return the threshold of a row's i-th pair for a query at a position, both counted from its first valid token."""

    def mix(x: int) -> int:
        for factor, bits in ((0x9E3779B1, 15), (0x85EBCA77, 13), (0xC2B2AE3D, 16)):
            x = x * factor % 2**32
            x ^= x >> bits
        return x

    v = ((97 * i << 24) + mix(i // 256) + 0x9E3779B9 * position + mix(layer + 1)) % 2**32
    return ((v >> 9) + 0.5) / 2**23


def draw_pairs(x: Tensor, position: int, layer: int) -> list[tuple[int, float]]:
    """Return (number, log weight) of the drawn ones of a row's pairs with x [n], as `kernels.draw_pairs` does."""
    drawn = [(i, share) for i, share in enumerate(x.tolist()) if share > threshold(i, position, layer)]
    return [(i, max(-math.log(share), 0.0) if share < math.inf else 0.0) for i, share in drawn]


def listed_scores(
    query: Tensor, pool: Tensor, table: Tensor, blocks: Tensor, counts: Tensor, valid: Tensor, length: int, *,
    scale: float, softcap: float | None,
) -> Tensor:  # fmt: skip
    """Return `scores` [B, Hq, C * block_size], float64, of `decode_attention`; NaN where it writes none."""
    group, size = query.shape[1] // pool.shape[1], pool.shape[3]
    scores = torch.full((*query.shape[:2], blocks.shape[2] * size), math.nan, dtype=torch.float64, device="cpu")
    for b, heads in enumerate(query.double()):
        for hq, vector in enumerate(heads):
            h = hq // group
            tokens = tokens_of(blocks[b, h, : int(counts[b, h])], size)
            found = Scores(scale, softcap).of(
                pool[table[b].long()[tokens // size], h, 0, tokens % size].double() @ vector
            )
            scores[b, hq, : len(tokens)] = torch.where(are_seen(tokens, valid[b], length), found, -math.inf)
    return scores


def tail_lse(
    query: Tensor, pool: Tensor, table: Tensor, first_block: int, length: int, valid: Tensor, *, scale: float,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Return lse [B, Hq], float64, of the tokens from `first_block` on: `digest_scores.tail_of_head`."""
    end = max(first_block, -(-length // pool.shape[3]))
    blocks = torch.arange(first_block, end, device="cpu").expand(query.shape[0], pool.shape[1], -1)
    counts = torch.full(blocks.shape[:2], end - first_block, dtype=torch.int64, device="cpu")
    return attend_blocks(query, pool, table, blocks, counts, valid, length, scale=scale, softcap=softcap)[1]


def pack_block(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V [..., block_size, D], float64, after `int8_blocks.pack_records`: what the codes stand for."""

    def short(x: Tensor, more: int) -> Tensor:
        bits = x.contiguous().view(torch.int32)
        return (((bits + more) >> 16) << 16).view(torch.float32)

    def rounded(x: Tensor, middle: Tensor, axis: int) -> Tensor:
        peak = (x - middle).abs().amax(axis, keepdim=True)
        scale = short(peak * (1 / torch.tensor(127.0, dtype=torch.float32, device="cpu")), 0xFFFF)  # rounded up
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        return ((x - middle) * inverse).round().double() * scale.double() + middle.double()

    keys, values = (torch.where(x.abs() < 3e38, x, 0.0).float() for x in (keys, values))
    low, high = keys.aminmax(dim=-2, keepdim=True)
    middle = short(high * 0.5 + low * 0.5, 0x8000)
    return rounded(keys, middle, -2), rounded(values, torch.zeros(1, dtype=torch.float32, device="cpu"), -1)


def read_tokens(pool: Tensor, table: Tensor, first: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, Hkv, tokens, D] in the pool's dtype: `move_records.gather_tokens`."""
    size = pool.shape[3]
    positions = torch.arange(first, first + tokens, device="cpu")
    blocks = pool[table.long()[:, positions // size], :, :, positions % size]  # [B, tokens, Hkv, 2, D]
    return blocks[:, :, :, 0].transpose(1, 2), blocks[:, :, :, 1].transpose(1, 2)


def score_vectors(
    query: Tensor, vectors: Tensor, bias: Tensor, table: Tensor, n_blocks: int, softcap: float | None = None
) -> Tensor:
    """Return logmass [B, Hq, n_blocks], float64, of `digest_scores.Vectors`."""
    group = query.shape[1] // vectors.shape[1]
    physical = table[:, :n_blocks].long()
    chosen = vectors[physical].double().repeat_interleave(group, 2)  # [B, n, Hq, W]
    dots = torch.einsum("bhw,bnhw->bhn", query.double(), chosen)
    shift = bias[physical][:, None].double()
    return torch.where(shift == -math.inf, -math.inf, Scores(1.0, softcap).of(dots) + shift)


def score_submeans(
    query: Tensor,
    codes: Tensor,
    levels: Tensor,
    scales: Tensor,
    sizes: Tensor,
    bias: Tensor,
    center: Tensor,
    sigma: Tensor,
    table: Tensor,
    n_blocks: int,
    *,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Return logmass [B, Hq, n_blocks], float64, of `submean_scores.SubMeans`.

    Codes and levels are [P, Hkv, S, D], center and sigma [B, Hkv, D]. sigma * query is rounded to 127 steps, as in the
    kernel.
    """
    group = query.shape[1] // codes.shape[1]
    weighted = query * sigma.repeat_interleave(group, 1)
    step = weighted.abs().amax(-1, keepdim=True) / 127
    weighted = step.double() * (weighted * (1 / step)).round()
    middle = (query.double() * center.double().repeat_interleave(group, 1)).sum(-1)
    physical = table[:, :n_blocks].long()
    means, halves = (
        torch.einsum("bhd,bnhjd->bhnj", weighted, (x[..., None] * y).double()[physical].repeat_interleave(group, 2))
        for x, y in ((scales, codes), (sizes, levels - 1.5))
    )
    shift = bias[physical][:, None].double()
    means += middle[..., None, None]
    pair = [Scores(scale, softcap).of(key) for key in (means + halves, means - halves)]
    return torch.where(shift == -math.inf, -math.inf, torch.logaddexp(*pair) - math.log(2) + shift).logsumexp(-1)


def join_scores(logmass: Tensor, tail: Tensor, kv_heads: int, *, join: str) -> Tensor:
    """Return score [B, Hkv, n], float64, from logmass [B, Hq, n]: `block_topk.choose_blocks`."""
    batch, query_heads, count = logmass.shape
    masses = logmass.double()
    total = torch.logsumexp(torch.cat((masses, tail.double()[..., None]), -1), -1, keepdim=True)
    shares = torch.where(total == -math.inf, 0.0, torch.exp(masses - total))
    grouped = (batch, kv_heads, query_heads // kv_heads, count)
    if join == "raw":
        return masses.view(grouped).mean(2)
    score = shares.view(grouped).amax(2) if join == "max" else shares.view(grouped).mean(2)
    return torch.where(masses.view(grouped).amax(2) == -math.inf, -math.inf, score)


def select_blocks(
    score: Tensor, n_sealed: int, n_blocks: int, sink_lo: Tensor, sink_hi: Tensor, recent: int, k: int
) -> list[list[list[int]]]:
    """Return the chosen blocks of each (row, KV head): `block_topk.select_blocks`."""
    rows = []
    for b, heads in enumerate(score.tolist()):
        low, high = int(sink_lo[b]), min(int(sink_hi[b]), n_blocks)
        always = set(range(max(low, 0), high)) | set(range(n_sealed, n_blocks))
        always |= set(range(max(low, n_sealed - recent, 0), n_sealed))
        row = []
        for values in heads:
            others = [n for n in range(max(low, 0), n_sealed) if n not in always and values[n] > -math.inf]
            others.sort(key=lambda n: (-values[n], n))
            row.append(sorted(always | set(others[: max(0, k - len(always))])))
        rows.append(row)
    return rows


def checksum(record: bytes) -> int:
    """Return the checksum of a record (a multiple of 64 bytes) as a signed 64-bit number: `kernels.checksum`."""
    prime, all_bits = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mix(lane: int, word: int) -> int:
        x = lane ^ word
        x = (x ^ (x >> 32)) * prime & all_bits
        return x ^ (x >> 32)

    lanes = list(range(1, 9))
    for place in range(0, len(record), 8):
        lane = place // 8 % 8
        lanes[lane] = mix(lanes[lane], int.from_bytes(record[place : place + 8], "little"))
    total = 0
    for lane in lanes:
        total = mix(total, mix(mix(lane, prime), prime))
    return total - (1 << 64) if total >> 63 else total
