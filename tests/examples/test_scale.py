"""The examples for several processes, started as their docstrings say."""

import re
from pathlib import Path
from typing import Any

import pytest
from launching import TESTS, torchrun
from letters import letters
from tiny import DEVICE, tiny_model

from hf_offload import HybridCache
from hf_offload.blocks import digests

EXAMPLES = TESTS.parent / "examples"
TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolish men. " * 8
)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the ranks here are processes on the CPU")


@pytest.mark.slow
def test_two_ranks_write_what_one_writes_and_keep_half_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "STATISTICS_TOKENS", 1024)  # as it is in other processes
    model, tokenizer = tiny_model("llama"), letters()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    command = [str(EXAMPLES / "tensor_parallel.py"), "--model", str(tmp_path), "--file", str(tmp_path / "text.txt")]
    result = torchrun(2, *command, "--answer", "24")
    assert result.returncode == 0, result.stderr
    inputs = tokenizer(TEXT, truncation=True, max_length=2000, return_tensors="pt")
    cache = HybridCache(model, "scout", budget=512)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=24, do_sample=False)
    written = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert len(written) > 5
    assert result.stdout.endswith(f"\n{written}\n")
    kept = [float(share) for share in re.findall(r"^rank \d keeps ([\d.]+) MiB", result.stdout, re.M)]
    assert kept == pytest.approx([cache.stats().as_dict()["host_bytes"] / 2**21] * 2, abs=0.051)


@pytest.mark.slow
def test_two_processes_share_the_prompts(smollm2: Any) -> None:
    result = torchrun(2, str(EXAMPLES / "data_parallel.py"))
    assert result.returncode == 0, result.stderr
    assert "process 0: What is two and two?" in result.stdout
    assert "process 1: What is the capital of France? The capital of France is Paris" in result.stdout
