"""Modules as packages define them, over a layer that they replace."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def of_package(module: str, name: str, forward: Any) -> type[nn.Module]:
    """A class of a module as a package would define it."""

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
