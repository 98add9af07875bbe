"""Fit of the predictor's network to samples (Fluxion, section 5.2)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from hf_offload.knobs import check_choice, check_count, check_number
from hf_offload.policies.fluxion.budgets import GRANULARITIES
from hf_offload.policies.fluxion.predictor import HeadPredictor
from hf_offload.tools.training.labels import FITS

_MEASURED = 16384  # samples that the held-out loss is computed for at a time


@dataclass(frozen=True)
class Fitting:
    """How a network is fitted.

    Args:
        epochs: passes over the samples, at most.
        patience: passes without a smaller held-out loss after which the fit ends; the best weights stay.
        batch: samples of a step.
        rate: step size of Adam at the beginning; it falls to 0 along a cosine.
        under: weight of an underestimated budget relative to an overestimated one: the first costs quality, the second
            only time.
        streaming_at: the probability from which a head counts as streaming. A head wrongly left out may be the one that
            finds the answer; a head wrongly kept reads little.
        fit: `"online"`: the line of Eq. 1 is fitted to the budgets at 16 to 128 tokens, which are chosen from online;
            `"paper"`: also to those of single tokens. Budgets rise faster than log₂ blk, so a line through all of them
            is too high at 16 tokens and too low at 128.
        seed: of weights and order.
    """

    epochs: int = 30
    patience: int = 6
    batch: int = 1024
    rate: float = 1e-3
    under: float = 1.0
    streaming_at: float = 0.9
    fit: str = "online"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "batch"):
            check_count(name, getattr(self, name), what="a count")
        check_number("rate", self.rate, "a step size", above=0)
        check_number("under", self.under, "a weight", above=0)
        check_choice("fit", self.fit, FITS)
        check_number("streaming_at", self.streaming_at, "a probability", above=0, below=1)


@torch.enable_grad()
def fit_predictor(
    features: torch.Tensor, budgets: torch.Tensor, held_out: torch.Tensor, wanted: torch.Tensor, fitting: Fitting, *,
    tau: float, progress: bool = False, **shared: Any,
) -> tuple[HeadPredictor, int]:  # fmt: skip
    """Fit a predictor for one τ.

    The loss compares the line of Eq. 1 with the needed budgets of retrieval heads, so that an error of bgt₀ or k weighs
    as much as the budgets that it makes wrong. Streaming heads train the third output alone.

    Args:
        features: fp32 `[N, 41]`; budgets: `[N, granularities]`, what was needed.
        held_out, wanted: the same of held-out texts.
        fitting: the settings.
        tau: the deviation that the budgets are for.
        progress: whether to show a progress bar.
        shared: digest, sinks and local tokens of the samples, as `HeadPredictor` takes them.

    Returns:
        The predictor with the least held-out loss, and the epochs it took.

    Raises:
        ValueError: samples without any retrieval head.
    """
    needed = budgets[budgets.amax(1) > 0]
    if not len(needed):
        raise ValueError(f"no head of the samples needs the host for tau={tau:g}: nothing to learn; lower tau")
    generator = torch.Generator("cpu").manual_seed(fitting.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fitting.seed)
        made = HeadPredictor(tau=tau, streaming_at=fitting.streaming_at, **shared)
    made.standardise(features)
    scale = _Scale(needed, fitting)
    optimizer = torch.optim.Adam(made.parameters(), lr=fitting.rate)
    steps = fitting.epochs * -(-len(features) // fitting.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    best, least, epochs = copy.deepcopy(made.state_dict()), torch.inf, 0
    with tqdm(total=fitting.epochs, unit="epoch", desc=f"tau {tau:g}", disable=not progress) as bar:
        for epoch in range(1, fitting.epochs + 1):
            for index in torch.split(torch.randperm(len(features), generator=generator, device="cpu"), fitting.batch):
                optimizer.zero_grad()
                _loss(made(features[index]), budgets[index], scale).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
            loss = _mean_loss(made, held_out, wanted, scale)
            bar.set_postfix(loss=f"{loss:.4f}")
            bar.update()
            if loss < least:
                best, least, epochs = copy.deepcopy(made.state_dict()), loss, epoch
            elif epoch - epochs >= fitting.patience:
                break
    made.load_state_dict(best)
    scale.fold(made.outputs)
    return made.eval().requires_grad_(False), epochs


class _Scale:
    """The scale of budgets: in training, the network's outputs are in units of the budgets' deviation.

    Args:
        needed: `[N, granularities]`, budgets of retrieval heads.
        fitting: the settings.
    """

    def __init__(self, needed: torch.Tensor, fitting: Fitting) -> None:
        steps = torch.tensor(GRANULARITIES, device=needed.device, dtype=torch.float32).log2()
        self.steps, self.under, self.first = steps, fitting.under, 1 if fitting.fit == "online" else 0
        self.deviation = float(needed.std().clamp(min=1e-4))
        self.factors = torch.stack((torch.ones_like(steps[0]), 1 / steps.mean())) * self.deviation
        self.offsets = torch.stack((needed[:, 0].mean(), (needed.mean() - needed[:, 0].mean()) / steps.mean()))

    def line(self, out: torch.Tensor) -> torch.Tensor:
        """Budgets at all granularities, `[N, granularities]`, from outputs `[N, 3]`."""
        first, slope = (out[:, :2] * self.factors + self.offsets)[..., None].unbind(1)
        return first + slope * self.steps

    @torch.no_grad()
    def fold(self, outputs: nn.Linear) -> None:
        """Fold the scale into the output layer, which then gives bgt₀ and k."""
        outputs.weight[:2] *= self.factors[:, None]
        outputs.bias[:2] = outputs.bias[:2] * self.factors + self.offsets


def _loss(out: torch.Tensor, budgets: torch.Tensor, scale: _Scale) -> torch.Tensor:
    streaming = budgets.amax(1) == 0
    error = ((scale.line(out) - budgets) / scale.deviation)[:, scale.first :]
    squares = torch.where(error < 0, scale.under * error.square(), error.square())
    line = (squares.mean(1) * ~streaming).mean()
    return line + nn.functional.binary_cross_entropy_with_logits(out[:, 2], streaming.float())


@torch.no_grad()
def _mean_loss(made: HeadPredictor, features: torch.Tensor, budgets: torch.Tensor, scale: _Scale) -> float:
    total = torch.zeros((), dtype=torch.float32, device="cpu")
    for x, y in zip(torch.split(features, _MEASURED), torch.split(budgets, _MEASURED), strict=True):
        total += _loss(made(x), y, scale) * len(x)
    return float(total) / len(features)
