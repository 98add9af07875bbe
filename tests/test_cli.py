"""The command line: quick help, a profile that is written and used, mistakes reported in one line."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model
from typer.testing import CliRunner

from hf_offload import HybridCache
from hf_offload.tools import assets
from hf_offload_cli import app


def tokenize(text: str, **options: Any) -> dict[str, list[int]]:
    """A token for each character."""
    return {"input_ids": [3 + ord(letter) % 150 for letter in text]}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Loading gives a tiny model; what it was asked for."""
    calls: list[tuple[Any, ...]] = []

    def load_demo_model(name: str | None = None, **options: Any) -> tuple[Any, Any]:
        calls.append((name, options))
        return tiny_model("llama", options.get("attn_implementation", "hybrid_sparse")), tokenize

    monkeypatch.setattr(assets, "load_demo_model", load_demo_model)
    return calls


def test_profile_is_written_and_its_line_works(tmp_path: Path, loads: list[tuple[Any, ...]]) -> None:
    out, book = tmp_path / "profile.json", tmp_path / "book.txt"
    book.write_text("It was a dark and stormy night. " * 20)
    options = {
        "tokens": 400, "steps": 10, "windows": 2, "budget": 224, "resident": 256, "threshold": 0.2, "out": out,
        "text": book, "model": "org/name", "dtype": "float32",
    }  # fmt: skip
    words = ["profile", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.exception
    assert re.search(r"loading .*window 2 of 2: 100%", result.stderr, re.DOTALL)
    assert "100%" not in result.stdout
    assert loads == [("org/name", {"attn_implementation": "hybrid_sparse", "dtype": torch.float32})]
    data = json.loads(out.read_text())
    assert (data["tokens"], data["steps"], data["windows"], data["threshold"]) == (400, 10, 2, 0.2)
    assert len(data["intervals"]) == 4
    said = re.sub(r"[\s│]+", " ", result.output)
    line = f'HybridCache(model, "scout", budget=224, resident=256, recall="{out}")'
    for told in ("ratio at 1 ", "ratio at 10 ", line, 'Here the line below needs tier="split"'):
        assert told in said
    names = {"HybridCache": HybridCache, "model": tiny_model("llama")}
    assert eval(f'{line[:-1]}, tier="split")', names).policy.recall == str(out)
    with pytest.raises(ValueError, match=r"recall=.* needs two memories"):
        eval(line, names)


COMMANDS = ("plan", "tune", "profile", "train-fluxion", "serve")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen_and_has_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80"})
    lines = result.output.splitlines()
    assert result.exit_code == 0
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    options, _, example = result.output.partition("Example:")
    assert f"hf-offload {command or 'plan'} " in example
    assert all(f"  {name} " in options for name in re.findall(r"--[a-z-]+", example) if command)
    assert command in ("", "plan") or "(SmolLM2-135M-Instruct)" in options


def test_imports_of_a_fresh_process_and_the_exit_code_of_the_script() -> None:
    """In a process of its own, for this one has imported all of that, and the script ends it."""
    code = """
import contextlib, sys
from hf_offload_cli import app, script
for words in (["--help"], ["--version"], *([name, "--help"] for name in %r), ["plan", "--batch", "many"]):
    with contextlib.suppress(SystemExit):
        app(words)
assert not {"torch", "transformers", "hf_offload"} & sys.modules.keys()
print("nothing imported")
import _thread, torch, transformers
interfaces = transformers.AttentionInterface, transformers.AttentionMaskInterface
before = [set(each._global_mapping) for each in interfaces]
threads = _thread._count(), torch.get_num_threads()
import hf_offload
for each, names in zip(interfaces, before):
    assert set(each._global_mapping) - names == {"hybrid_sparse"}
assert (_thread._count(), torch.get_num_threads()) == threads
print("nothing else registered")
sys.argv = ["hf-offload", "plan", "--policy", "sprase"]
script()
"""
    done = subprocess.run([sys.executable, "-c", code % (COMMANDS,)], capture_output=True, text=True, check=False)
    version = importlib.metadata.version("hf-offload")
    assert f"\n{version}\n" in done.stdout
    assert done.stdout.endswith("nothing imported\nnothing else registered\n"), done.stderr
    assert done.returncode == 2
    assert "Error: policy='sprase' is unknown" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_what_cannot_be_printed_is_told_in_a_line() -> None:
    code = "import hf_offload_cli; hf_offload_cli.script()"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"Error: .*No space left on device\n", done.stderr)


def mistake(*words: str) -> str:
    """What a command says on stderr of a mistake: one line, exit code 2, nothing on stdout."""
    result = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert result.stdout == ""
    # Before that one, a command that takes long says what it loads.
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    return last


@pytest.mark.parametrize(
    ("command", "fault", "said"),
    [
        ("plan", OSError("We couldn't connect.\nCheck your connection."), "couldn't connect. Check your connection"),
        ("tune", ValueError("The checkpoint has model type `nope`."), "model type `nope`"),
        ("profile", ImportError("needs a package:\n    pip install sentencepiece"), "pip install sentencepiece"),
        ("train-fluxion --out out", KeyError("qwen9"), "qwen9"),
        ("plan", None, ""),  # the hub is not reached
    ],
)
def test_a_model_that_cannot_be_loaded(
    command: str, fault: Exception | None, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise fault  # type: ignore[misc]

    monkeypatch.chdir(tmp_path)
    if fault is not None:
        monkeypatch.setattr(assets, "load_demo_model", fail)
        monkeypatch.setattr(assets, "load_config", fail)
        monkeypatch.setattr(assets, "demo_text", lambda kind: "text")
    told = mistake(*command.split(), "--model", "nobody/nothing")
    assert "model='nobody/nothing' cannot be loaded: " in told
    assert said in told


def test_a_folder_without_a_config_or_with_one_that_describes_no_model(tmp_path: Path) -> None:
    assert f"model='{tmp_path}' cannot be loaded: " in mistake("plan", "--model", str(tmp_path))
    tiny_model("llama").config.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    good = json.loads(config.read_text())
    for wrong, said in (
        ({"num_hidden_layers": "x"}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "cannot be loaded: "),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 is not a count in the model's config"),
        ({"vocab_size": -5}, "llama: the config describes no model that can be built"),
    ):
        config.write_text(json.dumps(good | wrong))
        assert said in mistake("plan", "--model", str(tmp_path))


MISTAKES = [
    ("plan --policy sprase", "policy='sprase' is unknown; use one of "),
    ("plan --policy scout:bugdet=5", "bugdet: not a knob of policy 'scout'"),
    ("plan --context 32m", "context='32m' is not a number of tokens"),
    (f"plan --batch {10**20}", "batch=100000000000000000000 is too large for a number of rows"),
    ("plan --model=", "model='' names nothing"),
    ("plan --device-memory much", "device-memory='much' is not an amount"),
    ("plan --dtype int3", "dtype='int3' is not known; use one of auto, "),
    ("plan --polcy full", "No such option: --polcy"),
    ("tune --target-kl 0", "target_kl=0.0 is not a divergence"),
    (f"tune --tokens {10**20}", "tokens=100000000000000000000 is too large for a count"),
    ("tune --tier three", "tier='three' is not known; use one of one, split, or None"),
    ("train-fluxion --out . --tau 3", "tau=[3.0] are no deviations"),
    ("train-fluxion", "Missing option '--out'"),
    ("serve --max-context 32m", "context='32m' is not a number of tokens"),
    ("serve --store-size much", "store-size='much' is not an amount"),
    ("serve --api-key=", "an API key is empty"),
    ("profile --threshold 1.5", "threshold=1.5 is not a share of the budget; use a number above 0 and below 1"),
    ("profile --budget 10", "budget=10 is less than"),
    ("profile --resident 40", "resident=40 tokens leave no room"),
    ("profile --tokens 100 --resident 256", "tokens=100 of prompt all fit into resident=256"),
    ("profile --out none/profile.json", "lies in a folder that does not exist; make it first"),
]


def test_mistakes_are_told_before_loading(
    loads: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words, said in MISTAKES:
        assert said in mistake(*words.split()), words
        assert not loads, words
        assert not list(tmp_path.iterdir()), words


@pytest.mark.parametrize("command", ["tune", "profile", "train-fluxion --out out"])
def test_texts_that_do_not_do(command: str, tmp_path: Path, loads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("Too short.")
    assert re.search(r"text has 10 tokens.*use (a )?longer text", mistake(*command.split(), "--text", "short.txt"))
    loads.clear()
    Path("latin.txt").write_bytes("Der Schlüssel".encode("latin-1"))
    assert "is not UTF-8" in mistake(*command.split(), "--text", "latin.txt")
    assert not loads
    assert not list(Path("out").rglob("*.*"))


def test_outputs_that_cannot_be_written(
    tmp_path: Path, loads: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert "is a file" in mistake("train-fluxion", "--out", str(tmp_path / "file"))
    assert str(tmp_path / "file") in mistake("train-fluxion", "--out", str(tmp_path / "file" / "folder"))

    def refuse(**options: Any) -> None:
        raise PermissionError(13, "Permission denied", str(options["dir"]))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    for words in (("profile", "--out", str(tmp_path / "p.json")), ("train-fluxion", "--out", str(tmp_path / "out"))):
        assert "Permission denied" in mistake(*words)
    assert not loads


def test_a_launcher_finds_the_commands() -> None:
    import hf_offload.cli

    assert hf_offload.cli.app is app
