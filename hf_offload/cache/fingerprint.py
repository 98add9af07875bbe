"""By what a saved cache knows its model again: the config, and a few values of every weight."""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch
from torch import nn

SAMPLES = 32  # of each weight
_IRRELEVANT = {
    "architectures", "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id", "output_attentions",
    "output_hidden_states", "pad_token_id", "problem_type", "quantization_config", "return_dict", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Keys of a config on which keys and values do not depend; what quantisation does shows in the weights."""


def fingerprint(config: Any, stack: nn.Module) -> dict[str, Any]:
    """What identifies a model, for `json`.

    Args:
        config: of its decoder.
        stack: the module that runs the decoder layers.
    """
    known = {key: value for key, value in config.to_dict().items() if key[0] != "_" and key not in _IRRELEVANT}
    return {
        "config": json.loads(json.dumps(known, default=str)),
        "weights": {name: _sample(weight) for name, weight in stack.named_parameters()},
    }


def _sample(weight: torch.Tensor) -> int | None:
    """A checksum of shape, dtype and evenly spaced values; None for weights that are elsewhere (accelerate)."""
    if weight.device.type == "meta":
        return None
    local = getattr(weight, "to_local", None)
    weight = (weight if local is None else local()).detach()
    places = torch.linspace(0, max(weight.numel() - 1, 0), min(SAMPLES, weight.numel()), dtype=torch.float64)
    values = weight.reshape(-1)[places.long().to(weight.device)].cpu().view(torch.uint8)
    return zlib.crc32(f"{tuple(weight.shape)} {weight.dtype}".encode() + values.numpy().tobytes())


def difference(saved: dict[str, Any], now: dict[str, Any]) -> str | None:
    """In what another model differs, or None; a key that only one of the configs has says nothing (versions differ)."""
    for key in sorted(saved["config"].keys() & now["config"].keys()):
        old, new = saved["config"][key], now["config"][key]
        if old != new:
            return f"{key} was {old!r}, here it is {new!r}"
    old, new = saved["weights"], now["weights"]
    if odd := sorted(old.keys() ^ new.keys()):
        return f"the weight {odd[0]} is {'missing here' if odd[0] in old else 'new'}"
    for name, sample in old.items():
        if None not in (sample, new[name]) and sample != new[name]:
            return f"the weight {name} has other values or another dtype"
    return None
