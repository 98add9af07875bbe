"""Selections of blocks in slots, with poison where nothing may be read, and float64 references in loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

FORMS = [
    ("torch", torch.float32),
    ("torch", torch.bfloat16),
    ("interpreter", torch.float32),
    ("interpreter", torch.float16),
    *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
]


def choose_form(form: str, request: pytest.FixtureRequest) -> str:
    """Have operations run as torch operations, interpreted kernels or compiled ones; say where their tensors lie."""
    if form == "interpreter":
        request.getfixturevalue("interpreted")
    return "cuda" if form == "cuda" else "cpu"


@dataclass
class Listing:
    """Arguments of an operation over a listing, and which of its tokens are attended."""

    query: Tensor  # [B, Hq, D]
    pool: Tensor  # [B, Hkv, R, 2, size, D], NaN where a token is not attended
    slots: Tensor  # [B, Hkv, C]
    blocks: Tensor  # [B, Hkv, C]
    counts: Tensor  # [B, Hkv]
    limits: Tensor  # [2]
    valid: Tensor | None  # [B, T]
    seen: Tensor  # [B, Hkv, R, size] bool

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order in which operations take them."""
        return self.query, self.pool, self.slots, self.blocks, self.counts, self.limits, self.valid

    def heads(self) -> Iterator[tuple[int, int, int]]:
        """(row, query head, KV head) of every query head."""
        group = self.query.shape[1] // self.pool.shape[1]
        for row in range(self.query.shape[0]):
            for head in range(self.query.shape[1]):
                yield row, head, head // group


def make_listing(
    device: str, dtype: torch.dtype, *, heads: int, group: int, dim: int, size: int, width: int, padded: bool = False
) -> Listing:  # fmt: skip
    """Two rows; in the first, one KV head lists nothing and the last one as much as there is room for."""
    generator = torch.Generator().manual_seed(dim * size + group)
    batch, slots_there, num_blocks = 2, width + 2, 2 * width
    length = num_blocks * size - size // 2 - 1
    valid = torch.rand(batch, num_blocks * size, generator=generator) > 0.2
    valid[0, : 2 * size + 3] = False  # two blocks of padding and a part of the next
    pool = torch.full((batch, heads, slots_there, 2, size, dim), math.nan)
    seen = torch.zeros(batch, heads, slots_there, size, dtype=torch.bool)
    garbage = torch.tensor([-1, 10**9, -(10**9)], dtype=torch.int32).repeat(width)[:width]
    slots, blocks = (garbage.repeat(batch, heads, 1) for _ in range(2))
    counts = torch.randint(1, width + 1, (batch, heads), generator=generator, dtype=torch.int32)
    counts[0, -1], counts[0, 0] = width, 0
    for row in range(batch):
        for head in range(heads):
            count = int(counts[row, head])
            slots[row, head, :count] = torch.randperm(slots_there, generator=generator)[:count].int()
            number = torch.randperm(num_blocks - 1, generator=generator)[:count].sort().values
            number[-1:] = num_blocks - 1  # the newest block is only partly there
            blocks[row, head, :count] = number.int()
            for slot, block in zip(slots[row, head, :count].tolist(), number.tolist(), strict=True):
                for offset in range(size):
                    position = block * size + offset
                    if position < length and (not padded or valid[row, position]):
                        seen[row, head, slot, offset] = True
                        pool[row, head, slot, :, offset] = torch.randn(2, dim, generator=generator)
    query = torch.randn(batch, heads * group, dim, generator=generator)
    found = (query.to(dtype), pool.to(dtype), slots, blocks, counts, torch.tensor([length, 0], dtype=torch.int32))
    return Listing(
        *(tensor.to(device) for tensor in found), valid.byte().to(device) if padded else None, seen.to(device)
    )


def true_scores(listing: Listing, scale: float, softcap: float | None) -> Tensor:
    """Scores float64 `[B, Hq, R, size]` of all tokens in slots, −inf where they are not attended."""
    pool, query, seen = listing.pool.double().cpu(), listing.query.double().cpu(), listing.seen.cpu()
    scores = torch.full((*query.shape[:2], *seen.shape[2:]), -math.inf, dtype=torch.float64)
    for row, head, kv_head in listing.heads():
        for slot, offset in seen[row, kv_head].nonzero().tolist():
            score = float(pool[row, kv_head, slot, 0, offset] @ query[row, head]) * scale
            scores[row, head, slot, offset] = score if softcap is None else softcap * math.tanh(score / softcap)
    return scores


def true_attention(listing: Listing, scale: float, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Out `[B, Hq, D]` and lse `[B, Hq]` float64 over all attended tokens; 0 and −inf where there is none."""
    scores, pool = true_scores(listing, scale, softcap), listing.pool.double().cpu()
    out = torch.zeros(listing.query.shape, dtype=torch.float64)
    lse = scores.flatten(2).logsumexp(2)
    for row, head, kv_head in listing.heads():
        for slot, offset in listing.seen[row, kv_head].nonzero().tolist():
            weight = math.exp(scores[row, head, slot, offset] - lse[row, head])
            out[row, head] += weight * pool[row, kv_head, slot, 1, offset]
    return out, lse
