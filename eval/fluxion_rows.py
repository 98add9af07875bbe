"""What `fluxion_report.py` compares: batches of mixed lengths, budgets by other criteria, predictions played again."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

import hf_offload
from common import FULL, Row, percentiles, synchronize
from context_attention import Watch, compare
from hf_offload.attention.merge import merge_partials
from hf_offload.attention.step import Step
from hf_offload.policies.base import Plan
from hf_offload.policies.fluxion import policy
from hf_offload.policies.fluxion.block_attention import BLOCK, Partial, Tokens, attend_blocks, join_blocks
from hf_offload.policies.fluxion.selector import SelectorState
from hf_offload.policies.fluxion.step import attend_local, has_host_tokens, join, segments_of, select
from hf_offload.policies.fluxion.training.labels import (
    GRANULARITIES,
    deviation_limit,
    fit_line,
    join_scores,
    needed_at_blocks,
)
from hf_offload.policies.registry import Fluxion

TAIL = 16  # tokens of a prompt that every cache reads itself: the last query is learnt from
WARM_UP = 2
CRITERIA = ("score-0.95", "output-0.1", "fluxion-0.1")
"""Which share of the attention's weight is kept; how far an output may deviate, from its own norm or from the largest
of the step's."""


def budgets_by_weight(kept: Partial, blocks: Partial, scores: torch.Tensor, digest: str, share: float) -> torch.Tensor:
    """The least budget, in whole runs by their digests' order, that leaves so much of the attention's weight.

    Args:
        kept: out `[B, Hq, D]` and lse `[B, Hq]` of what is attended anyway.
        blocks: of the host's blocks, out `[B, Hq, n, D]` and lse `[B, Hq, n]`.
        scores: `[B, Hq, n]`.

    Returns:
        `[B, Hq, granularities − 1]`, shares of the host's blocks.
    """
    found, total = [], merge_partials([kept, tuple(part[:, :, 0] for part in join_blocks(blocks, -1))])[1]
    for granularity in GRANULARITIES[1:]:
        run = granularity // BLOCK
        order = join_scores(scores, run, digest).argsort(dim=-1, descending=True, stable=True)
        weight = (join_blocks(blocks, run)[1] - total[..., None]).exp().gather(-1, order).cumsum(-1)
        missing = weight + (kept[1] - total).exp()[..., None] < share
        there = (kept[1] - total).exp() >= share
        runs = torch.where(there, 0, missing.sum(-1) + 1)
        found.append((runs * run / scores.shape[-1]).clamp(max=1.0))
    return torch.stack(found, -1)


@dataclass(frozen=True)
class Needing(Fluxion):
    """Fluxion without a predictor: every head gets what it needs in this very step, by one of `CRITERIA`."""

    criterion: str = "fluxion-0.1"

    def plan(self, step: Step) -> Plan:
        near = attend_local(step)
        if not has_host_tokens(step):
            return join(step, near, None)
        segments = segments_of(step, near.query)
        key, value, valid = zip(*segments.host, strict=True)
        far = Tokens(torch.cat(key, 2), torch.cat(value, 2), torch.cat(valid, 1))
        kept, blocks = merge_partials([near.sinks, near.newest]), attend_blocks(near.query, far, step.scores.scale)
        name, _, number = self.criterion.partition("-")
        digest, scores = self.known.digest, segments.scores
        if name == "score":
            budgets = budgets_by_weight(kept, blocks, scores, digest, float(number))
        else:
            full = merge_partials([kept, tuple(part[:, :, 0] for part in join_blocks(blocks, -1))])[0]
            norms = torch.linalg.vector_norm(full, dim=-1)[..., None] * float(number)
            limit = norms if name == "output" else deviation_limit(full, [float(number)])
            budgets = needed_at_blocks(kept, blocks, scores, far.valid, full, limit, digest=digest)[..., 0]
        line = fit_line(torch.cat((torch.zeros_like(budgets[..., :1]), budgets), -1), "online")
        return replace(join(step, near, select(step, (*line, (budgets == 0).all(-1)), self.granularities)), until=0)


class Told(SelectorState):
    """What a layer's heads need, step by step."""

    def __init__(self, layer: Any, needs: list[Any]) -> None:
        super().__init__(layer)
        self.needs = iter(needs)


@dataclass(frozen=True)
class Replayed(Fluxion):
    """Fluxion with needs that were told before, layer by layer and step by step: nothing is predicted."""

    needs: dict[int, list[Any]] = field(default_factory=dict)

    def new_state(self, layer: Any) -> Told:  # type: ignore[override]
        return Told(layer, self.needs[layer.index])

    def plan(self, step: Step) -> Plan:
        near = attend_local(step)
        return replace(join(step, near, select(step, next(step.state.needs), self.granularities)), until=0)


@contextmanager
def recording() -> Iterator[dict[int, list[Any]]]:
    """Write down what every head is said to need, by layer, in the order of the steps."""
    needs: dict[int, list[Any]] = {}

    real, modules = select, (policy, sys.modules[__name__])

    def watched(step: Step, *args: Any) -> Any:
        found = real(step, *args)
        step.begin()  # with one memory needs are computed then, and the next step plans anew
        synchronize()
        (budget0, slope), streaming = getattr(found, "selector", found).properties
        needs.setdefault(step.layer.index, []).append((budget0.clone(), slope.clone(), streaming.bool()))
        return found

    for module in modules:
        module.select = watched  # type: ignore[attr-defined]
    try:
        yield needs
    finally:
        for module in modules:
            module.select = real  # type: ignore[attr-defined]


class Batch:
    """Rows that hold the beginnings of one text, with the keys and values that full attention has for them.

    Args:
        model: the model.
        full: full attention's cache of the text, at least as long as the longest row.
        ids: the text `[1, N]`, with what follows every row.
        lengths: tokens of each row; padding stands at the left of the shorter ones.
    """

    def __init__(self, model: PreTrainedModel, full: Cache, ids: torch.Tensor, lengths: list[int]) -> None:
        self.model, self.ids, self.lengths = model, ids, lengths
        longest, device = max(lengths), ids.device
        self.mask = torch.arange(longest, device=device) >= longest - torch.tensor(lengths, device=device)[:, None]
        self._known = DynamicCache(config=model.config)
        for index, layer in enumerate(full.layers):
            pair = []
            for kept in (layer.keys, layer.values):
                rows = kept.new_zeros(len(lengths), kept.shape[1], longest - TAIL, kept.shape[3])
                for row, length in zip(rows, lengths, strict=True):
                    row[:, longest - length :] = kept[0, :, : length - TAIL]
                pair.append(rows)
            self._known.update(*pair, index)

    def make_cache(self, row: Row) -> Cache:
        """A row's cache with the batch in it."""
        row.activate(self.model)
        if row is FULL:
            cache: Any = DynamicCache(config=self.model.config)
            for index, layer in enumerate(self._known.layers):
                cache.update(layer.keys.clone(), layer.values.clone(), index)
        else:
            mask = self.mask[:, : -TAIL or None]
            cache = hf_offload.HybridCache.from_cache(
                self._known, self.model, row.policy, attention_mask=None if mask.all() else mask, **row.options
            )
        self.feed(cache, -TAIL, 0)
        return cache

    def feed(self, cache: Cache, first: int, stop: int) -> torch.Tensor:
        """Let every row take in its tokens first..stop-1, counted from its own length; the last logits `[B, V]`."""
        device = self.ids.device
        places = torch.arange(first, stop, device=device) + torch.tensor(self.lengths, device=device)[:, None]
        more = self.mask.new_ones(len(self.lengths), max(stop, 0))
        mask = torch.cat((self.mask, more), 1)[:, : self.mask.shape[1] + stop]
        out = self.model(
            self.ids[0, places], past_key_values=cache, position_ids=places, logits_to_keep=1,
            attention_mask=None if mask.all() else mask.long(),
        )  # fmt: skip
        return out.logits[:, -1]

    def decode(
        self, row: Row, cache: Cache, first: int, steps: int
    ) -> tuple[dict[str, list[float]], torch.Tensor, dict[str, float]]:
        """Feed so many tokens one by one.

        Returns:
            Milliseconds of the steps after the warm-up, log-probabilities `[N, V]`, and what the cache has counted in
            the steps after the warm-up (nothing for full attention).
        """
        row.activate(self.model)
        times: dict[str, list[float]] = {"attention": [], "step": []}
        logits, watch, before = [], Watch(), {}
        with watch.watching(self.model.config._attn_implementation, cache):
            for at in range(first, first + steps):
                if at == first + WARM_UP and row is not FULL:
                    before = _told(cache)
                synchronize()
                watch.seconds, start = 0.0, time.perf_counter()
                logits.append(self.feed(cache, at, at + 1))
                synchronize()
                times["step"].append(1000 * (time.perf_counter() - start))
                times["attention"].append(1000 * watch.seconds)
        told = torch.cat(logits).float().log_softmax(-1).cpu()
        now = _told(cache) if before else {}
        gone = {name: now[name] - before.get(name, 0.0) for name in now}
        return {name: values[WARM_UP:] for name, values in times.items()}, told, gone

    def compared(self, rows: list[Row], caches: dict[str, Cache], rounds: int, steps: int) -> list[dict[str, Any]]:
        """Rows in turns, full attention first: times, how far they are from it, what they waited for.

        Args:
            caches: by the rows' names, with the batch in them.
            rounds: turns; steps: that count of each.
        """
        times: dict[str, dict[str, list[float]]] = {row.name: {"attention": [], "step": []} for row in rows}
        apart: dict[str, list[tuple[float, float]]] = {row.name: [] for row in rows}
        counts: dict[str, dict[str, float]] = {row.name: {} for row in rows}
        each = WARM_UP + steps
        for number in tqdm(range(rounds), desc="rounds", delay=5, leave=False):
            seen = {}
            for row in rows:
                found, seen[row.name], gone = self.decode(row, caches[row.name], number * each, each)
                counts[row.name] = {name: counts[row.name].get(name, 0.0) + gone[name] for name in gone}
                for name, values in found.items():
                    times[row.name][name] += values
                if FULL.name in seen:
                    apart[row.name].append(compare(seen[row.name], seen[FULL.name]))
        lines = []
        for row in rows:
            parts = {name: percentiles(values) for name, values in times[row.name].items()}
            line = {"row": row.name, "batch": len(self.lengths), "context": max(self.lengths)}
            line |= {name: part["p50"] for name, part in parts.items()}
            if apart[row.name]:
                line |= dict(zip(("kl", "top1"), torch.tensor(apart[row.name]).mean(0).tolist(), strict=True))
            if row is not FULL:
                told, count = counts[row.name], rounds * steps
                line |= {f"{name}_ms": 1000 * seconds / count for name, seconds in told.items() if name != "bytes"}
                line["wait_share"] = line["wait_ms"] / line["step"]
                line["chosen_MiB"] = told["bytes"] / count / 2**20
                line["device_tasks"] = caches[row.name].stats().as_dict()["retrievals"].get("device_tasks")
            lines.append(line | {f"{n}_{p}": parts[n][p] for n in parts for p in ("p20", "p80")})
        return lines


def _told(cache: Any) -> dict[str, float]:
    """What a cache has counted so far: seconds of waiting and idling, and bytes that were chosen."""
    stats = cache.stats().as_dict()
    counted = {"wait": stats["wait_seconds"], "bytes": 0.0}
    for name, told in stats["retrievals"].items():
        if name == "retrieved_bytes":
            counted["bytes"] = float(told)
        elif name.endswith("_idle_seconds"):
            counted[name.removesuffix("_seconds")] = told
    return counted
