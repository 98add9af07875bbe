"""Atomicity: failed crops and forwards, changes during a forward, two threads after one that died."""

from __future__ import annotations

import _thread
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from tiny import SIZES, prompt, tiny_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel

from hf_offload import HybridCache
from hf_offload.model.hooks import hybrid_layers
from hf_offload.policies.hgca.token_mass import TokenMass

HGCA: dict[str, Any] = {"window": 60, "block_size": 16, "beta": 3.0, "tier": "one"}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


def feed(model: PreTrainedModel, cache: HybridCache, ids: torch.Tensor, *cuts: int) -> torch.Tensor:
    """Take tokens in, up to each of the cuts in turn; the last logits."""
    start, logits = cache.get_seq_length(), torch.empty(0)
    for stop in cuts:
        with torch.no_grad():
            logits = model(ids[:, start:stop], past_key_values=cache).logits[:, -1]
        start = stop
    return logits


def steps(model: PreTrainedModel, cache: HybridCache, ids: torch.Tensor, count: int) -> torch.Tensor:
    start = cache.get_seq_length()
    return torch.stack([feed(model, cache, ids, stop) for stop in range(start + 1, start + count + 1)])


def two_caches(model: PreTrainedModel, ids: torch.Tensor) -> list[HybridCache]:
    """Alike, with a prompt and ten steps behind it: 180 tokens."""
    caches = [HybridCache(model, "hgca", **HGCA) for _ in range(2)]
    for cache in caches:
        feed(model, cache, ids, 170)
        steps(model, cache, ids, 10)
    return caches


class Failing:
    """A function that raises MemoryError at its n-th call, counted from 1."""

    def __init__(self, real: Callable[..., Any], at: int) -> None:
        self.real, self.at, self.calls = real, at, 0

    def __get__(self, owner: Any, kind: Any = None) -> Callable[..., Any]:
        return lambda *args, **kwargs: self(owner, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise MemoryError("no luck")
        return self.real(*args, **kwargs)


@pytest.mark.parametrize("at", range(5))  # 0: none fails
def test_a_crop_that_finds_no_memory_has_not_cropped(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Lists of all tokens are made before any layer loses a token, once for each of the four layers."""
    ids = prompt(1, 260)[0]
    cache, other = two_caches(model, ids)
    for one in (cache, other):
        feed(model, one, ids, 220)
        steps(model, one, ids, 10)
    failing = Failing(TokenMass._copy_marked, at)
    with monkeypatch.context() as patch:
        patch.setattr(TokenMass, "_copy_marked", lambda *given: failing(*given))
        if at:
            with pytest.raises(MemoryError, match="no luck"):
                cache.crop(-60)
            assert [layer.past for layer in hybrid_layers(cache)] == [230] * 4
        else:
            cache.crop(-60)
            assert failing.calls == len(cache.layers)
    if not at:
        other.crop(-60)
    assert torch.equal(steps(model, cache, ids, 3), steps(model, other, ids, 3))


def test_a_layer_that_refuses_a_crop_is_asked_before_one_that_does_not() -> None:
    """Full layers that fit no block are Transformers' own, and forget whatever they are asked to."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=24, sliding_window=8, layer_types=kinds, query_pre_attn_scalar=16
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="hybrid_sparse").eval()
    ids = prompt(1, 80)[0]
    cache = HybridCache(model, "full", tier="one")
    with pytest.warns(UserWarning, match="layer"):
        feed(model, cache, ids, 60)
    lengths = [layer.get_seq_length() for layer in cache.layers]
    with pytest.raises(RuntimeError):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == lengths
    feed(model, cache, ids, 61)


@pytest.mark.parametrize("name", ["reserve", "append", "before_append"])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_chunk_of_a_prompt_that_fails_leaves_no_trace(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, name: str, layer: int
) -> None:
    ids = prompt(1, 260)[0]
    cache, other = HybridCache(model, "hgca", **HGCA), HybridCache(model, "hgca", **HGCA)
    feed(model, cache, ids, 120)
    with monkeypatch.context() as patch:
        failing = Failing(getattr(TokenMass, name), layer + 1)
        patch.setattr(TokenMass, name, lambda *given: failing(*given))
        with pytest.raises(MemoryError, match="no luck"):
            feed(model, cache, ids, 200)
    feed(model, cache, ids, 200, 240)
    feed(model, other, ids, 120, 200, 240)
    assert torch.equal(steps(model, cache, ids, 10), steps(model, other, ids, 10))
    for mine, theirs in zip(hybrid_layers(cache), hybrid_layers(other), strict=True):
        assert mine.state.progress.border == theirs.state.progress.border
        assert mine.state.progress.prompt


def test_a_step_that_fails_does_not_keep_an_append_from_being_taken_back(model: PreTrainedModel) -> None:
    def fail(*_: Any) -> None:
        raise ArithmeticError("no luck")

    ids = prompt(1, 260)[0]
    cache, other = two_caches(model, ids)
    feed(model, cache, ids, 220)
    handle = model.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        feed(model, cache, ids, 221)
    handle.remove()
    cache.crop(-40)
    assert all(layer.state.known.all() for layer in hybrid_layers(cache))
    assert torch.equal(steps(model, cache, ids, 10), steps(model, other, ids, 10))


@pytest.mark.parametrize("name", ["crop", "fork", "to_dynamic"])
def test_a_cache_that_is_changed_within_a_forward_wants_a_reset(model: PreTrainedModel, name: str) -> None:
    ids = prompt(1, 120)[0]
    cache = HybridCache(model, "full", tier="one")
    feed(model, cache, ids, 100)
    arguments = (0,) if name == "crop" else ()
    handle = model.model.layers[2].register_forward_pre_hook(lambda *_: getattr(cache, name)(*arguments) and None)
    with suppress(RuntimeError, ValueError):
        feed(model, cache, ids, 110)
    handle.remove()
    with pytest.raises(RuntimeError, match=r"changed.*call reset\(\)"):
        feed(model, cache, ids, 111)
    cache.reset()
    feed(model, cache, ids, 120)


def test_one_of_two_threads_inherits_from_one_that_is_gone(model: PreTrainedModel) -> None:
    cache, interval = HybridCache(model, "full", tier="one"), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            gone = threading.Thread(target=cache.transaction.take)
            gone.start()
            gone.join()
            held: list[bool] = []
            start, stop = threading.Barrier(2), threading.Barrier(2)

            def inherit(start: Any = start, stop: Any = stop, held: Any = held) -> None:
                start.wait()
                with suppress(RuntimeError):
                    cache.transaction.take()
                stop.wait()
                held.append(cache.transaction.mine)

            heirs = [threading.Thread(target=inherit) for _ in range(2)]
            for heir in heirs:
                heir.start()
            for heir in heirs:
                heir.join()
            assert sum(held) == 1
            cache.transaction.leave()
    finally:
        sys.setswitchinterval(interval)


def test_a_live_thread_that_threading_has_not_made_keeps_the_cache(model: PreTrainedModel) -> None:
    """A C extension's thread, say; when it has ended within a forward, the cache is taken over and rolled back."""
    cache, ids = HybridCache(model, "full", tier="one"), prompt(1, 120)[0]
    feed(model, cache, ids, 60)
    inside, on, ended = (threading.Event() for _ in range(3))

    def pause(*_: Any) -> None:
        inside.set()
        assert on.wait(60)
        raise SystemExit  # ends the thread, quietly

    def work() -> None:
        try:
            cache.begin()
            pause()
        finally:
            ended.set()

    worker = _thread.start_new_thread(work, ())
    assert inside.wait(60)
    with pytest.raises(RuntimeError, match="one thread at a time"):
        feed(model, cache, ids, 61)
    with pytest.raises(RuntimeError, match="one thread at a time"):
        cache.crop(-1)
    on.set()
    assert ended.wait(60)
    for _ in range(1000):
        if worker not in sys._current_frames():
            break
        time.sleep(0.01)
    cache.crop(0)
    feed(model, cache, ids, 61)
    assert cache.get_seq_length() == 61
