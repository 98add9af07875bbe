"""Fluxion and FixedHybrid: full attention, local tokens alone, batches of mixed lengths, statistics, files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import feed, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

from hf_offload import ConstantPredictor, Fluxion, HybridCache
from hf_offload.attention.decode import lone_step
from hf_offload.files.fingerprint import likeness
from hf_offload.policies.base import Selection
from hf_offload.policies.fluxion.features import FEATURES
from hf_offload.policies.fluxion.predictor import HeadPredictor, HeadProperties, save_predictors
from hf_offload.policies.fluxion.step import LocalBlocks, lengths_of, segments_of
from hf_offload.scores import Scores

TIERS = ("one", "split")
SINKS, LOCAL, BLOCK = 16, 32, 16
NEAR: dict[str, Any] = {"sinks": SINKS, "local": LOCAL}
LENGTHS = (512, 64, 40, 304)
"""Of rows: much on the host, one block, none, some; the padding of all but the third are whole blocks."""


@dataclass(frozen=True)
class Watched(ConstantPredictor):
    """A constant predictor that keeps the features that it gets, where they are made by torch: with two memories."""

    seen: list[torch.Tensor] = field(default_factory=list)

    def predict(self, features: torch.Tensor) -> HeadProperties:
        self.seen.append(features.clone())
        return super().predict(features)


def network() -> HeadPredictor:
    """A network that was not trained: it says something else for every head and step."""
    torch.manual_seed(0)
    made = HeadPredictor(tau=0.1, digest="submean", streaming_at=0.5, **NEAR)
    made.standardise(torch.randn(64, len(FEATURES)) * 20)
    return made.eval().requires_grad_(False)


def decode(model: PreTrainedModel, cache: Any, batch: int, length: int, steps: int) -> torch.Tensor:
    """Logits `[B, steps, V]` of tokens that come one by one behind a prompt of `length`; rows are left padded."""
    return torch.cat(feed(model, cache, *prompt(batch, length + steps), (0, *range(length, length + steps + 1)))[1:], 1)


def batch_of(lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[B, longest]` of rows that end together; a row holds the same ids in every batch."""
    longest = max(lengths)
    ids, mask = (torch.zeros(len(lengths), longest, dtype=torch.long) for _ in range(2))
    for row, length in enumerate(lengths):
        words = torch.randint(3, 150, (1024,), generator=torch.Generator().manual_seed(length))
        ids[row, longest - length :], mask[row, longest - length :] = words[:length], 1
    return ids, mask


def decode_mixed(model: PreTrainedModel, cache: Any, lengths: tuple[int, ...], steps: int = 4) -> torch.Tensor:
    longest = max(lengths)
    return torch.cat(feed(model, cache, *batch_of(lengths), (0, *range(longest - steps, longest + 1)))[1:], 1)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("policy", ["streaming", "budget 0", "fixed_hybrid"])
def test_without_a_budget_sinks_and_newest_tokens_are_attended(llama: PreTrainedModel, policy: str, tier: str) -> None:
    nothing = {
        "streaming": ConstantPredictor(streaming=True, **NEAR),
        "budget 0": ConstantPredictor(-0.1, 0.01, **NEAR),
    }
    if policy == "fixed_hybrid":
        cache = HybridCache(llama, policy, budget=0.0, tier=tier, **NEAR)
    else:
        cache = HybridCache(llama, "fluxion", predictor=nothing[policy], tier=tier)
    ids, steps, start = prompt(1, 160)[0], 20, 140
    stock = tiny_model("llama", "sdpa")
    known = DynamicCache(config=stock.config)
    with torch.no_grad():
        llama(input_ids=ids[:, :start], past_key_values=cache)
        stock(input_ids=ids[:, :start], past_key_values=known)
        for t in range(start, start + steps):
            got = llama(input_ids=ids[:, t : t + 1], past_key_values=cache).logits
            at = torch.arange(t + 1)
            seen = (at < SINKS) | (at >= (t // BLOCK) * BLOCK - LOCAL)  # blocks that were full before this step
            mask = seen[None, None, None]
            want = stock(input_ids=ids[:, t : t + 1], attention_mask=mask, past_key_values=known).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    told = cache.stats().as_dict()["retrievals"]
    assert told["head_budget"] == told["retrieved_share"] == told["retrieved_bytes"] == 0
    assert (told["streaming_groups"], told["scored_bytes"]) == (1, 0)


@pytest.mark.parametrize("knobs", [{"tier": "one"}, {"tier": "split"}, {"tier": "split", "schedule": "priority"}])
def test_a_budget_of_one_is_full_attention_for_every_row(llama: PreTrainedModel, knobs: dict[str, str]) -> None:
    full = decode_mixed(tiny_model("llama", "sdpa"), DynamicCache(config=llama.config), LENGTHS)
    got = decode_mixed(llama, HybridCache(llama, "fluxion", predictor=ConstantPredictor(**NEAR), **knobs), LENGTHS)
    torch.testing.assert_close(got, full, rtol=1e-4, atol=1e-4)


def test_features_of_a_row_are_those_that_it_has_alone(llama: PreTrainedModel) -> None:
    together = Watched(digest="quest", **NEAR)
    decode_mixed(llama, HybridCache(llama, "fluxion", predictor=together, tier="split"), LENGTHS)
    for row in (0, 3):  # the others alone have nothing to predict
        alone = Watched(digest="quest", **NEAR)
        decode_mixed(llama, HybridCache(llama, "fluxion", predictor=alone, tier="split"), LENGTHS[row : row + 1])
        for mine, theirs in zip(together.seen, alone.seen, strict=True):
            torch.testing.assert_close(mine[row], theirs[0], rtol=1e-3, atol=1e-3)
    hosts = torch.stack(together.seen)[..., FEATURES.index("host_length")][:, :, 0]
    assert hosts[0].tolist() == [448.0, 0.0, 0.0, 240.0]


def test_only_the_blocks_of_a_row_are_looked_at(llama: PreTrainedModel) -> None:
    predictor = ConstantPredictor(0.5, **NEAR)
    cache = HybridCache(llama, "fluxion", predictor=predictor, granularities=(16,), tier="split")
    decode_mixed(llama, cache, (512, 64, 512, 112), steps=1)
    choice = cache.layers[0].host_partial.selector.chosen
    there = choice.end - choice.first.clip(max=choice.end)
    assert there.tolist() == [28, 0, 28, 3]
    for row, blocks in enumerate(there.tolist()):
        assert (choice.runs[row] == -(-blocks // 2)).all()
        for head, count in enumerate(choice.counts[row].tolist()):
            chosen = choice.blocks[row, head, :count]
            assert -(-blocks // 2) <= count <= blocks
            assert ((chosen >= choice.first[row]) & (chosen < choice.end)).all()


@pytest.mark.parametrize("batch", [1, 3])
def test_both_memories_choose_alike(llama: PreTrainedModel, batch: int) -> None:
    constant = Watched(**NEAR)
    decode(llama, HybridCache(llama, "fluxion", predictor=constant, tier="split"), batch, 300, 20)
    assert len(constant.seen) == 20 * llama.config.num_hidden_layers
    features, net = torch.cat(constant.seen).flatten(0, -2), network()
    net.standardise(features)
    net.outputs.bias.data -= net(features).median(0).values - torch.tensor([0.3, 0.0, 0.0])
    caches = [HybridCache(llama, "fluxion", predictor=net, tier=tier) for tier in TIERS]
    logits = [decode(llama, cache, batch, 300, 20) for cache in caches]
    # What is rounded otherwise may, rarely, turn a head's choice, and what comes after it in that step.
    alike = (logits[0] - logits[1]).abs().amax(-1) < 1e-3
    assert alike.float().mean() >= 0.9
    one, two = (cache.stats().as_dict()["retrievals"] for cache in caches)
    for name in ("head_budget", "streaming_heads", "retrieved_share"):
        assert 0 < one[name] < 1
        assert one[name] == pytest.approx(two[name], rel=0.02)
    assert sum(one["granularities"].values()) == pytest.approx(1 - one["streaming_groups"])
    full = decode(tiny_model("llama", "sdpa"), DynamicCache(config=llama.config), batch, 300, 20)
    assert (logits[0] - full).abs().max() > 1e-3


def test_every_token_is_in_one_segment(llama: PreTrainedModel) -> None:
    ids, mask = prompt(3, 200)
    cache = HybridCache(llama, "fluxion", predictor=ConstantPredictor(**NEAR), tier="one", prefill_tile=48)
    known = DynamicCache(config=llama.config)
    feed(llama, cache, ids, mask, (0, 200))
    feed(tiny_model("llama", "sdpa"), known, ids, mask, (0, 200))
    layer: Any = cache.layers[0]
    query, scores = torch.randn(3, llama.config.num_attention_heads, layer.store.head_dim), layer.scores or Scores(1.0)
    found = segments_of(lone_step(layer, query, 201, scores), query)
    far = list(found.host)
    pieces = [found.sinks, *far, found.newest]
    lengths = lengths_of(lone_step(layer, query, 200, scores))
    for row in range(3):
        real = mask[row].bool()
        for i, want in enumerate((known.layers[0].keys, known.layers[0].values)):
            got = torch.cat([piece[i][row][:, piece[2][row]] for piece in pieces], 1)
            torch.testing.assert_close(got, want[row][:, real], rtol=1e-5, atol=1e-5)
        host = sum(int(piece[2][row].sum()) for piece in far)
        assert lengths[row].tolist() == [host, int(real.sum()) - host]
    assert found.scores.shape == (3, query.shape[1], -(-sum(piece[2].shape[1] for piece in far) // BLOCK))


def test_statistics_are_made_anew_when_the_host_has_twice_as_much(llama: PreTrainedModel) -> None:
    cache = HybridCache(llama, "fluxion", predictor=ConstantPredictor(**NEAR), tier="one")
    layer, ids, made = cache.layers[0], prompt(1, 200)[0], []
    decode(llama, cache, 1, 40, 1)
    assert layer.state.predictor is None  # nothing is on the host yet
    with torch.no_grad():
        for t in range(41, 180):
            llama(input_ids=ids[:, t : t + 1], past_key_values=cache)
            made.append(layer.state.blocks)
    assert sorted(set(made)) == [0, 2, 4, 8]


@pytest.mark.parametrize("tier", TIERS)
def test_a_predictor_from_a_file(llama: PreTrainedModel, tmp_path: Path, tier: str) -> None:
    path = tmp_path / "predictor.safetensors"
    save_predictors(path, likeness(llama.config, llama.model), {0.1: network()}, {})
    want = decode(llama, HybridCache(llama, "fluxion", predictor=network(), tier=tier), 1, 300, 4)
    cache = HybridCache(llama, "fluxion", predictor=str(path), tier=tier)
    assert torch.equal(decode(llama, cache, 1, 300, 4), want)
    with pytest.raises(ValueError, match=r"tau=0.3 is none that"):
        HybridCache(llama, "fluxion", predictor=path, tau=0.3)
    with pytest.raises(ValueError, match="another model"):
        HybridCache(tiny_model("qwen3"), "fluxion", predictor=path)
    with pytest.raises(RuntimeError, match="has not been read yet"):
        _ = Fluxion(predictor=path).trained


def test_local_blocks_of_rows_share_none_and_are_made_anew_after_a_change() -> None:
    """A row without padding, one whose sinks reach into the newest blocks, one that begins behind the host's end."""
    made: list[Selection] = []
    near = LocalBlocks(8, lambda selection: made.append(selection) or selection)
    sinks, want = (np.array([0, 7, 10], np.int32), np.array([2, 9, 12], np.int32)), []
    known = near.parts(sinks, 8, 12, 3)
    for selection in known:
        assert (selection.items == selection.items[:, :1]).all()
        assert selection.items.max() < 12  # what is behind a count is a block, too
        want.append(
            [line[0, : count[0]].tolist() for line, count in zip(selection.items, selection.counts, strict=True)]
        )
    assert want == [[[0, 1], [7], []], [[8, 9, 10, 11], [8, 9, 10, 11], [10, 11]]]
    assert near.parts(sinks, 8, 12, 3) is known
    for change in ((sinks, 9, 12, 3), (sinks, 9, 13, 3), (sinks, 9, 13, 4), ((sinks[0].copy(), sinks[1]), 9, 13, 4)):
        assert near.parts(*change) is not known
        known = near.parts(*change)
        assert near.parts(*change) is known
    assert len(made) == 10
