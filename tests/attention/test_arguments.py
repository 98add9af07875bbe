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
    """The registered attention function, with more keyword arguments."""

    def __init__(self) -> None:
        self.more: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return interface.hybrid_sparse_attention(*args, **(kwargs | self.more))


@pytest.fixture
def calls() -> Any:
    made = Calls()
    AttentionInterface.register(NAME, made)
    yield made
    interface.register()


def feed(model: PreTrainedModel, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(ids, past_key_values=cache).logits
    return logits


@pytest.mark.parametrize("knobs", TIERS, ids=["one", "split"])
def test_what_asks_for_nothing_is_served(calls: Calls, knobs: dict[str, Any]) -> None:
    """`cache` is the one that was updated, as newer versions of Transformers hand it on, or a pair with it."""
    model, ids = tiny_model("qwen3"), prompt(1, 60)[0]
    cache, plain = (HybridCache(model, "full", **knobs) for _ in range(2))
    nothing: tuple[dict[str, Any], ...] = (
        {},
        {"sliding_window": None, "indices": None, "position_bias": None, "cache": None},  # qwen3 passes the first
        {"is_causal": None},
        {"is_causal": False},  # of a single query it says nothing
        {"cache": cache},
        {"cache": EncoderDecoderCache(cache, DynamicCache())},
    )
    for each in (cache, plain):
        feed(model, each, ids)
    for i, more in enumerate(nothing):
        calls.more = {}
        want = feed(model, plain, ids[:, i : i + 1])
        calls.more = more
        assert torch.equal(feed(model, cache, ids[:, i : i + 1]), want)


@pytest.mark.parametrize("knobs", TIERS, ids=["one", "split"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_what_is_unsupported_is_refused(calls: Calls, knobs: dict[str, Any], tokens: int) -> None:
    model = tiny_model("llama")
    cache, ids = HybridCache(model, "full", **knobs), prompt(1, 60)[0]
    feed(model, cache, ids)
    feed(model, cache, ids[:, :1])
    for more, told in (
        ({"cache": object()}, "cannot serve LlamaAttention: cache"),  # a paged one, say, that holds the keys
        ({"indices": torch.zeros(1)}, "indices"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"dropout": 0.5}, r"dropout=0\.5"),
    ):
        calls.more = more
        with pytest.raises(ValueError, match=told):
            feed(model, cache, ids[:, :tokens])
        assert cache.get_seq_length() == 61
    calls.more = {}
    feed(model, cache, ids[:, :tokens])
