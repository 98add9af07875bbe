"""Scout's knobs and modes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tiny import DEVICE, feed, prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HybridCache, Scout
from hf_offload.attention.step_split import SplitStep

SMALL: dict[str, Any] = {"budget": 96, "sinks": 16, "recent": 16}
SELECTED: dict[str, Any] = {"attend_resident": "selected"}
CACHE: dict[str, Any] = {"block_size": 16, "resident": 144}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def decode(model: PreTrainedModel, cache: HybridCache, steps: int = 20) -> list[int]:
    out = model.generate(prompt(1, 300)[0], past_key_values=cache, max_new_tokens=steps, do_sample=False)
    return out[0, 300:].tolist()


def test_the_paper_in_one_word() -> None:
    paper = Scout.paper(1024)
    assert (paper.budget, paper.digest, paper.join, paper.lookahead) == (1024, "quest", "raw", "attend")
    assert (paper.correction, paper.smoothing, paper.synchronous_layers) == (False, 0.0, (0,))
    assert Scout.paper(512, lookahead="off", recall=8).recall == 8


@pytest.mark.parametrize(
    ("knobs", "ahead"),
    [
        ({}, ()), ({"lookahead": "attend"}, (3,)), ({"lookahead": "attend", "synchronous_layers": (2,)}, (1, 3)),
        ({"tier": "one", "synchronous_layers": ()}, ()),
    ],
)  # fmt: skip
def test_layers_that_look_ahead(model: PreTrainedModel, knobs: dict[str, Any], ahead: tuple[int, ...]) -> None:
    if knobs.get("tier") == "one" and DEVICE != "cpu":
        pytest.skip("beside a device there are two memories")
    cache = HybridCache(model, "scout", **SMALL, block_size=16, **({"tier": "split", "resident": 144} | knobs))
    decode(model, cache, 3)
    layers = cache.stats().as_dict()["layers"]
    assert tuple(row["layer"] for row in layers if row["query_cosine"] is not None) == ahead


@pytest.mark.skipif(DEVICE != "cpu", reason="beside a device there are two memories")
def test_looking_ahead_needs_two_memories(model: PreTrainedModel) -> None:
    for policy in (Scout(lookahead="select"), Scout.paper()):
        told = f'lookahead={policy.lookahead!r} needs two memories; use tier="split", a model on a GPU, or lookahead='
        with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
            HybridCache(model, policy, tier="one")


@pytest.mark.parametrize("lookahead", ["off", "select", "attend"])
def test_the_budget_is_kept(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, lookahead: Any) -> None:
    """No layer attends more blocks in a step than the budget has, on both sides together."""
    knobs = {**SMALL, **CACHE, **SELECTED, "lookahead": lookahead, "synchronous_layers": (0,)}
    seen, attend_device, plan = [], SplitStep.attend_device, Scout.plan

    def count(step: SplitStep, device: Any) -> Any:
        seen.append(device.counts)
        return attend_device(step, device)

    def look(policy: Scout, step: Any) -> Any:
        made = plan(policy, step)
        seen.append((seen.pop() + (0 if made.host is None else made.host.host.counts)).max())
        return made

    monkeypatch.setattr(SplitStep, "attend_device", count)
    monkeypatch.setattr(Scout, "plan", look)
    decode(model, HybridCache(model, "scout", tier="split", **knobs))
    # A predicted and a real selection may differ: then both sides attend what each of them wants.
    assert 0 < max(seen) <= (12 if lookahead == "attend" else 6)


def test_recall_lowers_the_share_of_the_cpu(model: PreTrainedModel) -> None:
    """Ten steps of one token want much the same blocks; the next token wants others."""
    (ids, mask), ratios = prompt(1, 360), []
    ids[:, 300:] = ids[:, 300::10].repeat_interleave(10, 1)
    for recall in (0, 1):
        cache = HybridCache(model, "scout", **SMALL, **CACHE, tier="split", recall=recall, smoothing=0.5)
        feed(model, cache, ids, mask, (0, *range(300, 361)))
        total = cache.stats().as_dict()
        ratios.append(total["cpu_ratio"])
        assert (total["recalls"] > 0) == (total["recall_bytes"] > 0) == (recall > 0)
    assert ratios[1] < 0.8 * ratios[0]


@pytest.mark.slow
def test_the_correction_brings_attending_ahead_nearer_to_the_truth(model: PreTrainedModel) -> None:
    """Teacher-forced logits: with the correction the distance to the real query's is smaller."""

    def logits(**knobs: Any) -> torch.Tensor:
        cache = HybridCache(model, "scout", **SMALL, **CACHE, tier="split", recall=0, **knobs)
        return torch.cat(feed(model, cache, *prompt(1, 340), (0, *range(300, 341)))[1:], 1)

    truth = logits(lookahead="off").log_softmax(-1)
    errors = []
    for correction in (False, True):
        got = logits(lookahead="attend", synchronous_layers=(0,), correction=correction).log_softmax(-1)
        errors.append(float((truth.exp() * (truth - got)).sum(-1).mean()))
    assert errors[0] > 0
    assert errors[1] < errors[0]


def test_a_change_of_the_rows_keeps_the_clock(model: PreTrainedModel) -> None:
    cache = HybridCache(model, "scout", tier="split", recall=5, **(SMALL | CACHE))
    feed(model, cache, *prompt(2, 303), (0, *range(300, 304)))
    cache.reorder_cache(torch.tensor([1, 0]))
    assert [float(layer.state.clock.since) for layer in cache.layers] == [3.0] * 4
