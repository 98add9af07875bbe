"""Partials over blocks against plain attention, with padding and poisoned tokens."""

from __future__ import annotations

import pytest
import torch

from hf_offload.policies.fluxion.block_attention import Tokens, attend, attend_blocks, join_blocks

HEADS, GROUP, DIM, SCALE = 2, 3, 8, 0.3


def case(length: int, seed: int = 0) -> tuple[torch.Tensor, Tokens]:
    """Two rows; some tokens of the second do not count and hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    query = 3 * torch.randn(2, HEADS * GROUP, DIM, generator=generator)
    key, value = (torch.randn(2, HEADS, length, DIM, generator=generator) for _ in range(2))
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[1, : length // 3] = False
    for x in (key, value):
        x[1, :, : length // 3] = torch.nan
    return query, Tokens(key, value, valid)


def plain(query: torch.Tensor, tokens: Tokens, row: int, head: int, span: slice) -> tuple[torch.Tensor, torch.Tensor]:
    keep = tokens.valid[row, span]
    key, value = (x[row, head // GROUP, span][keep].double() for x in tokens[:2])
    if not len(key):
        return torch.zeros(DIM).double(), torch.tensor(-torch.inf).double()
    scores = SCALE * key @ query[row, head].double()
    return scores.softmax(0) @ value, scores.logsumexp(0)


@pytest.mark.parametrize("length", [1, 16, 40, 100])
def test_blocks_and_runs_of_them(length: int) -> None:
    query, tokens = case(length)
    blocks = attend_blocks(query, tokens, SCALE)
    for run in (1, 2, 4):
        out, lse = join_blocks(blocks, run)
        assert out.shape[2] == lse.shape[2] == -(-length // (16 * run))
        for row in range(2):
            for head in range(HEADS * GROUP):
                for n in range(lse.shape[2]):
                    want = plain(query, tokens, row, head, slice(16 * run * n, 16 * run * (n + 1)))
                    torch.testing.assert_close(out[row, head, n].double(), want[0], atol=1e-5, rtol=1e-5)
                    torch.testing.assert_close(lse[row, head, n].double(), want[1], atol=1e-5, rtol=1e-5)


def test_all_tokens_and_none() -> None:
    query, tokens = case(50)
    out, lse = attend(query, tokens, SCALE)
    for head in range(HEADS * GROUP):
        want = plain(query, tokens, 1, head, slice(0, 50))
        torch.testing.assert_close(out[1, head].double(), want[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[1, head].double(), want[1], atol=1e-5, rtol=1e-5)
    none = Tokens(*(x[:, :, :0] for x in tokens[:2]), tokens.valid[:, :0])
    out, lse = attend(query, none, SCALE)
    assert torch.equal(out, torch.zeros(2, HEADS * GROUP, DIM))
    assert torch.equal(lse, torch.full((2, HEADS * GROUP), -torch.inf))
