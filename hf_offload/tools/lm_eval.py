"""The lm-eval model `hf_offload`: lm-eval's Hugging Face model with generation on a `HybridCache`.

    python -m hf_offload.lm_eval run --model hf_offload --tasks ruler --model_args pretrained=…,policy=scout,budget=2048

lm-eval's command line finds models in its own registry only, and has no plugins. This module registers one more model;
`hf_offload.lm_eval` then runs lm-eval's command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel

from hf_offload.hybrid_cache import HybridCache
from hf_offload.model.hooks import cache_argument
from hf_offload.model.model_support import NAME
from hf_offload.policies.registry import POLICIES, Policy, describe_policy
from hf_offload.tools.plan import CACHE_KNOBS

_KNOBS = CACHE_KNOBS | {part.name for policy in POLICIES.values() for part in dataclasses.fields(policy) if part.init}


def split_knobs(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the knobs of `HybridCache` and of the policies from the options of lm-eval's Hugging Face model.

    Args:
        options: the options of `--model_args` without `policy`.

    Returns:
        The knobs, and all other options.

    Raises:
        ValueError: an unknown name that resembles a knob, or another attention implementation.
    """
    knobs = {name: value for name, value in options.items() if name in _KNOBS}
    others = {name: value for name, value in options.items() if name not in _KNOBS}
    parameters = set(inspect.signature(HFLM.__init__).parameters)
    for name in sorted(others.keys() - parameters):
        if guess := difflib.get_close_matches(name, _KNOBS, 1, 0.75):
            raise ValueError(f"{name}={others[name]!r} is no knob of HybridCache or of a policy; was {guess[0]} meant?")
    if others.get("attn_implementation", NAME) != NAME:
        raise ValueError(
            f"attn_implementation={others['attn_implementation']!r} reads no HybridCache; leave it out, or use "
            "lm-eval's own model hf to compare with"
        )
    return knobs, others


class Totals:
    """Statistics over many caches."""

    MEANS = ("cpu_ratio", "query_cosine", "selection_overlap", "kept_share")
    SUMS = ("steps", "recalls", "recall_bytes", "placements", "placement_bytes", "wait_seconds")
    PEAKS = ("resident_bytes", "host_bytes", "digest_bytes", "context_bytes", "device_bytes")

    def __init__(self) -> None:
        self._stats: list[dict[str, Any]] = []

    def add(self, cache: HybridCache) -> None:
        """Add the statistics of a cache."""
        stats = cache.stats().as_dict()
        self._stats.append({key: stats[key] for key in (*self.MEANS, *self.SUMS, *self.PEAKS)})

    def as_dict(self) -> dict[str, Any]:
        """Return sums, means over decode steps (None: no cache has the value), and the maximum of each memory."""
        results: dict[str, Any] = {"caches": len(self._stats)}
        results |= {key: sum(stats[key] for stats in self._stats) for key in self.SUMS}
        for key in self.MEANS:
            counted = [stats for stats in self._stats if stats[key] is not None]
            steps = sum(stats["steps"] for stats in counted)
            results[key] = sum(stats[key] * stats["steps"] for stats in counted) / steps if steps else None
        return results | {key: max((stats[key] for stats in self._stats), default=0) for key in self.PEAKS}


@register_model("hf_offload")
class HybridLM(HFLM):  # type: ignore[misc]
    """lm-eval's Hugging Face model with a fresh `HybridCache` for each generation.

    Likelihoods are forwards without a cache, hence exact: likelihood tasks do not measure a policy. Results hold
    policy, knobs and `cache.stats()` under `config`; with several processes, those of the first.

    Args:
        pretrained: a hub name, a folder, or a model.
        policy: as for `HybridCache`.
        options: knobs of `HybridCache` and of the policy; all others are passed to lm-eval's model (`tokenizer`,
            `batch_size`, `dtype`, `peft`, …).

    Raises:
        ValueError: a knob that is not allowed, or a model that cannot work with a `HybridCache`.
    """

    def __init__(self, pretrained: str | PreTrainedModel, policy: str | Policy = "scout", **options: Any) -> None:
        self._policy, (self._knobs, others) = policy, split_knobs(options)
        self.totals = Totals()
        if isinstance(pretrained, str):
            others["attn_implementation"] = NAME
        else:
            pretrained.set_attn_implementation(NAME)
        super().__init__(pretrained, **others)
        self._description = describe_policy(self._make_cache().policy)  # checks the knobs before a task begins

    def _make_cache(self) -> HybridCache:
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model  # PEFT's wrappers
        return HybridCache(model, self._policy, **self._knobs)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        cache = self._make_cache()
        out: torch.Tensor = super()._model_generate(
            context, max_length, stop, **cache_argument(self.model, cache), **generation_kwargs
        )
        self.totals.add(cache)
        return out

    def get_model_info(self) -> dict[str, Any]:
        """Return lm-eval's information on the model, plus policy, knobs and statistics under `hf_offload`."""
        knobs = {name: value for name, value in self._knobs.items() if name in CACHE_KNOBS}
        about = {
            "policy": self._description["name"],
            "knobs": self._description["knobs"] | knobs,
            "stats": self.totals.as_dict(),
        }
        return {**super().get_model_info(), "hf_offload": about}
