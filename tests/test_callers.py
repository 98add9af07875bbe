"""Callers of `generate()`, pipelines and lm-eval, unchanged with an enabled model; the lm-eval model `hf_offload`."""

from __future__ import annotations

from typing import Any

import pytest
from letters import letters
from test_hybrid_cache import COVERING
from tiny import DEVICE, tiny_model
from torch import nn
from transformers import PreTrainedModel, pipeline

from hf_offload import HybridCache, disable, enable

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install hf-offload[eval]")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from hf_offload.lm_eval import HybridLM

PROMPTS = ["Once upon a time there was", "No", "It was the best of times, it was the worst of times", "Call me"]


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


def requests(texts: list[str] = PROMPTS, **options: Any) -> list[Instance]:
    arguments = {"until": ["!"], "max_gen_toks": 12, "do_sample": False, **options}
    return [Instance("generate_until", {}, (text, arguments), number) for number, text in enumerate(texts)]


def answers(model: PreTrainedModel, tokenizer: Any) -> list[Any]:
    """Answers and likelihoods, as lm-eval asks for them."""
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)
    weighed = [Instance("loglikelihood", {}, (text, " mat"), number) for number, text in enumerate(PROMPTS)]
    said: list[Any] = harness.generate_until(requests(), disable_tqdm=True)
    return said + harness.loglikelihood(weighed, disable_tqdm=True)


def hybrid(**options: Any) -> HybridLM:
    """A model with random weights, by its name in lm-eval."""
    given = {"tokenizer": letters(), "batch_size": 2, "device": DEVICE}
    made: HybridLM = get_model("hf_offload")(pretrained=tiny_model("llama", "sdpa"), **given | options)
    return made


def test_a_pipeline_works_unchanged() -> None:
    model = tiny_model("llama", "sdpa")
    generator = pipeline("text-generation", model=model, tokenizer=letters(), device=DEVICE)
    arguments: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "return_full_text": False}

    def run() -> list[Any]:
        return [
            generator(PROMPTS[:3], batch_size=2, **arguments),
            generator(PROMPTS[0], num_beams=2, num_return_sequences=2, **arguments),
        ]

    want = run()
    enable(model, **COVERING)
    meter = Meter(model)
    assert run() == want
    assert (len(meter.caches), meter.without) == (3, 0)  # two batches, and one with beams


def test_lm_eval_works_unchanged() -> None:
    model, tokenizer = tiny_model("llama", "sdpa"), letters()
    want = answers(model, tokenizer)
    enable(model, **COVERING)
    meter = Meter(model)
    assert answers(model, tokenizer) == want
    assert len(meter.caches) == 2  # four prompts to go on from, in batches of two
    assert meter.without > 0  # likelihoods need one forward each, which is the stock one
    disable(model)
    assert answers(model, tokenizer) == want
    ours = hybrid(policy="scout", **COVERING)
    assert ours.generate_until(requests(), disable_tqdm=True) == want[:4]
    about = ours.get_model_info()["hf_offload"]
    assert about["policy"] == "scout"
    assert COVERING.items() <= about["knobs"].items()
    stats = about["stats"]
    assert stats["caches"] == 2
    assert 0 < stats["steps"] <= 2 * 11
    assert stats["host_bytes"] > 0
    assert stats["kept_share"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bugdet": 64}, "bugdet=64 is no knob .* was budget meant"),
        ({"attn_implementation": "eager"}, "attn_implementation='eager' reads no HybridCache"),
        ({"policy": "scout", "window": 64}, "window: not a knob of policy 'scout'"),
        ({"policy": "nonesuch"}, "policy='nonesuch' is unknown"),
    ],
)
def test_wrong_options_are_refused_before_a_task_begins(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hybrid(**options)
