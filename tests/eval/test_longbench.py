"""LongBench from its own files: prompts, scores, a run that is stopped and resumed."""

from __future__ import annotations

import csv
import json

import pytest
import typer
from launching import TESTS, torchrun
from letters import letters
from tiny import tiny_model
from typer.testing import CliRunner

pytest.importorskip(
    "lm_eval.tasks.longbench.metrics",
    exc_type=ImportError,
    reason="needs lm-eval[longbench]: pip install hf-offload[eval]",
)

import common
import longbench
import tasks.run
from tasks.samples import named


def rows(count, task="qasper", words=40):
    return [
        {
            "input": f"What is number {n}?", "context": " ".join(f"word{n}x{i}" for i in range(words)),
            "answers": [f"number {n}", "four"], "length": words, "dataset": task, "language": "en",
            "all_classes": None, "_id": f"id{n}",
        }
        for n in range(count)
    ]  # fmt: skip


def write(folder, task, found):
    (folder / f"{task}.jsonl").write_text("\n".join(map(json.dumps, found)) + "\n", encoding="utf-8")


def test_samples_have_lm_evals_prompts_and_metrics():
    first = longbench.samples_of("qasper", rows(2))[0]
    assert first.name == "id0"
    assert "word0x39" in first.prompt
    assert first.prompt.endswith(first.question)
    assert first.question.endswith("Question: What is number 0?\n\nAnswer:")
    assert "word0x39" not in first.question
    assert (first.new_tokens, first.until, first.chat) == (128, (), True)
    assert first.score("Number 0!") == 100
    assert first.score("number 7") == 50
    assert first.score("") == 0


def test_examples_come_without_a_template_and_end_at_a_line():
    sample = longbench.samples_of("samsum", rows(1, "samsum"))[0]
    assert (sample.chat, sample.until, sample.new_tokens) == (False, ("\n",), 128)
    assert sample.question == "\nWhat is number 0?"
    assert sample.score("number 0") == pytest.approx(100, abs=0.01)  # ROUGE-L


def test_sets_are_those_of_the_papers():
    assert len(longbench.TASKS) == len(set(longbench.TASKS)) == 21
    assert [len(found) for found in longbench.SETS.values()] == [21, 8, 14]
    assert all(set(found) <= set(longbench.TASKS) for found in longbench.SETS.values())
    assert named("lcc,scout8,qasper", longbench.TASKS, longbench.SETS)[:3] == ["lcc", "qasper", "narrativeqa"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the script on rows of two tasks with a tiny model; returns its result and the CSV's lines."""
    monkeypatch.setattr(common, "load", lambda *_: (tiny_model("llama"), letters()))
    write(tmp_path, "qasper", [*rows(2), rows(3, words=2)[2]])
    write(tmp_path, "2wikimqa", rows(3, "2wikimqa", 20))

    def invoke(*options, names="qasper,2wikimqa,samsum"):
        out = tmp_path / "out.csv"
        given = ["--tasks", names, "--data-dir", str(tmp_path), "--new-tokens", "4", "--out", str(out)]
        result = CliRunner().invoke(common.command(longbench.main), [*given, *options])
        with out.open(encoding="utf-8") if out.exists() else open("/dev/null") as file:
            return result, list(csv.DictReader(file))

    return invoke


ROWS = ("--row", "full", "--row", "window:budget=64,sinks=8,block_size=8", "--row", "dynamic")


def test_samples_of_one_name_are_refused(run, tmp_path):
    write(tmp_path, "qasper", [row | {"_id": ""} for row in rows(2)])
    result, _ = run(*ROWS, names="qasper")
    assert "several samples named ''" in " ".join(result.output.replace("│", " ").split())


def test_rows_that_cannot_be_fetched_are_asked_for_as_files(run, monkeypatch):
    def unreachable(*_):
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(longbench, "samples_of", unreachable)
    result, _ = run(*ROWS, names="qasper")
    assert "(nobody answers): give it as files, with --data-dir" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on(run, tmp_path, monkeypatch):
    answered = []
    real = tasks.run.answer

    def answer(reading, row, setup, prompt, sample, *others):
        if len(answered) == 7:
            raise KeyboardInterrupt
        answered.append((sample.task, sample.name, row.name, setup))
        return real(reading, row, setup, prompt, sample, *others)

    monkeypatch.setattr(tasks.run, "answer", answer)
    options = (*ROWS, "--setup", "dense,sparse,dense", "--limit", "2")
    assert run(*options)[0].exit_code != 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1 + 7
    before, answered[:] = list(answered), []
    monkeypatch.setattr(tasks.run, "answer", lambda *given: answered.append(given) or real(*given))
    result, lines = run(*options)
    assert result.exit_code == 0, result.output
    assert len(before) + len(answered) == 2 * 2 * 3 * 2
    assert {(line["setup"], line["row"]) for line in lines} == {
        (setup, row) for setup in ("dense", "sparse") for row in ROWS[1::2]
    }
    assert "no samples of samsum" in result.output
    averages = [line for line in lines if line["task"] == "average"]
    assert all((line["samples"], line["tasks"], line["pairs"]) == ("4", "2", "4") for line in averages)
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()[1:]]
    said = {(a["task"], a["sample"], a["row"], a["setup"]): a["answer"] for a in answers}
    assert len(said) == 24
    for (task, name, row, setup), text in said.items():
        if row == "dynamic":
            assert text == said[task, name, "full", setup]


def test_rows_can_be_added_and_prompts_chosen_by_length(run):
    assert run("--row", "full", names="qasper")[0].exit_code == 0
    result, lines = run(*ROWS[:4], "--min-tokens", "1000", names="qasper")
    assert result.exit_code == 0, result.output
    assert [(line["row"], line["task"], line["samples"]) for line in lines][:3:2] == [
        ("full", "qasper", "2"),
        (ROWS[3], "qasper", "2"),
    ]
    result, _ = run("--row", "full", "--max-tokens", "900")
    assert result.exit_code == 2
    assert "other settings" in " ".join(result.output.split())


def test_a_sample_that_was_altered_is_asked_again(run, tmp_path, monkeypatch):
    assert run("--row", "full", names="qasper")[0].exit_code == 0
    write(tmp_path, "qasper", [*rows(1), rows(2, words=39)[1], rows(3, words=2)[2]])
    real, asked = tasks.run.answer, []
    monkeypatch.setattr(tasks.run, "answer", lambda *given: asked.append(given[4].name) or real(*given))
    for _ in range(2):
        result, lines = run("--row", "full", names="qasper")
        assert result.exit_code == 0, result.output
        assert (asked, lines[0]["samples"]) == (["id1"], "3")


def test_what_cannot_be_run_is_refused(run, monkeypatch):
    monkeypatch.setattr(common, "load", lambda *_: pytest.fail("the model was loaded"))
    for options, message in (
        (("--row", "nonesuch"), "nonesuch"),
        (("--setup", "thin"), "thin"),
        (("--dtype", "int3"), "int3"),
        (("--out", "there.txt"), "there.txt"),
    ):
        result, _ = run(*options)
        assert (result.exit_code, message in result.output) == (2, True), result.output
    result, _ = run(names="nonesuch")
    assert result.exit_code == 2
    assert "unknown task nonesuch" in result.output


def test_what_the_model_refuses_is_told_before_a_task_is_read(run, monkeypatch):
    monkeypatch.setattr(tasks.run, "questions", lambda *_: pytest.fail("a task was read"))
    result, _ = run("--row", "full", "--row", "scout:budget=64,block_size=32")
    assert result.exit_code == 2
    assert "--row scout:budget=64,block_size=32: budget=64 is less than the 96" in " ".join(
        result.output.replace("│", " ").split()
    )


def test_a_sample_without_a_context_is_a_question(tmp_path):
    write(tmp_path, "qasper", [rows(1)[0] | {"context": ""}])
    sample = longbench.read("qasper", tmp_path)[0]
    assert sample.question == sample.prompt
    write(tmp_path, "trec", [{"input": "", "context": "a", "answers": []}])
    with pytest.raises(typer.BadParameter, match="has no all_classes"):
        longbench.read("trec", tmp_path)


@pytest.mark.slow
def test_two_processes_share_the_samples(run, tmp_path):
    """Each answers every other sample; the results are those of one."""
    result, want = run(*ROWS)
    assert result.exit_code == 0, result.output
    model = tmp_path / "model"
    tiny_model("llama").save_pretrained(model)
    letters().save_pretrained(model)
    out = tmp_path / "two.csv"
    done = torchrun(
        2, str(TESTS.parent / "eval" / "longbench.py"), "--tasks", "qasper,2wikimqa", "--data-dir", str(tmp_path),
        "--new-tokens", "4", "--model", str(model), "--dtype", "float32", "--out", str(out), *ROWS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with out.open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [(x["row"], x["task"], x["score"], x["samples"]) for x in found] == [
        (x["row"], x["task"], x["score"], x["samples"]) for x in want
    ]
    assert not list(tmp_path.glob("two.*.jsonl"))
