"""Profiling: intervals from measured curves, the file, its use by a cache, refusals."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import prompt, tiny_model

from hf_offload import HybridCache
from hf_offload.policies.recall import RecallClock
from hf_offload.tools.profile import longest_interval, profile_intervals

KNOBS: dict[str, Any] = {"budget": 64, "sinks": 8, "recent": 16}
SHAPE: dict[str, Any] = {"block_size": 8, "resident": 80}
SIZES: dict[str, Any] = {"tokens": 200, "steps": 12, "windows": 2}


def text(length: int = 400) -> torch.Tensor:
    return prompt(1, length)[0]


def test_longest_interval() -> None:
    for ratios, steps in (
        ([0.0, 0.05, 0.1, 0.15, 0.2], 3),
        ([0.3, 0.4, 0.5], 1),  # too much at once: recall at every step
        ([0.01, 0.02, 0.03], 3),  # never: as long as was measured
        ([0.12, 0.12, 0.13], 2),  # at the threshold is not above it
        ([0.02, 0.2, 0.02, 0.04, 0.3, 0.3], 4),  # one odd token is no trend
    ):
        assert longest_interval(ratios, 0.12) == steps


def test_profile_measures_every_layer() -> None:
    found = profile_intervals(tiny_model("llama"), text(), **SIZES, **SHAPE, **KNOBS)
    ratios = np.array(found.ratio_by_step)
    assert ratios.shape == (4, 12)
    assert (ratios >= 0).all()
    assert 0 < ratios.mean() < 1
    assert found.intervals == [longest_interval(curve, 0.12) for curve in found.ratio_by_step]
    assert (found.budget, found.resident, found.block_size, found.digest) == (64, 80, 8, "submean")
    assert (found.tokens, found.steps, found.windows, found.threshold) == (200, 12, 2, 0.12)
    assert found.model["model_type"] == "llama"


def test_curve_is_the_mean_over_windows() -> None:
    model, ids = tiny_model("llama"), text(224)
    both, *alone = (
        profile_intervals(model, part, **SIZES | {"windows": windows}, **SHAPE, **KNOBS).ratio_by_step
        for windows, part in ((2, ids[0]), (1, ids[:, :212]), (1, ids[:, 12:]))
    )
    assert alone[0] != alone[1]
    np.testing.assert_allclose(both, np.mean(alone, 0), atol=2e-4)


def test_layers_that_are_not_offloaded(tmp_path: Path) -> None:
    """Sliding windows have an entry that is never used, so that a layer finds its own by its number."""
    model = tiny_model("gemma3")
    found = profile_intervals(model, text(), **SIZES, **SHAPE, **KNOBS, threshold=0.9)
    assert found.layers == [1, 3]
    assert found.intervals == [1, 12, 1, 12]
    assert [len(curve) for curve in found.ratio_by_step] == [0, 12, 0, 12]
    found.write(tmp_path / "profile.json")
    assert RecallClock.of(tmp_path / "profile.json", 0.12, 3, torch.device("cpu")).interval == 12


def test_a_cache_recalls_at_the_profiled_intervals(tmp_path: Path) -> None:
    model, path = tiny_model("llama"), tmp_path / "profile.json"
    found = profile_intervals(model, text(), **SIZES, **SHAPE, **KNOBS, threshold=0.2)
    found.write(path)
    assert json.loads(path.read_text()) == asdict(found) | {"version": 1}
    cache = HybridCache(model, "scout", tier="split", **SHAPE, **KNOBS, recall=str(path))
    model.generate(text(200), past_key_values=cache, max_new_tokens=20)
    for layer, interval in zip(cache.stats().layers, found.intervals, strict=True):
        assert layer.steps == 19
        assert 0 < layer.recalls <= layer.steps // interval


def test_refusals() -> None:
    for change, message in (
        ({"steps": 4097}, "steps=4097 is too large"),
        ({"tokens": 2.5}, r"tokens=2\.5 is not a count"),
        ({"threshold": 0.0}, r"threshold=0\.0 .* use a number above 0 and below 1"),
        ({"recall": 4}, "recall=4 .* leave recall out"),
        ({"tokens": 390}, "the text has 400 tokens, but .* need 414; use a longer text"),
        ({"windows": 20}, "the text has 400 tokens, but .* need 440; use a longer text"),
        ({"ids": text().expand(2, -1)}, r"shape \[2, 400\] are not one text"),
    ):
        options = {"ids": text(), **SIZES, **SHAPE, **KNOBS, **change}
        with pytest.raises(ValueError, match=message):
            profile_intervals(tiny_model("llama"), options.pop("ids"), **options)


def test_windows_beyond_the_models_positions_are_warned_about() -> None:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 210
    with pytest.warns(UserWarning, match="windows of 212 tokens are longer than the 210"):
        profile_intervals(model, text(), **SIZES, **SHAPE, **KNOBS)
