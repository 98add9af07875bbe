"""Support for autocast and torch.compile."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

set_eval_frame: Callable[..., Any] | None = None
with contextlib.suppress(ImportError):  # not a public name of torch
    from torch._C._dynamo.eval_frame import set_eval_frame

REASON = "a HybridCache attends outside of compiled graphs; compile without fullgraph=True"
F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Exclude a function, whose inputs change from step to step, from torch.compile.

    `torch.compiler.disable` alone costs more than some of the functions; without a compiled model it is bypassed.
    """
    shielded: F = torch.compiler.disable(function, reason=REASON)  # type: ignore[no-untyped-call, unused-ignore]
    exchange = set_eval_frame
    if exchange is None:
        return shielded

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        compiler = exchange(None)
        if compiler is None:
            return function(*args, **kwargs)
        exchange(compiler)
        return shielded(*args, **kwargs)

    skipped: F = torch.compiler.disable(called, recursive=False, reason=REASON)  # type: ignore[no-untyped-call, unused-ignore]
    return skipped


def attended(key: torch.Tensor, value: torch.Tensor, device_type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V in the dtype in which sdpa would attend them: autocast's if it is on for their device.

    Projections return that dtype, but rotary embeddings may have made keys float32 again.
    """
    if not torch.is_autocast_enabled(device_type):
        return key, value
    dtype = torch.get_autocast_dtype(device_type)
    return key.to(dtype), value.to(dtype)


def uncast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """A context with autocast off."""
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else contextlib.nullcontext()
