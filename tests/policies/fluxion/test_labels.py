"""Needed budgets against hand-computed cases and a search over all budgets; the line of Eq. 1."""

from __future__ import annotations

import math

import pytest
import torch

from hf_offload.attention.merge import merge_partials
from hf_offload.policies.fluxion.block_attention import Partial, Tokens, attend, attend_blocks, join_blocks
from hf_offload.policies.fluxion.budgets import GRANULARITIES, deviation_limit, join_scores
from hf_offload.tools.training.labels import fit_line, needed_budgets

HEADS, GROUP, DIM, SCALE = 2, 2, 8, 0.5
TAUS = (0.02, 0.1, 0.4)


def budgets(
    query: torch.Tensor, host: Tokens, kept: Tokens, scores: torch.Tensor, taus: tuple[float, ...], digest: str
) -> tuple[torch.Tensor, Partial, Partial]:
    """Budgets, what is kept, and everything."""
    near, blocks = attend(query, kept, SCALE), attend_blocks(query, host, SCALE)
    out, lse = join_blocks(blocks, -1)
    full = merge_partials([near, (out[:, :, 0], lse[:, :, 0])])
    limit = deviation_limit(full[0], taus)
    found = needed_budgets(near, query, host, blocks, scores, full[0], limit, scale=SCALE, digest=digest)
    return found, near, full


def searched(
    query: torch.Tensor, host: Tokens, near: Partial, full: torch.Tensor, scores: torch.Tensor, row: int, head: int,
    size: int, tau: float, digest: str,
) -> float:  # fmt: skip
    """The least budget, by trying every number of blocks in the order of their scores."""
    keep = host.valid[row]
    key, value = (torch.where(keep[:, None], x[row, head // GROUP], 0).double() for x in host[:2])
    own = torch.where(keep, SCALE * key @ query[row, head].double(), -torch.inf)
    if size == 1:
        rank = own
    else:
        runs = torch.split(scores[row, head].double(), size // 16)
        rank = torch.stack([run.amax() if digest == "quest" else run.logsumexp(0) for run in runs])
    order = rank.argsort(descending=True, stable=True).tolist()
    largest = float(full[row].double().norm(dim=-1).max())
    base = math.exp(float(near[1][row, head]))
    chosen: list[int] = []
    for block in [-1, *order]:
        if block >= 0:
            chosen += [t for t in range(block * size, min((block + 1) * size, len(own))) if keep[t]]
        weights = own[chosen].exp()
        out = (base * near[0][row, head].double() + weights @ value[chosen]) / (base + weights.sum())
        if float((out - full[row, head].double()).norm()) <= tau * largest:
            break
    return len(chosen) / int(keep.sum())


@pytest.mark.parametrize("digest", ["quest", "submean"])
@pytest.mark.parametrize("length", [48, 330])
def test_budgets_are_those_of_a_search(length: int, digest: str) -> None:
    """Two rows, one with padding that holds NaN; scores are near the truth but not it."""
    generator = torch.Generator().manual_seed(length)
    query = 3 * torch.randn(2, HEADS * GROUP, DIM, generator=generator)
    host_key, host_value = (torch.randn(2, HEADS, length, DIM, generator=generator) for _ in range(2))
    valid = torch.ones(2, length, dtype=torch.bool)
    valid[1, :20] = False
    for x in (host_key, host_value):
        x[1, :, :20] = torch.nan
    kept = Tokens(*torch.randn(2, 2, HEADS, 40, DIM, generator=generator), torch.ones(2, 40, dtype=torch.bool))
    host = Tokens(host_key, host_value, valid)
    lse = attend_blocks(query, host, SCALE)[1]
    scores = lse + 0.5 * torch.randn(lse.shape, generator=generator)
    found, near, full = budgets(query, host, kept, scores, TAUS, digest)
    assert found.shape == (2, HEADS * GROUP, len(GRANULARITIES), len(TAUS))
    different = set()
    for row in range(2):
        for head in range(HEADS * GROUP):
            for g, size in enumerate(GRANULARITIES):
                for t, tau in enumerate(TAUS):
                    want = searched(query, host, near, full[0], scores, row, head, size, tau, digest)
                    assert float(found[row, head, g, t]) == pytest.approx(want, abs=1e-6)
                    different.add(want)
    assert len(different) > 5


def test_two_tokens_by_hand() -> None:
    """One head, weights 1 (kept, value 0), 2 and 1 (host, values (4, 0) and (0, 4)): o = (2, 1)."""
    log2 = math.log(2) / SCALE
    query = torch.tensor([[[1.0, 0.0]]])
    kept = Tokens(torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2), torch.ones(1, 1, dtype=torch.bool))
    key = torch.tensor([[[[log2, 0.0], [0.0, 0.0]]]])
    value = torch.tensor([[[[4.0, 0.0], [0.0, 4.0]]]])
    host = Tokens(key, value, torch.ones(1, 2, dtype=torch.bool))
    # Without the host the deviation is ‖(2, 1)‖ / ‖(2, 1)‖ = 1; with the first token o = (8/3, 0), off by √13/3 of √5.
    edge = math.sqrt(13) / 3 / math.sqrt(5)
    taus = (1.001, edge * 1.001, edge * 0.999)
    found, _, full = budgets(query, host, kept, torch.zeros(1, 1, 1), taus, "submean")
    torch.testing.assert_close(full[0][0, 0], torch.tensor([2.0, 1.0]))
    assert found[0, 0, 0].tolist() == [0.0, 0.5, 1.0]
    assert found[0, 0, 1:].tolist() == [[0.0, 1.0, 1.0]] * 4  # a block of 16 holds both


def test_the_largest_head_sets_the_limit() -> None:
    full = torch.tensor([[[3.0, 4.0], [0.1, 0.0]], [[0.0, 0.0], [0.0, 2.0]]])
    limit = deviation_limit(full, (0.1, 0.5))
    torch.testing.assert_close(limit, torch.tensor([[[0.5, 2.5]] * 2, [[0.2, 1.0]] * 2]))


def test_scores_are_joined_as_digests_are() -> None:
    scores = torch.tensor([[0.0, 1.0, 3.0, -torch.inf, 2.0]])
    assert join_scores(scores, 2, "quest").tolist() == [[1.0, 3.0, 2.0]]
    want = torch.tensor([[math.log(1 + math.e), 3.0, 2.0]])
    torch.testing.assert_close(join_scores(scores, 2, "submean"), want)
    assert join_scores(torch.full((1, 2), -torch.inf), 2, "submean").tolist() == [[-torch.inf]]
    assert torch.equal(join_scores(scores, 2, "mean"), join_scores(scores, 2, "submean"))


def test_line_through_the_first_budget() -> None:
    """Steps 0, 4, 5, 6, 7: on a line exactly; and by hand, Σ step · rise / Σ step² with Σ step² = 126."""
    steps = torch.tensor(GRANULARITIES).log2()
    budgets = torch.stack((0.1 + 0.02 * steps, torch.tensor([0.0, 0.4, 0.4, 0.6, 0.6])))
    first, slope = fit_line(budgets, "paper")
    torch.testing.assert_close(first, torch.tensor([0.1, 0.0]))
    torch.testing.assert_close(slope, torch.tensor([0.02, (1.6 + 2.0 + 3.6 + 4.2) / 126]))


def test_line_through_the_budgets_that_are_chosen_online() -> None:
    """Steps −1.5, −0.5, 0.5, 1.5 from the middle, 5.5: slope Σ step · budget / 5; the first budget says nothing."""
    steps = torch.tensor(GRANULARITIES).log2()
    budgets = torch.stack((0.1 + 0.02 * steps, torch.tensor([9.0, 0.4, 0.4, 0.6, 0.6])))
    first, slope = fit_line(budgets, "online")
    torch.testing.assert_close(slope, torch.tensor([0.02, (0.3 + 0.1) / 5]))
    torch.testing.assert_close(first, torch.tensor([0.1, 0.5 - 5.5 * 0.08]))
    with pytest.raises(ValueError, match="fit='best' is not known; use one of online, paper"):
        fit_line(budgets, "best")
