"""`cuda_graph="auto"`: which steps are captured, what is told of the others, and the work before a replay."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from recording import CpuRecorder
from tiny import SIZES, prompt, spread_weights, tiny_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from hf_offload import HybridCache
from hf_offload.graph import graph_support as support

from ._graphs import KNOBS, SCOUT, SELECTED, graph_cache, logits_of

HEADS = {"num_key_value_heads": 2, "head_dim": 16}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, **HEADS),
    "qwen3": Qwen3Config(**SIZES, **HEADS),
    "mistral": MistralConfig(**SIZES, **HEADS, sliding_window=None),
    "gemma2": Gemma2Config(**SIZES, **HEADS, layer_types=["full_attention"] * 4, query_pre_attn_scalar=16),
}


def model_of(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    return spread_weights(
        AutoModelForCausalLM.from_config(config, attn_implementation="hybrid_sparse", dtype=torch.float32)
    )


def cache_of(model: PreTrainedModel, graph: bool, *, auto: bool = True) -> Any:
    if graph:
        return graph_cache(model, "scout", auto=auto, **SCOUT)
    return HybridCache(model, "scout", **KNOBS, **SCOUT)


@contextmanager
def told_of() -> Iterator[list[str]]:
    """The warnings of steps that run eagerly."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in found if warning.category is RuntimeWarning]


def steps(model: PreTrainedModel, cache: HybridCache, first: int, stop: int, **given: Any) -> torch.Tensor:
    ids, _ = prompt(1, stop)
    with torch.no_grad():
        if not cache.get_seq_length():
            model(ids[:, :first], past_key_values=cache)
        rows = [model(ids[:, i : i + 1], past_key_values=cache, **given).logits for i in range(first, stop)]
    return torch.cat(rows, 1)


def test_steps_that_are_checked_run_eagerly_and_the_others_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, mask) = tiny_model("llama"), prompt(1, 180)
    want = logits_of(model, HybridCache(model, "scout", **KNOBS, **SCOUT), ids, mask)
    recorded, replay = [], CpuRecorder.replay
    monkeypatch.setattr(CpuRecorder, "replay", lambda self: recorded.append(self) or replay(self))
    cache = graph_cache(model, "scout", auto=True, check_every=4, **SCOUT)
    with told_of() as told:
        assert torch.equal(logits_of(model, cache, ids, mask), want)
    assert not told
    # Of 30 steps 8 are checked (0, 4, 8, …) and the first plain one runs eagerly: nothing is captured twice.
    assert len(recorded) == 21
    assert len(set(map(id, recorded))) == 1
    stats = cache.stats().as_dict()
    assert sum(len(layer["checked_errors"]) for layer in stats["layers"]) == 8 * 4
    assert 0 < stats["missed_mass"] < 1


def test_layers_that_counted_a_failed_step_are_checked_as_the_others_are() -> None:
    model = tiny_model("llama")
    cache = graph_cache(model, "scout", auto=True, check_every=4, **SCOUT)
    steps(model, cache, 150, 160)
    for layer in cache.layers[:2]:
        layer.stats.steps += 1
    before = [layer["checked_errors"] for layer in cache.stats().as_dict()["layers"]]
    steps(model, cache, 160, 200)
    after = [layer["checked_errors"] for layer in cache.stats().as_dict()["layers"]]
    assert all(len(now) >= len(old) + 2 * 4 for now, old in zip(after, before, strict=True))


@pytest.mark.parametrize("family", CONFIGS)
def test_plain_models_are_captured(family: str) -> None:
    model, (ids, mask) = model_of(CONFIGS[family]), prompt(1, 160)
    want = logits_of(model, HybridCache(model, "scout", **KNOBS, **SCOUT), ids, mask)
    cache = graph_cache(model, "scout", auto=True, **SCOUT)
    with told_of() as told:
        assert torch.equal(logits_of(model, cache, ids, mask), want)
    assert not told
    assert cache.graph._capture is not None


class Adapter(nn.Module):
    """Stands for a module of a package that nobody here knows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.inner(x)


def hook(model: Any) -> None:
    model.model.layers[2].mlp.register_forward_hook(lambda module, args, output: output * 2)


def adapt(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = Adapter(model.model.layers[1].mlp.up_proj)


@pytest.mark.parametrize("when", [150, 155])
@pytest.mark.parametrize(("change", "told"), [(hook, "a hook of model.layers.2.mlp"), (adapt, "whose state a replay")])
def test_what_a_replay_would_not_run_is_run_and_told(change: Callable[[Any], None], told: str, when: int) -> None:
    """Before the first step and between two replays; the steps are those of a cache without graphs."""
    rows = []
    for graph in (False, True):
        model = tiny_model("llama")
        cache = (
            graph_cache(model, "scout", auto=True, **SCOUT) if graph else HybridCache(model, "scout", **KNOBS, **SCOUT)
        )
        first = [steps(model, cache, 150, when)] if when > 150 else [steps(model, cache, 150, 151)]
        change(model)
        with told_of() as found:
            rest = steps(model, cache, cache.get_seq_length(), 160)
        rows.append(torch.cat([*first, rest], 1))
    assert torch.equal(*rows)
    assert [told in message for message in found] == [True]
    assert cache.graph.off
    assert cache.graph._capture is None


def replace(model: Any) -> None:
    layer = model.model.layers[1].mlp
    layer.up_proj.weight = nn.Parameter(layer.up_proj.weight * 2)


def move(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data * 2


def swap(model: Any) -> None:
    layer = model.model.layers[1].mlp
    fresh = nn.Linear(*reversed(layer.up_proj.weight.shape), bias=False)
    with torch.no_grad():
        fresh.weight.copy_(layer.up_proj.weight * 2)
    layer.up_proj = fresh


@pytest.mark.parametrize("change", [replace, move, swap])
@pytest.mark.parametrize("auto", [False, True])
def test_weights_that_are_replaced_are_captured_anew(change: Callable[[Any], None], auto: bool) -> None:
    rows = []
    for graph in (False, True):
        model = tiny_model("llama")
        cache = (
            graph_cache(model, "scout", auto=auto, **SCOUT) if graph else HybridCache(model, "scout", **KNOBS, **SCOUT)
        )
        first = steps(model, cache, 150, 156)
        before = cache.graph and cache.graph._capture
        change(model)
        rows.append(torch.cat([first, steps(model, cache, 156, 165)], 1))
    assert torch.equal(*rows)
    assert cache.graph._capture is not None
    assert cache.graph._capture is not before


@pytest.mark.parametrize(
    ("given", "told"),
    [({"output_hidden_states": True}, "a step returns hidden states"), ({}, "under autocast a replay")],
)
def test_single_steps_run_eagerly(given: dict[str, Any], told: str) -> None:
    model = tiny_model("llama").bfloat16()
    cache = graph_cache(model, "scout", auto=True, **SCOUT)
    with told_of() as found:
        steps(model, cache, 150, 151)
        with torch.autocast("cpu", torch.bfloat16, enabled=not given):
            steps(model, cache, 151, 156, **given)
        assert cache.graph._capture is None
        steps(model, cache, 156, 160)
    assert [told in message for message in found] == [True]
    assert cache.graph._capture is not None  # the others are captured


def test_a_step_with_other_arguments_runs_eagerly_first() -> None:
    """A capture allows no compilation and no new buffers: each kind of step is rehearsed."""
    model = tiny_model("llama")
    cache = graph_cache(model, "scout", auto=True, **SCOUT)
    steps(model, cache, 150, 155)
    captured = cache.graph._capture
    steps(model, cache, 155, 156, logits_to_keep=1)
    assert cache.graph._capture is captured
    steps(model, cache, 156, 157, logits_to_keep=1)
    assert cache.graph._capture is not captured
    captured = cache.graph._capture
    steps(model, cache, 157, 158, logits_to_keep=2)  # another value
    assert cache.graph._capture is captured
    steps(model, cache, 158, 159, logits_to_keep=2)
    assert cache.graph._capture is not captured


def test_a_step_that_reads_a_value_on_the_host_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for graph in (False, True):
        model: Any = tiny_model("llama")
        forward = model.model.layers[2].mlp.forward

        def reads(x: torch.Tensor, forward: Any = forward) -> torch.Tensor:
            found: torch.Tensor = forward(x)
            if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
                raise RuntimeError("operation not permitted when stream is capturing")
            return found

        monkeypatch.setattr(model.model.layers[2].mlp, "forward", reads)
        cache = (
            graph_cache(model, "scout", auto=True, **SELECTED)
            if graph
            else HybridCache(model, "scout", **KNOBS, **SELECTED)
        )
        with told_of() as found:
            rows.append(steps(model, cache, 150, 160))
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-5)
    assert ["cannot be captured (operation not permitted" in message for message in found] == [True]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("lacking_room", lambda *args: "1 MiB of device memory is free", "1 MiB of device memory is free"),
        ("torch_version", lambda: (2, 11), "may end the process"),
    ],
)
def test_what_speaks_against_a_capture_is_told_once(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, told: str
) -> None:
    monkeypatch.setattr(support, name, value)
    monkeypatch.setattr("hf_offload.graph.cuda_graph.lacking_room", support.lacking_room)
    model = tiny_model("opt")
    cache = graph_cache(model, "scout", auto=True, **SCOUT)
    with told_of() as found:
        steps(model, cache, 150, 160)
    assert [told in message for message in found] == [True]
    assert cache.graph.off


def test_a_model_that_cannot_be_captured_is_told_of_where_a_graph_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on the CPU, and a policy whose steps are never captured, say nothing."""
    model = tiny_model("gemma3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HybridCache(model, "scout", tier="split")
        monkeypatch.setattr("hf_offload.hybrid_cache.on_device", lambda model: True)
        HybridCache(model, "hgca", tier="split")
    with pytest.warns(RuntimeWarning, match="without a CUDA graph .*: the model must be on one CUDA device"):
        HybridCache(model, "scout", tier="split")


def test_little_is_done_before_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step was prepared while the device was at work on the one before."""
    model = model_of(LlamaConfig(**SIZES | {"num_hidden_layers": 36}, **HEADS))
    cache = graph_cache(model, "scout", auto=True, **SCOUT, lookahead="attend")
    steps(model, cache, 150, 156)
    calls, counted = [0], []

    def count(frame: Any, event: str, argument: Any) -> None:
        calls[0] += event == "call"

    replay = CpuRecorder.replay

    def replayed(recorder: CpuRecorder) -> None:
        sys.setprofile(None)
        counted.append(calls[0])
        replay(recorder)

    monkeypatch.setattr(CpuRecorder, "replay", replayed)
    ids, _ = prompt(1, 162)
    with torch.no_grad():
        for i in range(156, 162):  # the fifth fills a block
            calls[0] = 0
            sys.setprofile(count)
            try:
                model(ids[:, i : i + 1], past_key_values=cache)
            finally:
                sys.setprofile(None)
    assert len(counted) == 6
    assert max(counted) <= 300, counted


class Quantised(torch.Tensor):
    """Stands for weights of a class of their own, which have no address."""

    def data_ptr(self) -> int:
        raise RuntimeError("no storage")


def test_weights_without_an_address_are_known_as_objects() -> None:
    model = tiny_model("llama")
    layer: Any = model.model.layers[0].mlp.up_proj
    del layer.weight
    layer.register_buffer("weight", torch.ones(3).as_subclass(Quantised))
    state = support.ModelState(model)
    assert state.holds()
    layer.weight = torch.ones(3).as_subclass(Quantised)
    assert not state.holds()
    del layer.weight
    assert not state.holds()


def test_what_happens_to_a_cache_between_two_replays_is_heeded() -> None:
    model, (ids, mask) = tiny_model("llama"), prompt(2, 175)
    rows = []
    for graph in (False, True):
        cache = (
            graph_cache(model, "scout", auto=True, **SCOUT) if graph else HybridCache(model, "scout", **KNOBS, **SCOUT)
        )
        found = []
        with torch.no_grad():
            model(ids[:, :150], attention_mask=mask[:, :150], past_key_values=cache)

            def step(i: int, cache: HybridCache = cache, seen: torch.Tensor = mask) -> torch.Tensor:
                seen = seen[:, : i + 1]
                positions = seen.sum(-1, keepdim=True) - 1
                given = {"attention_mask": seen, "position_ids": positions, "past_key_values": cache}
                return model(ids[:, i : i + 1], **given).logits

            found += [step(i) for i in range(150, 160)]
            cache.crop(-3)
            found += [step(i) for i in range(157, 162)]
            fork = cache.fork()
            found += [step(i) for i in range(162, 165)]
            found.append(model(ids[:, 162:170], attention_mask=mask[:, :170], past_key_values=fork).logits[:, -1:])
            found += [step(i) for i in range(165, 168)]
            changed = mask.clone()
            changed[0, 20:30] = 0
            found += [step(i, seen=changed) for i in range(168, 175)]
        rows.append(torch.cat(found, 1))
    assert torch.equal(*rows)
