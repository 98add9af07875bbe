"""Search for the fastest policy and knobs within a KL target on a model, text and machine: `hf-offload tune`."""

from __future__ import annotations

import bisect
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.table import Table
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import Cache, PreTrainedModel

from hf_offload.cache.settings import check_tier
from hf_offload.knobs import check_count, check_number
from hf_offload.model.model_support import has_two_memories
from hf_offload.policies.fluxion.predictor import read_about
from hf_offload.policies.registry import POLICIES
from hf_offload.tools.measuring import Reading, cost, cut, follow, hold, read
from hf_offload.tools.tables import make_table

Ladders = tuple[tuple[str, tuple[dict[str, Any], ...]], ...]
LADDERS: Ladders = (
    ("scout", tuple({"samples": samples} for samples in (64, 128, 256, 512, 1024, 2048))),
    ("scout", tuple({"budget": budget} for budget in (256, 512, 1024, 2048, 4096))),
    (
        "hgca",
        tuple(
            {"gpu_ratio": ratio, "beta": beta}
            for ratio, beta in ((0.05, 1.0), (0.1, 1.0), (0.25, 1.0), (0.25, 0.5), (0.5, 0.25))
        ),
    ),
    ("fixed_hybrid", tuple({"budget": share} for share in (0.02, 0.05, 0.1, 0.2, 0.4))),
    ("quest", tuple({"budget": budget} for budget in (256, 512, 1024, 2048, 4096))),
)
"""Policies, and settings of each to try, from the least attended tokens to the most."""
FETCHES = ("quest",)
"""Policies that are tried with two memories only: with one they fetch nothing, and Scout chooses blocks better."""
BLOCK_SIZES = (16, 32, 64)
ONE_SIZE = ("fluxion",)
"""Policies with a fixed block size."""
RECALLS = ("adaptive", 1, 8)
TURN = 8
"""Consecutive steps of one setting when times are compared in turns."""
AFTER_SWITCH = 2
"""Untimed steps at the start of a turn, when the CPU's caches hold another setting's data."""
ALIKE = 0.03
"""Relative difference of times below which device memory decides."""


@dataclass(frozen=True)
class Trial:
    """A measured setting.

    Args:
        policy: name of the policy; options: knobs of the cache and of the policy.
        kl: mean KL to full attention, in nats; error: its standard error; worst: the mean of the worst window.
        top1: share of the steps whose most likely token is that of full attention.
        seconds: median time of a step.
        host_bytes: bytes that a step reads in host memory, None with one memory; device_bytes: bytes of KV and digests.
    """

    policy: str
    options: dict[str, Any]
    kl: float
    error: float
    worst: float
    top1: float
    seconds: float
    host_bytes: float | None
    device_bytes: int

    def meets(self, target: float) -> bool:
        """Whether the mean KL plus two standard errors and the worst window's KL are at most `target`."""
        return self.kl + 2 * self.error <= target and self.worst <= target

    @property
    def line(self) -> str:
        """The line of Python that makes a cache with this setting."""
        knobs = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f'HybridCache(model, "{self.policy}"{knobs})'


@dataclass
class Tuning:
    """Results of `tune`.

    Args:
        target: the largest allowed KL.
        full_seconds: median time of a step of Transformers' own cache, measured in turns with the settings that meet
            the target.
        trials: the measured settings in order; the first is full attention with a `HybridCache`.
        held_out: the chosen setting on the held-out text, if one was given.
    """

    target: float
    full_seconds: float
    trials: list[Trial] = field(default_factory=list)
    held_out: Trial | None = None

    @property
    def chosen(self) -> Trial:
        """The fastest setting that meets the target; among equally fast ones, that with the least device memory."""
        good = [trial for trial in self.trials if trial.meets(self.target)]
        quickest = min(trial.seconds for trial in good)
        alike = [trial for trial in good if trial.seconds <= (1 + ALIKE) * quickest]
        return min(alike, key=lambda trial: trial.device_bytes)

    @property
    def why(self) -> str:
        """The reason for the choice, and the result on a held-out text, in a few sentences."""
        if self.held_out is None:
            return self._reason
        kept, kl = self.held_out.meets(self.target), f"{self.held_out.kl:.4f} ± {self.held_out.error:.4f}"
        end = "." if kept else ": too much. Tune on texts more like those that you will serve, or for a smaller KL."
        return f"{self._reason} On the text that was held out its KL is {kl}{end}"

    @property
    def _reason(self) -> str:
        chosen, good = self.chosen, [trial for trial in self.trials if trial.meets(self.target)]
        sentence = (
            f"{len(good)} of {len(self.trials)} settings stay below a KL of {self.target:g}; this one takes "
            f"{1000 * chosen.seconds:.1f} ms a token (Transformers' own cache: {1000 * self.full_seconds:.1f}) at a KL "
            f"of {chosen.kl:.4f} ± {chosen.error:.4f}"
        )
        others = sorted((t for t in good if t.policy != chosen.policy), key=lambda trial: trial.seconds)
        if chosen.policy == "full":
            if not others:
                return f"{sentence}. Nothing that leaves tokens out meets the target."
            near = f"{others[0].policy} with {1000 * others[0].seconds:.1f} ms"
            return f"{sentence}. Nothing that leaves tokens out is clearly faster at this length; the next is {near}."
        best = f"; next comes {others[0].policy} with {1000 * others[0].seconds:.1f} ms" if others else ""
        slower = " It is not quicker than Transformers' own." if chosen.seconds >= self.full_seconds else ""
        return f"{sentence}{best}.{slower}"

    def table(self) -> Table:
        """Return a table of the measured settings."""
        title = (
            f"KL to full attention of at most {self.target:g}; a token of its own cache takes "
            f"{1000 * self.full_seconds:.1f} ms"
        )
        rows = [
            {
                "setting": trial.line.removeprefix("HybridCache(model, ").removesuffix(")"),
                "KL": f"{trial.kl:.4f} ± {trial.error:.4f}",
                "worst window": f"{trial.worst:.4f}",
                "top token": f"{100 * trial.top1:.0f} %",
                "ms": f"{1000 * trial.seconds:.1f}",
                "host MiB a step": "–" if trial.host_bytes is None else f"{trial.host_bytes / 2**20:.1f}",
                "device MiB": f"{trial.device_bytes / 2**20:.1f}",
                "meets the target": "yes" if trial.meets(self.target) else "",
            }
            for trial in sorted(self.trials, key=lambda trial: trial.seconds)
        ]
        return make_table(title, rows)


def check_tuning(target: float, *, tokens: int, steps: int, windows: int, tier: str | None = None) -> None:
    """Check the settings of a run before a model is loaded.

    Raises:
        ValueError: a value that is not allowed.
    """
    for name, value in {"tokens": tokens, "steps": steps, "windows": windows}.items():
        check_count(name, value, what="a count")
    check_number("target_kl", target, "a divergence such as 0.02", above=0)
    check_tier(tier)


def tune(
    model: PreTrainedModel,
    ids: torch.Tensor,
    target: float,
    *,
    tokens: int = 4096,
    steps: int = 64,
    windows: int = 2,
    tier: str | None = None,
    predictor: str | os.PathLike[str] | None = None,
    held_out: torch.Tensor | None = None,
    progress: bool = False,
) -> Tuning:
    """Find the fastest setting whose KL to full attention stays below a target on a text.

    For each ladder, a binary search finds the first setting of a policy that meets the target, assuming that the KL
    falls along the ladder; of drawn keys that is the smallest `samples`. For the best policy, other block sizes and
    (with two memories) recalls are tried. `window` is not tried: it drops the middle of the context, which a text's KL
    hardly shows and questions do.

    Args:
        model: a model with `attn_implementation="hybrid_sparse"`.
        ids: token ids of the text, int64 `[1, N]`.
        target: largest KL(full‖policy) of a token, in nats.
        tokens: context tokens of each window; steps: tokens decoded after them.
        windows: number of windows, evenly spread over the text.
        tier: as for `HybridCache`.
        predictor: a file of `hf-offload train-fluxion` for this model; `fluxion` is tried with each of its τ.
        held_out: token ids of another text, int64 `[1, M]`, on which the chosen setting is measured with as many
            windows.
        progress: whether to show a progress bar.

    Raises:
        ValueError: a value that is not allowed, a text that is too short, a target below the rounding error of full
            attention, or a predictor for another model.
        FileNotFoundError: there is no such predictor.
    """
    check_tuning(target, tokens=tokens, steps=steps, windows=windows, tier=tier)
    ladders = LADDERS if predictor is None else (*LADDERS, ("fluxion", _by_deviation(predictor)))
    length = tokens + steps
    stretches = cut(ids, length, windows, length)
    others = [] if held_out is None else cut(held_out, length, windows, length)
    two_memories = has_two_memories(model, tier)
    with tqdm(total=_most_work(ladders, windows, len(others)), disable=not progress) as bar:

        def read_all(parts: list[torch.Tensor], name: str) -> list[Reading]:
            read_so_far = []
            for number, part in enumerate(parts, 1):
                bar.set_description(f"{name}, window {number} of {len(parts)}")
                read_so_far.append(read(model, part.to(model.device), steps))
                bar.update()
            return read_so_far

        readings = read_all(stretches, "full attention")
        tuning = Tuning(target, _stock_seconds(model, readings[0]))
        memory = {} if tier is None else {"tier": tier}

        def attempt(policy: str, options: dict[str, Any]) -> Trial:
            bar.set_description(policy)
            tuning.trials.append(_trial(model, policy, options | memory, readings))
            bar.update()
            return tuning.trials[-1]

        def first_meeting(policy: str, rungs: list[dict[str, Any]]) -> list[Trial]:
            """The trial of the first rung that meets the target, by binary search: the last that does; or none."""
            before = len(tuning.trials)
            bisect.bisect_left(rungs, True, key=lambda rung: attempt(policy, rung).meets(target))
            return [trial for trial in tuning.trials[before:] if trial.meets(target)][-1:]

        exact = attempt("full", {})
        if not exact.meets(target):
            raise ValueError(
                f"target_kl={target:g} is below the {exact.kl + 2 * exact.error:.2g} that rounding alone makes of full "
                "attention here; use a larger one, or another dtype"
            )
        meeting: list[Trial] = []
        for policy, ladder in ladders:
            if two_memories or policy not in FETCHES:
                rungs = [rung for rung in ladder if rung.get("budget", 0) < tokens]
                meeting += first_meeting(policy, rungs)
        if meeting:
            best = min(meeting, key=lambda trial: trial.seconds)
            for options in _variants(best, two_memories):
                attempt(best.policy, options)
        bar.set_description("times, in turns")
        _time(model, tuning, readings[0])
        bar.update()
        if others:
            readings = read_all(others, "held-out text")
            tuning.held_out = _trial(model, tuning.chosen.policy, tuning.chosen.options, readings)
            bar.update()
        bar.total = bar.n  # the search took fewer settings than the most
    return tuning


def _most_work(ladders: Ladders, windows: int, held_out: int) -> int:
    """Return the most steps of the progress bar: windows read, settings, and the comparison of times."""
    settings = 1 + sum(len(ladder).bit_length() for _, ladder in ladders)
    variants = len(BLOCK_SIZES) - 1 + len(RECALLS) - 1
    return windows + settings + variants + 1 + (held_out + 1 if held_out else 0)


def _by_deviation(predictor: str | os.PathLike[str]) -> tuple[dict[str, Any], ...]:
    """Return the ladder of `fluxion` for a predictor file: the largest τ, which reads least, first."""
    taus = sorted(map(float, read_about(predictor)["predictors"]), reverse=True)
    return tuple({"predictor": os.fspath(predictor), "tau": tau} for tau in taus)


def _variants(best: Trial, two_memories: bool) -> Iterator[dict[str, Any]]:
    """Yield the best setting's options with other block sizes, and for Scout with other recalls."""
    for size in () if best.policy in ONE_SIZE else BLOCK_SIZES:
        if size != POLICIES[best.policy].block_size:
            yield best.options | {"block_size": size}
    if best.policy == "scout" and two_memories:
        for recall in RECALLS[1:]:
            yield best.options | {"recall": recall}


def _trial(model: PreTrainedModel, policy: str, options: dict[str, Any], readings: list[Reading]) -> Trial:
    costs = [cost(model, policy, options, reading) for reading in readings]
    kl = torch.cat([each.kl for each in costs])
    host = [each.host_bytes for each in costs if each.host_bytes is not None]
    return Trial(
        policy=policy,
        options=options,
        kl=float(kl.mean()),
        error=float(kl.std(correction=0)) / math.sqrt(len(kl)),
        worst=max(float(each.kl.mean()) for each in costs),
        top1=sum(each.top1 for each in costs) / len(costs),
        seconds=sum(each.seconds for each in costs) / len(costs),
        host_bytes=sum(host) / len(host) if host else None,
        device_bytes=max(each.device_bytes for each in costs),
    )


def _time(model: PreTrainedModel, tuning: Tuning, reading: Reading) -> None:
    """Time the settings that meet the target and Transformers' own cache in turns, so that other load affects all."""
    meeting = [number for number, trial in enumerate(tuning.trials) if trial.meets(tuning.target)]
    caches: dict[int, Cache] = {-1: reading.cache}
    for number in meeting:
        caches[number] = hold(model, tuning.trials[number].policy, tuning.trials[number].options, reading)
    seconds: dict[int, list[float]] = {number: [] for number in caches}
    for tokens in reading.following.split(TURN, 1):  # type: ignore[no-untyped-call]
        for number, cache in caches.items():
            seconds[number] += follow(model, cache, tokens)[1][AFTER_SWITCH:]
    reading.cache.crop(-len(reading.full))
    if not seconds[-1]:  # too few steps to time
        return
    tuning.full_seconds = statistics.median(seconds[-1])
    for number in meeting:
        tuning.trials[number] = replace(tuning.trials[number], seconds=statistics.median(seconds[number]))


def _stock_seconds(model: PreTrainedModel, reading: Reading) -> float:
    """Return the median time of a step of Transformers' own cache."""
    seconds = follow(model, reading.cache, reading.following)[1]
    reading.cache.crop(-len(reading.full))
    return statistics.median(seconds)
