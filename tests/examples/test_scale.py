"""The examples for several processes, as their first lines say how to start them."""

import re
from pathlib import Path

import pytest
from launching import TESTS, torchrun
from letters import letters
from tiny import DEVICE, tiny_model

from hf_offload import HybridCache

EXAMPLES = TESTS.parent / "examples"
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the ranks here are processes on the CPU")


def test_two_ranks_write_what_one_writes_and_keep_half_each(tmp_path: Path) -> None:
    model, tokenizer = tiny_model("llama"), letters()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT * 8, encoding="utf-8")
    command = [str(EXAMPLES / "tensor_parallel.py"), "--model", str(tmp_path), "--file", str(tmp_path / "text.txt")]
    result = torchrun(2, *command, "--answer", "24")
    assert result.returncode == 0, result.stderr

    inputs = tokenizer(TEXT * 8, return_tensors="pt")
    cache = HybridCache(model, "scout", budget=512)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=24, do_sample=False)
    one = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert result.stdout.endswith(f"\n{one}\n")
    held = [float(share) for share in re.findall(r"rank \d keeps ([\d.]+) MiB", result.stdout)]
    half = cache.stats().as_dict()["host_bytes"] / 2**21
    assert held == pytest.approx([half, half], abs=0.051)


@pytest.mark.slow
def test_three_ranks_of_smollm2_write_what_one_writes(smollm2) -> None:
    """It has three KV heads."""
    result = torchrun(3, str(EXAMPLES / "tensor_parallel.py"), limit=900)
    assert result.returncode == 0, result.stderr
    one = torchrun(1, str(EXAMPLES / "tensor_parallel.py"), limit=900)
    assert one.returncode == 0, one.stderr
    said = [re.sub(r"(rank .*\n)+", "", output) for output in (result.stdout, one.stdout)]
    assert said[0] == said[1]
    assert len(said[0]) > 20
    assert result.stdout.count("keeps") == 3


@pytest.mark.slow
def test_two_processes_share_the_prompts(smollm2) -> None:
    result = torchrun(2, str(EXAMPLES / "data_parallel.py"))
    assert result.returncode == 0, result.stderr
    assert "process 0: What is two and two?" in result.stdout
    assert "process 1: What is the capital of France? The capital of France is Paris" in result.stdout
