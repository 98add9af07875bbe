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
from hf_offload.policies.recall import RecallClock, load_intervals
from hf_offload.tools.profile import Profile, longest_interval, profile_intervals, rising_trend

KNOBS: dict[str, Any] = {"budget": 64, "sinks": 8, "recent": 16}
SHAPE: dict[str, Any] = {"block_size": 8, "resident": 80}
SIZES: dict[str, Any] = {"tokens": 200, "steps": 12, "windows": 2}


def text(length: int = 400) -> torch.Tensor:
    return prompt(1, length)[0]


@pytest.mark.parametrize(
    ("ratios", "steps"),
    [
        ([0.0, 0.05, 0.1, 0.15, 0.2], 3),
        ([0.3, 0.4, 0.5], 1),  # too much at once: recall at every step
        ([0.01, 0.02, 0.03], 3),  # never: as long as was measured
        ([0.12, 0.12, 0.13], 2),  # at the threshold is not above it
        ([0.02, 0.2, 0.02, 0.04, 0.3, 0.3], 4),  # one odd token is no trend
        ([0.2, 0.1, 0.0], 3),
    ],
)
def test_longest_interval(ratios: list[float], steps: int) -> None:
    assert longest_interval(ratios, 0.12) == steps


def test_rising_trend_is_the_nearest_rising_curve() -> None:
    """Against the other formula of isotonic regression, max over starts of min over ends of the mean between."""
    values = np.random.default_rng(0).normal(size=30) + np.linspace(0, 2, 30)
    expected = [
        max(min(values[start : end + 1].mean() for end in range(i, 30)) for start in range(i + 1)) for i in range(30)
    ]
    np.testing.assert_allclose(rising_trend(values), expected)


@pytest.fixture(scope="module")
def found() -> Profile:
    return profile_intervals(tiny_model("llama"), text(), **SIZES, **SHAPE, **KNOBS)


def test_profile_measures_every_layer(found: Profile) -> None:
    assert found.layers == [0, 1, 2, 3]
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
    both = profile_intervals(model, ids[0], **SIZES, **SHAPE, **KNOBS)
    alone = [
        profile_intervals(model, part, **{**SIZES, "windows": 1}, **SHAPE, **KNOBS).ratio_by_step
        for part in (ids[:, :212], ids[:, 12:])
    ]
    assert alone[0] != alone[1]
    np.testing.assert_allclose(both.ratio_by_step, np.mean(alone, 0), atol=2e-4)


def test_a_higher_threshold_allows_longer_intervals(found: Profile) -> None:
    high = profile_intervals(tiny_model("llama"), text(), **SIZES, **SHAPE, **KNOBS, threshold=0.9).intervals
    assert high == [12] * 4
    assert all(a <= b for a, b in zip(found.intervals, high, strict=True))
    assert found.intervals != high


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
    assert load_intervals(path) == found.intervals
    cache = HybridCache(model, "scout", tier="split", **SHAPE, **KNOBS, recall=str(path))
    model.generate(text(200), past_key_values=cache, max_new_tokens=20)
    for layer, interval in zip(cache.stats().layers, found.intervals, strict=True):
        assert layer.steps == 19
        assert 0 < layer.recalls <= layer.steps // interval


def test_file_is_complete_json_or_the_old_one(found: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    found.write(path)
    data = json.loads(path.read_text())
    assert data.pop("version") == 1
    assert data == asdict(found)

    def full(self: Path, *args: Any, **kwargs: Any) -> int:
        self.touch()
        raise OSError("No space left on device")

    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            found.write(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 4097}, "steps=4097 is too large"),
        ({"tokens": 2.5}, r"tokens=2\.5 is not a count"),
        ({"threshold": 0.0}, r"threshold=0\.0 .* use a number above 0 and below 1"),
        ({"digest": "mode"}, "digest='mode' is not known; use one of"),
        ({"recall": 4}, "recall=4 .* leave recall out"),
        ({"colour": 4}, "colour: not a knob"),
        ({"tokens": 390}, "the text has 400 tokens, but .* need 414; use a longer text"),
        ({"windows": 20}, "the text has 400 tokens, but .* need 440; use a longer text"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile_intervals(tiny_model("llama"), text(), **{**SIZES, **SHAPE, **KNOBS, **change})


def test_two_texts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[2, 400\] are not one text"):
        profile_intervals(tiny_model("llama"), text().expand(2, -1), **SIZES, **SHAPE, **KNOBS)


def test_windows_beyond_the_models_positions_are_warned_about() -> None:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 210
    with pytest.warns(UserWarning, match="windows of 212 tokens are longer than the 210"):
        profile_intervals(model, text(), **SIZES, **SHAPE, **KNOBS)
