"""What the query heads of a KV head need of the host, in bytes: how coarse their runs are, and who reads most.

Method: Fluxion, sections 5.2, 5.3 and 6.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hf_offload.cpu.launch import Array, jit

_ALMOST = 1.0 - 1e-6  # a share of 0.05 in float32 is not one block of 20 more


@dataclass(frozen=True, slots=True)
class Needs:
    """What each query head needs of the host, and what the choice of a granularity weighs.

    Args:
        budget0, slope: float32 [B, Hq], of Eq. 1: share = budget0 + slope * log2(tokens of a run).
        streaming: uint8 [B, Hq], 1: the head needs nothing.
        granularities: int32 [n], blocks a run that may be chosen.
        block_size: tokens a block.
        digest_bytes: of a KV head's digest of a block; block_bytes: of its keys and values in one.
    """

    budget0: Array
    slope: Array
    streaming: Array
    granularities: Array
    block_size: int
    digest_bytes: float
    block_bytes: float


@jit
def budget_of(budget0: float, slope: float, streams: int, tokens: float) -> float:
    """The share of the host's tokens that a query head needs in runs of so many (Eq. 1), within [0, 1].

    A need that is no number is all of them, so that what made it so shows in what is attended.
    """
    if streams:
        return 0.0
    share = float(budget0) + float(slope) * math.log2(tokens)
    return max(share, 0.0) if share < 1.0 else 1.0


@jit
def shares_of(budget0: Array, slope: Array, streaming: Array, tokens: float) -> float:
    """The sum of what the query heads of a KV head need in runs of so many tokens, in shares of the host's."""
    needed = 0.0
    for g in range(len(budget0)):
        needed += budget_of(budget0[g], slope[g], streaming[g], tokens)
    return needed


@jit
def granularity_of(
    budget0: Array, slope: Array, streaming: Array, spans: Array, block_size: int, digest_bytes: float,
    block_bytes: float,
) -> int:  # fmt: skip
    """Return the blocks a run with the least V(blk), or 0 if no head needs any: streaming heads, and budgets of 0.

    V(blk) = digest_bytes / span + block_bytes * sum of the heads' budgets, a block of the host's segment (Eq. 3); equal
    ones: the first. The first term is the price of choosing among more runs: digests that are read are always those of
    single blocks.

    Args:
        budget0, slope: float32 [G], of the query heads of a KV head; streaming: uint8 [G].
        spans: int32 [n], blocks a run.
        digest_bytes: of a KV head's digest; block_bytes: of its keys and values in a block.
    """
    best, least = 0, np.inf
    for span in spans:
        needed = shares_of(budget0, slope, streaming, float(span * block_size))
        volume = digest_bytes / float(span) + block_bytes * needed
        if volume < least:
            best, least = int(span) if needed > 0.0 else 0, volume
    return best


@jit
def runs_wanted(budget: float, blocks: int, span: int) -> int:
    """Runs that hold a share of so many blocks, rounded up."""
    return min(math.ceil(budget * blocks / span * _ALMOST), (blocks + span - 1) // span)


@jit
def rank_tasks(
    budget0: Array, slope: Array, streaming: Array, granularities: Array, block_size: int, digest_bytes: float,
    block_bytes: float, first: Array, end: int, spans: Array, volumes: Array, order: Array,
) -> int:  # fmt: skip
    """Find the (row, KV head) pairs that need anything of the host, those that read most first; return how many.

    Args:
        budget0, slope: float32 [B, Hq], of Eq. 1; streaming: uint8 [B, Hq].
        granularities, block_size, digest_bytes, block_bytes: as in `Needs`.
        first: int32 [B], the host's blocks of a row are first..end-1.
        spans: int32 [B, Hkv], written: blocks a run, 0 where no head needs anything.
        volumes: float64 [B * Hkv], written: bytes that a pair reads, the digests of all its blocks and what each head
            needs; 0 for a pair that needs nothing.
        order: int32 [B * Hkv], written up to the number returned: row * Hkv + KV head; of equal ones the first.
    """
    batch, kv_heads = spans.shape
    group, found = budget0.shape[1] // kv_heads, 0
    for line in range(batch * kv_heads):
        b, h = line // kv_heads, line % kv_heads
        heads = slice(h * group, (h + 1) * group)
        mine = (budget0[b, heads], slope[b, heads], streaming[b, heads])
        span = granularity_of(*mine, granularities, block_size, digest_bytes, block_bytes)
        blocks = end - min(max(first[b], 0), end)
        spans[b, h], volumes[line] = span, 0.0
        if not span or not blocks:
            continue
        volumes[line] = (digest_bytes + block_bytes * shares_of(*mine, float(span * block_size))) * blocks
        place = found
        while place > 0 and volumes[order[place - 1]] < volumes[line]:
            order[place] = order[place - 1]
            place -= 1
        order[place] = line
        found += 1
    return found
