"""The examples for several processes, as their first lines say how to start them."""

from pathlib import Path

import pytest
from launching import TESTS, torchrun

EXAMPLES = TESTS.parent / "examples"


@pytest.mark.slow
def test_two_ranks_of_a_random_model_give_the_tokens_of_one():
    result = torchrun(2, str(EXAMPLES / "tensor_parallel.py"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("tokens equal: True") == 2


@pytest.mark.slow
def test_three_ranks_of_smollm2_give_the_tokens_of_one(smollm2, tmp_path: Path):
    """It has three KV heads."""
    model, tokenizer = smollm2
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = (TESTS.parent / "docs" / "architecture.md").read_text()
    (tmp_path / "text.txt").write_text(text)
    command = [str(EXAMPLES / "tensor_parallel.py"), "--model", str(tmp_path), "--file", str(tmp_path / "text.txt")]
    result = torchrun(3, *command, "--tokens", "2000", "--new", "24", limit=900)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("tokens equal: True") == 3


@pytest.mark.slow
def test_two_processes_share_the_prompts(smollm2):
    result = torchrun(2, str(EXAMPLES / "data_parallel.py"))
    assert result.returncode == 0, result.stderr
    assert "process 0: What is two and two?" in result.stdout
    assert "process 1: What is the capital of France? The capital of France is Paris" in result.stdout
