"""Modules of other packages in captured steps, and steps that run eagerly until there is a reason to try again."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tiny import tiny_model
from torch import nn
from torch.nn import functional

from hf_offload import HybridCache
from hf_offload.graph import cuda_graph
from hf_offload.graph import graph_support as support

from ._graphs import KNOBS, SCOUT, SELECTED, graph_cache
from .test_auto_graph import steps, told_of


def of_package(module: str, name: str, forward: Any) -> type[nn.Module]:
    """A class of a module as a package would define it, over a layer that it replaces."""

    def begin(self: Any, inner: nn.Module) -> None:
        nn.Module.__init__(self)
        self.inner = inner

    return type(name, (nn.Module,), {"__module__": module, "__init__": begin, "forward": forward})


def in_four_bits(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As bitsandbytes: the type to compute in is settled by the first call."""
    self.compute_dtype = getattr(self, "compute_dtype", x.dtype)
    return self.inner(x.to(self.compute_dtype))


def packed(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As GPTQ and AWQ: kernels by shape."""
    return self.inner(x) if x.shape[-2] < 8 else functional.linear(x, self.inner.weight)


def fused(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.inner(x)


def adapted(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As peft: active adapters add their part."""
    if self._disable_adapters:
        return self.inner(x)
    return self.inner(x) * (1 + sum(self.scaling[name] for name in self._active_adapter))


KNOWN = {
    "4 bits": ("bitsandbytes.nn.modules", "Linear4bit", in_four_bits),
    "gptq": ("gptqmodel.nn_modules.qlinear.marlin", "MarlinQuantLinear", packed),
    "awq": ("awq.modules.linear.gemm", "WQLinear_GEMM", packed),
    "liger": ("liger_kernel.transformers.rms_norm", "LigerRMSNorm", fused),
}


def both(change: Any) -> list[Any]:
    """Two models with the same change, a cache of each with and without a graph."""
    found: list[Any] = []
    for graph in (False, True):
        model: Any = tiny_model("llama")
        change(model)
        cache = (
            graph_cache(model, "scout", auto=True, **SCOUT) if graph else HybridCache(model, "scout", **KNOBS, **SCOUT)
        )
        found.append((model, cache))
    return found


@pytest.mark.parametrize("package", KNOWN)
def test_packages_without_a_state_are_captured(package: str) -> None:
    module, name, forward = KNOWN[package]

    def change(model: Any) -> None:
        for layer in model.model.layers:
            if package == "liger":
                layer.input_layernorm = of_package(module, name, forward)(layer.input_layernorm)
            else:
                layer.mlp.up_proj = of_package(module, name, forward)(layer.mlp.up_proj)

    pairs = both(change)
    with told_of() as told:
        rows = [steps(model, cache, 150, 165) for model, cache in pairs]
    assert not told
    assert torch.equal(*rows)
    assert pairs[1][1].graph._capture is not None


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("bitsandbytes.nn.modules", "Linear8bitLt"),  # looks for outliers on the host
        ("awq.modules.fused.attn", "QuantAttentionFused"),  # has a cache of its own
        ("peft.tuners.ia3.layer", "Linear"),
    ],
)
def test_other_modules_run_eagerly(module: str, name: str) -> None:
    def change(model: Any) -> None:
        made = of_package(module, name, fused)
        model.model.layers[1].mlp.up_proj = made(model.model.layers[1].mlp.up_proj)

    model, cache = both(change)[1]
    with told_of() as told:
        steps(model, cache, 150, 155)
    assert [name in message for message in told] == [True]
    assert cache.graph.off


def test_another_adapter_is_captured_anew() -> None:
    """A switch, another scale, and adapters that are disabled, between two replays each."""

    def change(model: Any) -> None:
        made = of_package("peft.tuners.lora.layer", "Linear", adapted)(model.model.layers[2].mlp.up_proj)
        made._active_adapter, made._disable_adapters, made.scaling = ["a"], False, {"a": 0.5, "b": 0.25}
        model.model.layers[2].mlp.up_proj = made

    rows = []
    for model, cache in both(change):
        found, adapter = [steps(model, cache, 150, 156)], model.model.layers[2].mlp.up_proj
        for number, (name, value) in enumerate(
            (("_active_adapter", ["b"]), ("_disable_adapters", True), ("_disable_adapters", False))
        ):
            setattr(adapter, name, value)
            found.append(steps(model, cache, 156 + 6 * number, 162 + 6 * number))
        adapter.scaling["b"] = 1.0
        rows.append(torch.cat([*found, steps(model, cache, 174, 180)], 1))
    assert torch.equal(*rows)
    assert cache.graph._capture is not None


def test_a_capture_that_lacked_memory_is_tried_again_at_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    cache = graph_cache(model, "scout", auto=True, **SELECTED)
    lacking = ["8 KiB of device memory are free, and the graph takes 64 MiB"]
    monkeypatch.setattr(cuda_graph, "lacking_room", lambda *_: lacking[0] if lacking else None)
    with told_of() as told:
        steps(model, cache, 150, 156)
    assert len(told) == 1
    assert cache.graph.off
    lacking.clear()
    steps(model, cache, 156, 160)
    assert cache.graph.off  # until the next turn
    with torch.no_grad():
        model(torch.full((1, 5), 7), past_key_values=cache)
    steps(model, cache, 165, 170)
    assert not cache.graph.off
    assert cache.graph._capture is not None
    cache.reset()
    steps(model, cache, 150, 156)  # whose placement has the number of the one before
    assert not cache.graph.off


def test_a_layer_that_fell_back_is_told_of() -> None:
    """Its cache is Transformers' own, which no capture may change."""
    model = tiny_model("llama")
    cache = graph_cache(model, "scout", auto=True, **SCOUT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache.fallback._replace(1, "its keys fit no block")
        with told_of() as told:
            steps(model, cache, 150, 155)
    assert ["layer 1 keeps Transformers' own cache" in message for message in told] == [True]
    assert cache.graph.off


def test_eager_steps_look_no_layer_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the model were on a device: there "auto" looks ahead in captured steps."""
    model = tiny_model("llama")
    cache = graph_cache(model, "scout", auto=True, **SCOUT)
    monkeypatch.setattr(type(cache.layers[0]), "on_device", property(lambda self: self.is_initialized))
    steps(model, cache, 150, 152)
    assert cache.looks_ahead
    with told_of():
        cache.graph.give_up("a test says so")
    assert not cache.looks_ahead
    ahead = HybridCache(model, "scout", **KNOBS, **SCOUT, lookahead="attend")
    steps(model, ahead, 150, 152)
    assert ahead.looks_ahead  # who asks for it has it


def test_the_warning_says_what_it_costs() -> None:
    with pytest.warns(RuntimeWarning, match="take several times as long, and none looks a layer ahead: it is a test"):
        support.tell_eager("it is a test", 1)
