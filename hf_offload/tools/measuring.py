"""Measurement of a policy on a text: KL divergence from full attention, time, memory. For `tune` and `eval/`."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_offload.hybrid_cache import HybridCache
from hf_offload.model.hooks import cache_argument, hybrid_layers

CHUNK = 2048
WARM_UP = 4
"""Decode steps at the start that are not timed."""


@dataclass(frozen=True)
class Reading:
    """A text with the results of full attention.

    Args:
        ids: int64 `[1, context + steps]`.
        cache: a cache of the context's tokens.
        full: fp32 `[steps, V]`, log-probabilities of full attention after each token that follows the context.
    """

    ids: torch.Tensor
    cache: DynamicCache
    full: torch.Tensor

    @property
    def context(self) -> torch.Tensor:
        """The cached tokens, `[1, context]`."""
        return self.ids[:, : self.ids.shape[1] - len(self.full)]

    @property
    def following(self) -> torch.Tensor:
        """The tokens to decode, `[1, steps]`."""
        return self.ids[:, self.ids.shape[1] - len(self.full) :]


@dataclass(frozen=True)
class Cost:
    """Quality and cost of decoding with a cache.

    Args:
        kl: fp32 `[steps]`, KL(full‖policy) after each token, in nats.
        top1: share of the steps whose most likely token is that of full attention.
        seconds: median time of a step.
        host_bytes: mean bytes that a step reads in host memory: blocks that the CPU attends, recalled blocks, digests;
            None with one memory.
        device_bytes: bytes of KV and digests in the model's memory.
        tokens: mean number of tokens that a row and KV head attends in a step; None: not counted (a budget tells).
    """

    kl: torch.Tensor
    top1: float
    seconds: float
    host_bytes: float | None
    device_bytes: int
    tokens: float | None = None


def cut(ids: torch.Tensor, length: int, windows: int, apart: int) -> list[torch.Tensor]:
    """Return evenly spread windows `[1, length]` of a text's ids `[1, N]`, whose starts are at least `apart` apart.

    Raises:
        ValueError: the text is too short for them.
    """
    have, need = ids.shape[1], length + (windows - 1) * apart
    if have < need:
        raise ValueError(
            f"the text has {have} tokens, but {windows} windows of {length} tokens need {need}; use a longer text, or "
            "fewer tokens, steps or windows"
        )
    starts = [i * (have - length) // max(windows - 1, 1) for i in range(windows)]
    return [ids[:, first : first + length] for first in starts]


@torch.inference_mode()
def read(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> Reading:
    """Run full attention over a text, int64 `[1, N]`, of which the last `steps` tokens will be decoded."""
    cache, context = DynamicCache(config=model.config), ids.shape[1] - steps
    take_in(model, cache, ids[:, :context])
    logits = model(ids[:, context:], **cache_argument(model, cache)).logits[0]
    cache.crop(-steps)
    return Reading(ids, cache, logits.float().log_softmax(-1).cpu())


def take_in(model: PreTrainedModel, cache: Cache, ids: torch.Tensor) -> None:
    """Run a prompt, int64 `[1, N]`, through a model with a cache, in chunks."""
    for part in ids.split(CHUNK, 1):  # type: ignore[no-untyped-call]
        model(part, **cache_argument(model, cache), logits_to_keep=1)


@torch.no_grad()
def hold(model: PreTrainedModel, policy: str, options: dict[str, Any], reading: Reading) -> HybridCache:
    """Return a `HybridCache` that holds the context of a reading.

    Args:
        options: knobs of the cache and of the policy.

    Raises:
        ValueError: an option that is not allowed.
    """
    cache = HybridCache(model, policy, **options)
    if not cache.policy.requirements.learns_from_prompts:
        return HybridCache.from_cache(reading.cache, model, policy, **options)
    take_in(model, cache, reading.context)
    return cache


@torch.inference_mode()
def follow(model: PreTrainedModel, cache: Cache, ids: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
    """Decode tokens, int64 `[1, N]`; return fp32 log-probabilities `[N, V]` and the seconds of each step."""
    seconds, logits, given = [], [], cache_argument(model, cache)
    for token in ids.split(1, 1):  # type: ignore[no-untyped-call]
        start = time.perf_counter()
        logits.append(model(token, **given).logits[0, -1])
        if logits[-1].is_cuda:
            torch.cuda.synchronize(logits[-1].device)
        seconds.append(time.perf_counter() - start)
    return torch.stack(logits).float().log_softmax(-1).cpu(), seconds


def divergence(policy: torch.Tensor, full: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return KL(full‖policy) of each token and the share of equal top tokens, from log-probabilities `[N, V]`."""
    kl = (full.exp() * (full - policy)).sum(-1)
    return kl, float((full.argmax(-1) == policy.argmax(-1)).float().mean())


def cost(model: PreTrainedModel, policy: str, options: dict[str, Any], reading: Reading) -> Cost:
    """Decode the tokens that follow a reading's context with a `HybridCache` and compare with full attention.

    Raises:
        ValueError: an option that is not allowed.
    """
    cache = hold(model, policy, options, reading)
    logprobs, seconds = follow(model, cache, reading.following)
    kl, top1 = divergence(logprobs, reading.full)
    stats = cache.stats().as_dict()
    pace = statistics.median(seconds[WARM_UP:] or seconds)
    return Cost(kl, top1, pace, host_bytes(cache), stats["device_bytes"], stats["attended_tokens"])


def host_bytes(cache: HybridCache) -> float | None:
    """Return the mean bytes that a decode step of a cache has read in host memory; None with one memory."""
    total = 0.0
    for layer in hybrid_layers(cache):
        store = layer.store
        if store is None or not layer.two_memories:
            return None
        layer.tally.count()
        stats, steps = layer.stats, max(layer.stats.steps, 1)
        drawn, lists, *_ = stats.drawn.tolist()
        budget = drawn / lists if lists else layer.requirements.budget
        within = store.length if budget is None else min(budget, store.length)
        attended = stats.cpu_ratio / steps * within
        total += attended * store.host_bytes / (store.reserved * store.block_size)  # of all rows
        total += stats.recall_bytes / steps
        if store.scored_on_host and store.digests is not None:
            total += store.sealed * store.batch * store.digests.block_bytes
    return total
