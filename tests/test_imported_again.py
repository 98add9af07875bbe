"""The package removed from `sys.modules` and imported again, as notebooks do, while older caches are alive."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import ONE_MEMORY, prompt, tiny_model
from transformers import DynamicCache, PreTrainedModel

import hf_offload

KNOBS: dict[str, Any] = {"budget": 256, "block_size": 16, **ONE_MEMORY}
SPLIT: dict[str, Any] = {"budget": 256, "block_size": 16, "sinks": 16, "recent": 0, "resident": 64, "tier": "split"}


def ours() -> list[str]:
    return [name for name in sys.modules if name == "hf_offload" or name.startswith("hf_offload.")]


@pytest.fixture
def again() -> Iterator[ModuleType]:
    """The package, imported a second time."""
    first = {name: sys.modules.pop(name) for name in ours()}
    try:
        yield importlib.import_module("hf_offload")
    finally:
        for name in ours():
            del sys.modules[name]
        sys.modules.update(first)
        first["hf_offload.attention.interface"].register()


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama")


def generate(model: PreTrainedModel, cache: Any = None) -> torch.Tensor:
    return model.generate(prompt(1, 80)[0], past_key_values=cache, max_new_tokens=6, do_sample=False)


@pytest.fixture
def older(model: PreTrainedModel) -> hf_offload.HybridCache:
    """A cache of the first import, which keeps its hooks on the model."""
    cache = hf_offload.HybridCache(model, "scout", **SPLIT)
    generate(model, cache)
    return cache


def test_new_caches_of_the_same_model_work(
    model: PreTrainedModel, older: hf_offload.HybridCache, again: ModuleType
) -> None:
    stock = tiny_model("llama", "sdpa")
    want = generate(stock, DynamicCache(config=stock.config))
    for knobs in (KNOBS, SPLIT):
        cache = again.HybridCache(model, "scout", **knobs)
        assert type(cache) is not type(older)
        assert torch.equal(generate(model, cache), want)
        assert cache.get_seq_length() == older.get_seq_length()


def test_older_caches_and_policies_say_that_they_are_older(
    model: PreTrainedModel, older: hf_offload.HybridCache, again: ModuleType
) -> None:
    held = older.get_seq_length()
    for tokens in (1, 5):
        with pytest.raises(ValueError, match="earlier import"), torch.no_grad():
            model(prompt(1, tokens)[0], past_key_values=older)
    assert older.get_seq_length() == held
    with pytest.raises(TypeError, match="this Scout is of an earlier import"):
        again.HybridCache(model, hf_offload.Scout(budget=256))
