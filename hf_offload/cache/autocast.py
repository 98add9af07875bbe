"""Autocast as Transformers' own attention takes it: what it attends is cast, and what computes is left alone."""

from __future__ import annotations

import contextlib

import torch


def attended(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V in the dtype in which sdpa would attend them: autocast's, where that is on for their device.

    Projections give that dtype already, while rotary positions may have made keys float32 again.
    """
    if not torch.is_autocast_enabled(key.device.type):
        return key, value
    dtype = torch.get_autocast_dtype(key.device.type)
    return key.to(dtype), value.to(dtype)


def uncast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """A context without autocast; nothing where it is off anyway."""
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else contextlib.nullcontext()
