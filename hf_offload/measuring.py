"""How far decoding with a cache is from full attention on a text, and what it costs: for `tune` and the evaluation."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_offload.attention.hooks import hybrid_layers
from hf_offload.hybrid_cache import HybridCache

CHUNK = 2048
WARM_UP = 4
"""Steps whose time does not count."""


@dataclass(frozen=True)
class Reading:
    """A text that full attention has read.

    Args:
        ids: `[1, context + steps]`.
        cache: holds the context.
        full: log-probabilities `[steps, V]` of full attention after each token behind the context.
    """

    ids: torch.Tensor
    cache: DynamicCache
    full: torch.Tensor

    @property
    def context(self) -> torch.Tensor:
        """The tokens that the cache holds, `[1, context]`."""
        return self.ids[:, : self.ids.shape[1] - len(self.full)]

    @property
    def following(self) -> torch.Tensor:
        """The tokens that are fed one by one, `[1, steps]`."""
        return self.ids[:, self.ids.shape[1] - len(self.full) :]


@dataclass(frozen=True)
class Cost:
    """What decoding with a cache is worth, and what it takes.

    Args:
        kl: KL(full‖mine) after each token, fp32 `[steps]`.
        top1: how often the most likely token is the same.
        seconds: median of a step.
        host_bytes: that a step reads in host memory, on average: what the CPU attends, what is brought to the device,
            digests that lie there; None with one memory.
        device_bytes: of KV and digests in the model's memory.
    """

    kl: torch.Tensor
    top1: float
    seconds: float
    host_bytes: float | None
    device_bytes: int


@torch.inference_mode()
def read(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> Reading:
    """Let full attention read a text `[1, N]`, of which the last `steps` tokens will be fed one by one."""
    cache, context = DynamicCache(config=model.config), ids.shape[1] - steps
    take_in(model, cache, ids[:, :context])
    logits = model(ids[:, context:], past_key_values=cache).logits[0]
    cache.crop(-steps)
    return Reading(ids, cache, logits.float().log_softmax(-1).cpu())


def take_in(model: PreTrainedModel, cache: Cache, ids: torch.Tensor) -> None:
    """Run a prompt `[1, N]` through a model into a cache, in chunks."""
    for part in ids.split(CHUNK, 1):  # type: ignore[no-untyped-call]
        model(part, past_key_values=cache, logits_to_keep=1)


@torch.no_grad()
def hold(model: PreTrainedModel, policy: str, options: dict[str, Any], reading: Reading) -> HybridCache:
    """A cache with the context of a reading.

    Args:
        options: of the cache and of the policy.

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
    """Feed tokens `[1, N]` one by one: log-probabilities `[N, V]`, and the seconds of each step."""
    seconds, logits = [], []
    for token in ids.split(1, 1):  # type: ignore[no-untyped-call]
        start = time.perf_counter()
        logits.append(model(token, past_key_values=cache).logits[0, -1])
        if logits[-1].is_cuda:
            torch.cuda.synchronize(logits[-1].device)
        seconds.append(time.perf_counter() - start)
    return torch.stack(logits).float().log_softmax(-1).cpu(), seconds


def divergence(mine: torch.Tensor, full: torch.Tensor) -> tuple[torch.Tensor, float]:
    """KL(full‖mine) of each token, and how often the top token is the same, of log-probabilities `[N, V]`."""
    kl = (full.exp() * (full - mine)).sum(-1)
    return kl, float((full.argmax(-1) == mine.argmax(-1)).float().mean())


def cost(model: PreTrainedModel, policy: str, options: dict[str, Any], reading: Reading) -> Cost:
    """Decode what follows a reading with a cache, and compare it with full attention.

    Raises:
        ValueError: an option that is not allowed.
    """
    cache = hold(model, policy, options, reading)
    mine, seconds = follow(model, cache, reading.following)
    kl, top1 = divergence(mine, reading.full)
    stats = cache.stats().as_dict()
    return Cost(kl, top1, statistics.median(seconds[WARM_UP:] or seconds), host_bytes(cache), stats["device_bytes"])


def host_bytes(cache: HybridCache) -> float | None:
    """Bytes that a decode step has read in host memory, the mean over the steps of a cache; None with one memory."""
    total = 0.0
    for layer in hybrid_layers(cache):
        store = layer.store
        if store is None or not layer.has_slots:
            return None
        layer.tally.count()
        stats, steps = layer.stats, max(layer.stats.steps, 1)
        budget = layer.requirements.budget
        within = store.length if budget is None else min(budget, store.length)
        attended = sum(stats.cpu_ratio_by_step) / steps * within
        total += attended * store.host_bytes / (store.reserved * store.block_size)  # of all rows
        total += stats.recall_bytes / steps
        if store.scored_on_host and store.digests is not None:
            total += store.sealed * store.batch * store.digests.block_bytes
    return total
