"""Release of memory, threads and hooks with a cache's last reference, without garbage collection."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from test_hybrid_cache import hooks_on
from tiny import DEVICE, prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import ConstantPredictor, HybridCache
from hf_offload.model.hooks import hybrid_layers
from hf_offload.policies.hgca.token_mass import TokenMass

KNOBS: dict[str, Any] = {"budget": 64, "sinks": 16, "recent": 0, "block_size": 16, "synchronous_layers": (0,)}
ONE: dict[str, Any] = {"tier": "one"} if DEVICE == "cpu" else {}
SPLIT: dict[str, Any] = {**KNOBS, "tier": "split" if DEVICE == "cpu" else None, "resident": 96, "recall": 1}
HGCA: dict[str, Any] = {"policy": "hgca", "window": 40, "block_size": 16}
PREDICTOR = ConstantPredictor(0.2, 0.02, sinks=16, local=32)
SETTINGS: dict[str, dict[str, Any]] = {
    "one": {**KNOBS, **ONE},
    "split": {**SPLIT, "lookahead": "off"},
    "split, selects ahead": {**SPLIT, "lookahead": "select"},
    "split, attends ahead": {**SPLIT, "lookahead": "attend"},
    "int8": {**SPLIT, "host_dtype": "int8"},
    "hgca": {**HGCA, "tier": "split" if DEVICE == "cpu" else None},
    "hgca, one": {**HGCA, **ONE},
    "fixed_hybrid": {"policy": "fixed_hybrid", "budget": 0.3, "sinks": 16, "local": 32, **ONE},
    "h2o": {"policy": "h2o", "block_size": 16, "tier": SPLIT["tier"]},
    "infinigen": {"policy": "infinigen", "block_size": 16, "tier": SPLIT["tier"]},
    "quest": {"policy": "quest", "budget": 64, "resident": 96, "tier": SPLIT["tier"]},
    "full, fetched": {"policy": "full", "host": "fetch", "block_size": 16, "resident": 96, "tier": SPLIT["tier"]},
    "fluxion": {
        "policy": "fluxion",
        "predictor": ConstantPredictor(0.2, 0.02, sinks=16, local=32),
        "tier": SPLIT["tier"],
    },
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def prefill(model: PreTrainedModel, cache: HybridCache) -> None:
    with torch.no_grad():
        model(prompt(2, 150)[0], past_key_values=cache)


def decode(model: PreTrainedModel, cache: HybridCache) -> None:
    prefill(model, cache)
    with torch.no_grad():
        for i in range(20):
            model(torch.full((2, 1), 5 + i, device=DEVICE), past_key_values=cache)


def generate(model: PreTrainedModel, cache: HybridCache) -> None:
    model.generate(prompt(2, 150)[0], past_key_values=cache, max_new_tokens=6, do_sample=False)


def beams(model: PreTrainedModel, cache: HybridCache) -> None:
    model.generate(prompt(2, 50)[0], past_key_values=cache, max_new_tokens=6, do_sample=False, num_beams=2)


def change(model: PreTrainedModel, cache: HybridCache) -> None:
    decode(model, cache)
    cache.crop(-30)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3], device="cpu"))
    decode(model, cache)
    cache.stats()


def fail(model: PreTrainedModel, cache: HybridCache) -> None:
    _stop(model, cache, ValueError)


def interrupt(model: PreTrainedModel, cache: HybridCache) -> None:
    _stop(model, cache, KeyboardInterrupt)


def end_interrupted(model: PreTrainedModel, cache: HybridCache) -> None:
    """As `interrupt`, and nothing comes after it but `crop(0)`."""
    decode(model, cache)
    handle = model.model.layers[2].mlp.register_forward_pre_hook(_interrupted)
    try:
        with torch.no_grad(), suppress(KeyboardInterrupt):
            model(prompt(2, 20)[0], past_key_values=cache)
    finally:
        handle.remove()
    cache.crop(0)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def _stop(model: PreTrainedModel, cache: HybridCache, error: type[BaseException]) -> None:
    decode(model, cache)

    def raise_it(*_: Any) -> None:
        raise error

    for tokens in (1, 20):
        handle = model.model.layers[2].mlp.register_forward_pre_hook(raise_it)
        try:
            with torch.no_grad(), suppress(error):
                model(prompt(2, tokens)[0], past_key_values=cache)
        finally:
            handle.remove()
        if error is KeyboardInterrupt:
            cache.crop(0)
        decode(model, cache)


def lose_a_job(model: PreTrainedModel, cache: HybridCache) -> None:
    """A job that raises, and one that is late."""
    decode(model, cache)
    worker = cache.settings.worker
    job = worker.submit(lambda: 1 / 0, "a division")
    late = worker.submit(lambda: time.sleep(0.3), "a nap")
    for each in (job, late):
        with suppress(RuntimeError):
            each.result(timeout=0.01 if each is late else 5)


def refuse(model: PreTrainedModel, cache: HybridCache) -> None:
    decode(model, cache)
    for attempt in (lambda: cache.crop(5), lambda: cache.reorder_cache(torch.tensor([7, 7], device="cpu"))):
        with suppress(ValueError, IndexError):
            attempt()


ACTS: list[Callable[[PreTrainedModel, HybridCache], None]] = [
    prefill, decode, generate, beams, change, fail, interrupt, end_interrupted, lose_a_job, refuse,
]  # fmt: skip


def live(
    model: PreTrainedModel, act: Callable[[PreTrainedModel, HybridCache], None], knobs: dict[str, Any]
) -> tuple[list[weakref.ref[Any]], list[threading.Thread]]:
    """Make a cache, let it live, and let it go; returns what can tell whether parts of it are still there."""
    cache = HybridCache(model, **knobs)
    act(model, cache)
    parts: list[Any] = [cache, cache.settings.worker]
    for layer in hybrid_layers(cache):
        parts += [layer, layer.store, layer.store.pool, *layer.store.pool.slabs]
        own = layer.resident, layer.host_partial, layer.store.digests, layer.state
        parts += [part for part in own if part is not None]
        if isinstance(layer.state, TokenMass):
            parts += [layer.state.retained, layer.state.retained.pool]
    return [weakref.ref(part) for part in parts], list(cache.settings.worker._pool)


QUICK = [("split, attends ahead", act) for act in ACTS]
QUICK += [(name, act) for name in ("one", "hgca") for act in (decode, change, interrupt)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "act"),
    [
        pytest.param(name, act, marks=() if (name, act) in QUICK else pytest.mark.slow, id=f"{act.__name__}-{name}")
        for act in ACTS
        for name in SETTINGS
    ],
)
def test_a_cache_goes_with_its_last_name(
    model: PreTrainedModel, act: Callable[[PreTrainedModel, HybridCache], None], name: str
) -> None:
    live(model, act, SETTINGS[name])  # compiles: Numba leaves frames in a circle, and who is in them
    gc.collect()
    assert hooks_on(model) == 0
    parts, threads = live(model, act, SETTINGS[name])
    for thread in threads:  # they hold what they still work on
        thread.join(300)
        assert not thread.is_alive()
    left = [type(part()).__name__ for part in parts if part() is not None]
    assert not left
    assert hooks_on(model) == 0


@pytest.mark.slow
def test_a_thread_at_work_lets_go_when_it_is_done(model: PreTrainedModel) -> None:
    """A recall in flight holds the memory that it reads and writes, and no longer."""

    def slowly(model: PreTrainedModel, cache: HybridCache) -> None:
        cache.settings.worker.delay = 0.3
        prefill(model, cache)
        with torch.no_grad():
            for i in range(3):
                model(torch.full((2, 1), 5 + i, device=DEVICE), past_key_values=cache)
        assert any(layer.resident._transfer is not None for layer in hybrid_layers(cache))

    test_a_cache_goes_with_its_last_name(model, slowly, "split")
