"""Fitting of predictors: learnable rules, weights of both kinds of error, numbers computed by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hf_offload import ConstantPredictor
from hf_offload.policies.fluxion.budgets import GRANULARITIES
from hf_offload.policies.fluxion.features import FEATURES
from hf_offload.policies.fluxion.predictor import HeadPredictor
from hf_offload.tools.training.fitting import Fitting, fit_predictor
from hf_offload.tools.training.report import quality, r_squared

OF = {"tau": 0.1, "digest": "quest", "sinks": 64, "local": 256}


def lesson(count: int, seed: int, noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads whose first feature says whether they are streaming, and the next two the line of their budgets."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, len(FEATURES), generator=generator)
    first, slope = 0.1 + 0.03 * features[:, 1], 0.03 + 0.01 * features[:, 2]
    budgets = first[:, None] + slope[:, None] * torch.tensor(GRANULARITIES).log2()
    budgets = budgets + noise * torch.randn(count, 1, generator=generator)
    budgets = budgets.clamp(1e-3, 1.0)
    budgets[features[:, 0] > 0] = 0.0
    return features, budgets


def fitted(noise: float = 0.0, **settings: Any) -> tuple[HeadPredictor, int]:
    options = {"epochs": 12, "batch": 128, "rate": 3e-3, "streaming_at": 0.5, "fit": "paper", **settings}
    return fit_predictor(*lesson(3000, 0, noise), *lesson(600, 1, noise), Fitting(**options), **OF)  # type: ignore[arg-type]


def test_what_can_be_learnt_is_learnt() -> None:
    made, epochs = fitted()
    assert 1 <= epochs <= 12
    found = quality(made, *lesson(600, 2), "paper")
    assert found["r2_budget0"] > 0.8
    assert found["r2_slope"] > 0.8
    assert found["streaming_precision"] > 0.95
    assert found["streaming_recall"] > 0.95
    assert found["budgets"]["32"]["predicted"] == pytest.approx(found["budgets"]["32"]["needed"], rel=0.1)


def test_the_same_seed_gives_the_same_predictor() -> None:
    """Whether the caller wants gradients or not."""
    settings = {"epochs": 2}
    with torch.no_grad():
        again, _ = fitted(**settings)
    assert torch.equal(fitted(**settings)[0].outputs.weight, again.outputs.weight)


def test_underestimates_can_weigh_more() -> None:
    features, budgets = lesson(600, 2, noise=0.1)
    even, careful = (
        quality(fitted(noise=0.1, epochs=6, under=under)[0], features, budgets, "paper") for under in (1.0, 8.0)
    )
    assert careful["budgets"]["16"]["too_little"] < 0.6 * even["budgets"]["16"]["too_little"]
    assert careful["budgets"]["16"]["too_much"] > even["budgets"]["16"]["too_much"]


def test_the_line_may_leave_single_tokens_out() -> None:
    """Budgets that jump behind the first: a line through all is off everywhere, one through the others is not."""
    features, budgets = lesson(600, 2)
    (seen, known), jump = lesson(3000, 0), torch.tensor([0.0, 0.4, 0.4, 0.4, 0.4])
    for target in (budgets, known):
        target[target.amax(1) > 0] = jump
    errors = {}
    for fit in ("online", "paper"):
        fitting = Fitting(epochs=8, batch=128, streaming_at=0.5, fit=fit)
        made, _ = fit_predictor(seen, known, features, budgets, fitting, **OF)  # type: ignore[arg-type]
        rows = quality(made, features, budgets, fit)["budgets"].values()
        errors[fit] = max(row["too_little"] + row["too_much"] for row in rows)
    assert 2 * errors["online"] < errors["paper"]


def test_it_ends_when_nothing_gets_better_and_keeps_the_best() -> None:
    """Held-out budgets that contradict the lesson: the first epochs stay the best, whatever follows."""
    features, budgets = lesson(600, 1)
    wrong = torch.where(budgets > 0, 0.0, 0.3)
    long, epochs = fit_predictor(*lesson(3000, 0), features, wrong, Fitting(epochs=30, patience=2, batch=128), **OF)  # type: ignore[arg-type]
    assert epochs <= 3
    again = torch.tensor([[-1.0, *[0.0] * 40], [1.0, *[0.0] * 40]])
    assert torch.isfinite(long(again)).all()


def test_nothing_to_learn_is_refused() -> None:
    features, budgets = lesson(50, 0)
    with pytest.raises(ValueError, match=r"no head of the samples needs the host for tau=0\.1"):
        fit_predictor(features, 0 * budgets, features, budgets, Fitting(), **OF)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs=0 is not a count; use an integer of at least 1"),
        ({"under": -1.0}, r"under=-1\.0 is not a weight; use a number above 0"),
        ({"streaming_at": 1.0}, r"streaming_at=1\.0 is not a probability"),
        ({"fit": "best"}, "fit='best' is not known; use one of online, paper"),
    ],
)
def test_refused_settings(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Fitting(**change)  # type: ignore[arg-type]


def test_figures_by_hand() -> None:
    """Three heads, one streaming; 0.2 + 0.02 · log₂ blk is predicted for all of them."""
    budgets = torch.tensor([[0.0] * 5, [0.1, 0.3, 0.3, 0.3, 0.3], [0.3, 0.3, 0.3, 0.3, 0.5]])
    found = quality(ConstantPredictor(0.2, 0.02), torch.zeros(3, 41), budgets, "paper")
    at_16 = found["budgets"]["16"]  # 0.28 is predicted
    assert at_16 == pytest.approx(
        {"needed": 0.2, "predicted": 0.28, "too_little": 0.04 / 3, "too_much": 0.28 / 3, "enough": 1 / 3}, abs=1e-6
    )
    assert found["streaming_share"] == pytest.approx(1 / 3)
    assert found["streaming_precision"] == found["streaming_recall"] == 0.0
    assert found["r2_budget0"] == pytest.approx(0.0, abs=1e-6)  # the mean of 0.1 and 0.3
    all_streaming = quality(ConstantPredictor(streaming=True), torch.zeros(3, 41), budgets, "paper")
    assert all_streaming["streaming_precision"] == pytest.approx(1 / 3)
    assert all_streaming["streaming_recall"] == 1.0
    assert all_streaming["budgets"]["128"]["predicted"] == 0.0
    assert math.isnan(r_squared(torch.ones(3), torch.ones(3)))
