"""Training of a predictor: what is learnt, from the samples of a text to a file, by the command."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model
from typer.testing import CliRunner

from hf_offload import ConstantPredictor
from hf_offload.cli import app
from hf_offload.files.fingerprint import likeness
from hf_offload.model.hooks import find_layers
from hf_offload.policies.fluxion.budgets import GRANULARITIES
from hf_offload.policies.fluxion.features import FEATURES
from hf_offload.policies.fluxion.predictor import HeadPredictor, read_about
from hf_offload.tools import assets
from hf_offload.tools.training import train as training
from hf_offload.tools.training.fitting import Fitting, fit_predictor
from hf_offload.tools.training.report import quality, r_squared
from hf_offload.tools.training.samples import Sampling
from hf_offload.tools.training.train import Window, check_sampling, collect, cut_windows, train

OF: dict[str, Any] = {"tau": 0.1, "digest": "quest", "sinks": 64, "local": 256}
SMALL = Sampling(interval=96, steps=3, taus=(0.05, 0.3), sinks=16, local=32, digest="quest")
QUICK = Fitting(epochs=3, batch=64)


# --- fitting ----------------------------------------------------------------------------------------------------------


def lesson(count: int, seed: int, noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads whose first feature says whether they are streaming, and the next two the line of their budgets."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, len(FEATURES), generator=generator)
    first, slope = 0.1 + 0.03 * features[:, 1], 0.03 + 0.01 * features[:, 2]
    budgets = first[:, None] + slope[:, None] * torch.tensor(GRANULARITIES).log2()
    budgets = budgets + noise * torch.randn(count, 1, generator=generator)
    budgets = budgets.clamp(1e-3, 1.0)
    budgets[features[:, 0] > 0] = 0.0
    return features, budgets


def fitted(noise: float = 0.0, **settings: Any) -> tuple[HeadPredictor, int]:
    options = {"epochs": 12, "batch": 128, "rate": 3e-3, "streaming_at": 0.5, "fit": "paper", **settings}
    return fit_predictor(*lesson(3000, 0, noise), *lesson(600, 1, noise), Fitting(**options), **OF)


def test_what_can_be_learnt_is_learnt() -> None:
    made, epochs = fitted()
    assert 1 <= epochs <= 12
    found = quality(made, *lesson(600, 2), "paper")
    assert min(found["r2_budget0"], found["r2_slope"]) > 0.8
    assert min(found["streaming_precision"], found["streaming_recall"]) > 0.95
    assert found["budgets"]["32"]["predicted"] == pytest.approx(found["budgets"]["32"]["needed"], rel=0.1)


def test_the_same_seed_gives_the_same_predictor() -> None:
    """Whether the caller wants gradients or not."""
    with torch.no_grad():
        again, _ = fitted(epochs=2)
    assert torch.equal(fitted(epochs=2)[0].outputs.weight, again.outputs.weight)


def test_underestimates_can_weigh_more() -> None:
    features, budgets = lesson(600, 2, noise=0.1)
    even, careful = (
        quality(fitted(noise=0.1, epochs=6, under=under)[0], features, budgets, "paper")["budgets"]["16"]
        for under in (1.0, 8.0)
    )
    assert careful["too_little"] < 0.6 * even["too_little"]
    assert careful["too_much"] > even["too_much"]


def test_the_line_may_leave_single_tokens_out() -> None:
    """Budgets that jump behind the first: a line through all is off everywhere, one through the others is not."""
    features, budgets = lesson(600, 2)
    (seen, known), jump = lesson(3000, 0), torch.tensor([0.0, 0.4, 0.4, 0.4, 0.4])
    for target in (budgets, known):
        target[target.amax(1) > 0] = jump
    errors = {}
    for fit in ("online", "paper"):
        fitting = Fitting(epochs=8, batch=128, streaming_at=0.5, fit=fit)
        made, _ = fit_predictor(seen, known, features, budgets, fitting, **OF)
        rows = quality(made, features, budgets, fit)["budgets"].values()
        errors[fit] = max(row["too_little"] + row["too_much"] for row in rows)
    assert 2 * errors["online"] < errors["paper"]


def test_it_ends_when_nothing_gets_better_and_keeps_the_best() -> None:
    """Held-out budgets that contradict the lesson: the first epochs stay the best, whatever follows."""
    features, budgets = lesson(600, 1)
    wrong = torch.where(budgets > 0, 0.0, 0.3)
    made, epochs = fit_predictor(*lesson(3000, 0), features, wrong, Fitting(epochs=30, patience=2, batch=128), **OF)
    assert epochs <= 3
    assert torch.isfinite(made(torch.zeros(2, len(FEATURES)))).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs=0 is not a count; use an integer of at least 1"),
        ({"under": -1.0}, r"under=-1\.0 is not a weight; use a number above 0"),
        ({"streaming_at": 1.0}, r"streaming_at=1\.0 is not a probability"),
        ({"fit": "best"}, "fit='best' is not known; use one of online, paper"),
        ({}, r"no head of the samples needs the host for tau=0\.1"),
    ],
)
def test_settings_and_samples_that_teach_nothing_are_refused(change: dict[str, Any], message: str) -> None:
    features, budgets = lesson(50, 0)
    with pytest.raises(ValueError, match=message):
        fit_predictor(features, 0 * budgets, features, budgets, Fitting(**change), **OF)


def test_figures_by_hand() -> None:
    """Three heads, one streaming; 0.2 + 0.02 · log₂ blk is predicted for all of them."""
    budgets = torch.tensor([[0.0] * 5, [0.1, 0.3, 0.3, 0.3, 0.3], [0.3, 0.3, 0.3, 0.3, 0.5]])
    found = quality(ConstantPredictor(0.2, 0.02), torch.zeros(3, 41), budgets, "paper")
    assert found["budgets"]["16"] == pytest.approx(  # 0.28 is predicted
        {"needed": 0.2, "predicted": 0.28, "too_little": 0.04 / 3, "too_much": 0.28 / 3, "enough": 1 / 3}, abs=1e-6
    )
    assert found["streaming_share"] == pytest.approx(1 / 3)
    assert found["streaming_precision"] == found["streaming_recall"] == 0.0
    assert found["r2_budget0"] == pytest.approx(0.0, abs=1e-6)  # the mean of 0.1 and 0.3
    all_streaming = quality(ConstantPredictor(streaming=True), torch.zeros(3, 41), budgets, "paper")
    assert all_streaming["streaming_precision"] == pytest.approx(1 / 3)
    assert all_streaming["streaming_recall"] == 1.0
    assert all_streaming["budgets"]["128"]["predicted"] == 0.0
    assert math.isnan(r_squared(torch.ones(3), torch.ones(3)))


# --- from a text to a file --------------------------------------------------------------------------------------------


def windows() -> list[Window]:
    generator = torch.Generator().manual_seed(0)
    return cut_windows(torch.randint(3, 150, (2, 900), generator=generator).tolist(), 300, 3)


def test_windows_are_disjoint_and_the_last_ones_are_for_measuring() -> None:
    cut = cut_windows([list(range(1000)), list(range(2000, 2250))], 100, 4)
    assert [int(one.ids[0, 0]) for one in cut if not one.held_out] == [0, 300, 600, 2000]
    assert [int(one.ids[0, 0]) for one in cut if one.held_out] == [900, 2150]
    assert all(one.ids.shape == (1, 100) for one in cut)
    alone = cut_windows([list(range(150)), list(range(200, 350))], 100, 4)
    assert [(int(one.ids[0, 0]), one.held_out) for one in alone] == [(0, False), (200, True)]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[1] * 200, [1] * 99], "a text has 99 tokens, fewer than context=100; use longer texts or less"),
        ([[1] * 199], "one window of context=100 tokens; use more text or a shorter context"),
    ],
)
def test_too_little_text(texts: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut_windows(texts, 100, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digest": "median"}, "digest='median' is not known; use one of submean, quest, mean"),
        ({"sinks": 20}, "sinks=20 is not a number of blocks; use a multiple of 16"),
        ({"taus": ()}, r"tau=\[\] are no deviations"),
        ({"taus": (0.1, 1.5)}, r"tau=\[0\.1, 1\.5\] are no deviations; use different numbers between 0 and 1"),
        ({"taus": (0.1, 0.1)}, r"tau=\[0\.1, 0\.1\] are no deviations"),
        ({"interval": 79}, "interval=79 leaves the host nothing .* use at least 80"),
        ({"steps": 0}, "steps=0 is not a count of tokens in an interval of 96"),
        ({"interval": 298}, "context=300 ends before the steps after interval=298; raise it"),
    ],
)
def test_refused_sampling(change: dict[str, Any], message: str) -> None:
    check_sampling(SMALL, 300)
    with pytest.raises(ValueError, match=message):
        check_sampling(Sampling(**{**vars(SMALL), **change}), 300)


def test_a_predictor_is_trained_and_serves_its_model(tmp_path: Path) -> None:
    model, cut, path = tiny_model("llama", "sdpa"), windows(), tmp_path / "predictor.safetensors"
    collect(model, cut, SMALL, tmp_path)
    report = train(model, cut, SMALL, QUICK, tmp_path)
    assert report is not None
    assert [one.held_out for one in cut] == [False] * 4 + [True] * 2
    assert report["samples"] == 4 * 9 * 4 * 4  # windows, steps, layers, heads
    assert report["held_out"] == 2 * 9 * 4 * 4
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report))
    identity = likeness(model.config, find_layers(model)[0])
    for tau in SMALL.taus:
        made = HeadPredictor.load(path, identity, tau)
        assert (made.digest, made.sinks, made.local) == ("quest", 16, 32)
        assert report["quality"][str(tau)]["budgets"].keys() == {"16", "32", "64", "128"}
    assert read_about(path)["summary"]["windows"] == 4
    with pytest.raises(ValueError, match="another model"):
        HeadPredictor.load(path, {**identity, "weights": {}}, 0.05)


@pytest.mark.slow
def test_what_was_collected_before_an_interruption_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the third window: two files stay as they are, and the others are those of an undisturbed run."""
    model, cut, calls = tiny_model("llama", "sdpa"), windows(), []
    real = training.layer_samples

    def stopped(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 10:  # four layers a window
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(training, "layer_samples", stopped)
        with pytest.raises(KeyboardInterrupt):
            collect(model, cut, SMALL, tmp_path / "one")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "one").glob("samples*")}
    assert len(before) == 2
    for name in ("one", "two"):
        collect(model, cut, SMALL, tmp_path / name)
    assert all(file.stat().st_mtime_ns == time for file, time in before.items())
    files = list((tmp_path / "two").glob("samples*"))
    assert len(files) == 6
    for file in files:
        ours, theirs = load_file(tmp_path / "one" / file.name), load_file(file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_samples_of_other_settings_and_windows_beyond_the_model_are_refused(tmp_path: Path) -> None:
    model, cut = tiny_model("llama", "sdpa"), windows()
    (tmp_path / "settings.json").write_text(json.dumps({"interval": 1}))
    with pytest.raises(ValueError, match="holds samples with another interval; name another folder, or empty this one"):
        collect(model, cut, SMALL, tmp_path)
    model.config.max_position_embeddings = 200
    with pytest.raises(ValueError, match="context=300 is longer than the model's 200 positions; use 200"):
        collect(model, cut, SMALL, tmp_path / "new")


def test_windows_are_shared_out_among_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the second of two processes: every second window, and nothing is trained."""

    class Second:
        is_main_process, num_processes, process_index = False, 2, 1

        def wait_for_everyone(self) -> None:
            pass

    monkeypatch.setattr(training, "PartialState", Second)
    model, cut = tiny_model("llama", "sdpa"), windows()
    collect(model, cut, SMALL, tmp_path)
    assert sorted(file.name[8:13] for file in tmp_path.iterdir()) == ["00001", "00003", "00005"]
    assert train(model, cut, SMALL, QUICK, tmp_path) is None


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text, and a tiny model that reads a token a character in place of any that is loaded."""

    class Tokenizer:
        chat_template = None

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [3 + ord(letter) % 150 for letter in text]}

    monkeypatch.setattr(assets, "load_demo_model", lambda *_, **__: (tiny_model("llama", "sdpa"), Tokenizer()))
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + (i * i // 7) % 26) for i in range(1600)))
    return path


def run(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train-fluxion", *map(str, words)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, re.sub(r"[\s│]+", " ", result.output)


def test_command(letters: Path, tmp_path: Path) -> None:
    options = ("--text", letters, "--context", "780", "--interval", "720", "--epochs", "2", "--tau", "0.3")
    code, said = run("--out", tmp_path / "made", *options, "--tau", "0.05")
    assert code == 0
    assert "held-out samples" in said
    assert "predictor.safetensors and " in said
    report = json.loads((tmp_path / "made" / "report.json").read_text())
    assert report["taus"] == [0.05, 0.3]
    assert report["asked_windows"] == 2  # both windows of 1,600 letters, one of them for measuring
    assert report["quality"].keys() == {"0.05", "0.3"}
    code, said = run("--out", tmp_path / "made", *options)
    assert code == 2
    assert "holds samples with another taus" in said


def test_command_tells_what_is_wrong(letters: Path, tmp_path: Path) -> None:
    for option, value, message in (
        ("--dtype", "int3", "dtype='int3' is not known"),
        ("--digest", "median", "digest='median' is not known"),
        ("--epochs", "0", "epochs=0 is not a count"),
        ("--context", "9000", "fewer than context=9000"),
    ):
        code, said = run("--out", tmp_path / "made", "--text", letters, option, value)
        assert code == 2
        assert message in said
    letters.write_bytes(b"\xff\xfe\xff")
    assert "is not UTF-8" in run("--out", tmp_path / "made", "--text", letters)[1]
