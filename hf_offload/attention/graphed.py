"""The `forward` of a model whose cache decodes by CUDA graphs: stock `generate()` calls it like any other.

What a CPU part does wrong in a replay is told by the next one, or at the end of `generate()`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
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
    """Takes the place of a model's `forward` and `generate` for as long as somebody holds it.

    Steps with one token and a cache that has a graph are replayed; everything else runs as before.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forward: Callable[..., Any] = model.forward
        self._generate: Any = getattr(model, "generate", None)
        self._names = tuple(inspect.signature(model.forward).parameters)
        self._local = threading.local()
        """`graphs`: those that this thread has replayed within the `generate` that it is in."""
        for name in ("forward", "generate"):
            if hasattr(model, name):
                _Stand(model, name, weakref.ref(self)).take_place(self)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's `generate`, at whose end the last step is known to be right."""
        outer = getattr(self._local, "graphs", None)
        self._local.graphs = graphs = set[Any]()
        try:
            made = self._generate(*args, **kwargs)
        finally:
            self._local.graphs = outer
        for graph in graphs:
            graph.check(settle=True)
        return made

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; a replay where one will do."""
        named = dict(zip(self._names, args, strict=False)) | kwargs
        cache = named.get("past_key_values")
        graph = getattr(cache, "graph", None)
        step = None
        if cache is not None and graph is not None and graph.ready():
            step = None if cache.transaction.open else _step_of(cache, named)  # what was interrupted `begin` tells
        if graph is None or step is None:
            if graph is not None:
                graph.check(settle=True)
            return self._forward(*args, **kwargs)
        if not graph.prepare(*step):
            graph.check(settle=True)
            return self._forward(*args, **kwargs)
        output = graph.run(self._forward, *step)
        if getattr(self._local, "graphs", None) is not None:
            self._local.graphs.add(graph)
        output = tree_map_only(torch.Tensor, torch.Tensor.clone, output)  # the graph writes into the same ones again
        if "past_key_values" in output:
            output["past_key_values"] = cache
        return output


class _Stand:
    """What stands in a model as a method of it: hands calls on for as long as there is a `GraphedForward`.

    Args:
        model: the model; name: of the method.
        graphed: the one that answers.
    """

    def __init__(self, model: nn.Module, name: str, graphed: Callable[[], GraphedForward | None]) -> None:
        self._before = getattr(model, name)
        functools.update_wrapper(self, self._before)
        self._model, self._name, self._mine = weakref.ref(model), name, model.__dict__.get(name)
        self._graphed = graphed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graphed = self._graphed()
        return self._before(*args, **kwargs) if graphed is None else getattr(graphed, self._name)(*args, **kwargs)

    def take_place(self, owner: GraphedForward) -> None:
        """Stand in the model until the owner is gone."""
        setattr(self._model(), self._name, self)
        weakref.finalize(owner, _restore, self._model, self, self._name, self._mine)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model has a method of its own."""
        if self._mine is not None:
            return copy.deepcopy(self._mine, memo)
        model = self._model()
        return self._of_class(memo.get(id(model), model))

    def __reduce__(self) -> tuple[Any, ...]:
        """So has the model that is unpickled."""
        if self._mine is not None:
            return _itself, (self._mine,)
        return getattr, (self._model(), self._name)  # which is its class's while the model is being made

    def _of_class(self, model: Any) -> Any:
        return types.MethodType(getattr(type(model), self._name), model)


def _itself(value: Any) -> Any:
    return value


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


def _restore(model: weakref.ref[nn.Module], stand: _Stand, name: str, mine: Any) -> None:
    owner = model()
    if owner is None or owner.__dict__.get(name) is not stand:
        return
    if mine is None:
        delattr(owner, name)
    else:
        setattr(owner, name, mine)
