"""Drawn keys and rounding: a row draws the same keys whatever way its tokens came into the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import feed, prompt, tiny_model

import hf_offload
import rounding
from hf_offload.blocks import digests

KNOBS = {"samples": 24, "sinks": 4, "recent": 16, "block_size": 16}
LENGTH, STEPS = 300, 48
IDS = prompt(1, LENGTH + STEPS)[0]


@pytest.fixture(autouse=True)
def few_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "STATISTICS_TOKENS", 64)


def read(model: Any, ids: torch.Tensor = IDS[:, :LENGTH], **memory: Any) -> Any:
    cache = hf_offload.HybridCache(model, "scout", **KNOBS, **memory)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return cache


def follow(model: Any, cache: Any, ids: torch.Tensor = IDS[:, LENGTH:], **options: Any) -> torch.Tensor:
    """Log probabilities `[STEPS, V]` of the first row's steps."""
    steps = [model(ids[:, i : i + 1], past_key_values=cache, **options).logits[0, -1] for i in range(ids.shape[1])]
    return torch.stack(steps).log_softmax(-1)


def with_noise(model: Any) -> torch.Tensor:
    cache = read(model)
    with rounding.noisy():
        return follow(model, cache)


def in_a_batch(model: Any) -> torch.Tensor:
    """Behind two blocks of padding, beside another row."""
    ids = torch.cat([torch.cat([IDS[:, :32], IDS], 1), torch.cat([IDS.roll(9, 1), IDS[:, :32]], 1)])
    mask = torch.ones_like(ids)
    mask[0, :32] = 0
    cuts = (0, *range(LENGTH + 32, ids.shape[1] + 1))
    logits = feed(model, hf_offload.HybridCache(model, "scout", **KNOBS), ids, mask, cuts)
    return torch.stack([each[0, -1] for each in logits[1:]]).log_softmax(-1)


@torch.inference_mode()
@pytest.mark.parametrize("way", [with_noise, in_a_batch])  # forks, files, crops and drafts: `test_samples.py`
def test_a_row_is_the_same(way: Callable[[Any], torch.Tensor]) -> None:
    model = tiny_model("llama")
    cache = read(model)
    want = follow(model, cache)
    assert cache.stats().as_dict()["attended_share"] < 0.5
    worst = (way(model) - want).abs().amax(-1)
    assert (worst <= 1e-3).float().mean() >= 0.9
    assert worst.max() <= 0.1
    other = follow(model, read(model, IDS[:, :LENGTH].roll(1, 1)))
    assert (other - want).abs().amax(-1).min() > 0.1  # what is compared is not insensitive


class Centered(digests.MeanStore):
    """A digest of a user's own with statistics."""

    frozen = False
    center: torch.Tensor

    @property
    def statistics(self) -> dict[str, tuple[int, ...]]:
        return {"center": (self.num_kv_heads, self.head_dim)}

    def freeze(self, tiles: digests.Tiles) -> None:
        self.center = sum(k.float().sum(2) for k, _ in tiles())
        self.frozen = True


@torch.inference_mode()
@pytest.mark.parametrize(
    ("policy", "knobs"),
    [
        ("scout", {"samples": 4}), ("scout", {"budget": 64, "resident": 96}),
        ("scout", {"budget": 64, "digest": "centered", "recent": 16, "resident": 96}),
        ("hgca", {"window": 48, "rescue": 4}), ("hgca", {"window": 48, "rescue": 4, "tier": "split"}),
    ],
)  # fmt: skip
def test_before_there_are_digests_all_is_attended(
    policy: str, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "STATISTICS_TOKENS", LENGTH + 16)
    monkeypatch.setitem(digests.DIGESTS, "centered", Centered)
    model, found = tiny_model("llama"), []
    knobs = {"tier": "split" if "resident" in knobs else "one", "policy": policy, **knobs}
    for given in ({"policy": "full"}, knobs):
        cache = hf_offload.HybridCache(model, **given, block_size=16)
        model(IDS[:, :LENGTH], past_key_values=cache, logits_to_keep=1)
        found.append(follow(model, cache, IDS[:, LENGTH : LENGTH + 28]))
    same = (found[0] - found[1]).abs().amax(-1) < 1e-4
    assert same[:15].all()  # the 316th token is in a full block at the 20th step
    assert not same[24:].any()


@torch.inference_mode()
def test_a_short_row_of_a_batch_takes_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt waits for it; the first decode step does not. A crop that leaves too few makes statistics anew."""
    monkeypatch.setattr(digests, "STATISTICS_TOKENS", 128)
    model, (ids, mask) = tiny_model("llama"), prompt(2, 200)
    mask[1, :100] = 0
    cache = hf_offload.HybridCache(model, "scout", **KNOBS)
    model(ids, attention_mask=mask, past_key_values=cache)
    stores = [layer.store for layer in cache.layers]
    assert all(store.awaits_digests for store in stores)
    mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
    model(ids[:, :1], attention_mask=mask, past_key_values=cache)
    assert not any(store.awaits_digests for store in stores)
    cache.crop(-70)
    assert not any(store.awaits_digests for store in stores)
    cache.crop(-10)
    assert all(store.awaits_digests for store in stores)


@torch.inference_mode()
def test_forks_that_share_blocks_have_digests_of_their_own() -> None:
    """Before there are statistics, blocks are shared that get other digests in each fork."""
    model = tiny_model("llama")
    want = follow(model, read(model))
    first = hf_offload.HybridCache(model, "scout", **KNOBS)
    model(IDS[:, :60], past_key_values=first, logits_to_keep=1)
    other = first.fork()
    model(IDS[:, 100:200] * 1, past_key_values=other, logits_to_keep=1)  # another text decides other statistics
    model(IDS[:, 60:LENGTH], past_key_values=first, logits_to_keep=1)
    centers = [cache.layers[0].store.digests.center for cache in (first, other)]
    assert not torch.equal(*centers)
    assert not (first.layers[0].store.table[:, 0] == other.layers[0].store.table[:, 0]).any()
    worst = (follow(model, first) - want).abs().amax(-1)
    assert (worst <= 1e-3).float().mean() >= 0.9


@torch.inference_mode()
def test_drafts_that_are_dropped_leave_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """With padding a row may be long enough, and hold too few tokens."""
    monkeypatch.setattr(digests, "STATISTICS_TOKENS", 64)
    model, (ids, mask), found = tiny_model("llama"), prompt(1, 160), []
    mask[0, :60] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for drafts in (8, 1):
        cache = hf_offload.HybridCache(model, "scout", **KNOBS)
        feed(model, cache, ids, mask, (0, 120))
        cache.activate_past_recording()
        stop = 120 + drafts
        given = {"attention_mask": mask[:, :stop], "position_ids": positions[:, 120:stop], "logits_to_keep": drafts}
        model(ids[:, 120:stop], past_key_values=cache, **given)
        if drafts > 1:
            cache.crop(1 - drafts)
        assert all(layer.store.awaits_digests for layer in cache.layers)
        found.append(torch.cat(feed(model, cache, ids, mask, range(121, 161)), 1).log_softmax(-1))
        assert not any(layer.store.awaits_digests for layer in cache.layers)
    assert (found[0] - found[1]).abs().max() < 0.1
