"""Reference of the granularity-budget selector: plain torch in float64."""

from __future__ import annotations

import math

from torch import Tensor


def budget(budget0: float, slope: float, streams: bool, tokens: int) -> float:
    """Return the share of the host's tokens that a head takes in runs of `tokens` (Fluxion, Eq. 1)."""
    share = 0.0 if streams else budget0 + slope * math.log2(tokens)
    return 1.0 if math.isnan(share) else min(max(share, 0.0), 1.0)


def volume(budgets: list[float], length: int, tokens: int, digest_bytes: float, token_bytes: float) -> float:
    """Return V(blk), in bytes (Fluxion, Eq. 3).

    Args:
        budgets: of the query heads of a KV head, in runs of `tokens`.
        length: tokens on the host.
        digest_bytes: of a run's digest; token_bytes: of a token's key and value.
    """
    return digest_bytes * length / tokens + token_bytes * length * sum(budgets)


def retrieve_blocks(
    masses: Tensor,
    first: Tensor,
    end: int,
    budget0: Tensor,
    slope: Tensor,
    streaming: Tensor,
    granularities: list[int],
    kv_heads: int,
    *,
    block_size: int,
    digest_bytes: float,
    block_bytes: float,
    sums: bool,
) -> tuple[list[list[list[int]]], list[list[int]], list[list[int]]]:
    """Return blocks and spans of each (row, KV head), and runs of each (row, query head), as `retrieve_blocks` does.

    Args:
        masses: [B, Hq, N], of single blocks; the others as in `selector.retrieve_blocks`.
    """
    group = masses.shape[1] // kv_heads
    found: list[list[list[int]]] = []
    spans: list[list[int]] = []
    runs: list[list[int]] = []
    for b in range(len(masses)):
        low = min(max(int(first[b]), 0), end)
        found.append([])
        spans.append([])
        runs.append([])
        for h in range(kv_heads):
            heads = range(h * group, (h + 1) * group)
            needs = [(float(budget0[b, g]), float(slope[b, g]), bool(streaming[b, g])) for g in heads]
            budgets = [[budget(*need, span * block_size) for need in needs] for span in granularities]
            volumes = [
                volume(some, (end - low) * block_size, span * block_size, digest_bytes, block_bytes / block_size)
                for some, span in zip(budgets, granularities, strict=True)
            ]
            best = volumes.index(min(volumes))
            span = granularities[best] if any(budgets[best]) else 0
            chosen: set[int] = set()
            for g, need in zip(heads, needs, strict=True):
                wanted = math.ceil(budget(*need, span * block_size) * (end - low) / span - 1e-4) if span else 0
                pieces = [list(range(n, min(n + span, end))) for n in range(low, end, span)] if span else []
                mass = masses[b, g].double()
                score = [float(mass[p].logsumexp(0) if sums else mass[p].max()) for p in pieces]
                order = sorted((i for i, s in enumerate(score) if s > -math.inf), key=lambda i: (-score[i], i))
                wanted = min(wanted, len(pieces))
                chosen.update(n for i in order[:wanted] for n in pieces[i])
                runs[-1].append(wanted)
            found[-1].append(sorted(chosen))
            spans[-1].append(span)
    return found, spans, runs
