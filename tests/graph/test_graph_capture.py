"""Capture and replay in a process: other threads, garbage collection, interruptions, exit."""

from __future__ import annotations

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from recording import CpuRecorder
from tiny import prompt, tiny_model

from hf_offload import HybridCache
from hf_offload.graph import graph_capture as capture

from ._graphs import KNOBS, SCOUT, graph_cache, logits_of


@pytest.mark.parametrize("role", ["step", pytest.param("ahead", marks=pytest.mark.slow)])
def test_sizes_whose_sending_was_interrupted_are_not_looked_for_where_they_were(role: str) -> None:
    model = tiny_model("llama")
    ids, mask = prompt(1, 180)
    knobs = {**SCOUT, "lookahead": "attend", "synchronous_layers": (0,)}
    want = logits_of(model, HybridCache(model, "scout", **KNOBS, **knobs), ids, mask)
    cache, rows = graph_cache(model, "scout", **knobs), []
    with torch.no_grad():
        model(ids[:, :150], past_key_values=cache)
        for i in range(150, 180):
            if i == 165:
                (mirror,) = cache.settings.mirrors.values()
                del mirror._held[role]
            rows.append(model(ids[:, i : i + 1], past_key_values=cache).logits)
    assert torch.equal(torch.cat(rows, 1), want)


def test_at_exit_a_replay_in_flight_still_has_its_doorbell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the device waits for all parts in vain, and the process for it. The newest finalizer runs first."""
    made: list[tuple[str, Any]] = []
    finalize = weakref.finalize

    def noting(obj: Any, function: Any, *args: Any) -> Any:
        made.append((getattr(function, "__qualname__", ""), finalize(obj, function, *args)))
        return made[-1][1]

    monkeypatch.setattr(weakref, "finalize", noting)
    model = tiny_model("llama")
    cache = graph_cache(model, "scout", **SCOUT, lookahead="attend")
    logits_of(model, cache, *prompt(1, 180))
    ends = [name for name, finalizer in made if finalizer.alive and name in ("_let_go", "_Crew.end")]
    assert ends == ["_Crew.end", "_let_go"]


def test_a_graph_whose_end_was_interrupted_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    ids, mask = prompt(1, 170)
    want = logits_of(model, HybridCache(model, "full", **KNOBS), ids, mask)
    cache = graph_cache(model, "full")
    rows = [logits_of(model, cache, ids[:, :160], mask)]

    def interrupted(self: CpuRecorder) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CpuRecorder, "settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.graph.close()
    with torch.no_grad():
        rows += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(160, 170)]
    assert torch.equal(torch.cat(rows, 1), want)


class _Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_while_a_step_is_captured(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """A graph or a slab that is let go meanwhile asks of the device what a capture refuses."""
    model = tiny_model("llama")
    cache = graph_cache(model, "full")
    record, found = CpuRecorder.record, []

    def noting(self: CpuRecorder, step: Any) -> Any:
        ring = weakref.ref(_Ring())
        [[] for _ in range(100_000)]
        output = record(self, step)
        found.append(ring() is not None)
        if fails:
            raise RuntimeError("not this one")
        return output

    monkeypatch.setattr(CpuRecorder, "record", noting)
    with torch.no_grad(), pytest.raises(RuntimeError) if fails else nullcontext():
        for part in prompt(1, 153)[0].split([150, 1, 1, 1], 1):
            model(part, past_key_values=cache)
    assert found == [True]
    assert gc.isenabled()


def test_captures_of_threads_come_one_at_a_time() -> None:
    inside: list[int] = []

    def record(number: int) -> bool:
        with capture.undisturbed():
            inside.append(number)
            time.sleep(0.005)
            alone = inside == [number] and not gc.isenabled()
            inside.clear()
        return alone

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(record, range(12)))
    assert gc.isenabled()
