"""The examples as a user runs them, on one SmolLM2 for all of them and with short texts."""

from __future__ import annotations

import builtins
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import hf_offload

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "quickstart")
QUESTION = "What is the secret number of the lighthouse keeper? Answer with the number only."

Run = Callable[..., str]


@pytest.fixture
def run(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run an example with arguments on the model that is loaded already; returns what it prints."""
    model, tokenizer = smollm2
    side = tokenizer.padding_side

    def loaded(name: str | None = None, *, attn_implementation: str = "sdpa", **options: Any) -> Any:
        assert name is None
        model.set_attn_implementation(attn_implementation)
        return smollm2

    def run(name: str, *arguments: str) -> str:
        app = typer.Typer()
        app.command()(importlib.import_module(name).main)
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    monkeypatch.setattr(hf_offload, "load_demo_model", loaded)
    yield run
    model.set_attn_implementation("sdpa")
    tokenizer.padding_side = side


@pytest.fixture
def document(smollm2: Any, tmp_path: Path) -> Path:
    """A file with a short text in which 7482915 is hidden."""
    text = hf_offload.hide_number(hf_offload.demo_text("documentation"), smollm2[1], tokens=500, question="").content
    (tmp_path / "document.txt").write_text(text, encoding="utf-8")
    return tmp_path / "document.txt"


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_is_short_and_says_how_it_is_run(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    assert re.match(rf'"""[A-Z].*\n\n(    .*\n)*    (python|torchrun .*) examples/{name}\.py\n', text)
    assert not re.search(r"hf_offload import|import hf_offload\.(?!lm_eval)", text)
    assert set(re.findall(r"hf_offload\.(\w+)", text)) <= {*hf_offload.__all__, "lm_eval"}


def test_chat_reads_the_document_once(run: Run, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter([QUESTION, "Say hello.", ""])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    output = run("chat", "--file", str(document), "--answer", "16")
    assert "7482915" in output
    turns = re.findall(r"\[([\d,]+) tokens cached, (\d+) read, (\d+) written", output)
    (first, read, written), (second, more, _) = [[int(number.replace(",", "")) for number in turn] for turn in turns]
    assert first > 400
    assert second >= first + read + written - 3  # the last token was not fed, and the end of a turn may differ
    assert max(read, more) < 60


def test_questions_share_a_document_that_is_read_in_the_first_run_only(
    run: Run, document: Path, smollm2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(document.parent)  # where the cache is saved
    arguments = ["--file", str(document), "--question", QUESTION]
    lengths: list[int] = []
    hook = smollm2[0].model.register_forward_pre_hook(
        lambda module, given, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    first = run("many_questions", *arguments)
    assert max(lengths) > 400
    lengths.clear()
    second = run("many_questions", *arguments)
    hook.remove()
    assert max(lengths) < 60
    for output in (first, second):
        assert "7482915" in output


def test_a_batch_is_summarised(run: Run, document: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("The cat is called Mathilda. She sleeps in the sun all day.", encoding="utf-8")
    output = run("batch_summaries", str(document), str(tmp_path / "short.txt"), "--answer", "12")
    summaries = re.findall(r"(\w+)\.txt, ([\d,]+) tokens:\n  (.+)\n", output)
    assert [name for name, *_ in summaries] == ["document", "short"]
    assert "Mathilda" in summaries[1][2]


def test_a_pipeline_finds_the_number(run: Run) -> None:
    assert run("text_pipeline", "--tokens", "500").endswith("\nfound\n")


def test_lm_eval_scores_the_capitals(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install hf-offload[eval]")
    monkeypatch.chdir(EXAMPLES.parent)
    output = run("lm_evaluation")
    assert re.search(r"capitals: (75|88|100)% of 8 answers are right", output)
    assert re.search(r"scout: \d+ decode steps in 2 caches", output)
