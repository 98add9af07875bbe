"""What a model must be like to run with a `HybridCache`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_offload.attention.function import NAME
from hf_offload.attention.spread import check_ranks, ranks_of
from hf_offload.policies.base import Policy


def stock_layers(config: Any) -> list[Any]:
    """The layers that `DynamicCache` would have for a decoder config."""
    return DynamicCache(config=config).layers or [DynamicLayer() for _ in range(config.num_hidden_layers)]


def inside(model: Any) -> str:
    """The end of an error message about something that is no model, if it wraps one."""
    found = [name for name in ("_orig_mod", "module") if hasattr(model, name)]
    return f"; use the model inside (model.{found[0]})" if found else ""


def image_layers(config: Any) -> set[int]:
    """Numbers of the layers that attend an image's tokens, not the text's (Mllama's cross-attention)."""
    return set(getattr(config, "cross_attention_layers", None) or ())


def held_layers(config: Any, stock: list[Any]) -> list[bool]:
    """Which of `DynamicCache`'s layers become ours: plain full attention over the text itself."""
    images = image_layers(config)
    return [type(layer) is DynamicLayer and index not in images for index, layer in enumerate(stock)]


def check_model(model: PreTrainedModel) -> Any:
    """The config of the model's decoder.

    Raises:
        TypeError: not a Transformers model.
        ValueError: the model cannot use, or does not use, the `hybrid_sparse` attention function.
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
    """Raise ValueError if the model computes attention whatever `attn_implementation` says (GPT-J, BLOOM)."""
    text: Any = model.get_decoder() if hasattr(model, "get_decoder") else model  # a vision tower may do as it likes
    settable = getattr(text, "_can_set_attn_implementation", None)
    if settable is not None and not settable():
        raise ValueError(
            f"{type(model).__name__} ignores attn_implementation, so HybridCache cannot serve it; use DynamicCache"
        )


def check_graph(model: PreTrainedModel, policy: Policy, config: Any) -> None:
    """Raise ValueError if decode steps of this model cannot be captured as a CUDA graph, with the reason."""
    if not policy.capturable:
        raise ValueError(
            f"cuda_graph=True: in a step of policy {policy.name!r} the host decides what is attended, or Python "
            "attends it; leave it out"
        )
    if ranks_of(model) > 1:
        raise ValueError(
            f"cuda_graph=True: {type(model).__name__} is spread over {ranks_of(model)} ranks, whose exchanges in a "
            "step have not been tried in a graph; leave it out"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        where = ", ".join(sorted("the host, offloaded" if d.type == "meta" else str(d) for d in devices))
        raise ValueError(f"cuda_graph=True needs a model on one CUDA device, but this one is on {where}; leave it out")
    if not all(held_layers(config, stock_layers(config))):
        raise ValueError(
            f"cuda_graph=True: {type(model).__name__} has layers with sliding windows, cross-attention or without "
            "attention, whose stock caches cannot be captured; leave it out"
        )
    kinds = _rope_types(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    if kinds & {"dynamic", "longrope"}:
        raise ValueError(
            f"cuda_graph=True: {type(model).__name__} has rotary positions of type {', '.join(sorted(kinds))}, which "
            "look at the positions' values in every step; leave it out"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"cuda_graph=True: {type(model).__name__} takes no position_ids, so that its positions cannot change from "
            "step to step; leave it out"
        )


def _rope_types(parameters: Any) -> set[str]:
    """The types of rotary positions that a config names, for all layers or for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    found = {str(parameters[name]) for name in ("rope_type", "type") if name in parameters}
    return found.union(*(_rope_types(value) for value in parameters.values()))
