"""Captured and replayed steps against eager steps: logits, interruptions, late CPU work."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recording import CpuRecorder
from tiny import prompt, tiny_model
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from hf_offload import HybridCache, WorkerError
from hf_offload.attention import decode_split as tiered
from hf_offload.attention.step_split import SplitStep
from hf_offload.blocks import digests
from hf_offload.cpu import serving
from hf_offload.graph import cuda_graph as graph
from hf_offload.graph import graph_capture as capture
from hf_offload.graph.cuda_graph import StepGraph

from ._graphs import KNOBS, SCOUT, SELECTED, graph_cache, logits_of

DRAWN: dict[str, Any] = {"samples": 60, "sinks": 16, "recent": 16, "synchronous_layers": (0,)}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    ("policy", "knobs"),
    [
        ("full", {}),
        pytest.param("window", {"budget": 96, "sinks": 16}, marks=pytest.mark.slow),
        pytest.param("scout", {**SCOUT, "lookahead": "off"}, marks=pytest.mark.slow),
        ("scout", {**SCOUT, "lookahead": "select", "synchronous_layers": (0,)}),
        pytest.param("scout", {**SCOUT, "lookahead": "attend", "synchronous_layers": (0,)}, marks=pytest.mark.slow),
        ("scout", {**SCOUT, "lookahead": "attend", "digest": "quest", "join": "raw", "recall": 3}),
        ("scout", {**SCOUT, "lookahead": "attend", "attend_resident": "all", "host_dtype": "int8"}),
        ("quest", {"budget": 96, "sinks": 16}),
        *(
            pytest.param("scout", {**DRAWN, "lookahead": lookahead}, marks=pytest.mark.slow if slow else ())
            for lookahead, slow in (("off", True), ("select", False), ("attend", False))
        ),
        pytest.param("full", {"host": "fetch"}, marks=pytest.mark.slow),
    ],
)
def test_replayed_steps_are_those_in_python(policy: str, knobs: dict[str, Any], batch: int) -> None:
    model = tiny_model("llama")
    ids, mask = prompt(batch, 195)
    want_cache = HybridCache(model, policy, **KNOBS, **knobs)
    want = logits_of(model, want_cache, ids, mask)
    cache = graph_cache(model, policy, **knobs)
    got = logits_of(model, cache, ids, mask)
    assert torch.equal(got, want)
    mine, other = cache.stats().as_dict(), want_cache.stats().as_dict()
    for key in ("steps", "recalls", "recall_blocks", "cpu_ratio"):
        assert mine[key] == other[key]


@pytest.mark.parametrize("knobs", [{**SCOUT, "lookahead": "attend"}, {**DRAWN, "lookahead": "select"}])
def test_replayed_steps_are_full_attention_until_there_are_digests(
    knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 176th token fills a block at the 26th step, of two rows; the third one has padding."""
    monkeypatch.setattr(digests, "STATISTICS_TOKENS", 176)
    model, (ids, mask) = tiny_model("llama"), prompt(3, 195)
    want = logits_of(model, HybridCache(model, "scout", **KNOBS, **knobs), ids, mask)
    found = logits_of(model, graph_cache(model, "scout", **knobs), ids, mask)
    assert torch.equal(found, want)
    apart = (found - logits_of(model, HybridCache(model, "full", **KNOBS), ids, mask)).abs().amax((0, 2))
    assert apart[:26].max() < 1e-4
    assert apart[26:].min() > 1e-2


def test_a_deep_copy_captures_steps_of_its_own() -> None:
    """The copied cache goes on replaying; both have the logits of eager steps."""
    model, (ids, mask), knobs = tiny_model("llama"), prompt(1, 195), {**SCOUT, "lookahead": "attend"}
    want = logits_of(model, HybridCache(model, "scout", **KNOBS, **knobs), ids, mask)[:, 20:]
    cache = graph_cache(model, "scout", **knobs)
    logits_of(model, cache, ids[:, :170], mask[:, :170])
    assert cache.graph._capture is not None
    copied = copy.deepcopy(cache)
    copied.graph, copied._graphed = StepGraph(copied, CpuRecorder), graph.graphed(model)
    for each in (copied, cache):
        with torch.no_grad():
            got = [model(ids[:, i : i + 1], past_key_values=each).logits for i in range(170, 195)]
        assert torch.equal(torch.cat(got, 1), want)
        assert each.graph._capture is not None


@pytest.mark.slow
def test_generate_replays_and_so_does_a_short_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    records = []
    record = CpuRecorder.record
    monkeypatch.setattr(CpuRecorder, "record", lambda self, step: records.append(1) or record(self, step))
    ids, _ = prompt(1, 200)

    def turns(cache: HybridCache) -> torch.Tensor:
        first = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
        more = torch.cat([first, ids[:, :30]], 1)
        return model.generate(more, past_key_values=cache, max_new_tokens=40, do_sample=False)

    want = turns(HybridCache(model, "scout", **KNOBS, **SCOUT, lookahead="attend"))
    assert torch.equal(turns(graph_cache(model, "scout", **SCOUT, lookahead="attend")), want)
    assert len(records) == 1


@pytest.mark.slow
def test_blocks_that_fill_up_behind_a_long_prompt_capture_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt takes all blocks of the pool, which grows before steps are captured."""
    model = tiny_model("llama")
    records = []
    record = CpuRecorder.record
    monkeypatch.setattr(CpuRecorder, "record", lambda self, step: records.append(1) or record(self, step))
    cache = graph_cache(model, "scout", **SCOUT, block_size=8)
    model.generate(prompt(1, 602)[0], past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert len(records) == 1


@pytest.mark.parametrize(
    ("policy", "knobs"),
    [("full", {}), ("scout", {**DRAWN, "lookahead": "attend"}), ("scout", {**DRAWN, "dense": False})],
)
def test_slots_that_run_out_between_two_replays_capture_anew(
    policy: str, knobs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all blocks are resident nothing is handed over; behind token 176 the CPU has a part."""
    model, (ids, mask) = tiny_model("llama"), prompt(2, 195)
    records = []
    record = CpuRecorder.record
    monkeypatch.setattr(CpuRecorder, "record", lambda self, step: records.append(1) or record(self, step))
    want = logits_of(model, HybridCache(model, policy, **KNOBS | {"resident": 176}, **knobs), ids, mask)
    cache = graph_cache(model, policy, resident=176, **knobs)
    assert torch.equal(logits_of(model, cache, ids, mask), want)
    assert len(records) == 2
    assert cache.graph._capture.announced


@pytest.mark.slow
@pytest.mark.parametrize("length", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (15, 16))])
def test_a_prompt_shorter_than_a_block(length: int) -> None:
    """What is captured before any block has a digest must not serve the steps after."""
    model = tiny_model("llama")
    ids, _ = prompt(1, 75)
    knobs = {**SCOUT, "budget": 64, "recent": 0}
    rows = []
    for cache in (HybridCache(model, "scout", **KNOBS, **knobs), graph_cache(model, "scout", **knobs)):
        with torch.no_grad():
            model(ids[:, :length], past_key_values=cache)
            steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(length, 75)]
        rows.append(torch.cat(steps, 1))
    assert torch.equal(*rows)


@pytest.mark.slow
def test_steps_in_python_between_replays() -> None:
    """Steps from embeddings are not replayed; what they recall is waited for all the same."""
    model = tiny_model("llama")
    ids, _ = prompt(1, 180)
    knobs = {**SCOUT, "lookahead": "attend", "recall": 1}
    rows = []
    for cache in (HybridCache(model, "scout", **KNOBS, **knobs), graph_cache(model, "scout", **knobs)):
        cache.settings.worker.delay = 0.005
        steps = []
        with torch.no_grad():
            model(ids[:, :150], past_key_values=cache)
            for i in range(150, 180):
                token = ids[:, i : i + 1]
                given = {"inputs_embeds": model.model.embed_tokens(token)} if i % 5 == 0 else {"input_ids": token}
                steps.append(model(**given, past_key_values=cache).logits)
        rows.append(torch.cat(steps, 1))
    assert torch.equal(*rows)


def test_a_replay_that_was_interrupted_is_told_of_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of rows with padding, whose masks then have a column less than the cache has tokens."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    model = tiny_model("llama")
    ids, mask = prompt(2, 170)
    want = logits_of(model, HybridCache(model, "scout", **KNOBS, **SELECTED), ids, mask)
    cache = graph_cache(model, "scout", **SELECTED)

    def step(i: int) -> torch.Tensor:
        seen = mask[:, : i + 1]
        positions = seen.sum(-1, keepdim=True) - 1
        given = {"attention_mask": seen, "position_ids": positions, "past_key_values": cache}
        return model(ids[:, i : i + 1], **given).logits

    with torch.no_grad():
        model(ids[:, :150], attention_mask=mask[:, :150], past_key_values=cache)
        for i in range(150, 156):
            step(i)
        with monkeypatch.context() as patch:
            patch.setattr(cache.graph, "_replay", interrupt)
            with pytest.raises(KeyboardInterrupt):
                step(156)
        with pytest.raises(RuntimeError, match="the last forward was interrupted; the cache holds the 156 tokens"):
            step(156)
        rows = [step(i) for i in range(156, 170)]
    assert torch.allclose(torch.cat(rows, 1), want[:, -14:], atol=1e-3)


@pytest.mark.slow
def test_slow_threads_change_nothing() -> None:
    model = tiny_model("llama")
    ids, mask = prompt(1, 165)
    knobs = {**SCOUT, "lookahead": "attend"}
    want = logits_of(model, HybridCache(model, "scout", **KNOBS, **knobs), ids, mask)
    cache = graph_cache(model, "scout", **knobs)
    cache.settings.worker.delay = 0.01
    assert torch.equal(logits_of(model, cache, ids, mask), want)


def test_a_part_that_is_late_is_told_at_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    ids, mask = prompt(1, 170)
    knobs = {**SELECTED, "lookahead": "attend", "recall": 0}
    want = logits_of(model, HybridCache(model, "scout", **KNOBS, **knobs), ids, mask)
    cache = graph_cache(model, "scout", **knobs)
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(capture, "LOOKS", 10)
        model(ids[:, :150], past_key_values=cache)
        for i in (150, 151):  # in Python
            model(ids[:, i : i + 1], past_key_values=cache)
        cache.settings.worker.delay = 0.5
        model(ids[:, 152:153], past_key_values=cache)
        with pytest.raises(WorkerError, match=r"not done in time.*crop\(-1\) and repeat it"):
            model(ids[:, 153:154], past_key_values=cache)
    cache.settings.worker.delay = 0.0
    cache.crop(-1)
    with torch.no_grad():
        rows = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(152, 170)]
    assert torch.allclose(torch.cat(rows, 1), want[:, 2:], atol=1e-3)


def test_a_part_that_is_late_in_the_last_step_is_told_by_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    ids, _ = prompt(1, 150)
    cache = graph_cache(model, "scout", **SCOUT, lookahead="attend", recall=0)
    monkeypatch.setattr(capture, "LOOKS", 10_000)  # a second in all

    class Slow(StoppingCriteria):
        """Have the CPU be late in the last step alone."""

        def __call__(self, tokens: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            if tokens.shape[1] == 158:
                cache.graph._doorbell.delay = 2.0
            return torch.zeros(1, dtype=torch.bool)

    knobs = {"past_key_values": cache, "do_sample": False, "stopping_criteria": StoppingCriteriaList([Slow()])}
    with pytest.raises(WorkerError, match=r"not done in time.*the last step is not right: crop\(-1\) and repeat it"):
        model.generate(ids, max_new_tokens=9, **knobs)
    assert cache.get_seq_length() == 158


def run_ahead(monkeypatch: pytest.MonkeyPatch, steps: int) -> tuple[PreTrainedModel, Any, torch.Tensor]:
    """So many replays behind 155 tokens that nobody looks at, the first with a part that is late; model, cache, ids."""
    model = tiny_model("llama")
    ids, _ = prompt(1, 170)
    cache = graph_cache(model, "scout", **SCOUT, lookahead="attend", recall=0)
    monkeypatch.setattr(capture, "LOOKS", 10_000)
    with torch.no_grad():
        model(ids[:, :150], past_key_values=cache)
        for i in range(150, 155):
            model(ids[:, i : i + 1], past_key_values=cache)
        cache.graph._doorbell.delay = 2.0
        with monkeypatch.context() as patch:
            patch.setattr(StepGraph, "check", lambda graph: None)
            for i in range(155, 155 + steps):
                model(ids[:, i : i + 1], past_key_values=cache)
    return model, cache, ids


@pytest.mark.slow
def test_all_steps_that_a_late_part_has_spoilt_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that looks at no result runs ahead of the device."""
    model, cache, ids = run_ahead(monkeypatch, 3)
    told = r"the last 3 steps are not right: crop\(-3\) and repeat them"
    with torch.no_grad(), pytest.raises(WorkerError, match=told):
        model(ids[:, 158:159], past_key_values=cache)
    cache.settings.worker.delay = 0.0
    cache.crop(-3)
    assert cache.get_seq_length() == 155


@pytest.mark.slow
def test_the_first_of_several_faults_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that was late, and a later one that failed; a step in Python behind both, which looks for itself."""
    model, cache, ids = run_ahead(monkeypatch, 2)
    crew = cache.graph._doorbell._crew
    for i, epoch in ((0, 4), (1, 5)):
        crew._rows[i, [serving.FAILED, serving.FAILED_IN, serving.UNDONE]] = 1, epoch, 1
    assert int(cache.graph._capture.late[0]) == 4
    told = rf"{re.escape(crew.items[0].label)} failed: 1 of \d+ .*the last 2 steps are not right: crop\(-2\)"
    with torch.no_grad(), pytest.raises(WorkerError, match=told):
        model(ids[:, 157:158], past_key_values=cache, output_hidden_states=True)
    assert cache.get_seq_length() == 157


@pytest.mark.parametrize("change", ["reset", "rows"])
def test_what_a_graph_held_goes_with_it(change: str) -> None:
    model = tiny_model("llama")
    ids, _ = prompt(1, 160)
    cache = graph_cache(model, "scout", **SCOUT)
    with torch.no_grad():
        model(ids[:, :150], past_key_values=cache)
        for i in range(150, 155):
            model(ids[:, i : i + 1], past_key_values=cache)
    held = [weakref.ref(layer.resident.pool) for layer in cache.layers]
    if change == "reset":  # rows go on with the same digests
        held += [weakref.ref(tensor) for layer in cache.layers for tensor in layer.store.digests.held()]
    if change == "reset":
        cache.reset()
    else:
        cache.batch_select_indices(torch.tensor([0, 0]))
    gc.collect()
    assert not any(one() is not None for one in held)


def test_the_forward_is_the_models_own_again_when_the_cache_is_gone() -> None:
    """At once, without the garbage collector: a cache may hold much of the memory."""
    model = tiny_model("llama")
    ids, mask = prompt(1, 155)
    cache = graph_cache(model, "scout", **SCOUT, lookahead="attend")
    logits_of(model, cache, ids, mask)
    assert {"forward", "generate"} <= set(model.__dict__)
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
    finally:
        gc.enable()
    assert not {"forward", "generate"} & set(model.__dict__)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_the_model_runs_its_own_weights(copied_by: Callable[[Any], Any]) -> None:
    model = tiny_model("llama")
    cache = graph_cache(model, "scout", **SCOUT)
    copied, method = copied_by(model), copied_by(model.generate)
    assert callable(method)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
        assert not copied(prompt(1, 9)[0]).logits.any()
    assert cache.graph is not None


def test_a_step_that_asks_for_hidden_states_keeps_them() -> None:
    model = tiny_model("llama")
    ids, _ = prompt(1, 160)
    cache = graph_cache(model, "scout", **SCOUT)
    with torch.no_grad():
        model(ids[:, :150], past_key_values=cache)
        kept = []
        for i in range(150, 160):
            states = model(ids[:, i : i + 1], past_key_values=cache, output_hidden_states=True).hidden_states
            kept.append((states[-1], states[-1].clone()))
    assert all(torch.equal(now, then) for now, then in kept)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("at", [159, *(pytest.param(at, marks=pytest.mark.slow) for at in (157, 160))])
def test_a_step_that_fails_when_it_is_closed_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, at: int, graphs: bool
) -> None:
    """Also the one that fills a block: it lies in its slot alone until then. At 152 the step is being captured."""
    model = tiny_model("llama")
    ids, mask = prompt(1, 170)
    knobs = {**SCOUT, "budget": 512}
    want = logits_of(model, HybridCache(model, "scout", block_size=16, **knobs), ids, mask)
    cache = graph_cache(model, "scout", **knobs) if graphs else HybridCache(model, "scout", **KNOBS, **knobs)
    close, calls = tiered.close_step, [0]

    def fail(layer: Any) -> None:
        calls[0] += 1
        if layer.index == 2 and layer.past in (153, at + 1) and calls[0] < 10_000:
            calls[0] += 10_000
            raise MemoryError("nothing left")
        close(layer)

    monkeypatch.setattr(tiered, "close_step", fail)
    monkeypatch.setattr(graph, "close_step", fail)
    rows = []
    with torch.no_grad():
        model(ids[:, :150], past_key_values=cache)
        for i in range(150, 170):
            if i in (152, at):
                calls[0] = 0
                with pytest.raises(MemoryError, match="nothing left"):
                    model(ids[:, i : i + 1], past_key_values=cache)
                assert cache.get_seq_length() == i
            rows.append(model(ids[:, i : i + 1], past_key_values=cache).logits)
    assert torch.allclose(torch.cat(rows, 1), want, atol=2e-5)


def test_a_capture_that_fails_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    ids, mask = prompt(1, 156)
    want = logits_of(model, HybridCache(model, "full", **KNOBS), ids, mask)
    cache = graph_cache(model, "full")
    attend, left = SplitStep.attend_device, [1]

    def broken(step: SplitStep, device: Any) -> Any:
        if step.mirror.capture is not None and step.layer.index == 2 and left:
            left.clear()
            raise ArithmeticError("in the midst of a capture")
        return attend(step, device)

    monkeypatch.setattr(SplitStep, "attend_device", broken)
    got = []
    with torch.no_grad():
        model(ids[:, :150], attention_mask=mask[:, :150], past_key_values=cache)
        while cache.get_seq_length() < 156:
            i = cache.get_seq_length()
            try:
                got.append(model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache).logits)
            except ArithmeticError:
                assert cache.get_seq_length() == i
                assert all(layer.past == i for layer in cache.layers)
    assert not left
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-5)


def test_a_model_that_is_not_on_a_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cuda_graph=True: the model must be on one CUDA device.* is on cpu"):
        HybridCache(tiny_model("llama"), "scout", cuda_graph=True)
