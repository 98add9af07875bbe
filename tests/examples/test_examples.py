"""The examples run as a user runs them, with one SmolLM2 and short texts."""

from __future__ import annotations

import builtins
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from letters import letters
from tiny import tiny_model
from typer.testing import CliRunner

import hf_offload

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOK = EXAMPLES / "attention_notebook.ipynb"
QUESTION = "What is the secret number of the lighthouse keeper? Answer with the number only."

Run = Callable[..., str]


@pytest.fixture
def demo(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A model and its tokenizer: SmolLM2 for tests that are slow; for the others a tiny one, and a text at hand."""
    if request.node.get_closest_marker("slow"):
        return request.getfixturevalue("smollm2")
    code = hf_offload.demo_text("code")
    monkeypatch.setattr(hf_offload, "demo_text", lambda kind: code)
    tokenizer = letters()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}>"
    return tiny_model("llama", "sdpa"), tokenizer


@pytest.fixture
def run(demo: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run an example with arguments on the model that is loaded already; returns what it prints."""
    model, tokenizer = demo
    side = tokenizer.padding_side

    def loaded(name: str | None = None, *, attn_implementation: str = "sdpa", **options: Any) -> Any:
        assert name is None
        model.set_attn_implementation(attn_implementation)
        return demo

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
def document(demo: Any, tmp_path: Path) -> Path:
    """A file with a short text in which 7482915 is hidden."""
    text = hf_offload.hide_number(hf_offload.demo_text("documentation"), demo[1], tokens=500, question="").content
    (tmp_path / "document.txt").write_text(text, encoding="utf-8")
    return tmp_path / "document.txt"


def test_an_example_is_short_and_says_how_it_is_run() -> None:
    for name in (path.stem for path in EXAMPLES.glob("*.py") if path.stem != "quickstart"):
        text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
        assert len(text.splitlines()) < 60
        assert re.match(rf'"""[A-Z].*\n\n(    .*\n)*    (python|torchrun .*) examples/{name}\.py\n', text), name


def test_chat_reads_the_document_once(run: Run, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter([QUESTION, "Say hello.", ""])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(lines))
    output = run("chat", "--file", str(document), "--answer", "16")
    turns = re.findall(r"\[([\d,]+) tokens cached, (\d+) read, (\d+) written", output)
    (first, read, _), (second, more, _) = [[int(number.replace(",", "")) for number in turn] for turn in turns]
    assert first > 400
    assert second >= first + len(QUESTION)
    assert max(read, more) < len(QUESTION) + 20


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_chat_that_is_killed_goes_on(document: Path) -> None:
    command = [sys.executable, EXAMPLES / "kept_chat.py", "--file", document, "--question", QUESTION]
    done = subprocess.run(command, cwd=document.parent, capture_output=True, text=True, check=True)
    before = re.findall(r"\[([\d,]+) of ([\d,]+) tokens were read before", done.stdout)
    (first, count), (second, _) = ([int(number.replace(",", "")) for number in pair] for pair in before)
    assert (first, second) == (0, count - 2)
    assert done.stdout.count("[killed]") == 1
    assert "7482915" in done.stdout.partition("[killed]")[2]


@pytest.mark.slow
def test_a_batch_is_summarised(run: Run, document: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("The cat is called Mathilda. She sleeps in the sun all day.", encoding="utf-8")
    output = run("batch_summaries", str(document), str(tmp_path / "short.txt"), "--answer", "12")
    summaries = re.findall(r"(\w+)\.txt, ([\d,]+) tokens:\n  (.+)\n", output)
    assert [name for name, *_ in summaries] == ["document", "short"]
    assert "Mathilda" in summaries[1][2]


def test_a_pipeline_is_asked_for_the_number(run: Run) -> None:
    assert re.match(r"hidden in \d+ tokens: 7482915\nanswer: ", run("text_pipeline", "--tokens", "500"))


def test_a_hybrid_model_holds_what_grows(run: Run) -> None:
    sizes = []
    for tokens in (200, 400):
        output = run("hybrid_model", "--tokens", str(tokens))
        assert "layers with full attention: [3, 7]" in output
        sizes.append([float(size) for size in re.findall(r"([\d.]+) MiB", output)])
    assert sizes[1][0] > 1.5 * sizes[0][0]
    assert sizes[1][1] == sizes[0][1] > 0


@pytest.mark.slow  # lm-eval takes long to import
def test_lm_eval_scores_the_capitals(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install hf-offload[eval]")
    monkeypatch.chdir(EXAMPLES.parent)
    output = run("lm_evaluation")
    assert re.search(r"capitals: (75|88|100)% of 8 answers are right", output)
    assert re.search(r"scout: \d+ decode steps in 2 caches", output)


def test_the_notebook_is_committed_with_its_plots() -> None:
    assert NOTEBOOK.stat().st_size < 300_000
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"display_data", "stream"}
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert not [output for output in outputs if output.get("name") == "stderr"]


@pytest.mark.slow
def test_the_notebook_as_it_stands() -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient: pip install hf-offload[dev]")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    said = "".join(out["text"] for cell in notebook.cells for out in cell.get("outputs", []) if out.get("text"))
    assert "next token: '2' - the number is 7482915" in said
    assert re.search(r"scout: \d+ of \d+ blocks, .* sees the number", said)
    assert re.search(r"window: .* misses the number", said)
    losses = re.findall(r"^ *(\w+): (\d\.\d{4}) with \d+ tokens$", said, re.M)
    assert {policy for policy, _ in losses} == {"scout", "quest", "hgca", "window"}
    assert all(0 <= float(loss) < 1 for _, loss in losses)
