"""The pretended device of `tests/pretended`: its delays, and its refusals as on a GPU."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pretended
import pytest
import torch
from test_exactness import assert_equal, decode_logits, knobs_of
from tiny import prompt, tiny_model
from transformers import DynamicCache

from hf_offload import HybridCache

pytestmark = pytest.mark.skipif(os.environ.get(pretended.VARIABLE) != "late", reason="for a device that lags behind")


def pinned(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, pin_memory=True)


def test_what_nobody_waits_for_is_not_there_yet() -> None:
    there, here = torch.arange(4.0, device="cuda") + 1, pinned(4)
    here.copy_(there, non_blocking=True)
    arrived = torch.cuda.current_stream().record_event()
    assert not here.any()
    arrived.synchronize()
    assert here.tolist() == [1, 2, 3, 4]


def test_streams_do_not_wait_for_each_other_unless_they_are_told() -> None:
    there, here, side = torch.zeros(1, device="cuda"), pinned(2), torch.cuda.Stream()
    there += 1
    with torch.cuda.stream(side):
        here[:1].copy_(there, non_blocking=True)
    side.synchronize()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        here[1:].copy_(there, non_blocking=True)
    side.synchronize()
    assert here.tolist() == [0, 1]


def test_a_graph_is_what_was_captured_on_the_memory_of_then() -> None:
    graph, there, before = torch.cuda.CUDAGraph(), torch.ones(2, device="cuda"), pretended.WAITS.total()
    with torch.cuda.graph(graph):
        doubled = there * 2
        with pytest.raises(RuntimeError, match="capturing"):
            doubled.sum().item()
    for value in (3.0, 5.0):
        there.fill_(value)
        graph.replay()
        assert doubled.tolist() == [2 * value] * 2
    assert pretended.WAITS.total() == before + 2


SCOUT = {"budget": 96, "sinks": 16, "recent": 16, "synchronous_layers": (0,), "recall": 3}
STEPS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "graph": ("scout", {**SCOUT, "lookahead": "attend", "cuda_graph": True}, set()),  # whose hand-over is flags
    "attend": ("scout", {**SCOUT, "lookahead": "attend"}, {"event"}),  # a thread of the worker waits for each query
    "select": ("scout", {**SCOUT, "lookahead": "select"}, {"event"}),
    "quest": ("quest", {"budget": 96, "sinks": 16}, {"event"}),
}


@pytest.mark.parametrize("name", STEPS)
def test_decode_steps_wait_for_nothing_but_the_cpu(name: str) -> None:
    model, ids, (policy, knobs, allowed) = tiny_model("llama"), prompt(1, 190)[0], STEPS[name]
    cache = HybridCache(model, policy, **{"block_size": 16, "resident": 96, "cuda_graph": False, **knobs})
    with torch.no_grad():
        model(ids[:, :150], past_key_values=cache)
        for step in range(150, 190):
            if step == 165:
                before = pretended.WAITS.copy()
            model(ids[:, step : step + 1], past_key_values=cache)
    waits = pretended.WAITS - before
    torch.cuda.synchronize()
    assert cache.stats().as_dict()["recall_blocks"] > 0
    assert set(waits) <= allowed


def with_scarce_pinned_memory(monkeypatch: pytest.MonkeyPatch, every: int, policy: str, **knobs: Any) -> int:
    """Compare logits with the stock model's where each so-manieth piece of pinned memory is refused.

    Returns:
        How often it was told that there is no graph.
    """
    empty, asked, (ids, mask) = torch.empty, [0], prompt(2, 75)
    stock, model = tiny_model("llama", "sdpa"), tiny_model("llama")
    want = decode_logits(stock, DynamicCache(config=model.config), ids, mask, None, 20)

    def scarce(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("pin_memory"):
            asked[0] += 1
            if asked[0] % every == 0:
                raise RuntimeError("CUDA error: out of memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", scarce)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        cache = HybridCache(model, policy, **{"block_size": 16, "resident": 64, **knobs})
        assert_equal(decode_logits(model, cache, ids, mask, 30, 20), want)
    assert asked[0] >= every
    return sum("steps run without a CUDA graph" in str(one.message) for one in told)


@pytest.mark.parametrize("every", [1, 5])
def test_without_pinned_memory_steps_go_on_without_a_graph(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """Or with one, where each fifth piece alone cannot be pinned and none of those is what a graph reads."""
    knobs = {"budget": 256, "sinks": 16, "recent": 0, "lookahead": "off"}
    told = with_scarce_pinned_memory(monkeypatch, every, "scout", cuda_graph=True, **knobs)
    assert told <= 1
    assert told or every > 1


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "scout-select", "full-fetch", "hgca", "fluxion"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_pinned_memory_that_cannot_be_had_changes_no_token(
    monkeypatch: pytest.MonkeyPatch, every: int, policy: str
) -> None:
    """None of it, or each second or third piece: whatever kernels would reach is copied then."""
    name, knobs = knobs_of(policy)
    with_scarce_pinned_memory(monkeypatch, every, name, prefill_tile=32, **knobs)
