"""Hooks on a model's decoder layers: one set for each model, shared by its caches and removed with the last of them."""

from __future__ import annotations

import inspect
import itertools
import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from hf_offload.attention.decode import look_ahead
from hf_offload.cache.arrivals import unconsumed
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.torch_modes import uncompiled
from hf_offload.model.drafts import predict_drafts
from hf_offload.model.installing import installing
from hf_offload.model.lookahead import PROBING, QueryPredictor, probing
from hf_offload.model.model_support import exchanges


class Attachment:
    """The hooks of one model.

    Before the decoder: the forward's transaction begins. Before each decoder layer, if a cache looks ahead: layer-ahead
    work for the next layer. After the decoder: a check that the `hybrid_sparse` attention function got all K and V.

    Args:
        model: the model whose decoder layers are hooked.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.stack, self.layers = find_layers(model)
        self._layer_handles: list[RemovableHandle] = []
        self.predictors = [QueryPredictor(layer, short_cut=not exchanges(model)) for layer in self.layers]
        self._looking: weakref.WeakSet[Any] = weakref.WeakSet()
        """The caches that look ahead."""
        ref = weakref.ref(self)
        self._handles = [
            self.stack.register_forward_pre_hook(_BeforeStack(ref), with_kwargs=True),
            self.stack.register_forward_hook(_AfterStack(ref), with_kwargs=True, always_call=True),
        ]
        self._finalizer = weakref.finalize(self, _remove, self._handles, self._layer_handles)

    def _hook_layers(self, cache: Any) -> None:
        """Hook each decoder layer while a cache that looks ahead lives: the hooks cost time in every layer and step."""
        with installing():
            if cache.looks_ahead:
                self._looking.add(cache)
            if self._looking and not self._layer_handles:
                ref = weakref.ref(self)
                for index, layer in enumerate(self.layers):
                    hook = _BeforeLayer(ref, index)
                    self._layer_handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
            elif not self._looking:
                _remove(self._layer_handles)
                self._layer_handles.clear()

    def before_stack(self, cache: Any, kwargs: dict[str, Any]) -> None:
        """Begin the transaction of a forward.

        Raises:
            ValueError: the forward wants attention weights, or gradient checkpointing would skip the cache.
        """
        if kwargs.get("output_attentions"):
            raise ValueError(
                "HybridCache cannot serve output_attentions: blocks that are not attended have no weights; use "
                "DynamicCache"
            )
        if self.stack.training and any(getattr(layer, "gradient_checkpointing", False) for layer in self.layers):
            raise ValueError(
                "gradient checkpointing keeps the cache from a model in train mode; call model.eval() before generating"
            )
        if (cache not in self._looking) if cache.looks_ahead else (self._layer_handles and not self._looking):
            self._hook_layers(cache)
        cache.begin()

    def after_stack(self, cache: Any, finished: bool) -> None:
        """End the transaction of a forward.

        Args:
            cache: the `HybridCache`.
            finished: whether the forward returned.

        Raises:
            RuntimeError: the attention function never got the K and V of a layer.
        """
        if finished:
            cache.fallback.replace_changed()
        unattended = [layer for layer in hybrid_layers(cache) if layer.pending is not None]
        cache.end(finished and not unattended)
        if unattended and finished:
            raise RuntimeError(unconsumed(unattended[0].index))

    def before_layer(self, index: int, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before decoder layer `index` runs, predict the next layer's query and start its layer-ahead work."""
        _learn_donor(cache, index, kwargs)
        hidden = args[0] if args else kwargs.get("hidden_states")
        if cache.settings.drafts.count and hidden is not None:
            predict_drafts(cache, index, hidden, args[1:], kwargs)
            return
        target = index + 1
        layer = cache.layers[target] if target < min(len(cache.layers), len(self.layers)) else None
        if hidden is None or hidden.shape[-2] != 1 or not isinstance(layer, HybridLayer) or layer.scores is None:
            return
        if not layer.past or not layer.looks_ahead or not layer.may_begin_early(layer.past + 1):
            return
        call = cache.transaction.calls.get(cache.donors.get(target))
        if call is None:
            return  # without arguments from an earlier layer of its kind, the next layer uses its real query
        if not (layer.device_type == "cpu" and hidden.is_cpu):
            hidden = hidden.to(layer.device)
        look_ahead(layer, cache.predict_query(target, hidden, args[1:], call))


def _learn_donor(cache: Any, index: int, kwargs: dict[str, Any]) -> None:
    """Record the earlier layer of this forward whose arguments a prediction for layer `index` can use.

    Such layers have identical position arguments; Gemma 3 has two kinds.
    """
    calls = cache.transaction.calls
    last = calls.get(index - 1)
    if last is not None and len(last) == len(kwargs) and all(map(operator.is_, last.values(), kwargs.values())):
        cache.donors[index] = index - 1  # all arguments are identical, as in most models
    else:
        positions = _positions(kwargs)
        for other in reversed(calls):
            if _same_positions(_positions(calls[other]), positions):
                cache.donors[index] = other
                break
        else:
            cache.donors.pop(index, None)
    calls[index] = kwargs


def _positions(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if "position" in name}


def _same_positions(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    for name, value in a.items():
        if not _same(value, b.get(name)):
            return False
    return len(a) == len(b) or all(value is None for name, value in b.items() if name not in a)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    both = isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b)
    return both and all(_same(x, y) for x, y in zip(a, b, strict=True))


def attach(model: PreTrainedModel) -> Attachment:
    """Return the model's hooks, existing or new ones; they are removed when the last reference goes."""
    stack, layers = find_layers(model)
    with installing():
        for module in (stack, *layers):
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key, hook in list(hooks.items()):
                    attachment = hook.attachment() if isinstance(hook, _Hook) else None
                    if attachment is not None and attachment.stack is stack:
                        return attachment
                    if isinstance(hook, _Hook):  # of the model that this one is a copy of
                        hooks.pop(key, None)
        return Attachment(model)


def find_layers(model: PreTrainedModel) -> tuple[nn.Module, list[nn.Module]]:
    """Return the module that runs the decoder layers, and the layers.

    Raises:
        ValueError: the model has no list of as many layers as its config says.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    for root in (decoder, model):  # the decoder first, since a vision tower may have as many layers
        for module in root.modules() if isinstance(root, nn.Module) else ():
            for child in module.children():
                if isinstance(child, nn.ModuleList) and len(child) == count and _numbered(child):
                    return module, list(child)
    raise ValueError(f"{type(model).__name__} has no list of {count} decoder layers; use DynamicCache for this model")


def _numbered(layers: nn.ModuleList) -> bool:
    """Whether modules in these layers have a `layer_idx`, as layers with a cache do and encoders' do not."""
    return any(
        getattr(module, "layer_idx", None) == index for index, layer in enumerate(layers) for module in layer.modules()
    )


def hybrid_layers(cache: Any) -> list[HybridLayer]:
    """Return the `HybridLayer`s of a cache; an empty list for other caches."""
    return [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, HybridLayer)]


CACHE_NAMES = ("past_key_values", "cache")
"""The cache's name among the arguments and outputs of a forward: before Transformers 5.24, and since."""


def cache_argument(model: nn.Module, cache: Any) -> dict[str, Any]:
    """Return the keyword argument that hands a cache to a forward of a model or decoder, or to its `generate()`."""
    old, new = CACHE_NAMES
    return {new if new in inspect.signature(model.forward).parameters else old: cache}


def find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the `HybridCache` among a forward's arguments, whatever its name, or None; not one of another import."""
    for value in (*map(kwargs.get, CACHE_NAMES), *kwargs.values(), *args):
        if getattr(value, "layer_type", None) is HybridLayer:
            return value
    return None


def _no_attachment() -> None:
    """Return None: the attachment of a hook that was copied or unpickled with its module."""


class _Hook:
    def __init__(self, attachment: Callable[[], Attachment | None], index: int = -1) -> None:
        self.attachment, self.index = attachment, index

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (_no_attachment,)  # caches of the copied model make hooks of their own

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        cache = find_cache(args, kwargs)
        if cache is not None:  # torch.compile can trace this hook if the cache is another one
            self.run(cache, args, kwargs, *output)

    def context(self) -> Attachment | None:
        """Return the attachment; None if it is gone or this thread predicts a query."""
        return None if PROBING and probing() else self.attachment()

    def run(self, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        """Handle a call of the module with a `HybridCache`."""
        raise NotImplementedError


class _BeforeStack(_Hook):
    @uncompiled
    def run(self, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        if context := self.context():
            context.before_stack(cache, kwargs)


class _AfterStack(_Hook):
    @uncompiled
    def run(self, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        if context := self.context():
            context.after_stack(cache, finished=output[0] is not None)


class _BeforeLayer(_Hook):
    @uncompiled
    def run(self, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *output: Any) -> None:
        context = self.context()
        if context is None or not cache.looks_ahead:
            return
        if torch.is_grad_enabled():
            with torch.no_grad():
                context.before_layer(self.index, cache, args, kwargs)
        else:
            context.before_layer(self.index, cache, args, kwargs)


def _remove(*handles: list[RemovableHandle]) -> None:
    for handle in itertools.chain(*handles):
        handle.remove()
