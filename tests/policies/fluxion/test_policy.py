"""Fluxion and FixedHybrid: full attention, local tokens alone, and the statistics of the features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny import prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

import hf_offload
from hf_offload import ConstantPredictor, Fluxion
from hf_offload.attention.decode import lone_step
from hf_offload.attention.step_cpu import CpuStep
from hf_offload.cache.layer import HybridLayer
from hf_offload.policies.fluxion.features import FEATURES
from hf_offload.policies.fluxion.kernels.predictor import Network
from hf_offload.policies.fluxion.predictor import HeadPredictor, HeadProperties, save_predictors
from hf_offload.policies.fluxion.selector import SelectedHostPartial, Selector
from hf_offload.policies.fluxion.step import lengths_of, segments_of
from hf_offload.scores import Scores

TIERS = ("one", "split")
SINKS, LOCAL, BLOCK = 16, 32, 16


@dataclass(frozen=True)
class Watched:
    """A predictor that keeps the features that it gets, where they are made by torch: with two memories."""

    inner: Any
    seen: list[torch.Tensor] = field(default_factory=list)
    tau: float = 0.1
    digest: str = "quest"
    sinks: int = SINKS
    local: int = LOCAL

    def predict(self, features: torch.Tensor) -> HeadProperties:
        self.seen.append(features.clone())
        found: HeadProperties = self.inner.predict(features)
        return found

    def network(self) -> Network:
        found: Network = self.inner.network()
        return found


def network() -> HeadPredictor:
    """A network that was not trained: it says something else for every head and step."""
    torch.manual_seed(0)
    made = HeadPredictor(tau=0.1, digest="submean", sinks=SINKS, local=LOCAL, streaming_at=0.5)
    made.standardise(torch.randn(64, len(FEATURES)) * 20)
    return made.eval().requires_grad_(False)


def decode(model: PreTrainedModel, cache: Any, batch: int, length: int, steps: int) -> torch.Tensor:
    """Logits `[B, steps, V]` of tokens that come one by one behind a prompt of `length`; rows are left padded."""
    ids, mask = prompt(batch, length + steps)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = []
    with torch.no_grad():
        for first, stop in [(0, length), *((t, t + 1) for t in range(length, length + steps))]:
            out = model(
                input_ids=ids[:, first:stop], attention_mask=mask[:, :stop], position_ids=positions[:, first:stop],
                past_key_values=cache, use_cache=True,
            )  # fmt: skip
            logits.append(out.logits[:, -1:])
    return torch.cat(logits[1:], 1)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("policy", ["streaming", "budget 0", "fixed_hybrid"])
def test_without_a_budget_sinks_and_newest_tokens_are_attended(llama: PreTrainedModel, policy: str, tier: str) -> None:
    nothing = {"streaming": ConstantPredictor(streaming=True, sinks=SINKS, local=LOCAL),
               "budget 0": ConstantPredictor(-0.1, 0.01, sinks=SINKS, local=LOCAL)}  # fmt: skip
    cache = (
        hf_offload.HybridCache(llama, policy, budget=0.0, sinks=SINKS, local=LOCAL, tier=tier)
        if policy == "fixed_hybrid"
        else hf_offload.HybridCache(llama, "fluxion", predictor=nothing[policy], tier=tier)
    )
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
            want = stock(
                input_ids=ids[:, t : t + 1], attention_mask=seen[None, None, None], past_key_values=known
            ).logits
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    told = cache.stats().as_dict()["retrievals"]
    assert told["head_budget"] == told["retrieved_share"] == told["retrieved_bytes"] == 0
    assert (told["streaming_groups"], told["scored_bytes"]) == (1, 0)


@pytest.mark.parametrize("batch", [1, 3])
def test_both_memories_choose_alike(llama: PreTrainedModel, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    constant = Watched(ConstantPredictor())
    decode(llama, hf_offload.HybridCache(llama, "fluxion", predictor=constant, tier="split"), batch, 300, 20)
    assert len(constant.seen) == 20 * llama.config.num_hidden_layers
    features = torch.cat(constant.seen).flatten(0, -2)
    net = network()
    net.standardise(features)
    net.outputs.bias.data -= net(features).median(0).values - torch.tensor([0.3, 0.0, 0.0])
    needs: list[torch.Tensor] = []

    def watch(cls: type, name: str, choice_of: Callable[[Any], Selector]) -> None:
        work = getattr(cls, name)

        def watched(part: Any, *args: Any) -> Any:
            found = work(part, *args)
            needs.append(torch.cat([one.float().reshape(-1) for one in choice_of(part).properties]))
            return found

        monkeypatch.setattr(cls, name, watched)

    watch(CpuStep, "run", lambda step: step.layer.kernels["fluxion", step.buffers.query.shape].selector)
    watch(SelectedHostPartial, "result", lambda partial: partial.selector)
    caches, logits = [], []
    for tier in TIERS:
        caches.append(hf_offload.HybridCache(llama, "fluxion", predictor=net, tier=tier))
        logits.append(decode(llama, caches[-1], batch, 300, 20))
    # What is rounded otherwise may, rarely, turn a head's choice, and what comes after it in that step.
    alike = (logits[0] - logits[1]).abs().amax(-1) < 1e-3
    assert alike.float().mean() >= 0.9
    first, second = torch.stack(needs).chunk(2)
    assert first.shape[0] == 20 * llama.config.num_hidden_layers
    assert torch.isclose(first, second, rtol=1e-3, atol=1e-3).float().mean() > 0.95
    one, two = (cache.stats().as_dict()["retrievals"] for cache in caches)
    assert one["head_budget"] == pytest.approx(two["head_budget"], rel=0.02)
    assert one["streaming_heads"] == pytest.approx(two["streaming_heads"], rel=0.02)
    assert 0 < one["head_budget"] < 1
    assert 0 < one["streaming_heads"] < 1
    assert sum(one["granularities"].values()) == pytest.approx(1 - one["streaming_groups"])
    full = decode(tiny_model("llama", "sdpa"), DynamicCache(config=llama.config), batch, 300, 20)
    assert (logits[0] - full).abs().max() > 1e-3


def test_every_token_is_in_one_segment(llama: PreTrainedModel) -> None:
    ids, mask = prompt(3, 200)
    predictor = ConstantPredictor(sinks=SINKS, local=LOCAL)
    cache = hf_offload.HybridCache(llama, "fluxion", predictor=predictor, tier="one", prefill_tile=48)
    known = DynamicCache(config=llama.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        llama(**inputs, past_key_values=cache)
        tiny_model("llama", "sdpa")(**inputs, past_key_values=known)
    layer = cache.layers[0]
    assert isinstance(layer, HybridLayer)
    query = torch.randn(3, llama.config.num_attention_heads, layer.store.head_dim)  # type: ignore[union-attr]
    step = lone_step(layer, query, 201, layer.scores or Scores(1.0))
    found = segments_of(step, query)
    far = list(found.host)
    pieces = [found.sinks, *far, found.newest]
    lengths = lengths_of(lone_step(layer, query, 200, layer.scores or Scores(1.0)))
    for row in range(3):
        keys, values = (torch.cat([p[i][row][:, p[2][row]] for p in pieces], 1) for i in (0, 1))
        real = mask[row].bool()
        torch.testing.assert_close(keys, known.layers[0].keys[row][:, real], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values, known.layers[0].values[row][:, real], rtol=1e-5, atol=1e-5)
        host = sum(int(p[2][row].sum()) for p in far)
        assert lengths[row].tolist() == [host, int(real.sum()) - host]
    assert found.scores.shape == (3, query.shape[1], -(-sum(p[2].shape[1] for p in far) // BLOCK))


def test_statistics_are_made_anew_when_the_host_has_twice_as_much(llama: PreTrainedModel) -> None:
    predictor = ConstantPredictor(sinks=SINKS, local=LOCAL)
    cache = hf_offload.HybridCache(llama, "fluxion", predictor=predictor, tier="one")
    layer = cache.layers[0]
    decode(llama, cache, 1, 40, 1)
    assert layer.state.predictor is None  # nothing is on the host yet
    decode_more = prompt(1, 200)[0]
    made = []
    with torch.no_grad():
        for t in range(41, 180):
            llama(input_ids=decode_more[:, t : t + 1], past_key_values=cache)
            made.append(layer.state.blocks)
    assert sorted(set(made)) == [0, 2, 4, 8]


@pytest.mark.parametrize("tier", TIERS)
def test_a_predictor_from_a_file(llama: PreTrainedModel, tmp_path: Any, tier: str) -> None:
    from hf_offload.files.fingerprint import likeness

    path = tmp_path / "predictor.safetensors"
    identity = likeness(llama.config, llama.model)
    save_predictors(path, identity, {0.1: network()}, {})
    want = decode(llama, hf_offload.HybridCache(llama, "fluxion", predictor=network(), tier=tier), 1, 300, 4)
    cache = hf_offload.HybridCache(llama, "fluxion", predictor=str(path), tier=tier)
    assert torch.equal(decode(llama, cache, 1, 300, 4), want)
    with pytest.raises(ValueError, match=r"tau=0.3 is none that"):
        hf_offload.HybridCache(llama, "fluxion", predictor=path, tau=0.3)
    with pytest.raises(ValueError, match="another model"):
        hf_offload.HybridCache(tiny_model("qwen3"), "fluxion", predictor=path)
    with pytest.raises(RuntimeError, match="has not been read yet"):
        _ = Fluxion(predictor=path).known
