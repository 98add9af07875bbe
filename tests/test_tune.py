"""`hf-offload tune`: measured settings, the choice, and its line of Python on another text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import tokenize
from tiny import prompt, tiny_model
from typer.testing import CliRunner

import hf_offload.tools.tune as tuning
from hf_offload import ConstantPredictor, HybridCache
from hf_offload.cli import app
from hf_offload.files.fingerprint import likeness
from hf_offload.policies.fluxion.predictor import HeadPredictor, save_predictors
from hf_offload.policies.registry import POLICIES
from hf_offload.tools import assets, measuring
from hf_offload.tools.measuring import cost, read
from hf_offload.tools.tune import Trial, Tuning, tune

SMALL = {"tokens": 200, "steps": 12, "windows": 2}
LADDERS = (
    ("scout", tuple({"budget": budget, "recent": 0} for budget in (64, 96, 128, 160, 192))),
    ("fixed_hybrid", tuple({"budget": share, "sinks": 16, "local": 32} for share in (0.05, 0.2, 0.5))),
)


@pytest.fixture
def ladders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LADDERS", LADDERS)


@pytest.mark.slow
def test_the_chosen_line_keeps_the_target_on_another_text(ladders: None) -> None:
    model, ids = tiny_model("llama"), prompt(1, 900)[0]
    found = tune(model, ids[:, :500], 0.5, held_out=ids[:, 476:], **SMALL)
    assert found.trials[0].policy == "full"
    assert found.trials[0].kl < 1e-6
    chosen, checked = found.chosen, found.held_out
    assert chosen.meets(0.5)
    assert eval(chosen.line, {"HybridCache": HybridCache, "model": model}).policy.name == chosen.policy
    other = cost(model, chosen.policy, chosen.options, read(model, ids[:, 688:900], 12))  # the last held-out window
    assert float(other.kl.mean()) <= 0.5
    assert checked is not None
    assert (checked.policy, checked.options) == (chosen.policy, chosen.options)
    assert checked.kl <= 0.5
    assert checked.kl != chosen.kl
    assert checked.worst >= float(other.kl.mean()) * (1 - 1e-6)
    assert found.table().row_count == len(found.trials)
    assert "settings stay below a KL of 0.5" in found.why


def test_the_smallest_number_of_samples_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(model: Any, policy: str, options: dict[str, Any], readings: Any) -> Trial:
        kl = 0.7 / options["samples"] if "samples" in options else 0.0 if policy == "full" else 1.0
        return Trial(policy, options, kl, 0.0, kl, 1.0, options.get("samples", 9999) / 1000, None, 7)

    monkeypatch.setattr(tuning, "_trial", fake)
    monkeypatch.setattr(tuning, "_time", lambda *_: None)
    found = tune(tiny_model("llama"), prompt(1, 500)[0], 0.003, **SMALL)
    met = [trial.options["samples"] for trial in found.trials if "samples" in trial.options and trial.meets(0.003)]
    assert min(met) == 256
    assert (found.chosen.policy, found.chosen.options["samples"]) == ("scout", 256)


@pytest.mark.slow
def test_a_predictor_brings_its_deviations(ladders: None, tmp_path: Path) -> None:
    model, path = tiny_model("llama"), tmp_path / "predictor.safetensors"
    predictors = {tau: HeadPredictor(tau=tau, digest="quest", sinks=16, local=32) for tau in (0.05, 0.2)}
    for predictor in predictors.values():  # everything is needed
        torch.nn.init.zeros_(predictor.outputs.weight)
        predictor.outputs.bias.data = torch.tensor([1.0, 0.0, -9.0])
    save_predictors(path, likeness(model.config, model.model), predictors, {})
    found = tune(model, prompt(1, 500)[0], 0.5, predictor=path, **SMALL)
    tried = [trial for trial in found.trials if trial.policy == "fluxion"]
    assert [trial.options["tau"] for trial in tried][:1] == [0.05]  # halved: the last of what was tried is enough
    assert all(trial.kl < 1e-4 for trial in tried)
    with pytest.raises(ValueError, match="trained for another model"):
        tune(tiny_model("qwen3"), prompt(1, 500)[0], 0.5, predictor=path, **SMALL)


def test_every_setting_around_every_rung_makes_a_cache() -> None:
    model, predictor = tiny_model("llama"), ConstantPredictor(sinks=16, local=32)
    for policy, ladder in (*tuning.LADDERS, ("fluxion", ({"predictor": predictor},))):
        for rung in ladder:
            best = Trial(policy, rung | {"tier": "split"}, 0.0, 0.0, 0.0, 1.0, 1.0, 5.0, 1)
            tried = list(tuning._variants(best, two_memories=True))
            assert {options.get("block_size") for options in tried if "recall" not in options} == (
                set() if policy == "fluxion" else {16, 32, 64} - {POLICIES[policy].block_size}
            )
            for options in tried:
                HybridCache(model, policy, **options)


def measured(policy: str, seconds: float = 1.0, device: int = 1, kl: float = 0.001, error: float = 0.0) -> Trial:
    return Trial(policy, {}, kl, error, kl, 1.0, seconds, None, device)


def test_of_alike_times_the_smaller_device_memory_wins() -> None:
    trials = [measured("full", 2.0, 9), measured("a", 1.0, 5), measured("b", 1.02, 3), measured("c", 0.5, 1, 0.02)]
    found = Tuning(0.01, 1.0, trials)
    assert found.chosen.policy == "b"
    assert "It is not quicker" in found.why
    found.held_out = measured("b", kl=0.006)
    assert "held out its KL is 0.0060 ± 0.0000." in found.why
    found.held_out = measured("b", kl=0.02)
    assert "too much. Tune on" in found.why
    found.trials[1:] = []
    assert "Nothing that leaves tokens out meets the target." in found.why
    found.trials.append(measured("scout", 1.98, 10))
    assert "Nothing that leaves tokens out is clearly faster at this length; the next is scout with 1980.0" in found.why


def test_two_standard_errors_and_every_window_count() -> None:
    assert measured("a", kl=0.01, error=0.0039).meets(0.018)
    assert not measured("a", kl=0.01, error=0.0041).meets(0.018)
    assert not Trial("a", {}, 0.01, 0.001, 0.019, 1.0, 1.0, None, 1).meets(0.018)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"target": float("nan")}, "target_kl=nan"),
        ({"tokens": 400}, "the text has 500 tokens, but 2 windows"),
        ({"held_out": torch.ones(1, 300, dtype=torch.long)}, "the text has 300 tokens"),
        ({"tier": "wrong"}, "tier='wrong' is not known"),
        ({"target": 1e-12}, "is below the .* that rounding alone makes"),
    ],
)
def test_wrong_settings(change: dict[str, Any], told: str) -> None:
    options = {**SMALL, **change}
    with pytest.raises(ValueError, match=told):
        tune(tiny_model("llama"), prompt(1, 500)[0], options.pop("target", 0.5), **options)


@pytest.mark.slow
def test_the_command(tmp_path: Path, ladders: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "load_demo_model", lambda *_, **options: (tiny_model("llama"), tokenize))
    text = tmp_path / "text.txt"
    letters = torch.randint(32, 120, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    text.write_text("".join(map(chr, letters)), encoding="utf-8")
    words = ["tune", "--text", str(text), "--held-out", str(text), "--target-kl", "0.5", "--tokens", "200"]
    result = CliRunner().invoke(app, [*words, "--steps", "8"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert re.search(r"HybridCache\(model, \"\w+\"", result.output)
    assert "On the text that was held out" in result.output


TOKEN = 2 * 4 * 2 * 16 * 4  # K and V, layers, heads, channels, bytes


def test_divergence_by_hand() -> None:
    full = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
    mine = torch.tensor([[0.2, 0.6, 0.2], [0.1, 0.1, 0.8]]).log()
    kl, top = measuring.divergence(mine, full)
    want = 0.5 * torch.tensor(0.5 / 0.2).log() + 0.3 * torch.tensor(0.3 / 0.6).log()
    torch.testing.assert_close(kl, torch.stack([want, torch.tensor(0.0)]))
    assert top == 0.5


@pytest.mark.parametrize(
    ("policy", "options", "tokens"),
    [("full", {"resident": 64}, 310 - 64), ("window", {"budget": 128, "resident": 96}, 32)],  # what is not resident
)
def test_bytes_of_the_host(policy: str, options: dict[str, Any], tokens: int) -> None:
    """Around the middle of the steps 310 tokens are cached; blocks are whole."""
    model = tiny_model("llama")
    reading = measuring.read(model, prompt(1, 320)[0], 20)
    two, one = (
        measuring.cost(model, policy, {"block_size": 16, **options, "tier": tier}, reading) for tier in ("split", "one")
    )
    assert two.host_bytes == pytest.approx(tokens * TOKEN, abs=24 * TOKEN)
    assert one.host_bytes is None
    assert len(two.kl) == 20
    assert policy != "full" or (two.kl.max() < 1e-5 and two.top1 == 1)
    torch.testing.assert_close(one.kl, two.kl, atol=1e-4, rtol=1e-3)
