"""Dispatch of torch operators on tensors of the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from . import attention, host
from .streams import current_stream, wait_here
from .tensor import OnDevice, dressed, room

_WAITING = {
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "allclose", "is_nonzero",
    "bincount",
}  # fmt: skip
"""Operators whose result, or its shape, the host asks for."""
_MIXING = frozenset(("index", "index_put_", "index_put", "_index_put_impl_"))
"""Operators on the device that take indices from the CPU, and wait to have them there."""


class Pretending(TorchDispatchMode):
    """Sends what concerns the device there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        leaves = tree_leaves((args, kwargs))
        device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        if not any(isinstance(leaf, OnDevice) for leaf in leaves) and (device is None or device.type != "cuda"):
            return host.on_host(name, func, args, kwargs)
        if name in _SPECIAL:
            return _SPECIAL[name](*args, **kwargs)
        if func._can_decompose() and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
        ):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _on_device(name, func, args, kwargs)


def _on_device(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    leaves, tree = tree_flatten((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    _meet(name, func, given)
    inner_args, inner_kwargs = tree_unflatten([_brought(leaf) for leaf in leaves], tree)
    if func.is_view or name == "_unsafe_view":
        with torch.inference_mode(given[0].is_inference()):
            return tree_map(dressed, func(*inner_args, **inner_kwargs))
    if not given or name == "empty_like":  # nothing that the device is still to compute
        return tree_map(dressed, func(*inner_args, **inner_kwargs))
    if _asks(name, args):
        wait_here(str(func))
    written = _written(func, args, kwargs)
    if written:
        current_stream().give(lambda: func(*inner_args, **inner_kwargs))
        return written[0] if len(func._schema.returns) == 1 else tuple(written) if func._schema.returns else None
    foretold = None if name in _WAITING or _masks(name, args) else _foretell(func, leaves, tree)
    if foretold is None:
        wait_here(str(func))
        with _disable_current_modes():
            return tree_map(dressed, func(*inner_args, **inner_kwargs))
    rooms = [room(*shape) for shape in foretold[0]]

    def compute() -> None:
        results = [leaf for leaf in tree_leaves(func(*inner_args, **inner_kwargs)) if isinstance(leaf, torch.Tensor)]
        for made, result in zip(rooms, results, strict=True):
            assert made.shape == result.shape, f"{func} gives {result.shape}, foretold {made.shape}"
            made.copy_(result)

    current_stream().give(compute)
    return tree_unflatten([OnDevice(made) for made in rooms], foretold[1])


def _meet(name: str, func: Any, given: list[torch.Tensor]) -> None:
    """Refuse tensors of both sides in an operator, but numbers."""
    strange = [leaf for leaf in given if not isinstance(leaf, OnDevice) and leaf.ndim > 0]
    if strange and not ("_like" in name or name.startswith("new_")):  # which make something anew, here or there
        if name not in _MIXING:
            shapes = [tuple(leaf.shape) for leaf in strange]
            raise RuntimeError(f"Expected all tensors to be on the same device: {func} is given {shapes} on cpu")
        wait_here(f"{name} with indices on the CPU")


def _brought(leaf: Any) -> Any:
    if isinstance(leaf, OnDevice):
        return leaf.inner
    if isinstance(leaf, torch.Tensor):
        return leaf.clone()  # a number from the CPU is read when the call is made
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _masks(name: str, args: Any) -> bool:
    return name in _MIXING and any(index is not None and index.dtype == torch.bool for index in args[1])


def _asks(name: str, args: Any) -> bool:
    """Whether the host waits for what is done in place: a mask says how many numbers there are to write."""
    return name != "index" and _masks(name, args) and (len(args[1]) > 1 or args[2].numel() > 1)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[place] if place < len(args) else kwargs[argument.name])
    return found


_FORETOLD: dict[Any, Any] = {}


def _foretell(func: Any, leaves: list[Any], tree: Any) -> Any:
    """Shapes, strides and dtypes of the results, and their tree; None where they depend on numbers."""
    key = (func, tree, tuple((leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else
                             (type(leaf), leaf) for leaf in leaves))  # fmt: skip
    if key not in _FORETOLD:
        args, kwargs = tree_unflatten([_without_numbers(leaf) for leaf in leaves], tree)
        try:
            results, shape = tree_flatten(func(*args, **kwargs))
            _FORETOLD[key] = [(x.shape, x.stride(), x.dtype) for x in results], shape
        except NotImplementedError:
            _FORETOLD[key] = None
    return _FORETOLD[key]


def _without_numbers(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf


_SPECIAL: dict[str, Callable[..., Any]] = {
    "copy_": host.copy_,
    "_to_copy": host.to_copy,
    "_local_scalar_dense": host.item,
    "is_pinned": host.is_pinned,
    "_fused_sdp_choice": lambda *args, **kwargs: 0,
    "_scaled_dot_product_flash_attention": attention.flash,
    "_scaled_dot_product_efficient_attention": attention.efficient,
}
