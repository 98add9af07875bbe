"""The predictor: what it makes of features, its file, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model

from hf_offload.files import tensor_file
from hf_offload.files.fingerprint import likeness
from hf_offload.model.hooks import find_layers
from hf_offload.policies.fluxion.features import FEATURES
from hf_offload.policies.fluxion.predictor import HeadPredictor, read_about, save_predictors


def made(tau: float = 0.1, seed: int = 0, streaming_at: float = 0.5, digest: str = "quest") -> HeadPredictor:
    torch.manual_seed(seed)
    one = HeadPredictor(tau=tau, digest=digest, sinks=64, local=256, streaming_at=streaming_at)
    one.standardise(sample(500))
    return one.eval().requires_grad_(False)


def sample(count: int) -> torch.Tensor:
    """Features of very different sizes, one of them constant."""
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(count, len(FEATURES), generator=generator)
    features = features * torch.logspace(-2, 4, len(FEATURES)) + 30
    features[:, 5] = 7.0
    return features


def identity(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    model = tiny_model("llama", seed=seed).to(dtype)
    return likeness(model.config, find_layers(model)[0])


def test_features_are_standardised_and_outliers_say_no_more_than_what_was_seen() -> None:
    """Every feature counts alike, whatever its unit; one that never varied in training counts for nothing."""
    one, features = made(), sample(500)
    assert sum(parameter.numel() for parameter in one.parameters()) == 111_699  # 0.112 M, as in the paper
    seen = torch.addcmul(one.offset, features, one.inverse)
    varied = [i for i in range(len(FEATURES)) if i != 5]
    torch.testing.assert_close(seen[:, varied].mean(0), torch.zeros(40), atol=1e-3, rtol=0)
    torch.testing.assert_close(seen[:, varied].std(0, unbiased=False), torch.ones(40), atol=1e-3, rtol=0)
    other, inside, beyond, far = (features.clone() for _ in range(4))
    other[:, 5] = 1e6
    assert torch.equal(one(features), one(other))
    for column in (30, 38):
        most = features[:, column].amax()
        inside[:, column], beyond[:, column], far[:, column] = most, most + 100, torch.inf
    assert torch.equal(one(inside), one(beyond))
    assert torch.equal(one(inside), one(far))
    assert not torch.equal(one(inside), one(features))
    strict = made(streaming_at=0.7)
    assert torch.equal(strict.predict(features).streaming, strict(features)[:, 2].sigmoid() > 0.7)


def test_file_gives_the_same_predictions_until_it_is_written_anew(tmp_path: Path) -> None:
    path, model, features = tmp_path / "predictor.safetensors", identity(), sample(50)
    both = {0.05: made(0.05, 1, 0.6), 0.1: made(0.1, 2, 0.7)}
    save_predictors(path, model, both, {"samples": 3})
    for tau, one in both.items():
        loaded = HeadPredictor.load(path, model, tau)
        assert (loaded.tau, loaded.digest, loaded.sinks, loaded.local) == (tau, "quest", 64, 256)
        for mine, theirs in zip(one.predict(features), loaded.predict(features), strict=True):
            assert torch.equal(mine, theirs)
        loaded.outputs.bias[0] = 1.0  # each has weights of its own
        assert torch.equal(HeadPredictor.load(path, model, tau).outputs.bias, one.outputs.bias)
    assert read_about(path)["summary"] == {"samples": 3}
    assert list(tmp_path.iterdir()) == [path]
    save_predictors(path, model, {0.1: made(seed=3)}, {})
    assert torch.equal(HeadPredictor.load(path, model).outputs.bias, made(seed=3).outputs.bias)


def test_refusals(tmp_path: Path) -> None:
    path, model = tmp_path / "predictor.safetensors", identity()
    save_predictors(path, model, {0.05: made(0.05), 0.1: made(0.1)}, {})
    with pytest.raises(ValueError, match=r"another model: the weight .* has other values; train one for this model"):
        HeadPredictor.load(path, identity(seed=1))
    with pytest.raises(ValueError, match=r"tau=0\.2 is none .*; use one of 0\.05, 0\.1, or train it for more"):
        HeadPredictor.load(path, model, 0.2)


def test_a_model_is_known_again_in_another_dtype(tmp_path: Path) -> None:
    path = tmp_path / "predictor.safetensors"
    full, half, short = torch.float32, torch.float16, torch.bfloat16
    for one, two in ((full, short), (half, full), (half, short)):
        save_predictors(path, identity(dtype=one), {0.1: made()}, {})
        HeadPredictor.load(path, json.loads(json.dumps(identity(dtype=two))))
        changed = identity(dtype=two)
        shape, values = changed["weights"]["layers.0.self_attn.q_proj.weight"]
        values[3] *= 1.01
        with pytest.raises(ValueError, match=r"another model: the weight .*q_proj.weight has other"):
            HeadPredictor.load(path, changed)
        shape.append(2)
        with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj.weight was \[.*\], here it is \[.*, 2\]"):
            HeadPredictor.load(path, changed)


def test_a_file_that_is_damaged_or_not_whole(tmp_path: Path) -> None:
    """Bits that flipped, an end that is missing, and files whose checksum agrees, but which never served."""
    path, model, nan = tmp_path / "predictor.safetensors", identity(), torch.full((312,), torch.nan)
    save_predictors(path, model, {0.1: made()}, {})
    whole, known, tensors = path.read_bytes(), read_about(path), load_file(path)
    header, last = int.from_bytes(whole[:8], "little"), len(whole) - 1
    for place in (0, 7, *range(8, 8 + header, header // 20), 8 + header, last // 2, last):
        for damaged in (whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :], whole[:place]):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"(?s)(is damaged|is no predictor).*train it again"):
                HeadPredictor.load(path, model)
    cases: tuple[tuple[dict[str, Any], dict[str, torch.Tensor], str], ...] = (
        ({}, {"0.1/first.bias": nan[:3]}, r"first\.bias has shape \[3\], not \[312\]"),
        ({}, {"0.1/first.bias": nan}, r"values that are not finite \(first\.bias\): its training failed"),
        ({"sinks": -1}, {}, "is not a whole predictor: sinks=-1 is not a number of tokens"),
        ({"predictors": {"0.1": {"streaming_at": 2}}}, {}, "is not a whole predictor: streaming_at=2"),
        ({"features": FEATURES[1:]}, {}, "was trained on other features than this version has"),
        ({"granularities": [1, 16]}, {}, r"was trained for block sizes \[1, 16\]"),
        ({"model": None, "sinks": None}, {}, "is not a whole predictor: it says nothing of model, sinks"),
    )
    for change, other, message in cases:
        about = {k: v for k, v in (known | change).items() if v is not None}
        tensor_file.replace(path, tensor_file.pack(json.dumps(about), tensors | other))
        with pytest.raises(ValueError, match=rf"(?s){path}.*{message}.*train it again"):
            HeadPredictor.load(path, model)
