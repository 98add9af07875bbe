"""`fast_linear`: linear layers of a model on a CPU that multiply a few rows at the speed of memory.

A served layer gets the class of a subclass of `nn.Linear`, whose forward looks at weight and input in each call and
calls `nn.Linear.forward` for what the kernel does not cover. No layer holds anything but a count: copies, pickles and
replaced, merged or offloaded weights need no code.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from hf_offload.cpu.kernels.linear import faster_than_torch, linear
from hf_offload.cpu.launch import LaunchSequence
from hf_offload.model.installing import installing

_COUNT = "_fast_linear_handles"
"""The attribute of a served layer that counts the open handles."""

_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


class FastLinear(nn.Linear):
    """An `nn.Linear` that multiplies a few rows by `cpu/kernels/linear.py` where that is possible and faster.

    It is while no gradient is wanted, in evaluation mode, outside of autocast, compilation and tracing, for weights
    that lie on the CPU as plain parameters of float32, float16 or bfloat16.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ + b, `[..., N]`, of x `[..., K]`."""
        # A pruned or parametrised layer has what it multiplies with elsewhere.
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias", input)
        if (
            torch.compiler.is_compiling()
            or torch._C._is_tracing()
            or type(input) is not torch.Tensor
            or type(weight) is not nn.Parameter
            or weight.ndim != 2
            or not input.ndim
        ):
            return nn.Linear.forward(self, input)
        (rows, dim), shape = weight.shape, input.shape
        count = input.numel() // dim if dim else 0
        # The crossing comes early: where torch is faster, asking costs little.
        if (
            shape[-1] != dim
            or not rows * count
            or not faster_than_torch(weight.dtype, count, dim)
            or self.training
            or _COUNT not in self.__dict__
            or not (input.is_cpu and weight.is_cpu and input.dtype == weight.dtype)
            or not (input.layout == weight.layout == torch.strided)
            or weight.stride()[1] != 1
            or input.is_neg()
            or weight.is_neg()
            or not (bias is None or _fits(bias, weight))
            or (torch.is_grad_enabled() and _wants_gradient(input, weight, bias))
            or torch.is_autocast_enabled("cpu")
            or _is_watched()
        ):
            return nn.Linear.forward(self, input)
        out = input.new_empty((*shape[:-1], rows))
        _products.multiply(input.contiguous(), weight, bias, out, (weight.dtype, count, rows, dim, weight.stride()[0]))
        return out


def _wants_gradient(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _fits(bias: torch.Tensor, weight: torch.Tensor) -> bool:
    if type(bias) is not nn.Parameter or not bias.is_cpu or bias.dtype != weight.dtype or bias.is_neg():
        return False
    return bias.shape == weight.shape[:1] and bias.is_contiguous()


def _is_watched() -> bool:
    """Whether torch transforms or intercepts operators, and so must see them."""
    return bool(
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
        or torch.autograd.forward_ad._current_level >= 0
        or (torch._C._len_torch_function_stack() and _intercepted())
    )


def _intercepted() -> bool:
    """Whether a function mode other than that of `torch.device` and `torch.set_default_device` is on."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(type(mode) is not DeviceContext for mode in modes)


class _Product:
    """The launch of one thread's products of one shape; the addresses change from call to call."""

    def __init__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, threads: int
    ) -> None:
        rows, dim = weight.shape
        launch = linear(x.view(-1, dim), weight, bias, out.view(-1, rows), threads)
        launch.keep = ()
        self.sequence = LaunchSequence((launch,))
        self.words = launch.word("x")[0]
        self.offsets = [launch.word(name)[1] for name in ("x", "weight", "bias", "out")]


class _Products(threading.local):
    """A thread's products by shape: two threads at once need arguments of their own."""

    def __init__(self) -> None:
        self.products: dict[tuple[Any, ...], _Product] = {}

    def multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        shape: tuple[Any, ...],
    ) -> None:
        """Write x Wᵀ + b to `out`; `shape` is all that the launch depends on besides addresses and threads."""
        threads = torch.get_num_threads()
        product = self.products.get((threads, shape))
        if product is None:
            product = self.products[threads, shape] = _Product(x, weight, bias, out, threads)
        words, (i, j, k, n) = product.words, product.offsets
        words[i], words[j], words[n] = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        words[k] = 0 if bias is None else bias.data_ptr()
        product.sequence.run()


_products = _Products()


class LinearHandle:
    """Layers that are served until `close` is called, or the `with` block ends.

    Attributes:
        layers: how many layers it serves.
    """

    def __init__(self, model: nn.Module) -> None:
        self._served: list[weakref.ref[nn.Module]] = []
        with installing():
            for module in model.modules():
                if type(module) in (nn.Linear, FastLinear) and "forward" not in module.__dict__:
                    module.__dict__[_COUNT] = module.__dict__.get(_COUNT, 0) + 1
                    module.__class__ = FastLinear
                    self._served.append(weakref.ref(module))

    @property
    def layers(self) -> int:
        """How many layers it serves; 0 once it is closed."""
        return sum(layer() is not None for layer in self._served)

    def close(self) -> None:
        """Give back the layers; one that another handle serves, too, stays served. A second call does nothing."""
        with installing():
            served, self._served = self._served, []
            for layer in (each() for each in served):
                if layer is None or _COUNT not in layer.__dict__:
                    continue
                layer.__dict__[_COUNT] -= 1
                if not layer.__dict__[_COUNT]:
                    del layer.__dict__[_COUNT]
                    if type(layer) is FastLinear:
                        layer.__class__ = nn.Linear  # type: ignore[assignment]

    def __enter__(self) -> LinearHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A copied or unpickled model is served, too: its copy of this object refers to the copied layers.
        return {"layers": [layer for each in self._served if (layer := each()) is not None]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._served = [weakref.ref(layer) for layer in state["layers"]]


def fast_linear(model: nn.Module) -> LinearHandle:
    """Let a model's linear layers multiply a few rows on a CPU at the speed at which memory gives the weights.

    It serves the modules that are exactly `nn.Linear`, 1 to 8 rows at a time: decode steps, small batches, drafts.
    Prompts, training, weights on other devices and packed weights are computed as before. Sums are in float32 and
    rounded once, so that results differ from torch's by rounding. `hf_offload.enable` calls it.

    Args:
        model: any module; its layers are changed in place.

    Returns:
        A handle with `close()`, also for `with`. Layers stay served until the last handle is closed. A copy of a served
        model is served, too. Close the handle before `torch.jit.script`, and before other tools replace layers by their
        exact type, as `torch.ao.quantization.quantize_dynamic` does.

    Raises:
        TypeError: not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fast_linear serves an nn.Module, not a {type(model).__name__}")
    return LinearHandle(model)
