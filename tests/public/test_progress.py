"""The progress bar of a long prompt: `HybridCache(progress=True)`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm.auto
from tiny import prompt, tiny_model
from transformers import PreTrainedModel

import hf_offload
from hf_offload import HybridCache
from hf_offload.cpu.kernels import prefill

LAYERS, TOKENS = 4, 300
WHOLE = LAYERS * TOKENS


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The bars that were made, each with the positions it went through and the delay it was made with."""
    kind, made = tqdm.auto.tqdm, list[Any]()
    init, update = kind.__init__, kind.update

    def make(bar: Any, *args: Any, **kwargs: Any) -> None:
        bar.asked, bar.positions, bar.told = kwargs["delay"], [], io.StringIO()
        # Without a delay it shows at once, and at every step.
        init(bar, *args, **kwargs | {"file": bar.told, "delay": 0, "mininterval": 0, "ncols": 100})
        made.append(bar)

    def move(bar: Any, n: float = 1) -> Any:
        moved = update(bar, n)
        bar.positions.append(bar.n)
        return moved

    monkeypatch.setattr(kind, "__init__", make)
    monkeypatch.setattr(kind, "update", move)
    return made


@torch.no_grad()
def run(model: PreTrainedModel, cache: HybridCache, length: int = TOKENS) -> torch.Tensor:
    logits: torch.Tensor = model(prompt(1, length)[0], past_key_values=cache).logits
    return logits


def shown(model: PreTrainedModel, policy: str = "full", **knobs: Any) -> HybridCache:
    return HybridCache(model, policy, progress=True, **knobs)


def closed(bar: Any) -> bool:
    return bar not in type(bar)._instances


def test_a_prompt_shows_its_layers_and_is_gone_at_its_end(model: PreTrainedModel, bars: list[Any]) -> None:
    run(model, HybridCache(model))
    assert not bars
    run(model, shown(model))
    (bar,) = bars
    assert sorted(set(bar.positions)) == [TOKENS * n for n in range(1, LAYERS + 1)]
    assert bar.asked == 5  # seconds until it shows
    text = bar.told.getvalue()
    assert f"prompt of {TOKENS} tokens" in text
    assert f"layer {LAYERS} of {LAYERS}" in text
    assert text.endswith("\r")  # the line is free again


def test_every_prompt_has_a_bar_that_reaches_its_end(model: PreTrainedModel, bars: list[Any], tmp_path: Path) -> None:
    """Decode steps and drafts have none; of a model with windows the layers with full attention count."""
    greedy: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    ids = prompt(1, 40)[0].repeat(1, 6)  # text that repeats itself is drafted from the prompt
    model.generate(
        ids, past_key_values=shown(model, "scout", budget=256, block_size=16), prompt_lookup_num_tokens=3, **greedy
    )
    model.generate(prompt(1, TOKENS)[0], past_key_values=shown(model), prefill_chunk_size=100, **greedy)
    windows, enabled = tiny_model("gemma3"), tiny_model("llama", "sdpa")
    run(windows, shown(windows))
    with hf_offload.enabled(enabled, progress=True):
        enabled.generate(prompt(1, TOKENS)[0], **greedy)
    cache = shown(model)
    run(model, cache)
    cache.save(tmp_path / "saved")
    run(model, cache.fork())
    run(model, HybridCache.load(tmp_path / "saved", model))  # shows none unless it is told to
    run(model, HybridCache.load(tmp_path / "saved", model, progress=True))
    totals = [LAYERS * 240, *[LAYERS * 100] * 3, WHOLE // 2, *[WHOLE] * 4]
    assert [bar.total for bar in bars] == [bar.positions[-1] for bar in bars] == totals
    assert all(map(closed, bars))


def test_a_long_layer_shows_its_pieces(
    model: PreTrainedModel, bars: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches of at most 288 queries, as of a long context."""
    monkeypatch.setattr(prefill, "_LAUNCH_OPERATIONS", 1)
    monkeypatch.setattr(prefill, "LEAST", 288)
    cache = shown(model)
    run(model, cache)
    run(model, cache)
    assert "tokens 301 to 600" in bars[1].told.getvalue()
    assert bars[1].positions[:2] == [288, TOKENS]
    assert bars[1].positions[-1] == WHOLE


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_a_forward_that_ends_early_closes_its_bar(
    model: PreTrainedModel, bars: list[Any], error: type[BaseException]
) -> None:
    def fail(*_: Any) -> None:
        raise error

    cache = shown(model)
    with model.model.layers[2].register_forward_pre_hook(fail), pytest.raises(error):
        run(model, cache)
    cache.crop(0)
    run(model, cache)
    assert [bar.n for bar in bars] == [2 * TOKENS, WHOLE]
    assert all(map(closed, bars))


def test_a_bar_that_cannot_be_written_is_no_error_of_the_prompt(
    model: PreTrainedModel, bars: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(io, "StringIO", type("Gone", (io.StringIO,), {"write": gone}))
    cache = shown(model)
    for _ in range(2):
        run(model, cache)
        assert cache.get_seq_length() == TOKENS
        cache.reset()


def test_chunks_share_five_seconds_and_another_prompt_has_its_own(
    model: PreTrainedModel, bars: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(hf_offload.cache.progress.time, "perf_counter", lambda: now[0])
    cache = shown(model)
    with model.model.layers[1].register_forward_hook(lambda *_: now.__setitem__(0, now[0] + 3.0)):
        for length in (TOKENS, 20, 1, TOKENS):  # a chunk, a decode step, another turn
            run(model, cache, length)
        cache.reset()
        run(model, cache)
    assert [bar.asked for bar in bars] == [5.0, 2.0, 5.0, 5.0]
