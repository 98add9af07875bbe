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
from pairwise import covering
from tiny import tiny_model
from typer.testing import CliRunner

from hf_offload import HybridCache
from hf_offload.tools import assets
from hf_offload_cli import app

OPTIONS = {
    "--tokens": "400", "--steps": "10", "--windows": "2", "--budget": "224", "--resident": "256", "--threshold": "0.2",
}  # fmt: skip


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


def run(out: Path, **change: str | None) -> str:
    """Output of `profile` with some options changed; line breaks are left out, and progress is on stderr alone."""
    options = {**OPTIONS, "--out": str(out), **{f"--{name.replace('_', '-')}": v for name, v in change.items()}}
    line = ["profile", *(word for name, value in options.items() if value is not None for word in (name, value))]
    result = CliRunner().invoke(app, line, env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    assert "loading " in result.stderr
    assert "window 2 of 2: 100%" in result.stderr
    assert "100%" not in result.stdout
    return re.sub(r"[\s│]+", " ", result.output)


def test_profile_is_written_and_its_line_works(tmp_path: Path, loads: list[tuple[Any, ...]]) -> None:
    out = tmp_path / "profile.json"
    said = run(out)
    assert loads == [(None, {"attn_implementation": "hybrid_sparse", "dtype": "auto"})]
    data = json.loads(out.read_text())
    assert (data["tokens"], data["steps"], data["windows"], data["threshold"]) == (400, 10, 2, 0.2)
    assert len(data["intervals"]) == 4
    assert "ratio at 1 " in said
    assert "ratio at 10 " in said
    line = f'HybridCache(model, "scout", budget=224, resident=256, recall="{out}")'
    assert line in said
    names = {"HybridCache": HybridCache, "model": tiny_model("llama")}
    assert eval(f'{line[:-1]}, tier="split")', names).policy.recall == str(out)
    assert "two memories were simulated. The intervals are for a GPU" in said
    assert 'Here the line below needs tier="split"' in said
    with pytest.raises(ValueError, match=r"recall=.* needs two memories"):
        eval(line, names)


def test_text_model_and_dtype(tmp_path: Path, loads: list[tuple[Any, ...]]) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark and stormy night. " * 20)
    said = run(tmp_path / "p.json", text=str(book), model="org/name", dtype="float32", block_size="16")
    assert loads[0][0] == "org/name"
    assert str(loads[0][1]["dtype"]) == "torch.float32"
    assert "resident=256, block_size=16, recall=" in said


COMMANDS = ("plan", "tune", "profile", "train-fluxion", "serve")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen_and_has_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80"})
    lines = result.output.splitlines()
    assert result.exit_code == 0
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert lines[-2].strip() == "Example:" or lines[-3].strip() == "Example:"
    assert f"hf-offload {command or 'plan'} " in result.output
    assert command in ("", "plan") or "(SmolLM2-135M-Instruct)" in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_name_options_that_exist(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).output
    options, _, example = said.partition("Example:")
    named = re.findall(r"--[a-z-]+", example)
    assert named
    assert not [name for name in named if f"  {name} " not in options]


def test_help_imports_no_torch() -> None:
    """A process of its own, for this one has torch already."""
    code = """
import contextlib, sys
from hf_offload_cli import app
for words in (["--help"], ["--version"], *([name, "--help"] for name in %r), ["plan", "--batch", "many"]):
    with contextlib.suppress(SystemExit):
        app(words)
assert not {"torch", "transformers", "hf_offload"} & sys.modules.keys()
print("nothing imported")
"""
    done = subprocess.run([sys.executable, "-c", code % (COMMANDS,)], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("nothing imported\n")


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.output.strip() == importlib.metadata.version("hf-offload")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        pytest.param(["--context", "1k", "--policy", "scout"], 0, "come on top.", marks=pytest.mark.slow),
        (["--policy", "sprase"], 2, "Error: policy='sprase' is unknown"),
    ],
)
def test_plan_from_a_shell(words: list[str], code: int, said: str) -> None:
    """The console script ends the process itself: nothing that was printed is lost, and the exit code is kept."""
    line = [sys.executable, "-c", "from hf_offload_cli import script; script()", "plan", *words]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == code
    assert said in (done.stderr if code else done.stdout)
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


LOADING = covering(
    ["plan", "tune", "profile", "train-fluxion --out out"],
    [
        (OSError("We couldn't connect.\nCheck your connection."), "couldn't connect. Check your connection"),
        (ValueError("The checkpoint has model type `nope`."), "model type `nope`"),
        (ImportError("needs a package:\n    pip install sentencepiece"), "pip install sentencepiece"),
        (KeyError("qwen9"), "qwen9"),
    ],
)


@pytest.mark.parametrize(("command", "fault"), LOADING)
def test_a_model_that_cannot_be_loaded(
    command: str, fault: tuple[Exception, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise fault[0]

    monkeypatch.chdir(tmp_path)
    for name in ("load_demo_model", "load_config"):
        monkeypatch.setattr(assets, name, fail)
    monkeypatch.setattr(assets, "demo_text", lambda kind: "text")
    told = mistake(*command.split(), "--model", "nobody/nothing")
    assert "model='nobody/nothing' cannot be loaded: " in told
    assert fault[1] in told


def test_the_hub_is_not_reached(tmp_path: Path) -> None:
    assert "model='nobody/nothing' cannot be loaded: " in mistake("plan", "--model", "nobody/nothing")
    assert f"model='{tmp_path}' cannot be loaded: " in mistake("plan", "--model", str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert f"model='{tmp_path}' cannot be loaded: " in mistake("plan", "--model", str(tmp_path))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_hidden_layers": "x"}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "cannot be loaded: "),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 is not a count in the model's config"),
        ({"hidden_size": -64}, "hidden_size=-64 is not a count in the model's config"),
        ({"vocab_size": -5}, "llama: the config describes no model that can be built"),
    ],
)
def test_a_config_that_describes_no_model(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | wrong))
    assert said in mistake("plan", "--model", str(tmp_path))


MISTAKES = [
    ("plan --policy sprase", "policy='sprase' is unknown; use one of "),
    ("plan --policy scout:bugdet=5", "bugdet: not a knob of policy 'scout'"),
    ("plan --policy scout:budget=much", "budget='much'"),
    ("plan --policy scout:budget=64,budget=96", "sets budget twice"),
    ("plan --context 32m", "context='32m' is not a number of tokens"),
    ("plan --context " + "9" * 5000, "is not a number of tokens; use one from 1 to 2147483647"),
    (f"plan --batch {10**20}", "batch=100000000000000000000 is too large for a number of rows"),
    ("plan --batch 0", "batch=0 is not a number of rows"),
    ("plan --model=", "model='' names nothing"),
    ("plan --device-memory much", "device-memory='much' is not an amount"),
    ("plan --dtype int3", "dtype='int3' is not known; use one of auto, "),
    ("plan --polcy full", "No such option: --polcy"),
    ("plna", "No such command 'plna'"),
    ("tune --target-kl 0", "target_kl=0.0 is not a divergence"),
    (f"tune --tokens {10**20}", "tokens=100000000000000000000 is too large for a count"),
    ("tune --tier three", "tier='three' is not known; use one of one, split, or None"),
    ("tune --predictor none.safetensors", "none.safetensors"),
    ("tune --text .", "Invalid value for '--text'"),
    ("train-fluxion --out . --tau 3", "tau=[3.0] are no deviations"),
    ("train-fluxion --out . --epochs 0", "epochs=0 is not a count"),
    ("train-fluxion", "Missing option '--out'"),
    ("serve --max-context 32m", "context='32m' is not a number of tokens"),
    ("serve --store-size much", "store-size='much' is not an amount"),
    ("serve --api-key=", "an API key is empty"),
    ("profile --tokens many", "Invalid value for '--tokens'"),
    ("profile --steps 0", "steps=0 is not a count; use"),
    ("profile --windows -1", "windows=-1 is not a count; use"),
    ("profile --threshold 1.5", "threshold=1.5 is not a share of the budget; use a number above 0 and below 1"),
    ("profile --budget 10", "budget=10 is less than"),
    ("profile --resident 40", "resident=40 tokens leave no room"),
    ("profile --block-size 5", "block_size=5 is not supported; use one of"),
    ("profile --tokens 100 --resident 256", "tokens=100 of prompt all fit into resident=256"),
    ("profile --dtype int3", "dtype='int3' is not known; use one of auto, float32"),
    ("profile --text no-such-file.txt", "no-such-file.txt"),
    ("profile --out none/profile.json", "lies in a folder that does not exist; make it first"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=[words[:40] for words, _ in MISTAKES])
def test_mistakes_are_told_before_loading(
    words: str, said: str, loads: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in mistake(*words.split())
    assert not loads
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["tune", "profile", "train-fluxion"])
def test_texts_that_do_not_do(
    command: str, tmp_path: Path, loads: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = ("--out", str(tmp_path / "out")) if command != "tune" else ()
    latin, short = tmp_path / "latin.txt", tmp_path / "short.txt"
    latin.write_bytes("Der Schlüssel".encode("latin-1"))
    short.write_text("Too short.")
    assert re.search(r"text has 10 tokens.*use (a )?longer text", mistake(command, *out, "--text", str(short)))
    loads.clear()
    assert "is not UTF-8" in mistake(command, *out, "--text", str(latin))

    def refuse(self: Path, *args: Any, **options: Any) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert "Permission denied" in mistake(command, *out, "--text", str(latin))
    assert not loads
    assert not list((tmp_path / "out").rglob("*.*"))


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
