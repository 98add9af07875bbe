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
    code = hf_offload.demo_text("code")
    monkeypatch.setattr(hf_offload, "load_demo_model", lambda name, dtype: (model, tokenizer))
    monkeypatch.setattr(hf_offload, "demo_text", lambda kind: code)
    return "--tokens", "600", "--budget", "256"


@pytest.fixture
def answers(monkeypatch):
    """What each way says, by its name."""
    said = dict.fromkeys(("DynamicCache", "scout", "scout, fast_linear", "scout, split"), "It is 7482915.")
    monkeypatch.setattr(quickstart.Way, "answer", lambda way, *_: said[way.name])
    return said


def test_it_shows_what_each_way_takes(tiny, answers, tmp_path):
    result = run(*tiny, "--split", "--csv", str(tmp_path / "new" / "demo.csv"))
    assert result.exit_code == 0, result.output
    for text in ("loaded SmolLM2", "one prefill, by HybridCache, serves all columns", "scout, split", "as a GPU would"):
        assert text in result.output
    assert result.output.count("It is 7482915.") == result.output.count("yes") == 4
    with (tmp_path / "new" / "demo.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["way"] for row in rows] == [*answers]
    full, sparse, *_ = rows
    assert all(float(row["p20"]) <= float(row["p50"]) <= float(row["p80"]) for row in rows)
    assert full["prefill_s"] == sparse["prefill_s"]
    tokens = int(full["context"]) + quickstart.NEW_TOKENS  # and those that were decoded
    held = tokens * 4 * 2 * 2 * 16 * 4 / 2**20  # layers, KV heads, K and V, entries, bytes
    assert float(full["device_mib"]) == float(full["read_mib"]) == pytest.approx(held, rel=1e-3)
    assert float(sparse["read_mib"]) < 0.6 * float(full["read_mib"])
    assert {"commit", "cpu", "threads", "omp_wait_policy", "torch", "transformers"} <= full.keys()


@pytest.mark.parametrize("missing", ["scout", "DynamicCache"])
def test_it_fails_where_full_attention_finds_the_number_and_the_policy_does_not(tiny, answers, missing):
    answers[missing] = "I do not know."
    result = run(*tiny)
    assert result.exit_code == (1 if missing == "scout" else 0)
    assert ("Full attention finds the number, scout does not." in result.output) == (missing == "scout")


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


@pytest.mark.slow
def test_every_way_finds_the_number_by_default(smollm2):
    result = run("--split")
    assert result.exit_code == 0, result.output
    assert result.output.count("yes") == 4
