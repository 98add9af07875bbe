"""Keyword arguments of attention calls: what they ask for counts, not that they are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import ONE_MEMORY, prompt, tiny_model
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from hf_offload import HybridCache
from hf_offload.attention import interface
from hf_offload.model.model_support import NAME

TIERS = [ONE_MEMORY, {"tier": "split", "resident": 128}]


class Calls:
    """The registered attention function, with more keyword arguments; counts the slow check."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.more: dict[str, Any] = {}
        self.checks, check = 0, interface._check

        def counted(*args: Any, **kwargs: Any) -> None:
            self.checks += 1
            check(*args, **kwargs)

        patch.setattr(interface, "_check", counted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return interface.hybrid_sparse_attention(*args, **(kwargs | self.more))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Calls(monkeypatch)
    AttentionInterface.register(NAME, made)
    yield made
    interface.register()


def feed(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, past_key_values=cache).logits
    return logits


@pytest.mark.parametrize("knobs", TIERS, ids=["one", "split"])
@pytest.mark.parametrize(
    "more",
    [
        {"sliding_window": None, "indices": None, "position_bias": None, "cache": None},  # qwen3 passes the first
        {"is_causal": None},
        {"is_causal": False},  # of a single query it says nothing
        {"cache": "its own"},
        {"cache": "another"},
    ],
    ids=str,
)
def test_a_decode_step_needs_no_check(calls: Calls, knobs: dict[str, Any], more: dict[str, Any]) -> None:
    """`cache` is the one that was updated, as newer versions of Transformers hand it on, or a pair with it."""
    model = tiny_model("qwen3")
    cache, plain = (HybridCache(model, "full", **knobs) for _ in range(2))
    ids = prompt(1, 60)[0]
    for each in (cache, plain):
        feed(model, each, ids)
        feed(model, each, ids[:, :1])  # the modules are known from here on
    want = feed(model, plain, ids[:, 1:2])
    kinds = {"its own": cache, "another": EncoderDecoderCache(cache, DynamicCache())}
    calls.more, calls.checks = {name: kinds.get(value, value) for name, value in more.items()}, 0
    assert torch.equal(feed(model, cache, ids[:, 1:2]), want)
    assert calls.checks == 0


@pytest.mark.parametrize("knobs", TIERS, ids=["one", "split"])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"cache": object()}, "cannot serve LlamaAttention: cache"),  # a paged one, say, that holds the keys
        ({"indices": torch.zeros(1)}, "indices"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"dropout": 0.5}, "dropout=0.5"),
    ],
    ids=["cache", "indices", "position_bias", "sliding_window", "dropout"],
)
def test_what_is_unsupported_is_refused(
    calls: Calls, knobs: dict[str, Any], tokens: int, more: dict[str, Any], told: str
) -> None:
    model = tiny_model("llama")
    cache, ids = HybridCache(model, "full", **knobs), prompt(1, 60)[0]
    feed(model, cache, ids)
    feed(model, cache, ids[:, :1])
    calls.more = more
    with pytest.raises(ValueError, match=told):
        feed(model, cache, ids[:, :tokens])
    calls.more = {}
    assert cache.get_seq_length() == 61
    feed(model, cache, ids[:, :tokens])
