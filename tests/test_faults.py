"""Faults in kernels, threads and memory: errors surface, nothing hangs, no token is lost or wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from breaking import UNDONE, broken_launch
from test_exactness import decode_logits
from tiny import prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HybridCache, WorkerError
from hf_offload.attention import step_split as tiered_step
from hf_offload.attention.host_partial import BlockHostPartial
from hf_offload.blocks import host_pool
from hf_offload.blocks.resident_set import ResidentSet
from hf_offload.cpu.kernels import move_records as movers
from hf_offload.cpu.launch import LaunchSequence
from hf_offload.cpu.thread_pool import Worker

KNOBS: dict[str, Any] = {"budget": 512, "sinks": 16, "recent": 0, "block_size": 16}
SPLIT: dict[str, Any] = {"tier": "split", "lookahead": "off", "resident": 64}
DRAWN: dict[str, Any] = {"samples": 2 * 10**9, "budget": None}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


class Broken(Exception):
    """Stands for whatever a kernel may die of."""


def broken_call(*args: Any, **kwargs: Any) -> Any:
    raise Broken("the kernel died")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("knobs", "module", "name"),
    [
        ({}, LaunchSequence, "run"),
        ({**SPLIT}, BlockHostPartial, "_launches"),
        ({**SPLIT, "lookahead": "attend"}, BlockHostPartial, "_launches"),
        ({**SPLIT, "lookahead": "attend", "synchronous_layers": (0,)}, Worker, "divide"),
        ({**SPLIT, "lookahead": "select", "synchronous_layers": (0,)}, Worker, "divide"),
        ({**SPLIT, **DRAWN}, BlockHostPartial, "_launches"),
        ({**SPLIT, **DRAWN, "lookahead": "select", "synchronous_layers": (0,)}, Worker, "divide"),
        ({**SPLIT, "recall": 1}, movers, "copy_records"),
        ({"budget": 96}, LaunchSequence, "run"),
        ({**SPLIT}, tiered_step, "select_blocks"),
    ],
)
@pytest.mark.parametrize("after", [pytest.param(0, marks=pytest.mark.slow), 9])
def test_a_kernel_that_raises_surfaces_and_the_step_can_be_repeated(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any], module: Any, name: str, after: int
) -> None:
    cache = HybridCache(model, "scout", **(KNOBS | knobs))
    real, calls = getattr(module, name), [0]

    def later(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] <= after:
            return real(*args, **kwargs)
        if module is BlockHostPartial:
            return (broken_launch(),)
        return (broken_call if module in (tiered_step, LaunchSequence, Worker) else broken_launch)(*args, **kwargs)

    def repeat(token: torch.Tensor) -> None:
        for _ in range(4):  # a broken recall surfaces when its blocks are to be used
            try_out(cache, token)

    def break_it(token: torch.Tensor) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, later)
            with pytest.raises((Broken, WorkerError), match=f"the kernel died|{UNDONE}"):
                repeat(token)
        cache.crop(162 - cache.get_seq_length())  # a crop that raised has not cropped

    def try_out(cache: HybridCache, token: torch.Tensor) -> None:
        model(token, past_key_values=cache)
        cache.crop(-1)

    whole = HybridCache(model, "scout", **(KNOBS | knobs))
    want = decode_with_a_break(model, whole, lambda token: try_out(whole, token))
    assert torch.equal(decode_with_a_break(model, cache, break_it), want)


def decode_with_a_break(
    model: PreTrainedModel, cache: HybridCache, pause: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """30 greedy tokens after a prompt of 150; before the 13th is taken in, `pause` gets it."""
    tokens = []
    with torch.no_grad():
        logits = model(prompt(1, 150)[0], past_key_values=cache).logits[:, -1]
        for i in range(30):
            tokens.append(logits.argmax(-1, keepdim=True))
            if i == 12:
                pause(tokens[-1])
            logits = model(tokens[-1], past_key_values=cache).logits[:, -1]
    return torch.cat(tokens, 1)


def test_a_worker_that_is_killed_is_replaced(model: PreTrainedModel) -> None:
    ids, mask = prompt(1, 150)
    knobs = {**KNOBS, **SPLIT, "lookahead": "attend", "recall": 1}
    want = decode_logits(model, HybridCache(model, "scout", **knobs), ids, mask, None, steps=20)
    cache = HybridCache(model, "scout", **knobs)
    tokens = []
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits[:, -1]
        for i in range(20):
            if i % 5 == 3:
                pool = list(cache.settings.worker._pool)
                for _ in pool:  # whichever thread takes it
                    cache.settings.worker._queue.put(None)
                for thread in pool:
                    thread.join(300)
            token = logits.argmax(-1, keepdim=True)
            tokens.append(token)
            logits = model(token, past_key_values=cache).logits[:, -1]
    assert torch.equal(torch.cat(tokens, 1), want[0])


def test_a_worker_that_hangs_is_given_up_in_time(model: PreTrainedModel) -> None:
    knobs = {**KNOBS, **SPLIT, "lookahead": "attend"}
    cache = HybridCache(model, "scout", **knobs)
    with torch.no_grad():
        token = model(prompt(1, 150)[0], past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        model(token, past_key_values=cache)
        cache.settings.worker.delay, cache.settings.worker.timeout = 5.0, 0.3

        def wait() -> None:
            for _ in range(3):
                model(token, past_key_values=cache)

        with pytest.raises(WorkerError, match=r"layer \d+, step \d+: not done in time"):
            wait()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", ["full", pytest.param("window", marks=pytest.mark.slow), "scout"])
@pytest.mark.parametrize("host_dtype", [None, "int8"])
@pytest.mark.parametrize("tier", ["one", "split"])
def test_memory_that_nobody_wrote_is_never_read(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tier: str, policy: str, host_dtype: str | None
) -> None:
    """Every buffer starts as NaN; ragged rows, chunks and partial blocks leave much of it unwritten."""
    make_slab, make_set = host_pool.host_empty, ResidentSet.__init__

    def poisoned_slab(*args: Any, **kwargs: Any) -> torch.Tensor:
        slab = make_slab(*args, **kwargs)
        return slab.fill_(float("nan") if slab.is_floating_point() else 255)

    def poisoned_set(self: ResidentSet, *args: Any) -> None:
        make_set(self, *args)
        self.pool.fill_(float("nan"))

    ids, mask = prompt(3, 275)
    knobs: dict[str, Any] = {
        "block_size": 16,
        "tier": tier,
        "host_dtype": host_dtype,
        **({"resident": 64} if tier == "split" else {}),
    }
    if policy != "full":
        knobs |= {"budget": 512, "sinks": 16}
    if policy == "scout":
        knobs |= {"recent": 0, "lookahead": "attend" if tier == "split" else "off"}
    want = decode_logits(model, HybridCache(model, policy, **knobs), ids, mask, 17, steps=40)
    monkeypatch.setattr(host_pool, "host_empty", poisoned_slab)
    monkeypatch.setattr(ResidentSet, "__init__", poisoned_set)
    got = decode_logits(model, HybridCache(model, policy, **knobs), ids, mask, 17, steps=40)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_a_forward_that_was_interrupted_can_be_repeated(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, _ = prompt(2, 60)
    cache = HybridCache(model, "scout", **KNOBS)
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)

        def interrupt(*args: Any, **kwargs: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[2].self_attn.o_proj, "forward", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, 30:], past_key_values=cache)
        with pytest.raises(RuntimeError, match="the last forward was interrupted; the cache holds the 30 tokens"):
            model(ids[:, 30:], past_key_values=cache)
        got = model(ids[:, 30:], past_key_values=cache).logits
        assert torch.allclose(got, model(ids).logits[:, 30:], atol=5e-5)
    assert {layer.get_seq_length() for layer in cache.layers} == {60}
