"""The quickstart run as a user runs it."""

from __future__ import annotations

import csv

import pytest
from letters import letters
from tiny import tiny_model
from typer.testing import CliRunner

import hf_offload
import quickstart


def run(*arguments: str):
    return CliRunner().invoke(quickstart.app, list(arguments))


@pytest.fixture
def tiny(monkeypatch):
    """A tiny random model in place of SmolLM2; its prompts are of 600 characters."""
    model, tokenizer = tiny_model("llama", "sdpa"), letters()
    monkeypatch.setattr(hf_offload, "load_demo_model", lambda name, dtype: (model, tokenizer))
    return "--tokens", "600", "--budget", "256"


@pytest.fixture
def answers(monkeypatch):
    """What each way says, by its name."""
    said = dict.fromkeys(("DynamicCache", "scout", "scout, fast_linear"), "It is 7482915.")
    monkeypatch.setattr(quickstart.Way, "answer", lambda way, *_: said[way.name])
    return said


def test_it_shows_what_each_way_takes(tiny, answers):
    result = run(*tiny)
    assert result.exit_code == 0, result.output
    assert "loaded SmolLM2" in result.output
    assert "earlier run" in result.output or "later runs" in result.output
    assert "one prefill, by HybridCache, serves all columns" in result.output
    assert result.output.count("It is 7482915.") == 3
    assert result.output.count("yes") == 3
    assert result.output.count("█ ") + result.output.count("ms a token") >= 4
    assert "split" not in result.output


@pytest.mark.parametrize("missing", ["scout", "DynamicCache"])
def test_it_fails_where_full_attention_finds_the_number_and_the_policy_does_not(tiny, answers, missing):
    answers[missing] = "I do not know."
    result = run(*tiny)
    assert result.exit_code == (1 if missing == "scout" else 0)
    assert ("Full attention finds the number, scout does not." in result.output) == (missing == "scout")


def test_figures_go_to_a_csv(tiny, tmp_path):
    result = run(*tiny, "--csv", str(tmp_path / "new" / "demo.csv"))
    assert result.exit_code == 0, result.output
    with (tmp_path / "new" / "demo.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["way"] for row in rows] == ["DynamicCache", "scout", "scout, fast_linear"]
    full, sparse, _ = rows
    assert all(float(row["p20"]) <= float(row["p50"]) <= float(row["p80"]) for row in rows)
    assert full["prefill_s"] == sparse["prefill_s"]
    tokens = int(full["context"]) + quickstart.NEW_TOKENS  # and those that were decoded
    held = tokens * 4 * 2 * 2 * 16 * 4 / 2**20  # layers, KV heads, K and V, entries, bytes
    assert float(full["device_mib"]) == float(full["read_mib"]) == pytest.approx(held, rel=1e-3)
    assert float(sparse["read_mib"]) < 0.6 * float(full["read_mib"])
    assert {"commit", "cpu", "threads", "omp_wait_policy", "torch", "transformers"} <= full.keys()


def test_two_memories_are_imitated_when_asked_for(tiny):
    result = run(*tiny, "--split")
    assert result.exit_code == 0, result.output
    assert "scout, split" in result.output
    assert "as a GPU would" in result.output


def test_a_policy_of_ones_own_choice(tiny):
    result = run(*tiny, "--policy", "full")
    assert result.exit_code == 0, result.output
    assert "budget" not in result.output


def test_a_question_needs_its_text():
    result = run("--question", "Who?")
    assert result.exit_code == 2
    assert "--file" in result.output


def test_a_question_of_ones_own(tiny, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("The cat is called Mathilda. " * 20)
    result = run("--file", str(file), "--question", "What is the cat called?", "--budget", "256")
    assert result.exit_code == 0, result.output
    assert "number" not in result.output


@pytest.fixture
def loaded(smollm2, monkeypatch):
    """The quickstart uses the model that is loaded already; its attention is put back afterwards."""
    model, tokenizer = smollm2
    monkeypatch.setattr(hf_offload, "load_demo_model", lambda name, dtype: (model, tokenizer))
    yield
    model.set_attn_implementation("sdpa")


def test_smollm2_finds_the_number_in_a_short_prompt(loaded, monkeypatch):
    monkeypatch.setattr(quickstart, "NEW_TOKENS", 24)
    result = run("--tokens", "400", "--budget", "256")
    assert result.exit_code == 0, result.output
    assert result.output.count("yes") == 3


@pytest.mark.slow
def test_smollm2_answers_a_question_of_ones_own(loaded, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("The cat is called Mathilda. " + "It sleeps all day. " * 40)
    result = run("--file", str(file), "--question", "What is the cat called?", "--budget", "256")
    assert result.exit_code == 0, result.output
    assert result.output.count("Mathilda") >= 2


@pytest.mark.slow
def test_every_way_finds_the_number_by_default(smollm2):
    result = run("--split")
    assert result.exit_code == 0, result.output
    assert result.output.count("yes") == 4
