"""The `forward` of a model whose cache decodes by CUDA graphs: stock `generate()` calls it like any other."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

_TENSORS = ("input_ids", "position_ids")
_HOST = ("attention_mask", "cache_position")
"""What the host looks at, and the graph does not take."""


class GraphedForward:
    """Takes the place of a model's `forward` for as long as somebody holds it.

    Steps with one token and a cache that has a graph are replayed; everything else runs as before.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        mine = model.__dict__.get("forward")
        self.forward: Callable[..., Any] = model.forward
        self._names = tuple(inspect.signature(model.forward).parameters)
        forward = _Forward(model, mine, weakref.ref(self))
        model.forward = forward
        weakref.finalize(self, _restore, weakref.ref(model), forward, mine)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(self._names, args, strict=False)) | kwargs
        cache = named.get("past_key_values")
        graph = getattr(cache, "graph", None)
        step = _step_of(cache, named) if graph is not None and graph.ready() else None
        if graph is None or step is None:
            if graph is not None:
                graph.check(settle=True)
            return self.forward(*args, **kwargs)
        if not graph.prepare(*step):
            return self.forward(*args, **kwargs)
        output = graph.run(self.forward, *step)
        output = tree_map_only(torch.Tensor, torch.Tensor.clone, output)  # the graph writes into the same ones again
        if "past_key_values" in output:
            output["past_key_values"] = cache
        return output


class _Forward:
    """What stands in a model as its `forward`: hands calls on for as long as there is a `GraphedForward`."""

    def __init__(self, model: nn.Module, mine: Any, graphed: Callable[[], GraphedForward | None]) -> None:
        functools.update_wrapper(self, model.forward)
        self._model, self._before, self._mine, self._graphed = weakref.ref(model), model.forward, mine, graphed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graphed = self._graphed()
        return self._before(*args, **kwargs) if graphed is None else graphed(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model has a forward of its own."""
        if self._mine is not None:
            return copy.deepcopy(self._mine, memo)
        owner = memo[id(self._model())]
        return types.MethodType(type(owner).forward, owner)


def graphed(model: nn.Module) -> GraphedForward:
    """The model's `GraphedForward`: the one that is there, or a new one."""
    found = getattr(model.__dict__.get("forward"), "_graphed", lambda: None)()
    return found or GraphedForward(model)


def _step_of(cache: Any, kwargs: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """The tensors and the other arguments of a decode step, or None if these are not the arguments of a plain one."""
    ids = kwargs.get("input_ids")
    known = _TENSORS + _HOST
    others = any(isinstance(value, torch.Tensor) and name not in known for name, value in kwargs.items())
    if others or ids is None or ids.shape[1] != 1 or kwargs.get("return_dict") is False:
        return None
    if torch.is_autocast_enabled(ids.device.type):
        return None  # a graph would go on in the dtypes that it was captured with
    mask, padding = kwargs.get("attention_mask"), cache.settings.padding
    if mask is not None and mask.ndim != 2:
        return None
    past, revision = cache.get_seq_length(), padding.revision
    padding.observe(None if mask is None else mask.bool(), ids.shape[0], past + 1)
    if padding.revision != revision:
        return None
    positions = kwargs.get("position_ids")
    if positions is None and padding.ragged:
        return None  # how rows with padding count their positions is the model's business
    if positions is None:
        positions = torch.full_like(ids, past)
    fixed = {name: value for name, value in kwargs.items() if name not in known}
    return {"input_ids": ids, "position_ids": positions}, fixed


def _restore(model: weakref.ref[nn.Module], forward: Any, mine: Any) -> None:
    owner = model()
    if owner is None or owner.__dict__.get("forward") is not forward:
        return
    if mine is None:
        del owner.__dict__["forward"]
    else:
        owner.forward = mine
