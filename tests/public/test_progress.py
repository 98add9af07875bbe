"""The progress bar of a long prompt: `HybridCache(progress=True)`."""

from __future__ import annotations

import functools
import io
from typing import Any

import pytest
import torch
import tqdm.auto
from tiny import DEVICE, prompt, tiny_model

import hf_offload
from hf_offload.cpu.kernels import prefill

LAYERS, TOKENS = 4, 300


class Bars(list):
    """The bars that were made, each with the positions it went through and the arguments it was made with."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kind = tqdm.auto.tqdm
        init, update = kind.__init__, kind.update

        @functools.wraps(init)
        def make(bar: Any, *args: Any, **kwargs: Any) -> None:
            bar.asked, bar.positions = dict(kwargs), []
            bar.stderr = io.StringIO()
            # Without a delay it shows at once, and at every step.
            init(bar, *args, **kwargs | {"file": bar.stderr, "delay": 0, "mininterval": 0, "ncols": 100})
            self.append(bar)

        @functools.wraps(update)
        def move(bar: Any, n: float = 1) -> Any:
            moved = update(bar, n)
            bar.positions.append(bar.n)
            return moved

        monkeypatch.setattr(kind, "__init__", make)
        monkeypatch.setattr(kind, "update", move)


@pytest.fixture
def bars(monkeypatch):
    made = Bars()
    made.install(monkeypatch)
    return made


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@torch.no_grad()
def run(model, cache, length=TOKENS, **kwargs):
    return model(prompt(1, length)[0], past_key_values=cache, **kwargs)


def closed(bar) -> bool:
    return bar not in type(bar)._instances


def test_a_prompt_shows_its_layers_and_is_gone_at_its_end(bars, model):
    run(model, hf_offload.HybridCache(model, progress=True))
    (bar,) = bars
    assert bar.total == LAYERS * TOKENS
    assert [TOKENS * n for n in range(1, LAYERS + 1)] == sorted(set(bar.positions))
    assert closed(bar)
    shown = bar.stderr.getvalue()
    assert f"prompt of {TOKENS} tokens" in shown
    assert f"layer {LAYERS} of {LAYERS}" in shown
    assert shown.endswith("\r")  # the line is free again


def test_it_waits_for_five_seconds(bars, model):
    run(model, hf_offload.HybridCache(model, progress=True))
    assert bars[0].asked["delay"] == 5


@pytest.fixture
def short_pieces(monkeypatch):
    """Launches of at most 288 queries, as of a long context."""
    monkeypatch.setattr(prefill, "_LAUNCH_OPERATIONS", 1)
    monkeypatch.setattr(prefill, "LEAST", 288)


def test_a_long_layer_shows_its_pieces(bars, model, short_pieces):
    cache = hf_offload.HybridCache(model, progress=True)
    run(model, cache)
    run(model, cache)
    later = bars[1]
    assert "tokens 301 to 600" in later.stderr.getvalue()
    assert later.positions[:2] == [288, TOKENS]
    assert later.positions[-1] == later.total == LAYERS * TOKENS


def test_decode_steps_show_nothing(bars, model):
    cache = hf_offload.HybridCache(model, progress=True, budget=256, block_size=16)
    run(model, cache)
    for _ in range(3):
        run(model, cache, 1)
    assert len(bars) == 1


def test_it_is_off_by_default(bars, model):
    run(model, hf_offload.HybridCache(model))
    assert bars == []


def test_drafts_are_decode_steps(bars, model):
    ids = prompt(1, 40)[0].repeat(1, 6)  # text that repeats itself is drafted from the prompt
    cache = hf_offload.HybridCache(model, progress=True, budget=256, block_size=16)
    model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3)
    assert len(bars) == 1


def test_each_chunk_has_a_bar_and_the_first_one_starts_the_clock(bars, model):
    ids = prompt(1, TOKENS)[0]
    cache = hf_offload.HybridCache(model, progress=True)
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "prefill_chunk_size": 100}
    model.generate(ids, past_key_values=cache, **options)
    assert [bar.total for bar in bars] == [LAYERS * 100] * 3
    delays = [bar.asked["delay"] for bar in bars]
    assert delays[0] == 5
    assert delays == sorted(delays, reverse=True)
    assert len(set(delays)) == 3
    bars.clear()
    run(model, cache)  # another turn, after decode steps
    assert bars[0].asked["delay"] == 5


def test_a_forward_that_raises_closes_its_bar(bars, model):
    cache = hf_offload.HybridCache(model, progress=True)

    def fail(*_: Any) -> None:
        raise ArithmeticError("half way")

    handle = model.model.layers[2].register_forward_pre_hook(fail)
    try:
        with pytest.raises(ArithmeticError):
            run(model, cache)
    finally:
        handle.remove()
    assert closed(bars[0])
    assert bars[0].n == 2 * TOKENS
    run(model, cache)
    assert bars[1].n == LAYERS * TOKENS


def test_an_interrupted_forward_leaves_no_bar(bars, model):
    cache = hf_offload.HybridCache(model, progress=True)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[2].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(model, cache)
    finally:
        handle.remove()
    with pytest.raises(RuntimeError, match="interrupted"):
        run(model, cache)
    assert closed(bars[0])
    run(model, cache)
    assert all(map(closed, bars))


def test_layers_of_other_kinds_do_not_count(bars):
    mixed = tiny_model("gemma3")  # two of its four layers are sliding windows
    run(mixed, hf_offload.HybridCache(mixed, progress=True))
    assert bars[0].positions[-1] == bars[0].total == 2 * TOKENS


def test_padded_rows_reach_the_end(bars, model, short_pieces):
    ids, mask = prompt(2, TOKENS)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=hf_offload.HybridCache(model, progress=True))
    assert bars[0].positions[-1] == bars[0].total == LAYERS * TOKENS
    assert bars[0].positions[:2] == [288, TOKENS]


def test_two_memories_show_it_too(bars, model):
    run(model, hf_offload.HybridCache(model, progress=True, tier="split", budget=256, block_size=16))
    assert bars[0].positions[-1] == bars[0].total


def test_enabled_models_and_forks_show_it(bars, model):
    ids = prompt(1, TOKENS)[0]
    enabled = tiny_model("llama", "sdpa")
    hf_offload.enable(enabled, progress=True)
    enabled.generate(ids, max_new_tokens=2, do_sample=False)
    assert len(bars) == 1
    cache = hf_offload.HybridCache(model, progress=True)
    run(model, cache)
    run(model, cache.fork())
    assert len(bars) == 3


def test_a_loaded_cache_shows_it_when_it_is_told_to(bars, model, tmp_path):
    cache = hf_offload.HybridCache(model, progress=True)
    run(model, cache)
    cache.save(tmp_path / "saved")
    run(model, hf_offload.HybridCache.load(tmp_path / "saved", model))
    assert len(bars) == 1
    run(model, hf_offload.HybridCache.load(tmp_path / "saved", model, progress=True))
    assert len(bars) == 2


@pytest.mark.parametrize("value", ["False", 1, None])
def test_only_true_and_false_are_taken(model, value):
    with pytest.raises(ValueError, match=r"progress=.* True or False"):
        hf_offload.HybridCache(model, progress=value)


def test_tokens_do_not_depend_on_it(model):
    ids = prompt(1, TOKENS)[0].to(DEVICE)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    made = [
        model.generate(ids, past_key_values=hf_offload.HybridCache(model, progress=shown), **options)
        for shown in (False, True)
    ]
    assert torch.equal(*made)


class Gone(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_a_bar_that_cannot_be_written_is_no_error_of_the_prompt(model, monkeypatch):
    kind, gone = tqdm.auto.tqdm, Gone()
    init = kind.__init__
    made = []

    def make(bar, *args, **kwargs):
        made.append(bar)
        init(bar, *args, **kwargs | {"file": gone, "delay": 0, "mininterval": 0})

    monkeypatch.setattr(kind, "__init__", make)
    want = run(model, hf_offload.HybridCache(model, "full")).logits
    cache = hf_offload.HybridCache(model, "full", progress=True)
    for _ in range(2):
        assert torch.equal(run(model, cache).logits, want)
        assert cache.get_seq_length() == TOKENS
        cache.reset()
    assert len(made) == 1


def test_another_prompt_has_its_own_five_seconds(model, bars, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(hf_offload.cache.progress.time, "perf_counter", lambda: now[0])
    cache = hf_offload.HybridCache(model, "full", progress=True)
    hook = model.model.layers[1].register_forward_hook(lambda *_: now.__setitem__(0, now[0] + 3.0))
    run(model, cache)
    run(model, cache, 20)  # a chunk
    cache.reset()
    run(model, cache)
    hook.remove()
    assert [bar.asked["delay"] for bar in bars] == [5.0, 2.0, 5.0]
