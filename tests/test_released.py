"""Release of memory, threads and hooks with a cache's last reference, without garbage collection."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from breaking import SETTINGS
from histories import Setting
from test_hybrid_cache import hooks_on
from tiny import DEVICE, prompt
from transformers import PreTrainedModel

from hf_offload import HybridCache
from hf_offload.model.hooks import hybrid_layers
from hf_offload.policies.hgca.token_mass import TokenMass

Act = Callable[[PreTrainedModel, HybridCache], None]


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@torch.no_grad()
def decode(model: PreTrainedModel, cache: HybridCache, steps: int = 6) -> None:
    model(prompt(2, 155)[0], past_key_values=cache)
    for i in range(steps):
        model(torch.full((2, 1), 5 + i, device=DEVICE), past_key_values=cache)


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
    """Forwards that raise half way, of a step and of a turn."""
    decode(model, cache)
    for error, tokens in itertools.product((ValueError, KeyboardInterrupt), (1, 20)):

        def raise_it(*_: Any, error: type[BaseException] = error) -> None:
            raise error

        with model.model.layers[2].mlp.register_forward_pre_hook(raise_it), torch.no_grad(), suppress(error):
            model(prompt(2, tokens)[0], past_key_values=cache)
        cache.crop(0)


def fail_and_go_on(model: PreTrainedModel, cache: HybridCache) -> None:
    fail(model, cache)
    decode(model, cache)


def lose_a_job(model: PreTrainedModel, cache: HybridCache) -> None:
    """A job that raises, and one that is late."""
    decode(model, cache)
    worker = cache.settings.worker
    for work, patience in ((lambda: 1 / 0, 5), (lambda: time.sleep(0.3), 0.01)):
        job = worker.submit(work, "a job")
        with suppress(RuntimeError):
            job.result(timeout=patience)


def recall_late(model: PreTrainedModel, cache: HybridCache) -> None:
    """A recall in flight holds the memory that it reads and writes, and no longer."""
    cache.settings.worker.delay = 0.1
    decode(model, cache, 3)


ACTS: list[Act] = [change, fail, fail_and_go_on, lose_a_job, recall_late, beams]


def live(model: PreTrainedModel, setting: Setting, act: Act) -> tuple[list[weakref.ref[Any]], list[threading.Thread]]:
    """Make a cache, let it live, and let it go; returns what can tell whether parts of it are still there."""
    cache = HybridCache(model, setting.policy, **setting.knobs)
    act(model, cache)
    parts: list[Any] = [cache, cache.settings.worker]
    for layer in hybrid_layers(cache):
        parts += [layer, layer.store, layer.store.pool, *layer.store.pool.slabs]
        own = layer.resident, layer.host_partial, layer.store.digests, layer.state
        parts += [part for part in own if part is not None]
        if isinstance(layer.state, TokenMass):
            parts += [layer.state.now.retained, layer.state.now.retained.pool]
    return [weakref.ref(part) for part in parts], list(cache.settings.worker._pool)


def cases() -> list[Any]:
    """All of them; in the quick set every second setting with one act."""
    return [
        pytest.param(name, act, marks=() if i % 2 == 0 and i // 2 % len(ACTS) == j else pytest.mark.slow)
        for (i, name), (j, act) in itertools.product(enumerate(SETTINGS), enumerate(ACTS))
    ]


@pytest.mark.skipif(DEVICE != "cpu", reason="the settings name tiers of the CPU")
@pytest.mark.parametrize(("name", "act"), cases())
def test_a_cache_goes_with_its_last_name(model: PreTrainedModel, name: str, act: Act) -> None:
    setting = SETTINGS[name]
    live(model, setting, act)  # compiles: Numba leaves frames in a circle, and who is in them
    gc.collect()
    assert hooks_on(model) == 0
    parts, threads = live(model, setting, act)
    for thread in threads:  # they hold what they still work on
        thread.join(300)
        assert not thread.is_alive()
    left = [type(part()).__name__ for part in parts if part() is not None]
    assert not left
    assert hooks_on(model) == 0
