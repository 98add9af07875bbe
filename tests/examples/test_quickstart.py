"""The quickstart as a user runs it."""

import pytest
import torch
from typer.testing import CliRunner

import quickstart


def test_a_question_needs_its_text():
    result = CliRunner().invoke(quickstart.app, ["--question", "Who?"])
    assert result.exit_code == 2
    assert "--file" in result.output


@pytest.fixture
def loaded(smollm2, monkeypatch):
    """Let the quickstart use the model that is loaded already, and put its attention back afterwards."""
    model, tokenizer = smollm2
    monkeypatch.setattr(quickstart.assets, "load_demo_model", lambda name, dtype: (model, tokenizer))
    yield
    model.set_attn_implementation("sdpa")


def test_every_row_finds_the_number_in_a_short_prompt(loaded):
    result = CliRunner().invoke(quickstart.app, ["--tokens", "1000", "--budget", "256"])
    assert result.exit_code == 0, result.output
    assert result.output.count("yes") == 3


@pytest.mark.slow
def test_a_question_of_ones_own(loaded, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("The cat is called Mathilda. " + "It sleeps all day. " * 40)
    result = CliRunner().invoke(
        quickstart.app, ["--file", str(file), "--question", "What is the cat called?", "--budget", "256"]
    )
    assert result.exit_code == 0, result.output
    assert result.output.count("Mathilda") >= 3


@pytest.mark.slow
def test_every_row_finds_the_number_by_default(smollm2):
    result = CliRunner().invoke(quickstart.app, [])
    assert result.exit_code == 0, result.output
    assert result.output.count("yes") == 3


def test_clock_counts_from_the_prompt():
    clock = quickstart.Clock()
    for _ in range(4):
        clock.put(torch.zeros(1))
    clock.times = [1.0, 3.0, 3.5, 4.5]
    assert clock.first == 2.0
    assert clock.each == 0.75
