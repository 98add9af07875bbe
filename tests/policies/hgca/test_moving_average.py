"""`move_averages` against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pools import run
from references import hgca as reference

from hf_offload.policies.hgca.kernels.moving_average import move_averages


def _request(batch: int, heads: int, first: int, length: int, capacity: int, width: int) -> tuple[torch.Tensor, ...]:
    """Averages, scores and their lse; scores of some tokens and heads are -inf, of tokens behind the last NaN."""
    average, scores = torch.rand(batch, heads, capacity), torch.randn(batch, heads, width) * 5
    scores[torch.rand(scores.shape) < 0.1] = -math.inf
    padding = torch.rand(batch, length - first) < 0.2
    scores[..., : length - first][padding[:, None].expand(-1, heads, -1)] = -math.inf
    scores[..., length - first :] = math.nan
    lse = torch.where(scores.isnan(), -math.inf, scores).logsumexp(-1) + 0.5
    lse[0, -1] = -math.inf
    return average, scores, lse


PEAKS: list[dict[str, Any]] = [{}, {"share": 0.5, "after": 7}]


@pytest.mark.parametrize("peak", PEAKS, ids=["mean", "peak"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("first", "length", "capacity", "width"), [(0, 33, 33, 33), (5, 37, 64, 32), (40, 40, 48, 3), (3, 4000, 4096, 4100)]
)
def test_averages_move(first: int, length: int, capacity: int, width: int, threads: int, peak: dict[str, Any]) -> None:
    torch.manual_seed(length)
    average, scores, lse = _request(2, 5, first, length, capacity, width)
    average[:, :, :first] = math.nan  # nobody touches what is outside
    average[:, :, length:] = math.nan
    want = reference.move_averages(average, scores, lse, first, length, alpha=0.3, **peak)
    run(move_averages(average.numpy(), scores.numpy(), lse.numpy(), first, length, alpha=0.3, **peak), threads)
    torch.testing.assert_close(average.double(), want, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_an_average_may_be_the_mean_or_follow(alpha: float) -> None:
    torch.manual_seed(0)
    average, scores, lse = _request(1, 2, 0, 20, 24, 20)
    want = reference.move_averages(average, scores, lse, 0, 20, alpha=alpha)
    move_averages(average.numpy(), scores.numpy(), lse.numpy(), 0, 20, alpha=alpha)()
    torch.testing.assert_close(average.double(), want, rtol=1e-5, atol=1e-7)


def test_a_launch_follows_the_window() -> None:
    torch.manual_seed(1)
    average, _, lse = _request(2, 3, 0, 64, 64, 64)
    scores, want = torch.randn(2, 3, 40), average.double()
    launch = move_averages(average.numpy(), scores.numpy(), lse.numpy(), 0, 20, alpha=0.2)
    (words, i), (_, j) = launch.word("first"), launch.word("length")
    for first, length in ((0, 33), (24, 64), (63, 64)):
        want = reference.move_averages(want, scores, lse, first, length, alpha=0.2)
        words[i], words[j] = first, length
        launch.run()
        torch.testing.assert_close(average.double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"scores": np.zeros((1, 2, 31), np.float32)}, ValueError, "31"),
        ({"scores": np.zeros((1, 3, 32), np.float32)}, ValueError, "scores"),
        ({"lse": np.zeros((1, 2))}, TypeError, "float64"),
        ({"first": -1}, ValueError, "-1"),
        ({"first": 41}, ValueError, "41"),
        ({"length": 49}, ValueError, "49"),
        ({"alpha": 1.5}, ValueError, "alpha"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {
        "average": np.zeros((1, 2, 48), np.float32),
        "scores": np.zeros((1, 2, 32), np.float32),
        "lse": np.zeros((1, 2), np.float32),
        "first": 8,
        "length": 40,
        "alpha": 0.5,
    }
    with pytest.raises(error, match=text):
        move_averages(**{**arguments, **changes})
