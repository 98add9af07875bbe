"""Checks of models for `HybridCache`, and their devices, ranks and offloaded weights."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionAndFullAttentionLayer

NAME = "hybrid_sparse"
"""Name of the attention implementation: attention function and mask function."""


def stock_layers(config: Any) -> list[Any]:
    """Return the layers that `DynamicCache` makes for a decoder config."""
    return DynamicCache(config=config).layers or [DynamicLayer() for _ in range(config.num_hidden_layers)]


def inside(model: Any) -> str:
    """Return the end of an error message on an object that is no model but wraps one, else an empty string."""
    wrappers = [name for name in ("_orig_mod", "module") if hasattr(model, name)]
    return f"; use the model inside (model.{wrappers[0]})" if wrappers else ""


def image_layers(config: Any) -> set[int]:
    """Return the numbers of the layers that attend image tokens (Mllama's cross-attention)."""
    return set(getattr(config, "cross_attention_layers", None) or ())


def held_layers(config: Any, stock: list[Any]) -> list[bool]:
    """Return which of `DynamicCache`'s layers a `HybridCache` holds: those with full attention over the text."""
    images = image_layers(config)
    return [type(layer) is DynamicLayer and index not in images for index, layer in enumerate(stock)]


def check_held(model: str, stock: list[Any], held: list[bool]) -> None:
    """Check that a cache holds a layer.

    Args:
        model: the model's name.
        stock: `DynamicCache`'s layers for it.
        held: as `held_layers` returns.

    Raises:
        ValueError: it holds none.
    """
    if any(held):
        return
    reason = "sliding windows and linear layers stay as they are"
    if any(isinstance(layer, LinearAttentionAndFullAttentionLayer) for layer in stock):
        reason = "its cache keeps keys, values and a recurrent state in one layer, which is not split"
    raise ValueError(
        f"no layer of {model} is plain full attention ({reason}), so there is nothing to offload; use DynamicCache"
    )


def check_model(model: PreTrainedModel) -> Any:
    """Check that a model can run with a `HybridCache`; return the config of its decoder.

    Raises:
        TypeError: not a Transformers model.
        ValueError: the model does not support, or does not use, the `hybrid_sparse` attention function.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, torch.nn.Module) or config is None:
        raise TypeError(f"model must be a Transformers model, not {type(model).__name__}{inside(model)}")
    if hasattr(model, "_orig_mod"):
        raise ValueError(f"a model compiled by torch.compile does not run a HybridCache{inside(model)}")
    if str(getattr(model, "peft_type", "")).endswith("PREFIX_TUNING"):
        raise ValueError("PEFT's prefix tuning brings a cache of its own, which HybridCache cannot take the place of")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder model, which HybridCache does not serve; use DynamicCache"
        )
    decoder = config.get_text_config(decoder=True)
    if not hasattr(decoder, "num_hidden_layers"):
        raise ValueError(
            f"{type(model).__name__} is no single stack of decoder layers, which HybridCache needs; use DynamicCache"
        )
    check_attention(model)
    used = decoder._attn_implementation
    if used != NAME:
        raise ValueError(
            f"{type(model).__name__} runs with attn_implementation={used!r}, which reads no HybridCache; load it with "
            f"attn_implementation={NAME!r} or call model.set_attn_implementation({NAME!r})"
        )
    check_ranks(model, decoder)
    return decoder


def check_attention(model: PreTrainedModel) -> None:
    """Raise ValueError if the model's attention ignores `attn_implementation` (GPT-J, BLOOM)."""
    text: Any = model.get_decoder() if hasattr(model, "get_decoder") else model  # a vision tower does not matter
    settable = getattr(text, "_can_set_attn_implementation", None)
    if settable is not None and not settable():
        raise ValueError(
            f"{type(model).__name__} ignores attn_implementation, so HybridCache cannot serve it; use DynamicCache"
        )


_HOOKS = "accelerate.hooks"
_KEYS = ("k_proj", "qkv_proj", "query_key_value")
_PROJECTIONS = (*_KEYS, "q_proj", "v_proj")
"""Names of the modules that project queries, keys and values, as in plans of tensor parallelism."""


def compute_devices(model: nn.Module) -> set[torch.device]:
    """Return the devices on which a model computes: those of its weights, and the targets of accelerate's hooks."""
    devices = {parameter.device for parameter in model.parameters()}
    for module in model.modules():
        for hook in _hooks(module):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                devices.add(torch.device(device))
    return {device for device in devices if device.type != "meta"}


def on_device(model: nn.Module) -> bool:
    """Whether any module of the model computes on a device other than the CPU."""
    return any(device.type != "cpu" for device in compute_devices(model))


def has_two_memories(model: nn.Module, tier: str | None) -> bool:
    """Whether a cache of the model has two memories, device and host, in any layer."""
    return tier == "split" or (tier is None and on_device(model))


def ranks_of(model: nn.Module) -> int:
    """Return the number of ranks of a model's tensor parallelism; 1 without it."""
    return getattr(model, "tp_size", None) or 1


def exchanges(model: nn.Module) -> bool:
    """Whether the computation of a query exchanges data between ranks, all of which must then run the same calls."""
    return bool(_styles(model, _PROJECTIONS) - {"colwise"})


def _styles(model: nn.Module, names: tuple[str, ...]) -> set[str]:
    """Return the styles of tensor parallelism of modules with these names; an empty set without it."""
    plan = getattr(model, "tp_plan", None) if ranks_of(model) > 1 else None
    return {style for name, style in (plan or {}).items() if name.rpartition(".")[2] in names}


def check_ranks(model: PreTrainedModel, config: Any) -> None:
    """Check how a model is spread over processes.

    Args:
        model: the model.
        config: config of its decoder.

    Raises:
        ValueError: pipeline stages, or heads that the ranks cannot share evenly.
    """
    stages = getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1
    if stages > 1:
        raise ValueError(
            f"{type(model).__name__} is spread over {stages} processes by its layers (pp_size={stages}), of which "
            "HybridCache would see a part; use tp_plan, or device_map in one process"
        )
    ranks = ranks_of(model)
    if "colwise" not in _styles(model, _KEYS):
        return  # every rank computes all heads
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % ranks:
            raise ValueError(
                f"{type(model).__name__} has {name}={heads}, which {ranks} ranks of tensor parallelism cannot share "
                "evenly; start as many ranks as divide it, or use device_map in one process"
            )


def hook_of(module: nn.Module | None) -> Any:
    """Return accelerate's hook of a module, which may load its weights for each forward; None without one."""
    return None if module is None else module.__dict__.get("_hf_hook")


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    hook = hook_of(module)
    return () if hook is None else getattr(hook, "hooks", (hook,))


def brings_weights(module: nn.Module) -> bool:
    """Whether a module called by itself has its weights: they are on a device, or its hooks load them.

    Without this check, torch returns uninitialized memory for CPU inputs and weights on the device "meta".
    """
    hooks = _hooks(module)
    if any(getattr(hook, "place_submodules", False) for hook in hooks):
        return True
    offloaded = any(parameter.is_meta for parameter in module.parameters(recurse=False))
    return bool(hooks or not offloaded) and all(map(brings_weights, module.children()))


def check_whole(layer: nn.Module) -> None:
    """Check that a decoder layer's weights are available for its `forward`, which query prediction calls.

    Raises:
        ValueError: they are offloaded without hooks, or sharded by FSDP.
    """
    cause = "" if brings_weights(layer) else "has offloaded weights and no hook that loads them before its forward"
    if "torch.distributed.fsdp" in sys.modules:
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

        if isinstance(layer, (FSDPModule, FullyShardedDataParallel)):
            cause = "is sharded by FSDP, which gathers its weights only when the layer runs"
    if cause:
        raise ValueError(f"{type(layer).__name__} {cause}, so its query cannot be predicted; use lookahead='off'")


def leave_hooks(traceback: TracebackType | None, output: torch.Tensor) -> None:
    """Run the post-forward hooks of accelerate for forwards that an exception ended, so that they offload weights.

    Args:
        traceback: the exception's traceback.
        output: passed to the hooks in place of the forwards' results.
    """
    entered: list[Any] = []
    while traceback is not None:
        frame, traceback = traceback.tb_frame, traceback.tb_next
        if frame.f_globals.get("__name__") == _HOOKS and frame.f_code.co_name == "new_forward":
            entered.append(frame.f_locals["module"])
    for module in reversed(entered):
        module._hf_hook.post_forward(module, output)
