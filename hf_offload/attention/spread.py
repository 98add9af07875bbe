"""Models whose weights are offloaded, or spread over devices or processes: where they compute, what is refused."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_HOOKS = "accelerate.hooks"
_KEYS = ("k_proj", "qkv_proj", "query_key_value")
_PROJECTIONS = (*_KEYS, "q_proj", "v_proj")
"""Modules that give queries, keys and values, by the names that plans of tensor parallelism use."""


def compute_devices(model: nn.Module) -> set[torch.device]:
    """Where the modules of a model compute: where their weights lie, or where accelerate's hooks bring them to."""
    found = {parameter.device for parameter in model.parameters()}
    for module in model.modules():
        for hook in _hooks(module):
            place = getattr(hook, "execution_device", None)
            if place is not None:
                found.add(torch.device(place))
    return {device for device in found if device.type != "meta"}


def on_device(model: nn.Module) -> bool:
    """Whether any part of the model computes on a device beside the CPU."""
    return any(device.type != "cpu" for device in compute_devices(model))


def two_memories(model: nn.Module, tier: str | None) -> bool:
    """Whether any layer's blocks lie in two memories, the model's device and the host."""
    return tier == "split" or (tier is None and on_device(model))


def ranks_of(model: nn.Module) -> int:
    """Over how many processes tensor parallelism has spread the heads of a model."""
    return getattr(model, "tp_size", None) or 1


def exchanges(model: nn.Module) -> bool:
    """Whether computing a query takes part in an exchange of all ranks, each of which must then do the very same."""
    return bool(_styles(model, _PROJECTIONS) - {"colwise"})


def _styles(model: nn.Module, names: tuple[str, ...]) -> set[str]:
    """How tensor parallelism has spread modules of these names; nothing without it."""
    plan = getattr(model, "tp_plan", None) if ranks_of(model) > 1 else None
    return {style for name, style in (plan or {}).items() if name.rpartition(".")[2] in names}


def check_ranks(model: PreTrainedModel, config: Any) -> None:
    """Raise ValueError if a model is spread over processes in a way that a cache cannot follow.

    Args:
        model: the model.
        config: of its decoder.
    """
    stages = getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1
    if stages > 1:
        raise ValueError(
            f"{type(model).__name__} is spread over {stages} processes by its layers (pp_size={stages}), of which "
            "HybridCache would see a part; use tp_plan, or device_map in one process"
        )
    ranks = ranks_of(model)
    if "colwise" not in _styles(model, _KEYS):
        return  # every rank holds all heads
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % ranks:
            raise ValueError(
                f"{type(model).__name__} has {name}={heads}, which {ranks} ranks of tensor parallelism cannot share "
                "evenly; start as many ranks as divide it, or use device_map in one process"
            )


def hook_of(module: nn.Module | None) -> Any:
    """What accelerate has hung on a module, such as a hook that brings its weights for each forward; None without."""
    return None if module is None else module.__dict__.get("_hf_hook")


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    hook = hook_of(module)
    return () if hook is None else getattr(hook, "hooks", (hook,))


def brings_weights(module: nn.Module) -> bool:
    """Whether weights are there when a module is called by itself: they lie on a device, or its hooks bring them.

    It must be asked: torch gives memory that nobody wrote where CPU tensors meet weights that are away ("meta").
    """
    hooks = _hooks(module)
    if any(getattr(hook, "place_submodules", False) for hook in hooks):
        return True
    away = any(parameter.is_meta for parameter in module.parameters(recurse=False))
    return bool(hooks or not away) and all(map(brings_weights, module.children()))


def check_whole(layer: nn.Module) -> None:
    """Raise ValueError if a layer's weights are not there for its `forward`, so that its query cannot be predicted.

    Args:
        layer: a decoder layer.
    """
    cause = "" if brings_weights(layer) else "has weights that nothing brings when its forward is called"
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        if isinstance(layer, (FSDPModule, FullyShardedDataParallel)):
            cause = "is sharded by FSDP, which gathers its weights only when the layer runs"
    if cause:
        raise ValueError(f"{type(layer).__name__} {cause}, so its query cannot be predicted; use lookahead='off'")


def leave_hooks(traceback: TracebackType | None, output: torch.Tensor) -> None:
    """Let accelerate's hooks put away what they had brought for forwards that an exception has cut short.

    Args:
        traceback: of the exception.
        output: stands for what the forwards did not return.
    """
    entered: list[Any] = []
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        if frame.f_globals.get("__name__") == _HOOKS and frame.f_code.co_name == "new_forward":
            entered.append(frame.f_locals["module"])
    for module in reversed(entered):
        module._hf_hook.post_forward(module, output)
