"""What keeps a model's decode step from being captured as a CUDA graph, and what a captured step relies on."""

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from hf_offload.blocks.host_format import FORMATS
from hf_offload.blocks.memory import size_text
from hf_offload.graph.windows import is_window
from hf_offload.model.model_support import held_layers, hook_of, ranks_of, stock_layers
from hf_offload.policies.base import Policy

SAFE_FAILURES = (2, 12)
"""The first torch with which a capture that fails leaves the process intact."""
TRIED = ("gpt_neox", "llama", "qwen3")
"""Model types whose captures have passed on a GPU with an older torch."""
CAPTURE_BYTES = 64 << 20
"""Device memory of a capture beside its logits, roughly: workspaces of matrix products, segments of the allocator."""
_address: Callable[[Any], int] = torch.Tensor.data_ptr
_OUR_ROOT = __name__.partition(".")[0]
_KNOWN_ROOTS = ("torch", "transformers", "transformers_modules", _OUR_ROOT)
STATELESS = (
    # 4-bit layers fix type and layout in their first forward. Those of 8 bits look for outliers on the host.
    *(f"bitsandbytes.nn.modules.{name}" for name in ("Linear4bit", "LinearFP4", "LinearNF4")),
    # Layers of packed weights choose their kernels by shapes and types, which a captured step has fixed. (AutoAWQ's
    # fused attention has a cache of its own.)
    "awq.modules.linear.",
    "gptqmodel.",
    # Fused norms, activations and rotary positions are functions of their inputs.
    "liger_kernel.",
    # LoRA layers choose adapters by attributes, which `ModelState` compares.
    "peft.tuners.lora.",
    "peft.peft_model.",
)
"""How the names of classes of other packages begin whose modules hold no state that a replay misses."""
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
"""Attributes of a peft layer that decide what it computes."""


def obstacle(model: nn.Module, policy: Policy, config: Any, host_dtype: str | None = None) -> str | None:
    """Return why no decode step of a cache can be captured, as a clause; None if steps can be.

    Args:
        model: the model.
        policy: the cache's policy; host_dtype: its host format.
        config: config of the model's decoder.
    """
    name = type(model).__name__
    if not policy.requirements.capturable:
        return f"in a step of policy {policy.name!r} the host decides what is attended, or Python attends it"
    if not FORMATS[host_dtype].read_by_device:
        return f"no GPU kernel reads host_dtype={host_dtype!r}"
    if ranks_of(model) > 1:
        return (
            f"{name} is spread over {ranks_of(model)} ranks, whose exchanges in a step have not been tried in a graph"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        where = ", ".join(sorted("the host, offloaded" if d.type == "meta" else str(d) for d in devices))
        return f"the model must be on one CUDA device, but this one is on {where}"
    stock = stock_layers(config)
    others = [layer for layer, held in zip(stock, held_layers(config, stock), strict=True) if not held]
    if not all(map(is_window, others)) or getattr(config, "attention_chunk_size", None):
        return (
            f"{name} has layers with cross-attention, attention in chunks or none, whose stock caches are not captured"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        return f"{name} has layers that share keys and values, which recalls beside a captured step would change"
    kinds = _rope_types(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None))
    if kinds & {"dynamic", "longrope"}:
        return (
            f"{name} has rotary positions of type {', '.join(sorted(kinds))}, which look at the positions' values in "
            "every step"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{name} takes no position_ids, so that its positions cannot change from step to step"
    return None


def _rope_types(parameters: Any) -> set[str]:
    """Return the types of rotary positions in a config, which may have one for each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    types = {str(parameters[name]) for name in ("rope_type", "type") if name in parameters}
    return types.union(*(_rope_types(value) for value in parameters.values()))


def doubt(model: nn.Module) -> str | None:
    """Return why a replay might differ from the model's step, as a clause; None if nothing in the model says so.

    A replay runs no Python: hooks are not called, and a module's own state (which adapters are active) is not asked.
    """
    if torch_version() < SAFE_FAILURES and getattr(model.config, "model_type", None) not in TRIED:
        return f"with torch {torch.__version__} a capture that fails may end the process, and this model is not tried"
    if module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks:
        return "a hook on all modules would not be called"
    for name, module in model.named_modules():
        path = name or "the model"
        if hook_of(module) is not None:
            return f"accelerate's hook of {path} would not be called"
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if _root(hook) not in _KNOWN_ROOTS:  # Transformers' own record outputs that no replayed step returns
                return f"a hook of {path} would not be called"
        if not _is_stateless(module, _root(model)):
            return f"{path} is a {type(module).__module__}.{type(module).__name__}, whose state a replay does not ask"
    return None


def _is_stateless(module: nn.Module, own: str) -> bool:
    """Whether a replay misses no state of a module; `own` is the package of its model."""
    kind = type(module)
    return _root(module) in (*_KNOWN_ROOTS, own) or f"{kind.__module__}.{kind.__qualname__}".startswith(STATELESS)


def _root(thing: Any) -> str:
    """Return the package that a function, or the class of an object, is from."""
    return str(thing.__module__).partition(".")[0]


def torch_version() -> tuple[int, int]:
    """Return torch's version, major and minor."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def capture_bytes(vocabulary: int, rows: int, dtype: torch.dtype) -> int:
    """Return the device memory that a captured step takes, roughly: its buffers, and logits in the model's dtype."""
    return CAPTURE_BYTES + 2 * rows * vocabulary * dtype.itemsize


def lacking_room(device: torch.device, nbytes: int) -> str | None:
    """Return why a device has no room for a capture, as a clause; None if it has. It may empty torch's cache."""
    if device.type != "cuda" or torch.cuda.mem_get_info(device)[0] >= nbytes:
        return None
    torch.cuda.empty_cache()  # a capture cannot free what torch holds back
    free = torch.cuda.mem_get_info(device)[0]
    if free >= nbytes:
        return None
    return f"{size_text(free)} of device memory are free, and the graph takes {size_text(nbytes)}"


def tell_eager(reason: str, stacklevel: int) -> None:
    """Warn that decode steps run eagerly, and why."""
    warnings.warn(
        f"decode steps run without a CUDA graph and take several times as long, and none looks a layer ahead: {reason};"
        " cuda_graph=False does so without this warning",
        RuntimeWarning,
        stacklevel=stacklevel + 1,
    )


class ModelState:
    """What a captured step has taken from a model: its modules, the addresses of its weights, the number of its hooks.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        children = [(m._modules, name) for m in modules for name in m._modules]
        kinds = [kind for m in modules for kind in (m._parameters, m._buffers)]
        weights = [(kind, name) for kind in kinds for name, tensor in kind.items() if tensor is not None]
        # Tensors of a class of their own (quantised weights) may have no address: these are objects as objects.
        objects: list[tuple[Any, str]] = [*children, *(w for w in weights if not _has_address(w[0][w[1]]))]
        locations = [*objects, *(w for w in weights if _has_address(w[0][w[1]]))]
        self._locations, self._names = [location for location, _ in locations], [name for _, name in locations]
        held = self._held()
        self._objects = held[: len(objects)]
        self._addresses = list(map(_address, held[len(objects) :]))
        self._hooks = [hooks for m in modules for hooks in (m._forward_pre_hooks, m._forward_hooks)]
        self._count = sum(map(len, self._hooks))
        self._adapted = [m for m in modules if _root(m) == "peft"]
        self._adapters = self._held_adapters()

    def _held_adapters(self) -> list[Any]:
        """Return what the adapters are set to now."""
        adapters = [getattr(module, name, None) for module in self._adapted for name in _ADAPTERS]
        return [x.copy() if isinstance(x, list | dict) else x for x in adapters]

    def _held(self) -> list[Any]:
        """Return the modules and weights that are there now."""
        return list(map(operator.getitem, self._locations, self._names))

    def holds(self) -> bool:
        """Whether nothing of it has changed; some 0.1 µs for each module and weight."""
        try:
            held = self._held()
            return (
                all(map(operator.is_, held, self._objects))  # the others come behind them
                and list(map(_address, held[len(self._objects) :])) == self._addresses
                and sum(map(len, self._hooks)) == self._count
                and (not self._adapted or self._held_adapters() == self._adapters)
            )
        except (KeyError, TypeError):  # a weight or module is gone
            return False


def _has_address(tensor: Any) -> bool:
    try:
        return bool(tensor.data_ptr())
    except RuntimeError:
        return False
