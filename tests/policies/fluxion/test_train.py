"""Training of a predictor end to end: samples, an interruption, other settings, file, command line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model
from typer.testing import CliRunner

from hf_offload.cli import app
from hf_offload.files.fingerprint import likeness
from hf_offload.model.hooks import find_layers
from hf_offload.policies.fluxion.predictor import HeadPredictor, read_about
from hf_offload.tools import assets
from hf_offload.tools.training import train as training
from hf_offload.tools.training.fitting import Fitting
from hf_offload.tools.training.samples import Sampling
from hf_offload.tools.training.train import Window, check_sampling, collect, cut_windows, train

SMALL = Sampling(interval=96, steps=3, taus=(0.05, 0.3), sinks=16, local=32, digest="quest")
QUICK = Fitting(epochs=3, batch=64)


def windows() -> list[Window]:
    generator = torch.Generator().manual_seed(0)
    return cut_windows(torch.randint(3, 150, (2, 900), generator=generator).tolist(), 300, 3)


def test_windows_are_disjoint_and_the_last_ones_are_for_measuring() -> None:
    cut = cut_windows([list(range(1000)), list(range(2000, 2250))], 100, 4)
    assert [int(one.ids[0, 0]) for one in cut if not one.held_out] == [0, 300, 600, 2000]
    assert [int(one.ids[0, 0]) for one in cut if one.held_out] == [900, 2150]
    assert all(one.ids.shape == (1, 100) for one in cut)
    alone = cut_windows([list(range(150)), list(range(200, 350))], 100, 4)
    assert [int(one.ids[0, 0]) for one in alone] == [0, 200]
    assert [one.held_out for one in alone] == [False, True]


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
def test_refused_settings(change: dict[str, Any], message: str) -> None:
    check_sampling(SMALL, 300)
    with pytest.raises(ValueError, match=message):
        check_sampling(Sampling(**{**vars(SMALL), **change}), 300)


def test_a_predictor_is_trained_and_serves_its_model(tmp_path: Path) -> None:
    model, cut = tiny_model("llama", "sdpa"), windows()
    collect(model, cut, SMALL, tmp_path)
    report = train(model, cut, SMALL, QUICK, tmp_path)
    assert report is not None
    assert [one.held_out for one in cut] == [False] * 4 + [True] * 2
    assert report["samples"] == 4 * 9 * 4 * 4  # windows, steps, layers, heads
    assert report["held_out"] == 2 * 9 * 4 * 4
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report))
    identity = likeness(model.config, find_layers(model)[0])
    for tau in SMALL.taus:
        made = HeadPredictor.load(tmp_path / "predictor.safetensors", identity, tau)
        assert (made.digest, made.sinks, made.local) == ("quest", 16, 32)
        assert report["quality"][str(tau)]["budgets"].keys() == {"16", "32", "64", "128"}
    assert read_about(tmp_path / "predictor.safetensors")["summary"]["windows"] == 4
    with pytest.raises(ValueError, match="another model"):
        HeadPredictor.load(tmp_path / "predictor.safetensors", {**identity, "weights": {}}, 0.05)


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
    files = sorted((tmp_path / "one").glob("samples*"))
    assert len(files) == 2
    before = [file.stat().st_mtime_ns for file in files]
    collect(model, cut, SMALL, tmp_path / "one")
    assert [file.stat().st_mtime_ns for file in files] == before
    collect(model, cut, SMALL, tmp_path / "two")
    for file in (tmp_path / "two").glob("samples*"):
        ours, theirs = load_file(tmp_path / "one" / file.name), load_file(file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert len(list((tmp_path / "two").glob("samples*"))) == 6


def test_samples_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    model, cut = tiny_model("llama", "sdpa"), windows()
    (tmp_path / "settings.json").write_text(json.dumps({"interval": 1}))
    with pytest.raises(ValueError, match="holds samples with another interval; name another folder, or empty this one"):
        collect(model, cut, SMALL, tmp_path)


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


def test_windows_beyond_the_models_positions_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama", "sdpa")
    model.config.max_position_embeddings = 200
    with pytest.raises(ValueError, match="context=300 is longer than the model's 200 positions; use 200"):
        collect(model, windows(), SMALL, tmp_path)


@pytest.fixture
def letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text, and a tiny model that reads a token a character in place of any that is loaded."""

    class Tokenizer:
        chat_template = None

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [3 + ord(letter) % 150 for letter in text]}

    def load_demo_model(name: str | None = None, **options: Any) -> tuple[Any, Any]:
        return tiny_model("llama", "sdpa"), Tokenizer()

    monkeypatch.setattr(assets, "load_demo_model", load_demo_model)
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
