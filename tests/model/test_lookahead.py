"""Query prediction: equal to the real query bit for bit when given the true input, without side effects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from test_exactness import decode_logits
from tiny import FAMILIES, prompt, tiny_model
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization
from transformers import DynamicCache, PreTrainedModel

from hf_offload import HybridCache
from hf_offload.attention import interface as function
from hf_offload.model import lookahead
from hf_offload.model.hooks import find_layers
from hf_offload.model.lookahead import QueryPredictor, capture_query, probing

HAS_ADAPTER = {"llama": True, "qwen3": True, "gemma3": True, "gpt_neox": False, "opt": False}


def record_step(model: PreTrainedModel, cache: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """Inputs (hidden, args, kwargs) and real queries of all decoder layers in one decode step after a padded prompt."""
    ids, mask = prompt(2, 21)
    inputs, queries = [], []
    original = function.sdpa_attention_forward

    def record(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        queries.append(query)
        return original(module, query, *args, **kwargs)

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        inputs.append((hidden.clone(), args[1:], kwargs))

    with torch.no_grad():
        model(ids[:, :20], attention_mask=mask[:, :20], past_key_values=cache)
        handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in find_layers(model)[1]]
        monkeypatch.setattr(function, "sdpa_attention_forward", record)
        model(ids[:, 20:], attention_mask=mask, past_key_values=cache)
        monkeypatch.undo()
    for handle in handles:
        handle.remove()
    return inputs, queries


@pytest.mark.parametrize(
    ("error", "surfaces"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (NotImplementedError('Module [Parts] is missing the required "forward" function'), False),
        (KeyError("position_embeddings"), False),
    ],
    ids=lambda given: "" if isinstance(given, bool) else str(given)[:12],
)
def test_a_fault_is_not_taken_for_another_kind_of_layer(
    error: Exception, surfaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def adapter(*_: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(lookahead, "make_adapter", lambda layer: adapter)
    model, knobs = tiny_model("llama"), {"budget": 64, "sinks": 16, "recent": 0, "tier": "split", "block_size": 16}
    cache = HybridCache(model, "scout", lookahead="select", **knobs)
    with pytest.raises(type(error), match="memory") if surfaces else nullcontext():
        decode_logits(model, cache, *prompt(1, 40), None, 2)
    assert surfaces or all(predictor.adapter is None for predictor in cache._attachment.predictors)


def check_predictions(model: PreTrainedModel, cache: Any, adapter: bool) -> None:
    """Given a layer's true input, capture and predictor give the query that the layer attends with, bit for bit."""
    with pytest.MonkeyPatch.context() as patch:
        inputs, queries = record_step(model, cache, patch)
    for layer, (hidden, args, kwargs), query in zip(find_layers(model)[1], inputs, queries, strict=True):
        assert torch.equal(capture_query(layer, hidden, args, kwargs), query)
        predictor = QueryPredictor(layer)
        for _ in range(2):
            assert torch.equal(predictor(hidden, args, kwargs), query)
        assert (predictor.adapter is not None) == adapter
    assert cache.get_seq_length() == 21  # nothing was taken in
    assert not probing()


@pytest.mark.parametrize("family", FAMILIES)
def test_capture_and_adapter_give_the_real_query(family: str) -> None:
    model = tiny_model(family)
    check_predictions(model, DynamicCache(config=model.config), HAS_ADAPTER[family])


def test_an_adapter_that_differs_in_one_bit_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    inputs, queries = record_step(model, DynamicCache(), monkeypatch)
    right = lookahead.make_adapter(find_layers(model)[1][1])
    assert right is not None
    wrong = lambda hidden, kwargs: right(hidden, kwargs) * (1 + 2**-23)  # noqa: E731
    monkeypatch.setattr(lookahead, "make_adapter", lambda layer: wrong)
    predictor = QueryPredictor(find_layers(model)[1][1])
    for _ in range(2):
        assert torch.equal(predictor(*inputs[1]), queries[1])
        assert predictor.adapter is None


def minus(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return -output


def another_forward(projection: nn.Linear) -> None:
    real = projection.forward
    projection.forward = lambda x: -real(x)  # type: ignore[method-assign]


class Larger(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 1.5 * weight


CHANGES: dict[str, Callable[[Any], Any]] = {
    "hook of the norm": lambda layer: layer.input_layernorm.register_forward_hook(minus),
    "hook of the projection": lambda layer: layer.self_attn.q_proj.register_forward_hook(minus),
    "hook before the attention": lambda layer: layer.self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, kwargs | {"hidden_states": -kwargs["hidden_states"]}), with_kwargs=True
    ),
    "forward": lambda layer: another_forward(layer.self_attn.q_proj),
    "epsilon": lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 1.0),
    "pruned": lambda layer: prune.l1_unstructured(layer.self_attn.q_proj, "weight", 0.3),
    "parametrized": lambda layer: register_parametrization(layer.self_attn.q_proj, "weight", Larger()),
    "transposed": lambda layer: setattr(
        layer.self_attn.q_proj, "weight", nn.Parameter(layer.self_attn.q_proj.weight.detach().T.contiguous().T)
    ),
    "bias": lambda layer: setattr(layer.self_attn.q_proj, "bias", nn.Parameter(torch.randn(64))),
}
"""What may happen to a layer while a cache of its model lives."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_has_changed_is_looked_at_anew(change: str) -> None:
    """A model that has decoded goes on as one that was changed before its first step."""
    ids, _ = prompt(1, 60)

    def decode(model: PreTrainedModel, cache: Any) -> torch.Tensor:
        with torch.no_grad():
            return torch.cat([model(part, past_key_values=cache).logits[:, -1] for part in ids.split((57, 1, 1, 1), 1)])

    def changed() -> PreTrainedModel:
        torch.manual_seed(0)
        for layer in find_layers(model)[1]:
            CHANGES[change](layer)
        return model

    knobs: dict[str, Any] = {"budget": 32, "sinks": 8, "recent": 8, "block_size": 8, "synchronous_layers": (0,)}
    knobs |= {"tier": "split", "resident": 48, "lookahead": "attend"}
    model = tiny_model("llama")
    want = decode(changed(), HybridCache(model, **knobs))
    model = tiny_model("llama")
    before = HybridCache(model, **knobs)  # while it lives, what is known of the model's layers does
    decode(model, before)
    got = decode(changed(), cache := HybridCache(model, **knobs))
    assert cache.stats().as_dict()["layers"][2]["query_cosine"] is not None
    torch.testing.assert_close(got, want)


def test_a_layer_that_never_attends_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="lookahead='off'"):
        capture_query(nn.Linear(4, 4), torch.zeros(1, 1, 4), (), {})
    assert not probing()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_that_may_look_ahead_does(family: str) -> None:
    """With true inputs out of reach, the prediction is at least a query of the right layer, position and norm."""
    model = tiny_model(family)
    knobs: dict[str, Any] = {"lookahead": "attend", "synchronous_layers": (0,), "tier": "split", "resident": 64}
    cache = HybridCache(model, "scout", budget=256, sinks=16, recent=0, block_size=16, **knobs)
    ids, mask = prompt(2, 60)
    model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False)
    rows = cache.stats().as_dict()["layers"]
    predicted = [row["layer"] for row in rows if row["query_cosine"] is not None]
    # Gemma 3's first full layer (1) has none before it that could lend it its rotary positions.
    assert predicted == ([3] if family == "gemma3" else [1, 2, 3])


def test_layers_are_hooked_while_a_cache_that_looks_ahead_lives() -> None:
    model, (ids, _) = tiny_model("llama"), prompt(1, 40)
    layers, other = model.model.layers, HybridCache(model, "full")
    knobs: dict[str, Any] = {"lookahead": "select", "tier": "split", "resident": 64}
    ahead = HybridCache(model, "scout", budget=256, sinks=16, recent=0, block_size=16, **knobs)
    counts = []
    with torch.no_grad():
        for cache in (other, ahead, other):
            model(ids, past_key_values=cache)
            counts.append(sum(len(layer._forward_pre_hooks) for layer in layers))
        del ahead, cache
        model(ids[:, :1], past_key_values=other)
    assert counts == [0, 4, 4]
    assert not any(layer._forward_pre_hooks for layer in layers)
    again = HybridCache(model, "scout", budget=256, sinks=16, recent=0, block_size=16, **knobs)
    with torch.no_grad():
        model(ids, past_key_values=again)
    assert sum(len(layer._forward_pre_hooks) for layer in layers) == 4
