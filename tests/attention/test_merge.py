"""The merge of partials by log-sum-exp."""

from __future__ import annotations

import itertools

import torch

from hf_offload.attention.merge import merge_partials


def partial(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def test_parts_of_the_keys_add_up_to_all_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 50, generator=generator) * 20
    values = torch.randn(50, 8, generator=generator)
    want = partial(scores, values)
    for cuts in ([0, 50], [0, 1, 50], [0, 7, 30, 49, 50]):
        spans = [slice(a, b) for a, b in itertools.pairwise(cuts)]
        out, lse = merge_partials([partial(scores[..., span], values[span]) for span in spans])
        assert torch.allclose(out, want[0], atol=1e-5)
        assert torch.allclose(lse, want[1], atol=1e-5)


def test_empty_parts_have_no_weight_and_nothing_is_zero() -> None:
    none = torch.zeros(2, 3, 8), torch.full((2, 3), float("-inf"))
    some = torch.ones(2, 3, 8), torch.full((2, 3), -200.0)
    out, lse = merge_partials([none, some, none])
    assert torch.equal(out, some[0])
    assert torch.equal(lse, some[1])
    out, lse = merge_partials([none, none])
    assert torch.equal(out, none[0])
    assert torch.equal(lse, none[1])


def test_sinks_take_weight_and_give_nothing() -> None:
    scores, values = torch.tensor([[1.0, 2.0]]), torch.eye(2)
    out, _ = merge_partials([partial(scores, values)], torch.tensor([3.0]))
    want = torch.tensor([1.0, 2.0, 3.0]).softmax(-1)[:2]
    assert torch.allclose(out[0], want)
