"""Replayed steps that are interrupted, fail or are late, threads, and what a graph leaves behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from recording import CpuRecorder
from tiny import prompt
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_offload import HybridCache, WorkerError
from hf_offload.graph import cuda_graph, graph_capture
from hf_offload.graph.cuda_graph import StepGraph

from ._graphs import AHEAD, SCOUT, SELECTED, eager_cache, graph_cache, model_of, run


def interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


def test_a_replay_that_was_interrupted_is_told_of_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of rows with padding, whose masks then have a column less than the cache has tokens."""
    model = model_of("llama")
    want = run(model, eager_cache(model, "scout", **SELECTED), (150, 20), rows=2)
    cache = graph_cache(model, "scout", **SELECTED)
    run(model, cache, (150, 6), rows=2)
    with monkeypatch.context() as patch:
        patch.setattr(CpuRecorder, "replay", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(model, cache, (156, 1), rows=2)
    with pytest.raises(RuntimeError, match="the last forward was interrupted; the cache holds the 156 tokens"):
        run(model, cache, (156, 1), rows=2)
    assert torch.allclose(run(model, cache, (156, 14), rows=2), want[:, -14:], atol=1e-3)


def test_a_step_that_fails_when_it_is_closed_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one that fills a block: it lies in its slot alone until then. At 152 the step is being captured."""
    model, knobs, close = model_of("llama"), {**SCOUT, "budget": 512}, cuda_graph.close_step
    want = run(model, eager_cache(model, "scout", **knobs), (150, 20))
    cache, due, rows = graph_cache(model, "scout", **knobs), {153, 160}, []

    def fail(layer: Any) -> None:
        if layer.index == 2 and layer.past in due:
            due.remove(layer.past)
            raise MemoryError("nothing left")
        close(layer)

    monkeypatch.setattr(cuda_graph, "close_step", fail)
    for i in range(150, 170):
        if i + 1 in due:
            with pytest.raises(MemoryError, match="nothing left"):
                run(model, cache, (i, 1))
            assert cache.get_seq_length() == i
        rows.append(run(model, cache, (i, 1)))
    assert not due
    assert torch.allclose(torch.cat(rows, 1), want, atol=2e-5)


def test_a_part_that_is_late_is_told_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, knobs = model_of("llama"), {**SELECTED, "lookahead": "attend", "recall": 0}
    want = run(model, eager_cache(model, "scout", **knobs), (150, 20))
    cache = graph_cache(model, "scout", **knobs)
    with monkeypatch.context() as patch:
        patch.setattr(graph_capture, "LOOKS", 10)
        run(model, cache, (150, 2))  # in Python
        cache.settings.worker.delay = 0.5
        run(model, cache, (152, 1))
        with pytest.raises(WorkerError, match=r"not done in time.*crop\(-1\) and repeat it"):
            run(model, cache, (153, 1))
    cache.settings.worker.delay = 0.0
    cache.crop(-1)
    assert torch.allclose(run(model, cache, (152, 18)), want[:, 2:], atol=1e-3)


def test_a_part_that_is_late_in_the_last_step_is_told_by_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    cache = graph_cache(model, "scout", **AHEAD, recall=0)
    monkeypatch.setattr(graph_capture, "LOOKS", 4_000)  # half a second in all

    class Slow(StoppingCriteria):
        """Have the CPU be late in the last step alone."""

        def __call__(self, tokens: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            if tokens.shape[1] == 158:
                cache.graph._doorbell.delay = 1.0
            return torch.zeros(1, dtype=torch.bool)

    knobs = {"past_key_values": cache, "do_sample": False, "stopping_criteria": StoppingCriteriaList([Slow()])}
    with pytest.raises(WorkerError, match=r"not done in time.*the last step is not right: crop\(-1\) and repeat it"):
        model.generate(prompt(1, 150)[0], max_new_tokens=9, **knobs)
    assert cache.get_seq_length() == 158


@pytest.mark.slow
def test_all_steps_that_a_late_part_has_spoilt_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that looks at no result runs ahead of the device."""
    model = model_of("llama")
    cache = graph_cache(model, "scout", **AHEAD, recall=0)
    monkeypatch.setattr(graph_capture, "LOOKS", 10_000)
    run(model, cache, (150, 5))
    cache.graph._doorbell.delay = 2.0
    with monkeypatch.context() as patch:
        patch.setattr(StepGraph, "check", lambda graph: None)
        run(model, cache, (155, 3))
    with pytest.raises(WorkerError, match=r"the last 3 steps are not right: crop\(-3\) and repeat them"):
        run(model, cache, (158, 1))
    cache.crop(-3)
    assert cache.get_seq_length() == 155


@pytest.mark.parametrize("change", [HybridCache.reset, lambda cache: cache.batch_select_indices(torch.tensor([0, 0]))])
def test_what_a_graph_held_goes_with_it(change: Callable[[Any], None]) -> None:
    model = model_of("llama")
    cache = graph_cache(model, "scout", **SCOUT)
    run(model, cache, (150, 5))
    held = [weakref.ref(layer.resident.pool) for layer in cache.layers]
    change(cache)
    gc.collect()
    assert not any(one() is not None for one in held)


def test_the_forward_is_the_models_own_again_when_the_cache_is_gone() -> None:
    """At once, without the garbage collector: a cache may hold much of the memory."""
    model = model_of("llama")
    cache = graph_cache(model, "scout", **AHEAD)
    run(model, cache, (150, 5))
    assert {"forward", "generate"} <= set(model.__dict__)
    gone = weakref.ref(cache)
    with graph_capture.undisturbed():
        del cache
        assert gone() is None
    assert not {"forward", "generate"} & set(model.__dict__)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_runs_its_own_weights(copied_by: Callable[[Any], Any]) -> None:
    model = model_of("llama")
    cache = graph_cache(model, "scout", **SCOUT)
    copied, method = copied_by(model), copied_by(model.generate)
    assert callable(method)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
        assert not copied(prompt(1, 9)[0]).logits.any()
    assert cache.graph is not None


def test_at_exit_a_replay_in_flight_still_has_its_doorbell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the device waits for all parts in vain, and the process for it. The newest finalizer runs first."""
    made: list[tuple[str, Any]] = []
    finalize = weakref.finalize

    def noting(obj: Any, function: Any, *args: Any) -> Any:
        made.append((getattr(function, "__qualname__", ""), finalize(obj, function, *args)))
        return made[-1][1]

    monkeypatch.setattr(weakref, "finalize", noting)
    model = model_of("llama")
    cache = graph_cache(model, "scout", **AHEAD)
    run(model, cache, (150, 30))
    ends = [name for name, finalizer in made if finalizer.alive and name in ("_let_go", "_Team.end")]
    assert ends == ["_Team.end", "_let_go"]


class _Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_step_is_captured(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """A graph or a slab that is let go meanwhile asks of the device what a capture refuses."""
    model, record, found = model_of("llama"), CpuRecorder.record, []
    cache = graph_cache(model, "full")

    def noting(self: CpuRecorder, step: Any) -> Any:
        garbage: Any = torch.nn.Module()
        garbage.me, ring = [garbage], weakref.ref(garbage)
        del garbage
        [[] for _ in range(100_000)]
        output = record(self, step)
        found.append(ring() is not None)
        if fails:
            raise RuntimeError("not this one")
        return output

    monkeypatch.setattr(CpuRecorder, "record", noting)
    with pytest.raises(RuntimeError) if fails else nullcontext():
        run(model, cache, (150, 3))
    assert found == [True]
    assert gc.isenabled()
