"""Prediction of the next layer's query from this layer's input (ScoutAttention §3.3).

The generic way works for every model family: the next decoder layer's forward runs up to its attention function, which
raises an exception with the query. An adapter for the common pre-norm layer does the same with three calls; it is used
for a layer only if its query equals the generic one bit for bit.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from hf_offload.blocks.memory import is_shortage
from hf_offload.cache.torch_modes import uncompiled
from hf_offload.model.model_support import brings_weights, check_whole, hook_of, leave_hooks

_FAULTS = torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError)
"""Errors of a device, among torch's RuntimeErrors."""

PROBING: set[int] = set()
"""Identifiers of the threads that run a layer's forward for its query alone."""


Adapter = Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]
"""Computes a layer's query from its input and the keyword arguments of its forward."""


class _Captured(BaseException):
    """Carries the query out of a forward; a `BaseException`, so that no `except Exception` catches it."""

    def __init__(self, query: torch.Tensor) -> None:
        super().__init__("the query was captured")
        self.query = query


def _no_layer() -> None:
    """Return None: the tag of K and V that belong to no layer."""


class _Sentinel(Cache):
    """A cache for a forward that stops at its query: it stores nothing, and delegates all else to the real cache."""

    def __init__(self, real: Cache) -> None:
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)

    @uncompiled
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        key, value = key_states.detach(), value_states.detach()
        key._hybrid_layer = value._hybrid_layer = _no_layer  # type: ignore[attr-defined]
        return key, value

    def get_seq_length(self, *args: Any, **kwargs: Any) -> Any:
        return self._real.get_seq_length(*args, **kwargs)

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> Any:
        return self._real.get_mask_sizes(*args, **kwargs)


def probing() -> bool:
    """Whether this thread runs a layer's forward for its query alone."""
    return bool(PROBING) and threading.get_ident() in PROBING


def intercept(query: torch.Tensor) -> None:
    """End a forward that runs for its query alone; the attention function calls this first."""
    if probing():
        raise _Captured(query)


def _replace_cache(value: Any) -> Any:
    return _Sentinel(value) if isinstance(value, Cache) else value


def capture_query(
    layer: nn.Module, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return the query that a decoder layer computes from an input, by running its forward up to the attention.

    Args:
        layer: the decoder layer.
        hidden: `[B, Q, hidden]`, its input.
        args, kwargs: the other arguments of its forward.

    Returns:
        `[B, Hq, Q, D]`, as passed to the attention function.

    Raises:
        RuntimeError: the layer never reached the `hybrid_sparse` attention function.
    """
    rest = tuple(_replace_cache(value) for value in args)
    named = {name: _replace_cache(value) for name, value in kwargs.items() if name != "hidden_states"}
    PROBING.add(threading.get_ident())
    try:
        with torch.no_grad():
            layer.forward(hidden, *rest, **named)
    except _Captured as captured:
        leave_hooks(captured.__traceback__, captured.query)
        return captured.query
    finally:
        PROBING.discard(threading.get_ident())
    raise RuntimeError(
        f"{type(layer).__name__} did not reach the 'hybrid_sparse' attention function, so its query is unknown; "
        "use lookahead='off'"
    )


def make_adapter(layer: nn.Module) -> Adapter | None:
    """Return an adapter for layers of the Llama kind (norm, q_proj, optionally q_norm, rotary), None for others.

    The adapter may be wrong for a layer: the caller compares it with `capture_query`.
    """
    rotate = getattr(sys.modules[type(layer).__module__], "apply_rotary_pos_emb", None)
    attention: Any = getattr(layer, "self_attn", None)
    norm, project, query_norm = _parts(layer)
    dim = getattr(attention, "head_dim", None)
    if norm is None or project is None or rotate is None or not isinstance(dim, int):
        return None

    def adapter(hidden: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
        query = project(norm(hidden))
        query = query.view(*query.shape[:-1], -1, dim)
        query = (query if query_norm is None else query_norm(query)).transpose(1, 2)
        cos, sin = kwargs["position_embeddings"]  # may be on another device
        rotated: torch.Tensor = rotate(query, query[:, :1], cos.to(query.device), sin.to(query.device))[0]
        return rotated

    return adapter


def _parts(layer: nn.Module) -> tuple[Any, Any, Any]:
    """Return norm, query projection and query norm of a layer of the Llama kind; None for a missing one."""
    attention = layer._modules.get("self_attn")  # a module's own attribute access takes several times as long
    submodules = {} if attention is None else attention._modules
    return layer._modules.get("input_layernorm"), submodules.get("q_proj"), submodules.get("q_norm")


def _computation_key(module: nn.Module | None) -> tuple[Any, ...] | None:
    """Return what determines a module's computation besides arguments and parameters."""
    if module is None:
        return None
    own = module.__dict__
    before, after = own["_forward_pre_hooks"], own["_forward_hooks"]
    hooks = (*before, -1, *after) if before or after else None
    return (
        module.__class__, own.get("forward"), own.get("_hf_hook"), hooks, own.get("variance_epsilon"), own.get("eps"),
    )  # fmt: skip


class QueryPredictor:
    """Predicts the query of one decoder layer from another layer's input.

    Args:
        layer: the decoder layer whose query is predicted.
        short_cut: whether an adapter may be used. It may not if ranks exchange data in the query's computation: they
            might decide differently.
    """

    def __init__(self, layer: nn.Module, *, short_cut: bool = True) -> None:
        self.layer, self.short_cut = layer, short_cut
        self.adapter: Adapter | None = None
        self._known: tuple[Any, ...] | None = None

    def _layer_key(self) -> tuple[Any, ...]:
        """Return the layer's parts and all that determines their computation besides parameters."""
        layer = self.layer
        parts = _parts(layer)
        own = hook_of(layer), layer.__dict__.get("forward")  # `forward` is called directly, without torch's hooks
        return (*parts, *own, *map(_computation_key, (layer._modules.get("self_attn"), *parts)))

    def __call__(self, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Return the query `[B, Hq, Q, D]` that the layer computes from an input.

        Args:
            hidden: `[B, Q, hidden]`, the input.
            args, kwargs: the other arguments of the layer's forward.

        Raises:
            ValueError: the layer's weights are not available for its forward.
            RuntimeError: the layer did not reach the `hybrid_sparse` attention function.
        """
        key = self._layer_key()
        if key == self._known:
            if self.adapter is not None:
                return self.adapter(hidden, kwargs)
            return capture_query(self.layer, hidden, args, kwargs)
        check_whole(self.layer)
        # The first call, or parts or hooks of the layer have changed (LoRA, accelerate): check the adapter again.
        query = capture_query(self.layer, hidden, args, kwargs)
        adapter = None
        if self.short_cut and all(brings_weights(part) for part in key[:3] if part is not None):
            adapter = make_adapter(self.layer)
            if adapter is not None and not _equals_query(adapter, hidden, kwargs, query):
                adapter = None
        self.adapter = adapter
        self._known = key  # last, so that other threads do not use an unchecked adapter
        return query


def _equals_query(adapter: Adapter, hidden: torch.Tensor, kwargs: dict[str, Any], query: torch.Tensor) -> bool:
    try:
        with torch.no_grad():
            return torch.equal(adapter(hidden, kwargs), query)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:  # not a layer of the Llama kind
        if isinstance(error, _FAULTS) or is_shortage(error):
            raise
        return False
