"""Captured steps of models some of whose layers have sliding windows, in Transformers' own layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recording import CpuRecorder
from tiny import SIZES, prompt, spread_weights, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from hf_offload import HybridCache

from ._graphs import KNOBS, SCOUT, SELECTED, graph_cache
from .test_auto_graph import steps, told_of

HEADS = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 24}
KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
MORE: dict[str, dict[str, Any]] = {
    "gemma2": {**KINDS, "query_pre_attn_scalar": 16},
    "gemma3_text": {**KINDS, "query_pre_attn_scalar": 16},
    "qwen3": {**KINDS, "use_sliding_window": True},
    "gpt_oss": {**KINDS, "num_local_experts": 2, "num_experts_per_tok": 1},
}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **HEADS, **MORE[family])
    return spread_weights(AutoModelForCausalLM.from_config(config, attn_implementation="hybrid_sparse").eval())


def run(model: Any, cache: Any, rows: int, turns: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Logits of the steps of several turns: `(tokens in all before the steps, steps)`; rows of a batch are ragged."""
    total = sum(turns[-1])
    ids, mask = prompt(rows, total)
    ids = ids.clamp(min=3)
    found, past = [], 0
    with torch.no_grad():
        for length, count in turns:
            positions = (mask[:, :length].cumsum(-1) - 1).clamp(min=0)[:, past:]
            model(ids[:, past:length], attention_mask=mask[:, :length], position_ids=positions, past_key_values=cache)
            for i in range(length, length + count):
                seen = mask[:, : i + 1]
                given = {"attention_mask": seen, "position_ids": seen.sum(-1, keepdim=True) - 1}
                found.append(model(ids[:, i : i + 1], **given, past_key_values=cache).logits)
            past = length + count
    return torch.cat(found, 1)


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("gemma2", 3),
        ("gemma3_text", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gemma3_text", 3), ("qwen3", 3), ("gpt_oss", 1))),
    ],
)
def test_steps_with_windows_are_replayed(family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a window's length, and through a second turn, which uses the same captured step."""
    model, turns = model_of(family), ((150, 40), (200, 20))
    want = run(model, HybridCache(model, "scout", **KNOBS, **SCOUT), rows, turns)
    recorded: list[int] = []
    record, replay = CpuRecorder.record, CpuRecorder.replay
    monkeypatch.setattr(CpuRecorder, "record", lambda self, step: recorded.append(0) or record(self, step))
    monkeypatch.setattr(CpuRecorder, "replay", lambda self: recorded.append(1) or replay(self))
    cache = graph_cache(model, "scout", auto=True, **SCOUT)
    with told_of() as told:
        assert torch.equal(run(model, cache, rows, turns), want)
    assert not told
    assert recorded.count(0) <= 2
    assert recorded.count(1) >= 50
    assert {layer.get_seq_length() for layer in cache.layers} == {220}


def test_windows_that_are_not_full_wait() -> None:
    """And rows whose padding is still within them."""
    model = model_of("gemma3_text")
    want = run(model, HybridCache(model, "full", **KNOBS), 1, ((10, 40),))
    cache = graph_cache(model, "full", auto=True)
    assert torch.equal(run(model, cache, 1, ((10, 10),)), want[:, :10])
    assert cache.graph._capture is None
    cache.reset()
    assert torch.equal(run(model, cache, 1, ((10, 40),)), want)
    assert cache.graph._capture is not None


@pytest.mark.parametrize(
    ("kind", "part", "error"),
    [
        ("gemma2", "record", RuntimeError("operation not permitted when stream is capturing")),
        ("gemma3_text", "replay", torch.OutOfMemoryError("no memory")),
    ],
)
def test_a_capture_or_first_replay_that_fails_leaves_the_windows(
    monkeypatch: pytest.MonkeyPatch, kind: str, part: str, error: Exception
) -> None:
    model = model_of(kind)
    want = run(model, HybridCache(model, "scout", **KNOBS, **SELECTED), 1, ((150, 12),))
    cache = graph_cache(model, "scout", auto=True, **SELECTED)
    done = getattr(CpuRecorder, part)

    def fails(*args: Any) -> Any:
        if part == "record":  # the step's work has run before
            done(*args)
        raise error

    monkeypatch.setattr(CpuRecorder, part, fails)
    with told_of() as told:
        found = run(model, cache, 1, ((150, 12),))
    assert len(told) == 1
    assert torch.allclose(found, want, atol=1e-4)


def test_a_fork_has_windows_of_its_own() -> None:
    model = tiny_model("gemma3")
    cache = graph_cache(model, "full", auto=True)
    steps(model, cache, 60, 70)
    assert cache.graph._capture is not None
    forked = cache.fork()
    first = steps(model, cache, 70, 80)
    ids, _ = prompt(1, 80)
    with torch.no_grad():
        rows = [model(ids[:, i : i + 1], past_key_values=forked).logits for i in range(70, 80)]
    assert torch.allclose(torch.cat(rows, 1), first, atol=1e-5)


def ragged(rows: int, hidden: tuple[tuple[int, int], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = prompt(rows, 210)
    mask = mask.clone()
    for row, token in hidden:
        mask[row, token] = 0
    return ids.clamp(min=3), mask


@pytest.mark.parametrize(
    ("rows", "hidden"), [(3, ((0, 170),)), (1, ((0, 165), (0, 195))), (2, ((0, 160), (1, 160), (1, 171), (1, 172)))]
)
def test_a_token_that_is_hidden_is_not_attended(rows: int, hidden: tuple[tuple[int, int], ...]) -> None:
    """While it is in the windows, whose replayed steps have no mask."""
    model, (ids, mask) = model_of("gemma3_text"), ragged(rows, hidden)

    def logits(cache: HybridCache) -> torch.Tensor:
        found = []
        with torch.no_grad():
            positions = (mask[:, :150].cumsum(-1) - 1).clamp(min=0)
            model(ids[:, :150], attention_mask=mask[:, :150], position_ids=positions, past_key_values=cache)
            for i in range(150, 210):
                seen = mask[:, : i + 1]
                given = {"attention_mask": seen, "position_ids": (seen.sum(-1, keepdim=True) - 1).clamp(min=0)}
                found.append(model(ids[:, i : i + 1], **given, past_key_values=cache).logits)
        return torch.cat(found, 1)

    cache = graph_cache(model, "full", auto=True)
    assert torch.equal(logits(cache), logits(HybridCache(model, "full", **KNOBS)))
    assert cache.graph._capture is not None


def test_drafts_behind_replays_are_recorded() -> None:
    model, (ids, _) = tiny_model("gemma3"), prompt(1, 60)
    rows = []
    for cache in (HybridCache(model, "full", **KNOBS), graph_cache(model, "full", auto=True)):
        steps(model, cache, 40, 46)
        cache.activate_past_recording()
        steps(model, cache, 46, 48)
        cache.crop(-1)
        with torch.no_grad():
            rows.append(model(ids[:, 47:48], past_key_values=cache).logits)
    assert torch.equal(*rows)


def test_masks_by_kind_of_layer_run_eagerly() -> None:
    model, (ids, _) = tiny_model("gemma3"), prompt(1, 60)
    masks = {"full_attention": None, "sliding_attention": None}
    rows = []
    for cache in (HybridCache(model, "full", **KNOBS), graph_cache(model, "full", auto=True)):
        steps(model, cache, 40, 46)
        with torch.no_grad():
            rows.append(model(ids[:, 46:47], attention_mask=masks, past_key_values=cache).logits)
    assert torch.equal(*rows)


def test_what_a_cache_gives_of_its_windows_is_copied() -> None:
    model = tiny_model("gemma3")
    cache = graph_cache(model, "full", auto=True)
    steps(model, cache, 40, 46)
    keys = next(iter(cache))[0]
    assert keys is not None
    before = keys.clone()
    steps(model, cache, 46, 48)
    assert torch.equal(keys, before)
