"""CUDA graph of a whole model's decode step: captured once, replayed for every token.

A replay runs no Python. Kernels read all that changes from step to step in tensors: the token, its position, lengths,
block tables, the step's epoch. Flags in pinned memory announce CPU work to a `Doorbell`, whose threads compute
them; the device waits for their answers by flags, too. Between two replays the host counts the token and closes blocks
that became full.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import threading
import types
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from hf_offload.attention.decode_split import close_step
from hf_offload.cpu.host_signals import Doorbell, ItemError
from hf_offload.cpu.thread_pool import WorkerError
from hf_offload.graph.graph_capture import Capture, Recorder, undisturbed
from hf_offload.graph.graph_support import ModelState, capture_bytes, doubt, lacking_room, tell_eager
from hf_offload.graph.windows import Windows
from hf_offload.model.hooks import CACHE_NAMES, find_cache, hybrid_layers
from hf_offload.model.installing import installing


class NotCaptured(RuntimeError):
    """A step cannot be captured as a CUDA graph."""


class StepGraph:
    """The CUDA graph of a cache's decode steps, captured again when its signature changes.

    Args:
        cache: the `HybridCache`.
        recorder: returns an object that captures and replays a graph (`Recorder`).
        auto: whether steps run eagerly, after a warning, where a replay may differ from them or cannot be had; else
            that is an error.
    """

    def __init__(self, cache: Any, recorder: Callable[[], Any] = Recorder, *, auto: bool = False) -> None:
        self.layers, self.recorder, self.auto = hybrid_layers(cache), recorder, auto
        self._windows = Windows(cache.layers)
        self._off = False
        """Whether steps have proved not to be captured."""
        self._off_since: int | None = None
        """The placement of resident sets after which memory was lacking: until the next one steps run eagerly."""
        self._cache = weakref.proxy(cache)
        self._transaction = cache.transaction
        self._model: Callable[[], nn.Module | None] = cache._model
        self._model_state: ModelState | None = None
        self._capture: Capture | None = None
        self._next: Capture | None = None
        """The capture of the next graph, made when host memory has proved to be pinned."""
        self._recorded: Any = None
        self._state: object = None
        """Signature of the graph's steps; `_next_signature`: of the next step. Both keep the tensors that the graph
        reads alive: a fork in another thread may replace them by larger ones.
        """
        self._next_signature: object = None
        self._call: object = None
        """The part of `_state` that the arguments of a step give."""
        self._prepared: tuple[object, ...] | None = None
        """What must still be so (`_unchanged`) for the next step to be replayed as it was prepared; or None."""
        self._arrays: object = None
        self._doorbell: Doorbell | None = None
        self._epoch = 0
        """Number of replays, an int32 that wraps around like the device's counter."""
        self._inputs: dict[str, torch.Tensor] = {}
        self._limits: tuple[torch.Tensor, ...] = ()
        """Lengths in the next step, which kernels read."""
        self._all_resident: list[bool] = []
        """By layer, whether all blocks of the next step are resident: no host partial is captured then."""
        self._dense: list[bool] = []
        """By layer, whether the next step attends them all: nothing is chosen or predicted then."""
        self._output: Any = None
        self._finalizer: Any = None
        self._told: set[str] = set()

    def ready(self) -> bool:
        """Whether a step can be captured or replayed: the resident set of every layer is placed, no check is due."""
        if self.off:
            return False
        if replaced := self._cache.fallback.reasons:  # by Transformers' own
            self.give_up(f"layer {min(replaced)} keeps Transformers' own cache ({replaced[min(replaced)]})")
            return False
        checks = self.layers[0].settings.checks
        if checks is not None and any(checks.due(layer.index, layer.stats.steps) for layer in self.layers):
            return False
        return self._unchanged() or all(layer.past and not layer.unplaced for layer in self.layers)

    @property
    def off(self) -> bool:
        """Whether steps run eagerly: for ever, or until the next turn."""
        return self._off or self._off_since == self.layers[0].stats.placements

    def tell(self, reason: str) -> None:
        """Warn, once for each reason, that steps run eagerly."""
        if reason not in self._told:
            self._told.add(reason)
            tell_eager(reason, stacklevel=2)

    def _unchanged(self) -> bool:
        """Whether the next step is prepared, and nothing has happened to the cache since."""
        return self._prepared is not None and all(map(operator.is_, self._prepared, self._relied_on()))

    def _relied_on(self) -> tuple[object, ...]:
        """Return objects, each replaced by another when the cache or its padding is changed."""
        padding = self.layers[0].settings.padding
        return self._transaction.turn, padding.valid, padding.holes, padding.first

    def prepare(self, inputs: dict[str, torch.Tensor], fixed: dict[str, Any], *, same_model: bool = False) -> bool:
        """Prepare a step; return whether `run` can take it, or it must run eagerly.

        The first step with a new signature (`_signature`) runs eagerly, since a capture allows no compilation of
        kernels and no allocation of buffers. The second one is captured. A replayed step is prepared by the one before.

        Args:
            inputs: the step's tensors: `input_ids` and `position_ids`, `[B, 1]`.
            fixed: the other arguments of the model's forward.
            same_model: whether nothing but `generate()` has run since the last replay, so that weights, modules and
                hooks are not looked at.

        Raises:
            WorkerError: CPU work of the previous step failed or was late.
        """
        self.check()
        if not self._windows.ready(self.layers[0].settings.padding):
            self._prepared = None
            return False
        call = _signature_of_call(inputs, fixed)
        model = self._model_state if same_model and self._prepared is not None else self._same_model()
        if self._unchanged() and model is self._model_state and call == self._call:
            self.layers[0].mirror.valid()  # of the token that has arrived
            return True
        self._prepared, self._model_state = None, model
        if call != self._call:
            self._call, self._state, self._next_signature = call, None, None
        for layer in self.layers:
            layer.drain_ahead()  # of an eager step
        self._prepare_layers()
        previous, self._next_signature = self._next_signature, self._signature()
        return self._next_signature == self._state or (self._next_signature == previous and self._may_capture())

    def _same_model(self) -> ModelState:
        """Return the state of the model: the object of the last call as long as nothing has changed."""
        state = self._model_state
        if state is not None and state.holds():
            return state
        model = self._model()
        assert model is not None, "the model is running"
        return ModelState(model)

    def _prepare_layers(self) -> None:
        """Make room for the next step's token, and update the tensors that kernels read."""
        for layer in self.layers:
            assert layer.store is not None
            assert layer.resident is not None
            layer.resident.wait()
            layer.store.reserve(layer.store.length + 1)
        self._windows.prepare()
        self._refresh()

    def _may_capture(self) -> bool:
        """Whether the next step can be captured; if not, none is in this turn, for a reason that a warning tells."""
        model = self._model()
        reason = doubt(model) if self.auto and model is not None else None
        lasting = reason is not None
        if reason is None and not self._reachable():
            reason = "pinned host memory cannot be had"
        if reason is None and self.auto:
            first = self.layers[0]
            vocabulary = getattr(self._cache._config, "vocab_size", 0)
            reason = lacking_room(first.device, capture_bytes(vocabulary, first.batch_size, first.dtype))
        if reason is not None:
            self.give_up(reason, lasting=lasting)
        return reason is None

    def give_up(self, reason: str, *, lasting: bool = True) -> None:
        """Run further steps eagerly: all, or those of this turn."""
        self.close()
        if lasting:
            self._off = True
        else:
            self._off_since = self.layers[0].stats.placements
        self.tell(reason)

    def _reachable(self) -> bool:
        """Whether all host memory that a graph reads is pinned; if so, make the next capture."""
        pools = [layer.store.pool.pinned for layer in self.layers if layer.store is not None]
        partials = [layer.host_partial.reachable for layer in self.layers if layer.host_partial is not None]
        device, worker = self.layers[0].device, self.layers[0].settings.worker
        if device.type == "cuda" and not all((*pools, *partials)):
            return False
        with self.layers[0].mirror.current():
            self._next = Capture(device, 2 * len(self.layers), worker.timeout)  # a draw and its attention
        return self._next.reachable

    def run(self, forward: Callable[..., Any], inputs: dict[str, torch.Tensor], fixed: dict[str, Any]) -> Any:
        """Run one decode step for which `prepare` returned True, by capture or replay.

        Args:
            forward: the model's forward.
            inputs, fixed: as in `prepare`.

        Returns:
            The model's output; its tensors are valid until the next step. None: the step cannot be captured, and has
            not run.

        Raises:
            NotCaptured: the step cannot be captured, unless `auto`.
        """
        with self.layers[0].mirror.current():
            if self._prepared is not None or self._next_signature == self._state:
                self._replay_step(inputs)
                return self._output
            try:
                self._capture_step(forward, inputs, fixed)
            except (NotCaptured, torch.OutOfMemoryError) as error:
                if not self.auto:
                    raise
                short = isinstance(error, torch.OutOfMemoryError)
                self.give_up(f"a step cannot be captured ({error.__cause__ or error})", lasting=not short)
                return None
        return self._output

    def _capture_step(
        self, forward: Callable[..., Any], inputs: dict[str, torch.Tensor], fixed: dict[str, Any]
    ) -> None:
        past = self._cache.get_seq_length()
        try:
            self._record(forward, inputs, fixed)  # this runs the forward, whose hooks count the token
            self._state = self._signature()
            self._replay()
            self._prepare_next()
        except BaseException:
            self._windows.undo(past)
            self.close()
            self._cache.fail(past)
            raise

    def _replay_step(self, inputs: dict[str, torch.Tensor]) -> None:
        if self._prepared is None:
            self._update_doorbell()
        for name, value in inputs.items():
            self._inputs[name].copy_(value)
        self._cache.begin()
        try:
            for layer, dense in zip(self.layers, self._dense, strict=True):
                assert layer.store is not None
                layer.store.length += 1
                layer.stats.count_step(dense=dense)
            self._windows.count()
            self._replay()
            self._prepare_next()
        except Exception:  # after an interruption the next `begin` rolls back
            self._cache.end(False)
            raise
        self._cache.end(True)

    def _prepare_next(self) -> None:
        """Prepare the next replay while the device is at work on this one."""
        self._prepared = None
        if any(layer.unplaced for layer in self.layers):
            return
        with suppress(MemoryError, RuntimeError):  # the next step meets them again, before anything has changed
            self._prepare_layers()
            if self._signature() == self._state:
                self._update_doorbell()
                self._prepared = self._relied_on()

    def _replay(self) -> None:
        assert self._capture is not None
        self._recorded.replay()
        self._windows.replayed()
        self._epoch = (self._epoch + 1 + 2**31) % 2**32 - 2**31
        self._capture.tally()
        for layer in self.layers:
            close_step(layer)

    def _refresh(self) -> None:
        """Update the tensors that kernels read for the next step."""
        for layer in self.layers:
            assert layer.store is not None
            layer.store.tables.table()
            layer.store.tables.block_ptr()
        first = self.layers[0]  # all layers of a graph share one device mirror: lengths and padding
        assert first.store is not None
        length, sealed, limits = first.store.length, first.store.sealed, first.mirror.limits
        self._limits = limits("step", length + 1, sealed), limits("ahead", length, sealed)
        self._all_resident = [layer.holds_all(length + 1) for layer in self.layers]
        self._dense = [layer.is_dense(length + 1) for layer in self.layers]
        first.mirror.sinks(first.requirements.sinks)
        first.mirror.valid()

    def _signature(self) -> object:
        """Return all that a captured step depends on besides its arguments and the values of tensors."""
        first = self.layers[0]
        valid = first.mirror.valid()
        sinks = first.mirror.sinks(first.requirements.sinks)
        shared = (*self._limits, *sinks, *(() if valid is None else (valid,)))
        sizes = [(tensor.data_ptr(), tensor.shape) for tensor in shared]
        views = [layer.device_view() for layer in self.layers]
        return views, self._all_resident, self._dense, sizes, self._windows.signature(), self._model_state

    def _record(self, forward: Callable[..., Any], inputs: dict[str, torch.Tensor], fixed: dict[str, Any]) -> None:
        capture, self._next = self._next, None
        self.close()
        mirrors = {layer.mirror for layer in self.layers}
        assert capture is not None
        self._capture = capture
        with torch.inference_mode(False):
            self._inputs = {name: value.clone() for name, value in inputs.items()}
        for layer in self.layers:
            if layer.host_partial is not None:
                layer.host_partial.rehearse(capture)
        self._recorded = self.recorder()

        def step() -> Any:
            try:
                capture.epoch.add_(1)
                output = forward(**self._inputs, **fixed)
                self._windows.write_back()
                capture.finish()
            except BaseException:
                capture.abandon()
                raise
            return output

        self._windows.hold()
        for mirror in mirrors:
            mirror.capture = capture
        try:
            with undisturbed():
                self._output = self._recorded.record(step)
            for name in CACHE_NAMES:
                if name in self._output:  # a reference that would keep the cache alive
                    self._output[name] = None
        except BaseException as error:
            self._capture = self._recorded = self._state = None
            if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
                raise
            raise NotCaptured(
                "a step of this model cannot be captured as a CUDA graph (the cause is above); leave cuda_graph out"
            ) from error
        finally:
            for mirror in mirrors:
                mirror.capture = None
        worker = self.layers[0].settings.worker
        self._doorbell, self._epoch, self._arrays = Doorbell(worker.threads, timeout=worker.timeout), 0, None
        self._doorbell.delay = worker.delay
        self._finalize(self._doorbell)
        self._update_doorbell()

    def _update_doorbell(self) -> None:
        """Give the doorbell new launches if the arrays that they read were replaced."""
        assert self._capture is not None
        assert self._doorbell is not None
        store = self.layers[0].store
        assert store is not None
        padding = store.padding
        shared = id(padding.valid), id(padding.holes), id(padding.first)
        arrays = [
            (id(layer.store.table), id(layer.store.pool.block_ptr), *shared)
            for layer in self.layers
            if layer.store is not None
        ]
        if arrays != self._arrays and self._capture.announced:
            self._wait()
            self._doorbell.replace(self._capture.items(), self._epoch)
            self._arrays = arrays
            self._finalize(self._doorbell)

    def _finalize(self, doorbell: Doorbell) -> None:
        """Register the end of a doorbell after its replay. The newest finalizer runs first at exit."""
        previous = self._finalizer
        self._finalizer = weakref.finalize(self, _let_go, self._recorded, doorbell)
        if previous is not None:
            previous.detach()

    def check(self, *, wait: bool = False) -> None:
        """Raise the errors of CPU work since the last check.

        Args:
            wait: whether to wait for a replay in flight first, before anything but a replay.

        Raises:
            WorkerError: CPU work failed or was not done in time.
        """
        if wait and self._doorbell is not None:
            self._wait()
        late = 0 if self._capture is None else int(self._capture.late[0])
        epochs = [late] if late else []
        try:
            if self._doorbell is not None:
                self._doorbell.check()
        except ItemError as error:
            self.close()
            raise WorkerError(f"{error}; {self._describe_wrong_steps(*epochs, error.epoch)}") from error
        if late:
            self.close()
            raise WorkerError(f"CPU work was not done in time; {self._describe_wrong_steps(late)}")

    def _describe_wrong_steps(self, *epochs: int) -> str:
        """Return the part of an error message on the steps since the earliest of these epochs, all of them wrong."""
        steps = 1 + max((self._epoch - epoch) % 2**32 for epoch in epochs)
        what = "result of the last step is" if steps == 1 else f"results of the last {steps} steps are"
        if any(self._windows):
            return f"the {what} not right, and layers with sliding windows cannot go back: call reset()"
        return f"the {what} not right: crop(-{steps}) and repeat {'it' if steps == 1 else 'them'}"

    def reset(self) -> None:
        """Close, and forget for which turn memory was lacking."""
        self.close()
        self._off_since = None

    def close(self) -> None:
        """Free the graph and stop its doorbell."""
        self._next_signature = self._prepared = None
        self._windows.forget()
        if self._doorbell is None:
            return
        self._wait()  # an interruption here leaves the graph intact
        doorbell, self._doorbell = self._doorbell, None
        self._finalizer.detach()
        self._capture = self._recorded = self._state = self._output = self._next = None
        with suppress(WorkerError):  # the results are dropped
            doorbell.stop()

    def _wait(self) -> None:
        """Wait for a replay in flight, which waits for the CPU."""
        if self._recorded is not None:
            self._recorded.wait()


def _signature_of_call(inputs: dict[str, torch.Tensor], fixed: dict[str, Any]) -> object:
    """Return what a captured step depends on in its arguments."""
    others = {name: value for name, value in fixed.items() if name not in CACHE_NAMES}
    return [(name, value.shape) for name, value in inputs.items()], others


def _let_go(recorded: Any, doorbell: Doorbell) -> None:
    """Stop the doorbell of a freed graph, after a replay in flight."""
    recorded.wait()
    with suppress(WorkerError):  # the graph is freed: there is no caller to raise it in
        doorbell.stop()


_GRAPH_INPUTS = ("input_ids", "position_ids")
_KEPT = ("output_hidden_states", "output_attentions")
_HOST_ARGUMENTS = ("attention_mask", "cache_position")
"""Arguments that the host reads and the graph does not."""


class GraphedForward:
    """Replacement of a model's `forward` and `generate`; it is undone when the last reference goes.

    Decode steps of a cache with a graph are replayed; all other calls run the original methods.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._forward: Callable[..., Any] = model.forward
        self._generate: Any = getattr(model, "generate", None)
        self._names = tuple(inspect.signature(model.forward).parameters)
        self._local = threading.local()
        """`graphs`: the graphs that this thread has replayed in its current `generate`."""
        for name in ("forward", "generate"):
            if hasattr(model, name):
                _MethodOverride(model, name, weakref.ref(self)).install(self)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's `generate`, then check the CPU work of its last step."""
        outer = getattr(self._local, "graphs", None)
        self._local.graphs = graphs = set[Any]()
        try:
            output = self._generate(*args, **kwargs)
        finally:
            self._local.graphs = outer
        for graph in graphs:
            graph.check(wait=True)
        return output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward, as a replay where possible."""
        named = dict(zip(self._names, args, strict=False)) | kwargs
        cache = find_cache((), named)
        graph = getattr(cache, "graph", None)
        if cache is None or graph is None:
            return self._forward(*args, **kwargs)
        step = output = None
        replayed = getattr(self._local, "graphs", ())  # by the `generate` that calls
        if graph.ready() and not cache.transaction.open:  # else `begin` reports it
            step = _split_arguments(cache, named)
        if step is not None and graph.prepare(*step, same_model=bool(replayed) and graph in replayed):
            output = graph.run(self._forward, *step)
        if output is None:
            graph.check(wait=True)
            return self._forward(*args, **kwargs)
        if isinstance(replayed, set):
            replayed.add(graph)
        output = tree_map_only(torch.Tensor, torch.Tensor.clone, output)  # the next replay overwrites them
        for name in CACHE_NAMES:
            if name in output:
                output[name] = cache
        return output


class _MethodOverride:
    """A model's replaced method: it delegates to the `GraphedForward`, or to the original method when that is gone.

    Args:
        model: the model; name: name of the method.
        graphed: returns the `GraphedForward`, or None.
    """

    def __init__(self, model: nn.Module, name: str, graphed: Callable[[], GraphedForward | None]) -> None:
        self._original = getattr(model, name)
        functools.update_wrapper(self, self._original)
        self._model, self._name, self._instance_method = weakref.ref(model), name, model.__dict__.get(name)
        self._graphed = graphed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graphed = self._graphed()
        return self._original(*args, **kwargs) if graphed is None else getattr(graphed, self._name)(*args, **kwargs)

    def install(self, owner: GraphedForward) -> None:
        """Replace the model's method until `owner` is freed."""
        setattr(self._model(), self._name, self)
        weakref.finalize(owner, _restore, self._model, self, self._name, self._instance_method)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the original method, bound to the copied model."""
        if self._instance_method is not None:
            return copy.deepcopy(self._instance_method, memo)
        model = self._model()
        return self._of_class(memo.get(id(model), model))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the original method, bound to the unpickled model."""
        if self._instance_method is not None:
            return _identity, (self._instance_method,)
        return getattr, (self._model(), self._name)  # the class's method, as the unpickled model has no attributes yet

    def _of_class(self, model: Any) -> Any:
        return types.MethodType(getattr(type(model), self._name), model)


def _identity(value: Any) -> Any:
    return value


def graphed(model: nn.Module) -> GraphedForward:
    """Return the model's `GraphedForward`, an existing or a new one."""
    with installing():
        graphed = getattr(model.__dict__.get("forward"), "_graphed", lambda: None)()
        if isinstance(graphed, GraphedForward):
            return graphed
        for name in ("forward", "generate"):
            override = model.__dict__.get(name)
            if isinstance(override, _MethodOverride) and override._graphed() is None:  # it is about to be restored
                _restore(weakref.ref(model), override, name, override._instance_method)
        return GraphedForward(model)


def _split_arguments(cache: Any, kwargs: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Split a forward's arguments into the tensors and the others of a decode step; None if it is not a plain one."""
    ids = kwargs.get("input_ids")
    handled = _GRAPH_INPUTS + _HOST_ARGUMENTS
    others = any(isinstance(value, torch.Tensor) and name not in handled for name, value in kwargs.items())
    if others or ids is None or ids.shape[1] != 1 or kwargs.get("return_dict") is False:
        return None
    if torch.is_autocast_enabled(ids.device.type):
        cache.graph.tell("under autocast a replay would use the dtypes of its capture")
        return None
    if cache.graph.auto and any(kwargs.get(name) or getattr(cache._config, name, False) for name in _KEPT):
        cache.graph.tell("a step returns hidden states or attention weights")
        return None
    mask, padding = kwargs.get("attention_mask"), cache.settings.padding
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        return None
    past, revision = cache.get_seq_length(), padding.revision
    padding.observe(None if mask is None else mask.bool(), ids.shape[0], past + 1)
    if padding.revision != revision:
        return None
    positions = kwargs.get("position_ids")
    if positions is None and padding.ragged:
        return None  # models differ in the positions of padded rows
    if positions is None:
        positions = torch.full_like(ids, past)
    fixed = {name: value for name, value in kwargs.items() if name not in handled}
    return {"input_ids": ids, "position_ids": positions}, fixed


def _restore(model: weakref.ref[nn.Module], override: _MethodOverride, name: str, instance_method: Any) -> None:
    owner = model()
    if owner is None or owner.__dict__.get(name) is not override:
        return
    if instance_method is None:
        owner.__dict__.pop(name, None)  # `graphed` in another thread may have taken it out
    else:
        setattr(owner, name, instance_method)
