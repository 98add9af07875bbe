"""`samples`: keys drawn by their estimated attention, in whole decode steps with one memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import prompt, tiny_model
from transformers import DynamicCache

import hf_offload
from hf_offload import Plan
from hf_offload.policies import quest, scout
from hf_offload.policies.base import EVER

BLOCK, PROMPT, STEPS = 16, 150, 24
FEW = {"samples": 40, "sinks": 16, "recent": 16}


@pytest.fixture
def always_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw in short contexts, too."""
    for module in (scout, quest):
        monkeypatch.setattr(
            module, "draw", lambda step, join, samples: Plan(step.attend_drawn(join, samples), until=EVER)
        )


def decode(model: Any, cache: Any, batch: int = 1, steps: int = STEPS, **options: Any) -> torch.Tensor:
    ids, mask = prompt(batch, PROMPT)
    given = {"past_key_values": cache, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=steps, **given, **options)
    return torch.stack(out.logits, 1)


@pytest.mark.parametrize("name", ["scout", "quest"])
@pytest.mark.parametrize(
    ("family", "batch"), [("llama", 3), ("llama", 1), pytest.param("gemma3", 3, marks=pytest.mark.slow)]
)
def test_with_all_pairs_it_is_full_attention(family: str, batch: int, name: str, always_drawn: None) -> None:
    stock, model = tiny_model(family, "sdpa"), tiny_model(family)
    want = decode(stock, DynamicCache(config=stock.config), batch)
    for join in ("max", "mean"):
        cache = hf_offload.HybridCache(model, name, samples=10**7, join=join, block_size=BLOCK, sinks=16)
        found = decode(model, cache, batch)
        assert torch.equal(found.argmax(-1), want.argmax(-1))
        assert (found - want).abs().max() <= 1e-5 * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("options", [{}, {"host_dtype": "int8"}], ids=["plain", "int8"])
def test_more_samples_are_nearer_to_full_attention(options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    full = decode(model, hf_offload.HybridCache(model, "full", block_size=BLOCK), 3, steps=2)[:, 1].log_softmax(-1)
    far, attended = [], []
    for samples in (20, 120):
        cache = hf_offload.HybridCache(
            model, "scout", block_size=BLOCK, samples=samples, sinks=16, recent=16, **options
        )
        found = decode(model, cache, 3, steps=2)[:, 1].log_softmax(-1)
        far.append(float((full.exp() * (full - found)).sum(-1).mean()))
        attended.append(cache.stats().as_dict()["attended_tokens"])
        assert "tokens" in str(cache.stats())
    assert 48 < attended[0] < attended[1] < PROMPT
    assert 0 < far[1] < far[0] / 2


def test_up_to_so_many_tokens_all_are_attended() -> None:
    model = tiny_model("llama")
    want = decode(model, hf_offload.HybridCache(model, "full", block_size=BLOCK))
    cache = hf_offload.HybridCache(model, "scout", block_size=BLOCK, samples=PROMPT + STEPS + BLOCK)
    assert torch.equal(decode(model, cache), want)
    assert cache.stats().as_dict()["attended_tokens"] is None


def test_threads_do_not_change_a_token() -> None:
    model, found = tiny_model("llama"), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(decode(model, hf_offload.HybridCache(model, "scout", block_size=BLOCK, **FEW), 3))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0].argmax(-1), found[1].argmax(-1))


def test_forks_files_and_crops_go_on_with_the_same_tokens(tmp_path: Path) -> None:
    model = tiny_model("llama")
    whole = decode(model, hf_offload.HybridCache(model, "scout", block_size=BLOCK, **FEW))
    tokens = whole.argmax(-1)
    cache = hf_offload.HybridCache(model, "scout", block_size=BLOCK, **FEW)
    begun = decode(model, cache, steps=6)
    assert torch.equal(begun, whole[:, :6])
    fork = cache.fork()
    cache.save(tmp_path / "saved")
    caches = {"fork": fork, "file": hf_offload.HybridCache.load(tmp_path / "saved", model), "itself": cache}
    for name, each in caches.items():
        for i in range(5, STEPS - 1):
            with torch.no_grad():
                logits = model(tokens[:, i : i + 1], past_key_values=each).logits[:, -1]
            assert torch.equal(logits, whole[:, i + 1]), (name, i)
    cache.crop(5 - (STEPS - 1))
    with torch.no_grad():
        again = model(tokens[:, 5:6], past_key_values=cache).logits[:, -1]
    assert torch.equal(again, whole[:, 6])


def test_drafts_are_steps_of_their_own() -> None:
    model = tiny_model("llama")
    cache = hf_offload.HybridCache(model, "scout", block_size=BLOCK, **FEW)
    want = decode(model, cache).argmax(-1)
    drafted = hf_offload.HybridCache(model, "scout", block_size=BLOCK, **FEW)
    assert torch.equal(decode(model, drafted, prompt_lookup_num_tokens=3).argmax(-1), want)


@pytest.mark.parametrize(
    ("name", "knobs", "why"),
    [
        ("scout", {"samples": 64, "budget": 1024}, "give one of them"),
        ("scout", {"samples": 0}, "samples=0"),
        ("scout", {"samples": 64, "digest": "quest"}, 'needs digest="submean"'),
        ("scout", {"samples": 64, "join": "raw"}, "no share"),
        ("scout", {"samples": 64, "tier": "split"}, "needs one memory"),
        ("quest", {"samples": 64, "tier": "split"}, "needs one memory"),
    ],
)
def test_what_does_not_go_together(name: str, knobs: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        hf_offload.HybridCache(tiny_model("llama"), name, **knobs)
