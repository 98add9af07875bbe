"""The next layer's query, predicted from this layer's input (ScoutAttention §3.3).

Generic for every model family: the next decoder layer's own forward is run up to its attention function, which hands
the query out and stops it there. For the common pre-norm layer an adapter does the same with three calls; it is used
for a layer only if it gave the very same bits as the generic way.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from hf_offload.attention.model_support import brings_weights, check_whole, hook_of, leave_hooks
from hf_offload.cache.torch_modes import uncompiled

CAPTURING: set[int] = set()
"""The threads that run a forward that is to be cut short."""


Adapter = Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]


class _Captured(BaseException):
    """Carries the query out of a forward; no `except Exception` on the way may swallow it."""

    def __init__(self, query: torch.Tensor) -> None:
        super().__init__("the query was captured")
        self.query = query


def _no_layer() -> None:
    """The tag of K and V that no layer holds."""


class _Sentinel(Cache):
    """A cache that stores nothing: the forward that is cut short must leave no trace."""

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


def capturing() -> bool:
    """Whether this thread runs a forward that is to be cut short."""
    return bool(CAPTURING) and threading.get_ident() in CAPTURING


def intercept(query: torch.Tensor) -> None:
    """Called first in the attention function: hands the query out if that is all that is wanted."""
    if capturing():
        raise _Captured(query)


def _replace_cache(value: Any) -> Any:
    return _Sentinel(value) if isinstance(value, Cache) else value


def capture_query(
    layer: nn.Module, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """The query that a decoder layer would compute from an input, by its own code.

    Args:
        layer: the decoder layer.
        hidden: `[B, Q, hidden]`, its input.
        args, kwargs: the other arguments of its forward.

    Returns:
        `[B, Hq, Q, D]`, as the attention function gets it.

    Raises:
        RuntimeError: the layer never reached the `hybrid_sparse` attention function.
    """
    rest = tuple(_replace_cache(value) for value in args)
    named = {name: _replace_cache(value) for name, value in kwargs.items() if name != "hidden_states"}
    CAPTURING.add(threading.get_ident())
    try:
        with torch.no_grad():
            layer.forward(hidden, *rest, **named)
    except _Captured as captured:
        leave_hooks(captured.__traceback__, captured.query)
        return captured.query
    finally:
        CAPTURING.discard(threading.get_ident())
    raise RuntimeError(
        f"{type(layer).__name__} did not reach the 'hybrid_sparse' attention function, so its query is unknown; "
        "use lookahead='off'"
    )


def make_adapter(layer: nn.Module) -> Adapter | None:
    """The quick way to a query for layers of the Llama kind (norm, q_proj, maybe q_norm, rotary), or None.

    Whether it is right for a layer is for the caller to find out by comparing it with `capture_query`.
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
        cos, sin = (table.to(query.device) for table in kwargs["position_embeddings"])  # as given to another layer
        rotated: torch.Tensor = rotate(query, query[:, :1], cos, sin)[0]
        return rotated

    return adapter


def _parts(layer: nn.Module) -> tuple[Any, Any, Any]:
    """Norm, query projection and query norm of a layer of the Llama kind; None for what it has not."""
    attention = layer._modules.get("self_attn")  # a module's own attribute access takes several times as long
    inside = {} if attention is None else attention._modules
    return layer._modules.get("input_layernorm"), inside.get("q_proj"), inside.get("q_norm")


def _ways(module: nn.Module | None) -> tuple[Any, ...] | None:
    """What a module computes by, beside its arguments and parameters."""
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
        layer: the decoder layer whose query is wanted.
        short_cut: whether there may be one; not where its proof might end differently on ranks that must do the same.
    """

    def __init__(self, layer: nn.Module, *, short_cut: bool = True) -> None:
        self.layer, self.short_cut = layer, short_cut
        self.adapter: Adapter | None = None
        self._known: tuple[Any, ...] | None = None

    def _now(self) -> tuple[Any, ...]:
        """The parts of the layer and all that makes them compute what they do, but for their parameters."""
        layer = self.layer
        parts = _parts(layer)
        own = hook_of(layer), layer.__dict__.get("forward")  # its other hooks are not called
        return (*parts, *own, *map(_ways, (layer._modules.get("self_attn"), *parts)))

    def __call__(self, hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The query `[B, Hq, Q, D]` that the layer would compute from `hidden` `[B, Q, hidden]`.

        Args:
            hidden: the input.
            args, kwargs: the other arguments of the layer's forward.
        """
        known = self._now()
        if known == self._known:
            if self.adapter is not None:
                return self.adapter(hidden, kwargs)
            return capture_query(self.layer, hidden, args, kwargs)
        check_whole(self.layer)
        # The first time, or the layer has other parts now (an adapter of another kind, LoRA's; hooks): prove it again.
        query = capture_query(self.layer, hidden, args, kwargs)
        adapter = None
        if self.short_cut and all(brings_weights(part) for part in known[:3] if part is not None):
            adapter = make_adapter(self.layer)
            if adapter is not None and not _agrees(adapter, hidden, kwargs, query):
                adapter = None
        self.adapter = adapter
        self._known = known  # last: until then another thread proves it for itself
        return query


def _agrees(adapter: Adapter, hidden: torch.Tensor, kwargs: dict[str, Any], query: torch.Tensor) -> bool:
    try:
        with torch.no_grad():
            return torch.equal(adapter(hidden, kwargs), query)
    except (KeyError, TypeError, ValueError, RuntimeError):  # not a layer of this kind after all
        return False
