"""Training of a predictor: what is learnt, from the samples of a text to a file, by the command."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from letters import letters
from safetensors.torch import load_file
from tiny import begin, tiny_model
from typer.testing import CliRunner

from hf_offload import HybridCache
from hf_offload.cli import app
from hf_offload.policies.fluxion.budgets import GRANULARITIES
from hf_offload.policies.fluxion.features import FEATURES
from hf_offload.policies.fluxion.predictor import HeadPredictor
from hf_offload.tools import assets
from hf_offload.tools.training import train as training
from hf_offload.tools.training.fitting import Fitting, fit_predictor
from hf_offload.tools.training.report import quality, r_squared
from hf_offload.tools.training.samples import CapturedLayer, Samples, Sampling
from hf_offload.tools.training.train import Window, check_sampling, collect, cut_windows, train

OF: dict[str, Any] = {"tau": 0.1, "digest": "quest", "sinks": 64, "local": 256}
SMALL = Sampling(interval=96, steps=3, taus=(0.05, 0.3), sinks=16, local=32, digest="quest")


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


def fitted(noise: float = 0.0, **settings: Any) -> HeadPredictor:
    options = {"epochs": 12, "batch": 128, "rate": 3e-3, "streaming_at": 0.5, "fit": "paper", **settings}
    return fit_predictor(*lesson(3000, 0, noise), *lesson(600, 1, noise), Fitting(**options), **OF)[0]


def test_what_can_be_learnt_is_learnt() -> None:
    """And the same again with the same seed, whether the caller wants gradients or not."""
    found = quality(fitted(), *lesson(600, 2), "paper")
    assert min(found["r2_budget0"], found["r2_slope"]) > 0.8
    assert min(found["streaming_precision"], found["streaming_recall"]) > 0.95
    assert found["budgets"]["32"]["predicted"] == pytest.approx(found["budgets"]["32"]["needed"], rel=0.1)
    with torch.no_grad():
        again = fitted(epochs=1)
    assert torch.equal(fitted(epochs=1).outputs.weight, again.outputs.weight)


def test_underestimates_can_weigh_more() -> None:
    even, careful = (
        quality(fitted(0.1, epochs=6, under=under), *lesson(600, 2, 0.1), "paper")["budgets"]["16"]
        for under in (1.0, 8.0)
    )
    assert careful["too_little"] < 0.6 * even["too_little"]
    assert careful["too_much"] > even["too_much"]


def test_the_line_may_leave_single_tokens_out() -> None:
    """Budgets that jump behind the first: a line through all is off everywhere, one through the others is not."""
    (features, budgets), (seen, known) = lesson(600, 2), lesson(2000, 0)
    for target in (budgets, known):
        target[target.amax(1) > 0] = torch.tensor([0.0, 0.4, 0.4, 0.4, 0.4])
    errors = {}
    for fit in ("online", "paper"):
        fitting = Fitting(epochs=6, batch=128, streaming_at=0.5, fit=fit)
        made, _ = fit_predictor(seen, known, features, budgets, fitting, **OF)
        rows = quality(made, features, budgets, fit)["budgets"].values()
        errors[fit] = max(row["too_little"] + row["too_much"] for row in rows)
    assert 2 * errors["online"] < errors["paper"]


def test_it_ends_when_nothing_gets_better_and_wants_something_to_learn() -> None:
    """Held-out budgets that contradict the lesson: the first epochs stay the best, whatever follows."""
    features, budgets = lesson(600, 1)
    wrong = torch.where(budgets > 0, 0.0, 0.3)
    _, epochs = fit_predictor(*lesson(3000, 0), features, wrong, Fitting(epochs=30, patience=2, batch=128), **OF)
    assert epochs <= 3
    with pytest.raises(ValueError, match=r"no head of the samples needs the host for tau=0\.1"):
        fit_predictor(features, 0 * budgets, features, budgets, Fitting(), **OF)


def test_figures_by_hand() -> None:
    """Three heads, one streaming; the same is predicted for all of them."""
    features, found = torch.zeros(3, 41), []
    budgets = torch.tensor([[0.0] * 5, [0.1, 0.3, 0.3, 0.3, 0.3], [0.3, 0.3, 0.3, 0.3, 0.5]])
    made = HeadPredictor(**OF).requires_grad_(False)
    made.outputs.weight.zero_()
    for said in ([0.2, 0.02, -9.0], [1.0, 0.0, 9.0]):
        made.outputs.bias.copy_(torch.tensor(said))
        found.append(quality(made, features, budgets, "paper"))
    assert found[0]["budgets"]["16"] == pytest.approx(  # 0.28 is predicted
        {"needed": 0.2, "predicted": 0.28, "too_little": 0.04 / 3, "too_much": 0.28 / 3, "enough": 1 / 3}, abs=1e-6
    )
    assert found[0]["r2_budget0"] == pytest.approx(0.0, abs=1e-6)  # the mean of 0.1 and 0.3
    told = [[one[f"streaming_{name}"] for name in ("share", "precision", "recall")] for one in found]
    assert told == [pytest.approx([1 / 3, 0.0, 0.0]), pytest.approx([1 / 3, 1 / 3, 1.0])]
    assert found[1]["budgets"]["128"]["predicted"] == 0.0
    assert math.isnan(r_squared(torch.ones(3), torch.ones(3)))


# --- from a text to samples -------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="one window of context=100 tokens; use more text or a shorter context"):
        cut_windows([[1] * 199], 100, 4)


def test_refused_sampling(tmp_path: Path) -> None:
    check_sampling(SMALL, 300)
    for change, message in (
        ({"sinks": 20}, "sinks=20 is not a number of blocks; use a multiple of 16"),
        ({"taus": (0.1, 0.1)}, r"tau=\[0\.1, 0\.1\] are no deviations; use different numbers between 0 and 1"),
        ({"interval": 79}, "interval=79 leaves the host nothing .* use at least 80"),
        ({"steps": 0}, "steps=0 is not a count of tokens in an interval of 96"),
        ({"interval": 298}, "context=300 ends before the steps after interval=298; raise it"),
    ):
        with pytest.raises(ValueError, match=message):
            check_sampling(Sampling(**{**vars(SMALL), **change}), 300)
    model = tiny_model("llama", "sdpa")
    model.config.max_position_embeddings = 200
    with pytest.raises(ValueError, match="context=300 is longer than the model's 200 positions; use 200"):
        collect(model, windows(), SMALL, tmp_path)


def test_processes_share_windows_and_an_interruption_keeps_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two processes takes every second window, and trains nothing. Ctrl-C is in its second one."""

    class Second:
        is_main_process, num_processes, process_index = False, 2, 1

        def wait_for_everyone(self) -> None:
            pass

    layers, sums = [0], []

    def layer_samples(seen: CapturedLayer, *_: Any) -> Samples:
        layers[0] += 1
        if layers[0] == 6:  # of four in a window
            raise KeyboardInterrupt
        return Samples(seen.key.sum().view(1, 1), torch.zeros(1, 2, 4), torch.zeros(1, 5, 2))

    monkeypatch.setattr(training, "PartialState", Second)
    monkeypatch.setattr(training, "layer_samples", layer_samples)
    model, cut = tiny_model("llama", "sdpa"), windows()
    with pytest.raises(KeyboardInterrupt):
        collect(model, cut, SMALL, tmp_path)
    (first,) = tmp_path.iterdir()
    written = first.stat().st_mtime_ns
    for _ in range(2):
        collect(model, cut, SMALL, tmp_path)
        files = sorted(tmp_path.iterdir())
        assert [file.name for file in files] == [f"samples-0000{number}.safetensors" for number in (1, 3, 5)]
        assert first.stat().st_mtime_ns == written
        sums.append([load_file(file)["features"].tolist() for file in files])
        for file in files[1:]:
            file.unlink()
    assert sums[0] == sums[1]
    assert train(model, cut, SMALL, Fitting(), tmp_path) is None


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text, and a tiny model that reads a token a character in place of any that is loaded."""
    monkeypatch.setattr(assets, "load_demo_model", lambda *_, **__: (tiny_model("llama", "sdpa"), letters()))
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(97 + (i * i // 7) % 26) for i in range(1600)))
    return path


def run(*words: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train-fluxion", *map(str, words)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, re.sub(r"[\s│]+", " ", result.output)


def test_command(text: Path, tmp_path: Path) -> None:
    options = ("--text", text, "--context", "780", "--interval", "720", "--epochs", "2", "--tau", "0.3")
    code, said = run("--out", tmp_path / "made", *options, "--tau", "0.05")
    assert code == 0
    assert "held-out samples" in said
    assert "predictor.safetensors and " in said
    report = json.loads((tmp_path / "made" / "report.json").read_text())
    assert report["taus"] == [0.05, 0.3]
    assert (report["samples"], report["held_out"]) == (2 * 8 * 4 * 4, 2 * 8 * 4 * 4)  # windows, steps, layers, heads
    assert report["asked_windows"] == 2  # both windows of 1,600 letters, one of them for measuring
    assert report["quality"].keys() == {"0.05", "0.3"}
    for tau in (0.05, 0.3):
        model = tiny_model("llama")
        cache = HybridCache(model, "fluxion", predictor=tmp_path / "made/predictor.safetensors", tau=tau)
        begin(model, cache, 1, 400, 2)
        assert cache.stats().as_dict()["retrievals"]
    code, said = run("--out", tmp_path / "made", *options)
    assert code == 2
    assert "holds samples with another taus; name another folder, or empty this one" in said
