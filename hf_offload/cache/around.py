"""What may stand around a forward: autocast, and torch.compile, which must not trace what is ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """A function that a compiled model calls as it is: what it looks at changes from step to step."""
    called: F = torch.compiler.disable(function)  # type: ignore[no-untyped-call, unused-ignore]
    return called


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
