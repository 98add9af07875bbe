"""HGCA: retained tokens against a direct computation of the algorithm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import feed, prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HGCA, HybridCache
from hf_offload.attention import interface as function
from hf_offload.cache.layer import HybridLayer
from hf_offload.model.hooks import hybrid_layers
from hf_offload.policies.hgca.token_mass import TokenMass

BLOCK = 16
TURNS = (40, 33, 21, 50)  # a prompt and three appends
STEPS = 25


def run(model: PreTrainedModel, cache: Any, batch: int, chunk: int | None = None) -> torch.Tensor:
    """Logits `[B, steps, V]` of the last steps of a conversation; rows are left padded."""
    cuts, start = [0], 0
    for turn in TURNS:
        cuts += [*range(start + (chunk or turn), start + turn, chunk or turn)]
        cuts += range(start + turn, start + turn + STEPS + 1)
        start += turn + STEPS
    return torch.cat(feed(model, cache, *prompt(batch, start), cuts), 1)[:, -STEPS:]


class Record:
    """The queries of one layer, as they reach the attention functions: (first position, `[B, Hq, Q, D]`)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
        self.turns: list[tuple[int, torch.Tensor]] = []
        for name in ("append", "decode"):
            monkeypatch.setattr(function, name, self._recording(getattr(function, name), index))

    def _recording(self, attend: Any, index: int) -> Any:
        def record(layer: HybridLayer, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if layer.index == index:
                self.turns.append((layer.past, query.double()))
            return attend(layer, query, *args, **kwargs)

        return record


def weights(query: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor, start: int, first: int, stop: int) -> Any:
    """Weights `[B, Hq, Q, T]` of queries from position `start` on, normalised over tokens first … stop - 1."""
    group = query.shape[1] // keys.shape[1]
    scores = query @ keys.repeat_interleave(group, 1).transpose(2, 3) * query.shape[3] ** -0.5
    token, position = torch.arange(keys.shape[2]), start + torch.arange(query.shape[2])
    seen = (token <= position[:, None]) & (token >= first) & (token < stop) & valid[:, None, None]
    found = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1).nan_to_num(0.0)
    return found * valid[:, None, start : start + query.shape[2], None]


def direct(
    turns: list[tuple[int, torch.Tensor]], keys: torch.Tensor, valid: torch.Tensor, rule: HGCA, stagger: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Algorithm 1, query by query: the least distance of an average from its threshold, marks, tokens outside."""
    batch, kv_heads, length = keys.shape[:3]
    average = torch.zeros(batch, turns[0][1].shape[1], length, dtype=torch.float64)
    kept = torch.zeros(batch, kv_heads, length, dtype=torch.bool)
    margin = torch.full((), float("inf"), dtype=torch.float64)
    assert rule.window is not None
    blocks, outside, decoded, border, asked = -(-rule.window // BLOCK), 0, False, 0, False
    alpha = rule.alpha or 1 / (blocks * BLOCK)
    near = min(64, blocks * BLOCK // 4) if rule.steps == "max" else 0

    def decide(first: int, stop: int, size: torch.Tensor) -> None:
        nonlocal margin
        joined = average.unflatten(1, (kv_heads, -1))
        joined = joined.amax(2) if rule.group == "any" else joined.mean(2)
        over = joined[:, :, first:stop] - rule.beta / size.clamp(min=1)[:, None, None]
        real = valid[:, None, first:stop].expand_as(over)
        margin = torch.minimum(margin, over[real].abs().min() if real.any() else margin)
        kept[:, :, first:stop] = (over > 0) & real

    for start, query in turns:
        count = query.shape[2]
        stop = start + count
        age = (stop - torch.arange(length)).double().clamp(min=1)
        if count == 1 and start:
            w = weights(query, keys, valid, start, outside, stop)[:, :, 0]
            if rule.steps == "max":
                moved = torch.maximum((1 - alpha) * average, w / 3 * (age > near))
            else:
                moved = average + (1 / age).clamp(min=alpha) * (w - average)
            average[:, :, outside:stop] = moved[:, :, outside:stop]
            decoded, due = True, max((stop - stagger) // BLOCK + 1 - blocks, 0) * BLOCK
            if due > outside:
                decide(outside, due, valid[:, outside:stop].sum(1))
                outside = due
            continue
        fresh = decoded or not start
        if fresh:
            border, decoded, asked = outside, False, start > 0
        among = min(count, round(1 / alpha) if asked or not rule.prompt_queries else rule.prompt_queries)
        w = weights(query, keys, valid, start, border, stop)
        too_near = torch.arange(length) + near > start + torch.arange(count)[:, None]
        far = age - near  # steps that count
        mean = w.masked_fill(too_near, 0.0)[:, :, -among:].sum(2) / far.clamp(min=1, max=among)
        for token in range(border, stop):
            met = min(count, int(age[token]))
            if asked and rule.steps == "max":
                left = (1 - alpha) ** met * average[:, :, token]
                average[:, :, token] = torch.maximum(left, mean[:, :, token])
                continue
            if asked:
                rate = max(1 - (1 - alpha) ** met, met / age[token])
            else:
                met = max(min(count, int(far[token])), 0)
                rate = met / max(min(max(rule.prompt_queries or round(1 / alpha), met), far[token]), 1)
            average[:, :, token] += rate * (mean[:, :, token] - average[:, :, token])
        if border and rule.reevaluate:
            most = weights(query, keys, valid, start, 0, border).amax(2)
            plain = most.clone()
            for token in range(1, border):
                before = plain[:, :, max(token - rule.append_run, 0) : token].amax(-1) if rule.append_run else 0.0
                most[:, :, token] = torch.maximum(most[:, :, token], torch.as_tensor(before) / 64)
            average[:, :, :border] = (most if fresh else torch.maximum(average, most))[:, :, :border]
            decide(0, border, valid[:, :border].sum(1))
        outside = max((stop - stagger) // BLOCK + 1 - blocks, 0 if rule.reevaluate else border // BLOCK) * BLOCK
        kept[:, :, border if border and not rule.reevaluate else outside :] = False
        decide(border, outside, valid[:, border:stop].sum(1))
    return margin, kept, outside


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tier", ["one", "split"])
@pytest.mark.parametrize(
    "knobs",
    [
        {"beta": 1.5},  # a tiny model's peaks exceed 1 almost everywhere
        {"group": "mean", "alpha": 0.4, "beta": 0.6, "prompt_queries": 7, "append_run": 0},
        {"reevaluate": False, "prompt_queries": None},
        {"steps": "mean"},
        {"window": 140, "beta": 2.5},  # the first append finds nothing on the host
    ],
)
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_what_is_kept_is_what_the_algorithm_keeps(
    monkeypatch: pytest.MonkeyPatch, batch: int, knobs: dict[str, Any], tier: str
) -> None:
    model = tiny_model("llama")
    policy = HGCA(**{"window": 40} | knobs)
    cache = HybridCache(model, policy, tier=tier, block_size=BLOCK, prefill_tile=32)
    record = Record(monkeypatch, 2)
    run(model, cache, batch, 19)
    layer = hybrid_layers(cache)[2]
    layer.drain()
    mass = layer.state
    assert isinstance(mass, TokenMass)
    keys = cache.to_dynamic().layers[2].keys.double()
    valid = torch.from_numpy(layer.settings.padding.valid[:, : layer.past] != 0)
    margin, kept, outside = direct(record.turns, keys, valid, policy, mass.stagger)
    assert outside == mass.now.evicted * BLOCK >= 5 * BLOCK
    assert margin > 1e-7, "an average is too near to its threshold for a comparison"
    assert torch.equal(torch.from_numpy(mass.now.kept[:, :, :outside] != 0), kept[:, :, :outside])
    assert 0.02 < kept[:, :, :outside].float().mean() < 0.9
    context = mass.now.retained
    for i in range(context.lists):
        found = context.positions[i, : context.counts[i]]
        assert np.array_equal(found, kept.flatten(0, 1)[i].nonzero()[:, 0].numpy())
