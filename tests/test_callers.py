"""Callers of `generate()` with an enabled model: pipelines and lm-eval, unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from letters import letters
from test_hybrid_cache import COVERING
from tiny import DEVICE, tiny_model
from torch import nn
from transformers import PreTrainedModel, pipeline

from hf_offload import HybridCache, disable, enable, enabled
from hf_offload.tools import assets

TEXTS = ["Once upon a time", "No", "It was the best of times"]


class Meter:
    """Counts the HybridCaches that reach a model's decoder, and the forwards without one."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.caches: list[HybridCache] = []
        self.without = 0
        model.model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values", kwargs.get("cache"))  # its name from Transformers 5.24 on
        if not isinstance(cache, HybridCache):
            self.without += 1
        elif all(cache is not known for known in self.caches):
            self.caches.append(cache)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", "sdpa")


def test_a_pipeline_works_unchanged(model: PreTrainedModel) -> None:
    generator = pipeline("text-generation", model=model, tokenizer=letters(), device=DEVICE)
    arguments: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "return_full_text": False}

    def run() -> list[Any]:
        return [
            generator(TEXTS, batch_size=2, **arguments),
            generator(TEXTS[0], num_beams=2, num_return_sequences=2, **arguments),
        ]

    want = run()
    enable(model, **COVERING)
    meter = Meter(model)
    assert run() == want
    assert (len(meter.caches), meter.without) == (3, 0)  # two batches, and one with beams


@pytest.fixture
def tasks(tmp_path: Path) -> Any:
    """Two tasks of lm-eval without the hub: one that compares likelihoods, one that generates."""
    lm_eval_tasks = pytest.importorskip("lm_eval.tasks", reason="needs lm-eval: pip install lm-eval")
    rows = [
        {"question": f"{a}+{b}=", "choices": [str(a + b), str(a + b + 1)], "answer": 0, "text": str(a + b)}
        for a, b in ((1, 2), (11, 7), (3, 5), (40, 2))
    ]
    data = tmp_path / "sums.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "Sum: {{question}}",
    }
    choose = {"task": "choose_sums", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
    choose |= {"doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}]}
    write = {"task": "write_sums", "output_type": "generate_until", "doc_to_target": "{{text}}"}
    write |= {"generation_kwargs": {"until": ["!"], "max_gen_toks": 12}, "metric_list": [{"metric": "exact_match"}]}
    for task in (choose, write):
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(source | task))  # JSON is YAML
    return lm_eval_tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)


def evaluate(model: Any, tokenizer: Any, tasks: Any, **arguments: Any) -> dict[str, Any]:
    """Answers and likelihoods of both tasks, by lm-eval."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, **arguments)
    found = simple_evaluate(harness, tasks=["choose_sums", "write_sums"], task_manager=tasks, bootstrap_iters=0)
    assert found is not None
    return {name: [sample["resps"] for sample in samples] for name, samples in found["samples"].items()}


@pytest.mark.parametrize("mixed", [None])
def test_lm_eval_works_unchanged(model: PreTrainedModel, tasks: Any, mixed: str | None) -> None:
    tokenizer = letters()
    want = evaluate(model, tokenizer, tasks, mixed_precision_dtype=mixed)
    enable(model, **COVERING)
    meter = Meter(model)
    assert evaluate(model, tokenizer, tasks, mixed_precision_dtype=mixed) == want
    assert len(meter.caches) == 2  # four prompts to go on from, in batches of two
    assert meter.without > 0  # likelihoods need one forward each, which is the stock one
    disable(model)
    assert evaluate(model, tokenizer, tasks, mixed_precision_dtype=mixed) == want


@pytest.mark.slow
def test_smollm2_finds_a_number_in_a_pipeline_and_answers_lm_eval(smollm2: Any, tasks: Any) -> None:
    model, tokenizer = smollm2
    needle = assets.hide_number(assets.demo_text("documentation"), tokenizer, tokens=4000)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    want = evaluate(model, tokenizer, tasks)
    with enabled(model, budget=1024):
        answer = generator(
            tokenizer.decode(needle.prompt[0]), max_new_tokens=16, do_sample=False, return_full_text=False
        )
        assert needle.found_in(answer[0]["generated_text"])
        assert evaluate(model, tokenizer, tasks) == want
    assert model.config._attn_implementation == "sdpa"
