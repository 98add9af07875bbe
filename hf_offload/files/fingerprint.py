"""Fingerprints that tie a saved cache or predictor to its model: the config and a few values of every weight."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn

SAMPLES = 32  # values of each weight that `fingerprint` hashes
FEW = 8  # values of each weight that `likeness` keeps
ROUNDED = 2.0**-8  # allowed relative difference between dtypes: twice the rounding error of bfloat16
_IRRELEVANT = {
    "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id", "output_attentions",
    "output_hidden_states", "pad_token_id", "problem_type", "quantization_config", "return_dict", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Config entries that K and V do not depend on; quantisation shows in the weights."""


def fingerprint(config: Any, stack: nn.Module) -> dict[str, Any]:
    """Return what identifies a model, as JSON values.

    Args:
        config: config of its decoder.
        stack: the module that runs the decoder layers.
    """
    adapters = active_adapters(stack)
    return {
        "config": _config(config),
        "weights": {name: _sample(weight) for name, weight in _weights(stack)},
        **({"adapters": adapters} if adapters else {}),
    }


def likeness(config: Any, stack: nn.Module) -> dict[str, Any]:
    """Return what identifies a model in any dtype, as JSON values; arguments as in `fingerprint`."""
    return {"config": _config(config), "weights": {name: _values(weight) for name, weight in _weights(stack)}}


def _config(config: Any) -> dict[str, Any]:
    relevant = {key: value for key, value in config.to_dict().items() if key[0] != "_" and key not in _IRRELEVANT}
    plain: dict[str, Any] = json.loads(json.dumps(relevant, default=str))
    return plain


def _weights(stack: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights by name; those that accelerate has offloaded from where they are."""
    for name, weight in stack.named_parameters():
        yield name, weight if weight.device.type != "meta" else _offloaded(stack, name, weight)


def _offloaded(stack: nn.Module, name: str, weight: torch.Tensor) -> torch.Tensor:
    """The values of an offloaded weight, which a hook of its module or of one around it knows; else the weight."""
    parts = name.split(".")
    for i in reversed(range(len(parts))):
        hook = stack.get_submodule(".".join(parts[:i])).__dict__.get("_hf_hook")
        for each in getattr(hook, "hooks", (hook,)):
            values = getattr(each, "weights_map", None) or {}
            if ".".join(parts[i:]) in values:
                return cast(torch.Tensor, values[".".join(parts[i:])])
    return weight


def active_adapters(stack: nn.Module) -> dict[str, int]:
    """What PEFT's adapters add to the modules of a model: the states, each with a checksum of the modules' names."""
    names: dict[str, int] = {}
    for name, module in stack.named_modules():
        if hasattr(module, "merged_adapters"):
            state = _adapter_state(module)
            names[state] = zlib.crc32(name.encode(), names.get(state, 0))
    return dict(sorted(names.items()))


def _adapter_state(module: Any) -> str:
    if module.merged_adapters:
        return f"{', '.join(module.merged_adapters)} merged"
    ranks, scaling = getattr(module, "r", {}), getattr(module, "scaling", {})
    active = [] if module.disable_adapters else [name for name in module.active_adapters if name in (ranks or [name])]
    names = [f"{name} (rank {ranks.get(name)}, scaling {scaling.get(name)})" for name in active]
    return ", ".join(names) or "none active"


def _spaced(weight: torch.Tensor, most: int) -> torch.Tensor | None:
    """Up to `most` values of a weight, evenly spaced, on the host; None for weights that are nowhere."""
    if weight.device.type == "meta":
        return None
    local = getattr(weight, "to_local", None)
    weight = (weight if local is None else local()).detach()
    positions = torch.linspace(
        0, max(weight.numel() - 1, 0), min(most, weight.numel()), dtype=torch.float64, device="cpu"
    )
    return weight.reshape(-1)[positions.long().to(weight.device)].cpu()


def _sample(weight: torch.Tensor) -> int | None:
    """A checksum of shape, dtype and sampled values; None for weights that are nowhere."""
    values = _spaced(weight, SAMPLES)
    if values is None:
        return None
    header = f"{tuple(weight.shape)} {weight.dtype}".encode()
    return zlib.crc32(header + values.view(torch.uint8).numpy().tobytes())


def _values(weight: torch.Tensor) -> list[Any]:
    """The shape and a few values; no values for weights that are nowhere."""
    values = _spaced(weight, FEW)
    return [list(weight.shape), [] if values is None else [float(f"{x:.5g}") for x in values.tolist()]]


def difference(saved: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The difference between two fingerprints as text, or None; config entries that only one has are ignored."""
    if saved.get("adapters") != now.get("adapters"):
        old, new = (" and ".join(each.get("adapters", ())) or "none" for each in (saved, now))
        return f"its adapters were {old}, here they are {new}" + (" in other modules" if old == new else "")
    if odd := _other_layout(saved, now):
        return odd
    for name, sample in saved["weights"].items():
        if None not in (sample, now["weights"][name]) and sample != now["weights"][name]:
            return f"the weight {name} has other values or another dtype"
    return None


def unlikeness(saved: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The difference between two likenesses as text, rounding aside, or None."""
    if odd := _other_layout(saved, now):
        return odd
    for name, (shape, values) in saved["weights"].items():
        here, loaded = now["weights"][name]
        if shape != here:
            return f"the weight {name} was {shape}, here it is {here}"
        pairs = zip(values, loaded, strict=True) if values and loaded else ()
        if any(abs(old - new) > ROUNDED * abs(old) + 1e-7 for old, new in pairs):
            return f"the weight {name} has other values"
    return None


def _other_layout(saved: dict[str, Any], now: dict[str, Any]) -> str | None:
    for key in sorted(saved["config"].keys() & now["config"].keys()):
        old, new = saved["config"][key], now["config"][key]
        if old != new:
            return f"{key} was {old!r}, here it is {new!r}"
    old, new = saved["weights"], now["weights"]
    if odd := sorted(old.keys() ^ new.keys()):
        return f"the weight {odd[0]} is {'missing here' if odd[0] in old else 'new'}"
    return None
