"""One decode step of a whole model as a CUDA graph: captured once, replayed for every token.

A captured step runs no Python. What changes from step to step lies in tensors that kernels read: the token, its
position, sizes, block tables, the epoch of the step. The CPU's parts are announced by flags in pinned memory and served
by a `Doorbell`; the device waits for them by itself. Between two replays the host keeps its own books: it counts the
token, and closes blocks that became full.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hf_offload.attention.decode_split import close_step
from hf_offload.attention.graph_capture import Capture, Recorder, undisturbed
from hf_offload.attention.hooks import hybrid_layers
from hf_offload.cpu.host_signals import Doorbell, ItemError
from hf_offload.cpu.thread_pool import WorkerError


class StepGraph:
    """Decodes with one token by replaying a graph; captures it when there is none that fits.

    Args:
        cache: the `HybridCache`.
        recorder: makes what captures and replays (`Recorder`).
    """

    def __init__(self, cache: Any, recorder: Callable[[], Any] = Recorder) -> None:
        self.layers, self.recorder = hybrid_layers(cache), recorder
        self._cache = weakref.proxy(cache)
        self._capture: Capture | None = None
        self._next: Capture | None = None
        """What the next graph hands over with, once it is known that it can."""
        self._recorded: Any = None
        self._state: object = None
        """The signature of the steps that the graph serves; `_coming`: of the step that comes. They hold what the graph
        reads, for which a fork in another thread may have found a larger place.
        """
        self._coming: object = None
        self._arrays: object = None
        self._doorbell: Doorbell | None = None
        self._epoch = 0
        """Replays of this graph; an int32 that wraps around, as the device counts."""
        self._inputs: dict[str, torch.Tensor] = {}
        self._limits: tuple[torch.Tensor, ...] = ()
        """Sizes in the step that comes, which kernels read; made anew where an interruption has cost the old ones."""
        self._output: Any = None
        self._finalizer: Any = None
        self._warned = False

    def ready(self) -> bool:
        """Whether a step may be captured or replayed now: what is resident has been decided and loaded."""
        return all(layer.past and not layer.unplaced for layer in self.layers)

    def prepare(self, inputs: dict[str, torch.Tensor], fixed: dict[str, Any]) -> bool:
        """Get ready for a step; whether it can be `run`, or must be taken in Python first.

        What a step launches may have to be compiled and loaded, and buffers made, which a capture refuses. So the first
        of a new kind (see `_signature`) runs in Python, and the second is captured.

        Args:
            inputs: the step's tensors: `input_ids` and `position_ids`, `[B, 1]`.
            fixed: the other arguments of the model's forward.

        Raises:
            WorkerError: a CPU part of the step before failed or was late.
        """
        self.check()
        for layer in self.layers:
            assert layer.store is not None
            assert layer.resident is not None
            layer.drain_ahead()  # of a step that ran in Python
            layer.resident.wait()
            layer.store.reserve(layer.store.length + 1)
        self._refresh()
        before, self._coming = self._coming, self._signature(inputs, fixed)
        return self._coming == self._state or (self._coming == before and self._reachable())

    def _reachable(self) -> bool:
        """Whether a graph could read what lies in host memory; a warning, once, where that is not pinned."""
        pools = [layer.store.pool.pinned for layer in self.layers if layer.store is not None]
        parts = [layer.host_part.reachable for layer in self.layers if layer.host_part is not None]
        device, worker = self.layers[0].device, self.layers[0].settings.worker
        if device.type != "cuda" or all((*pools, *parts)):
            with self.layers[0].mirror.current():
                self._next = Capture(device, len(self.layers), worker.timeout)
            if self._next.reachable:
                return True
        if not self._warned:
            self._warned = True
            warnings.warn(
                "cuda_graph=True needs pinned host memory, which cannot be had; steps go on without a graph",
                RuntimeWarning,
                stacklevel=2,
            )
        return False

    def run(self, forward: Callable[..., Any], inputs: dict[str, torch.Tensor], fixed: dict[str, Any]) -> Any:
        """One decode step, after `prepare`, which has agreed.

        Args:
            forward: the model's forward.
            inputs, fixed: as in `prepare`.

        Returns:
            What the model returns; its tensors are good until the next step.

        Raises:
            RuntimeError: the model does what cannot be captured.
        """
        with self.layers[0].mirror.current():
            if self._coming == self._state:
                self._repeat(inputs)
            else:
                self._begin(forward, inputs, fixed)
        return self._output

    def _begin(self, forward: Callable[..., Any], inputs: dict[str, torch.Tensor], fixed: dict[str, Any]) -> None:
        past = self._cache.get_seq_length()
        try:
            self._record(forward, inputs, fixed)  # a forward of its own: it counts the token
            self._state = self._signature(inputs, fixed)
            self._replay()
        except BaseException:
            self.close()
            self._cache.fail(past)
            raise

    def _repeat(self, inputs: dict[str, torch.Tensor]) -> None:
        self._serve()
        for name, value in inputs.items():
            self._inputs[name].copy_(value)
        self._cache.begin()
        try:
            for layer in self.layers:
                assert layer.store is not None
                layer.store.length += 1
                layer.stats.steps += 1
            self._replay()
        except Exception:  # what an interruption leaves is for the next `begin`
            self._cache.end(False)
            raise
        self._cache.end(True)

    def _replay(self) -> None:
        assert self._capture is not None
        self._recorded.replay()
        self._epoch = (self._epoch + 1 + 2**31) % 2**32 - 2**31
        self._capture.tally()
        for layer in self.layers:
            close_step(layer)

    def _refresh(self) -> None:
        """Bring what kernels read up to date for the step that comes."""
        for layer in self.layers:
            assert layer.store is not None
            layer.store.tables.table()
            layer.store.tables.block_ptr()
        first = self.layers[0]  # a graph has one device, on which all layers read the same sizes and padding
        assert first.store is not None
        length, sealed, limits = first.store.length, first.store.sealed, first.mirror.limits
        self._limits = limits("step", length + 1, sealed), limits("ahead", length, sealed)
        first.mirror.sinks(first.requirements.sinks)
        first.mirror.valid()

    def _signature(self, inputs: dict[str, torch.Tensor], fixed: dict[str, Any]) -> object:
        """What a captured step depends on beside the values in its tensors; a few microseconds a layer, every step."""
        views = [layer.device_view() for layer in self.layers]
        first = self.layers[0]
        valid = first.mirror.valid()
        sinks = first.mirror.sinks(first.requirements.sinks)
        shared = (*self._limits, *sinks, *(() if valid is None else (valid,)))
        shapes = tuple((name, value.shape) for name, value in sorted(inputs.items()))
        sizes = [(tensor.data_ptr(), tensor.shape) for tensor in shared]
        return views, sizes, shapes, {name: value for name, value in fixed.items() if name != "past_key_values"}

    def _record(self, forward: Callable[..., Any], inputs: dict[str, torch.Tensor], fixed: dict[str, Any]) -> None:
        capture, self._next = self._next, None
        self.close()
        mirrors = {layer.mirror for layer in self.layers}
        assert capture is not None
        self._capture = capture
        with torch.inference_mode(False):
            self._inputs = {name: value.clone() for name, value in inputs.items()}
        for layer in self.layers:
            if layer.host_part is not None:
                layer.host_part.rehearse(capture)
        self._recorded = self.recorder()

        def step() -> Any:
            try:
                capture.epoch.add_(1)
                output = forward(**self._inputs, **fixed)
                capture.finish()
            except BaseException:
                capture.abandon()
                raise
            return output

        for mirror in mirrors:
            mirror.capture = capture
        try:
            with undisturbed():
                self._output = self._recorded.record(step)
            if "past_key_values" in self._output:  # which would keep the cache alive
                self._output["past_key_values"] = None
        except BaseException as error:
            self._capture = self._recorded = self._state = None
            if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
                raise
            raise RuntimeError(
                "a step of this model cannot be captured as a CUDA graph (the cause is above); leave cuda_graph out"
            ) from error
        finally:
            for mirror in mirrors:
                mirror.capture = None
        worker = self.layers[0].settings.worker
        self._doorbell, self._epoch, self._arrays = Doorbell(worker.threads, timeout=worker.timeout), 0, None
        self._doorbell.delay = worker.delay
        self._finalize(self._doorbell)
        self._serve()

    def _serve(self) -> None:
        """Let the doorbell work on the arrays that there are now."""
        assert self._capture is not None
        assert self._doorbell is not None
        store = self.layers[0].store
        assert store is not None
        arrays = [
            (id(layer.store.table), id(layer.store.pool.block_ptr), id(store.padding.valid), id(store.padding.holes))
            for layer in self.layers
            if layer.store is not None
        ]
        if arrays != self._arrays and self._capture.parts:
            self._settle()
            self._doorbell.replace(self._capture.items(), self._epoch)
            self._arrays = arrays
            self._finalize(self._doorbell)

    def _finalize(self, doorbell: Doorbell) -> None:
        """Let a replay in flight end before its doorbell: the newest finalizer, at exit the first, is this one."""
        before = self._finalizer
        self._finalizer = weakref.finalize(self, _let_go, self._recorded, doorbell)
        if before is not None:
            before.detach()

    def check(self, *, settle: bool = False) -> None:
        """Raise what went wrong on the CPU's side since the last look.

        Args:
            settle: wait for a replay that is in flight first: what follows is none.

        Raises:
            WorkerError: a part failed or was not done in time.
        """
        if settle and self._doorbell is not None:
            self._settle()
        late = 0 if self._capture is None else int(self._capture.late[0])
        epochs = [late] if late else []
        try:
            if self._doorbell is not None:
                self._doorbell.check()
        except ItemError as error:
            self.close()
            raise WorkerError(f"{error}; {self._wrong_since(*epochs, error.epoch)}") from error
        if late:
            self.close()
            raise WorkerError(f"a CPU part was not done in time; {self._wrong_since(late)}")

    def _wrong_since(self, *epochs: int) -> str:
        """What to tell of the steps from the first of these epochs on: who looks at no result may have gone on."""
        steps = 1 + max((self._epoch - epoch) % 2**32 for epoch in epochs)
        what = "result of the last step is" if steps == 1 else f"results of the last {steps} steps are"
        return f"the {what} not right: crop(-{steps}) and repeat {'it' if steps == 1 else 'them'}"

    def close(self) -> None:
        """Forget the graph; the thread that served it ends."""
        self._coming = None
        if self._doorbell is None:
            return
        self._settle()  # an interruption finds all of it as it was
        doorbell, self._doorbell = self._doorbell, None
        self._finalizer.detach()
        self._capture = self._recorded = self._state = self._output = self._next = None
        with suppress(WorkerError):  # nobody asks for these parts any more
            doorbell.stop()

    def _settle(self) -> None:
        """Let a replay that is in flight end: it waits for the CPU."""
        if self._recorded is not None:
            self._recorded.settle()


def _let_go(recorded: Any, doorbell: Doorbell) -> None:
    """End a doorbell whose graph is gone; a replay in flight still waits for it."""
    recorded.settle()
    with suppress(WorkerError):
        doorbell.stop()


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
