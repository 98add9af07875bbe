"""`cuda_graph="auto"`: what makes steps run eagerly, for how long, and what is told of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recording import CpuRecorder
from tiny import tiny_model
from torch import nn

from hf_offload import HybridCache
from hf_offload.graph import cuda_graph
from hf_offload.graph import graph_support as support

from ._graphs import AHEAD, SCOUT, SELECTED, counted, eager_cache, graph_cache, model_of, run, told_of
from .packages import fused, of_package

Change = Callable[[Any, Any, pytest.MonkeyPatch], None]


def hook(model: Any, *rest: Any) -> None:
    model.model.layers[2].mlp.register_forward_hook(lambda module, args, output: output * 2)


def module(made: type[nn.Module]) -> Change:
    def change(model: Any, *rest: Any) -> None:
        model.model.layers[1].mlp.up_proj = made(model.model.layers[1].mlp.up_proj)

    return change


def fall_back(model: Any, cache: Any, patch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache.fallback._replace(1, "its keys fit no block")


def little_memory(model: Any, cache: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_graph, "lacking_room", lambda *_: "1 MiB of device memory is free")


def old_torch(model: Any, cache: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(support, "torch_version", lambda: (2, 11))


UNKNOWN = of_package("a_package", "Adapter", lambda self, x: self.inner(x) + self.inner(x))
BEFORE, BETWEEN = 155, 159
REASONS: list[tuple[Change, int, str]] = [
    (hook, BEFORE, "a hook of model.layers.2.mlp"),
    (hook, BETWEEN, "a hook of model.layers.2.mlp"),
    (module(UNKNOWN), BEFORE, "whose state a replay"),
    (module(UNKNOWN), BETWEEN, "whose state a replay"),
    # It looks for outliers on the host; the others have a cache of their own, or adapters of another kind.
    (module(of_package("bitsandbytes.nn.modules", "Linear8bitLt", fused)), BEFORE, "Linear8bitLt"),
    (module(of_package("awq.modules.fused.attn", "QuantAttentionFused", fused)), BEFORE, "QuantAttentionFused"),
    (module(of_package("peft.tuners.ia3.layer", "Linear", fused)), BEFORE, "Linear"),
    (fall_back, BEFORE, "layer 1 keeps Transformers' own cache"),
    (little_memory, BEFORE, "1 MiB of device memory is free"),
    (old_torch, BEFORE, "may end the process"),
]
"""What is changed, before the first step or between two replays; what is told."""


@pytest.mark.parametrize(("change", "when", "reason"), REASONS, ids=[f"{i}-{row[1]}" for i, row in enumerate(REASONS)])
def test_what_a_replay_would_not_do_is_done_and_told_once(
    change: Change, when: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    for graph in (False, True):
        model = model_of("opt" if change is old_torch else "llama")
        cache = graph_cache(model, "scout", auto=True, **SCOUT) if graph else eager_cache(model, "scout", **SCOUT)
        first = run(model, cache, (BEFORE, when - BEFORE))
        change(model, cache, monkeypatch)
        with told_of() as told, counted() as count:
            rows.append(torch.cat([first, run(model, cache, (when, 6))], 1))
    assert torch.equal(*rows)
    assert [reason in message for message in told] == [True]
    assert cache.graph.off
    assert not count


@pytest.mark.parametrize(
    ("given", "reason"),
    [({"output_hidden_states": True}, "a step returns hidden states"), ({}, "under autocast a replay")],
)
def test_single_steps_run_eagerly(given: dict[str, Any], reason: str) -> None:
    model = model_of("llama", num_attention_heads=6, hidden_size=96).bfloat16()  # whose kernels others use
    cache = graph_cache(model, "scout", auto=True, **SCOUT)
    with told_of() as told, counted() as count:
        run(model, cache, (150, 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=not given):
            run(model, cache, (151, 5), **given)
        assert not count
        run(model, cache, (156, 4))
    assert [reason in message for message in told] == [True]
    assert count["record"] == 1  # the others are captured


def fail_in(name: str, error: Exception) -> Change:
    """A recording that fails when the step's work is done, or a replay that fails."""

    def change(model: Any, cache: Any, patch: pytest.MonkeyPatch) -> None:
        done = getattr(CpuRecorder, name)

        def fails(*args: Any) -> None:
            if name == "record":
                done(*args)
            raise error

        patch.setattr(CpuRecorder, name, fails)

    return change


def read_on_the_host(model: Any, cache: Any, patch: pytest.MonkeyPatch) -> None:
    forward = model.model.layers[2].mlp.forward

    def reads(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = forward(x)
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return found

    patch.setattr(model.model.layers[2].mlp, "forward", reads)


REFUSED = RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("llama", read_on_the_host, "operation not permitted"),
        ("gemma2", fail_in("record", REFUSED), "operation not permitted"),
        ("gemma3", fail_in("replay", torch.OutOfMemoryError("no memory")), "no memory"),
    ],
)
def test_a_capture_or_first_replay_that_fails_leaves_the_cache_as_it_was(
    monkeypatch: pytest.MonkeyPatch, family: str, change: Change, reason: str
) -> None:
    model = model_of(family)
    want = run(model, eager_cache(model, "scout", **SELECTED), (150, 12))
    cache = graph_cache(model, "scout", auto=True, **SELECTED)
    change(model, cache, monkeypatch)
    with told_of() as told:
        torch.testing.assert_close(run(model, cache, (150, 12)), want, rtol=1e-4, atol=1e-5)
    assert [reason in message for message in told] == [True]


def test_a_capture_that_lacked_memory_is_tried_again_at_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    cache = graph_cache(model, "scout", auto=True, **SELECTED)
    lacking = ["8 KiB of device memory are free, and the graph takes 64 MiB"]
    monkeypatch.setattr(cuda_graph, "lacking_room", lambda *_: lacking[0] if lacking else None)
    with told_of() as told, counted() as count:
        run(model, cache, (150, 6))
        lacking.clear()
        run(model, cache, (156, 4))
        assert not count  # until the next turn
        run(model, cache, (165, 5))
        assert count["replay"]
    assert len(told) == 1
    cache.reset()
    run(model, cache, (150, 6))  # whose placement has the number of the one before
    assert not cache.graph.off


def test_models_that_are_not_captured_are_told_of_where_a_graph_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on the CPU, and a policy whose steps are never captured, say nothing."""
    with pytest.raises(ValueError, match=r"cuda_graph=True: the model must be on one CUDA device.* is on cpu"):
        HybridCache(tiny_model("llama"), "scout", cuda_graph=True)
    model = tiny_model("gemma3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HybridCache(model, "scout", tier="split")
        monkeypatch.setattr("hf_offload.hybrid_cache.on_device", lambda model: True)
        HybridCache(model, "hgca", tier="split")
    told = "without a CUDA graph and take several times as long, and none looks a layer ahead: the model must be on one"
    with pytest.warns(RuntimeWarning, match=told):
        HybridCache(model, "scout", tier="split")


def test_eager_steps_look_no_layer_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the model were on a device: there "auto" looks ahead in captured steps."""
    model = model_of("llama")
    cache = graph_cache(model, "scout", auto=True, **SCOUT)
    monkeypatch.setattr(type(cache.layers[0]), "on_device", property(lambda self: self.is_initialized))
    run(model, cache, (150, 2))
    assert cache.looks_ahead
    with told_of():
        cache.graph.give_up("a test says so")
    assert not cache.looks_ahead
    ahead = eager_cache(model, "scout", **AHEAD)
    run(model, ahead, (150, 2))
    assert ahead.looks_ahead  # who asks for it has it


class Quantised(torch.Tensor):
    """Stands for weights of a class of their own, which have no address."""

    def data_ptr(self) -> int:
        raise RuntimeError("no storage")


def test_weights_without_an_address_are_known_as_objects() -> None:
    model = model_of("llama")
    layer: Any = model.model.layers[0].mlp.up_proj
    del layer.weight
    layer.register_buffer("weight", torch.ones(3).as_subclass(Quantised))
    state = support.ModelState(model)
    assert state.holds()
    layer.weight = torch.ones(3).as_subclass(Quantised)
    assert not state.holds()
    del layer.weight
    assert not state.holds()
