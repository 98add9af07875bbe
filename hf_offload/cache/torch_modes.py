"""Autocast and torch.compile around a forward."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

set_eval_frame: Callable[..., Any] | None = None
with contextlib.suppress(ImportError):  # not a public name of torch's
    from torch._C._dynamo.eval_frame import set_eval_frame

REASON = "a HybridCache attends outside of compiled graphs; compile without fullgraph=True"
F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """A function that a compiled model calls as it is: what it looks at changes from step to step.

    Where nothing is compiled, which is nearly always, torch's own wrapper would take longer than some of what it wraps.
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
    """K and V in the dtype in which sdpa would attend them: autocast's, where that is on for their device.

    Projections give that dtype already, while rotary positions may have made keys float32 again.
    """
    if not torch.is_autocast_enabled(device_type):
        return key, value
    dtype = torch.get_autocast_dtype(device_type)
    return key.to(dtype), value.to(dtype)


def uncast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """A context without autocast; nothing where it is off anyway."""
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else contextlib.nullcontext()
