"""The predictor: size, file, refusals, and the constant predictor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_model

from hf_offload import ConstantPredictor
from hf_offload.files.fingerprint import likeness
from hf_offload.model.hooks import find_layers
from hf_offload.policies.fluxion import predictor
from hf_offload.policies.fluxion.features import FEATURES
from hf_offload.policies.fluxion.predictor import HeadPredictor, read_about, save_predictors, write_whole


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


def test_shapes_and_the_threshold() -> None:
    features = sample(24).view(2, 12, -1)
    found = made().predict(features)
    assert [part.shape for part in found] == [(2, 12)] * 3
    assert found.streaming.dtype == torch.bool
    logit = made()(features)[..., 2]
    assert torch.equal(found.streaming, logit > 0)
    strict = made(streaming_at=0.7).predict(features).streaming
    assert torch.equal(strict, logit.sigmoid() > 0.7)
    with pytest.raises(ValueError, match=r"streaming_at=1 is not a probability; use a number above 0 and below 1"):
        made(streaming_at=1)


def test_it_predicts_where_the_features_are() -> None:
    one, features = made(), sample(4)
    want = one.predict(features)
    assert all(part.device.type == "meta" and part.shape == (4,) for part in one.predict(features.to("meta")))
    assert torch.equal(one.predict(features).budget0, want.budget0)


def test_file_gives_the_same_predictions(tmp_path: Path) -> None:
    path, model = tmp_path / "predictor.safetensors", identity()
    both = {0.05: made(0.05, 1, 0.6), 0.1: made(0.1, 2, 0.7)}
    save_predictors(path, model, both, {"samples": 3})
    features = sample(50)
    for tau, one in both.items():
        loaded = HeadPredictor.load(path, model, tau)
        assert (loaded.tau, loaded.digest, loaded.sinks, loaded.local) == (tau, "quest", 64, 256)
        for mine, theirs in zip(one.predict(features), loaded.predict(features), strict=True):
            assert torch.equal(mine, theirs)
    assert read_about(path)["summary"] == {"samples": 3}
    assert list(tmp_path.iterdir()) == [path]


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "predictor.safetensors", identity()
    save_predictors(path, model, {0.05: made(0.05), 0.1: made(0.1)}, {})
    with pytest.raises(ValueError, match=r"another model: the weight .* has other values; train one for this model"):
        HeadPredictor.load(path, identity(seed=1))
    with pytest.raises(ValueError, match=r"tau=0\.2 is none .*; use one of 0\.05, 0\.1, or train it for more"):
        HeadPredictor.load(path, model, 0.2)
    for name, value, message in (
        ("FEATURES", FEATURES[1:], "trained on other features"),
        ("GRANULARITIES", (1, 16), r"block sizes \[1, 16, 32, 64, 128\]"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(predictor, name, value)
            with pytest.raises(ValueError, match=message):
                HeadPredictor.load(path, model)
    with pytest.raises(FileNotFoundError):
        HeadPredictor.load(tmp_path / "none", model)
    with pytest.raises(ValueError, match="2 settings"):
        save_predictors(path, model, {0.05: made(0.05), 0.1: made(0.1, digest="submean")}, {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_is_known_again_in_another_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "predictor.safetensors"
    for one, two in ((torch.float32, dtype), (dtype, torch.float32), (torch.float16, torch.bfloat16)):
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


def test_a_file_is_read_once_as_long_as_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads = tmp_path / "predictor.safetensors", []
    save_predictors(path, identity(), {0.1: made()}, {})
    read = predictor.load_file
    monkeypatch.setattr(predictor, "load_file", lambda name: reads.append(name) or read(name))
    first, second = (HeadPredictor.load(path, identity()) for _ in range(2))
    assert reads == [str(path)]
    first.outputs.bias[0] = 1.0  # each has weights of its own
    assert second.outputs.bias[0] == made().outputs.bias[0]
    save_predictors(path, identity(), {0.1: made(seed=3)}, {"again": True})
    assert HeadPredictor.load(path, identity()).outputs.bias[0] == made(seed=3).outputs.bias[0]
    assert len(reads) == 2


def test_files_that_are_no_predictors_and_a_flipped_bit_anywhere(tmp_path: Path) -> None:
    path, model = tmp_path / "predictor.safetensors", identity()
    save_predictors(path, model, {0.1: made()}, {})
    whole = path.read_bytes()
    (tmp_path / "text").write_text("hello, this is no predictor at all")
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    save_file({"x": torch.zeros(1)}, tmp_path / "old", {"about": json.dumps({"format": 0})})
    for name in ("text", "other", "old"):
        with pytest.raises(ValueError, match=r"is no predictor.*hf-offload train-fluxion"):
            HeadPredictor.load(tmp_path / name, model)
    header, random = int.from_bytes(whole[:8], "little"), torch.randint(0, len(whole), (30,)).tolist()
    damaged = [whole[:keep] for keep in (0, 7, len(whole) // 2, len(whole) - 1)]
    for place in (0, 7, *range(8, 8 + header, header // 60), 8 + header, len(whole) - 1, *random):
        damaged.append(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"(?s)(is damaged|is no predictor).*train it again"):
            HeadPredictor.load(path, model)


def test_a_file_that_is_not_whole(tmp_path: Path) -> None:
    """Its checksum agrees, but what was written never served."""
    whole, model = tmp_path / "predictor.safetensors", identity()
    save_predictors(whole, model, {0.1: made()}, {})

    def write(path: Path, change: dict[str, Any], tensor: str = "", value: torch.Tensor | None = None) -> None:
        about, tensors = read_about(whole) | change, load_file(whole)
        about = {name: value for name, value in about.items() if value is not None}
        if tensor:
            del tensors[tensor]
        if value is not None:
            tensors[tensor] = value
        write_whole(path, tensors, about)

    nan = torch.full((312,), torch.nan)
    cases: list[tuple[tuple[Any, ...], str]] = [
        (({}, "0.1/first.bias"), r"is not a whole predictor: 'first\.bias' is missing"),
        (({}, "0.1/first.bias", torch.zeros(3)), r"is not a whole predictor: first\.bias has shape \[3\], not \[312\]"),
        (({}, "0.1/first.bias", nan), r"values that are not finite \(first\.bias\): its training failed"),
        (({"sinks": -1},), "is not a whole predictor: sinks=-1 is not a number of tokens"),
        (({"local": "256"},), "is not a whole predictor: local='256' is not a number of tokens"),
        (({"digest": "median"},), "is not a whole predictor: digest='median' is not known"),
        (({"predictors": {"0.1": {"streaming_at": 2}}},), "is not a whole predictor: streaming_at=2"),
        (({"model": None, "sinks": None},), "is not a whole predictor: it says nothing of model, sinks"),
    ]
    for number, (change, message) in enumerate(cases):
        path = tmp_path / f"{number}.safetensors"
        write(path, *change)
        with pytest.raises(ValueError, match=rf"(?s){message}.*train it a") as caught:
            HeadPredictor.load(path, model)
        assert str(path) in str(caught.value)


def test_constant_predictor() -> None:
    found = ConstantPredictor(0.25, 0.01, streaming=True).predict(torch.zeros(2, 3, 41))
    assert torch.equal(found.budget0, torch.full((2, 3), 0.25))
    assert torch.equal(found.slope, torch.full((2, 3), 0.01))
    assert torch.equal(found.streaming, torch.ones(2, 3, dtype=torch.bool))
    assert torch.equal(ConstantPredictor().predict(torch.zeros(1, 41)).budget0, torch.ones(1))
