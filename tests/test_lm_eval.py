"""The lm-eval model `hf_offload`: its options and results."""

from __future__ import annotations

from typing import Any

import pytest
from letters import letters
from test_hybrid_cache import COVERING
from tiny import DEVICE, tiny_model

pytest.importorskip("lm_eval", reason="needs lm-eval: pip install hf-offload[eval]")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

from hf_offload.lm_eval import HybridLM, split_knobs

PROMPTS = ["Once upon a time there was", "No", "It was the best of times, it was the worst of times", "Call me"]


def requests() -> list[Instance]:
    arguments = {"until": ["!"], "max_gen_toks": 12, "do_sample": False}
    return [Instance("generate_until", {}, (text, arguments), number) for number, text in enumerate(PROMPTS)]


def hybrid(**options: Any) -> HybridLM:
    """A model with random weights, by its name in lm-eval."""
    given = {"tokenizer": letters(), "batch_size": 2, "device": DEVICE}
    made: HybridLM = get_model("hf_offload")(pretrained=tiny_model("llama", "sdpa"), **given | options)
    return made


def test_it_answers_as_stock_attention_does_and_tells_what_its_caches_did() -> None:
    stock = HFLM(pretrained=tiny_model("llama", "sdpa"), tokenizer=letters(), batch_size=2)
    want = stock.generate_until(requests(), disable_tqdm=True)
    model = hybrid(policy="scout", **COVERING)
    assert model.generate_until(requests(), disable_tqdm=True) == want
    about = model.get_model_info()["hf_offload"]
    assert about["policy"] == "scout"
    assert COVERING.items() <= about["knobs"].items()
    stats = about["stats"]
    assert stats["caches"] == 2  # four prompts in batches of two
    assert 0 < stats["steps"] <= 2 * 11
    assert stats["host_bytes"] > 0
    assert stats["kept_share"] is None


def test_means_are_over_the_steps_of_all_caches() -> None:
    model = hybrid(policy="hgca", window=32, block_size=16, beta=0.5)
    long = [Instance("generate_until", {}, (text * 9, {"max_gen_toks": 5}), n) for n, text in enumerate(PROMPTS[2:])]
    model.batch_size_per_gpu = 1
    model.generate_until(long, disable_tqdm=True)
    stats = model.get_model_info()["hf_offload"]["stats"]
    assert (stats["caches"], stats["steps"]) == (2, 8)
    assert 0 < stats["kept_share"] <= 1


def test_options_go_where_they_belong() -> None:
    knobs, others = split_knobs({"budget": 64, "tier": "split", "dtype": "float32", "window": 8, "revision": "main"})
    assert knobs == {"budget": 64, "tier": "split", "window": 8}
    assert others == {"dtype": "float32", "revision": "main"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bugdet": 64}, "bugdet=64 is no knob .* was budget meant"),
        ({"attn_implementation": "eager"}, "attn_implementation='eager' reads no HybridCache"),
        ({"policy": "scout", "window": 64}, "window: not a knob of policy 'scout'"),
        ({"policy": "nonesuch"}, "policy='nonesuch' is unknown"),
        ({"budget": 1}, "budget=1 "),
    ],
)
def test_wrong_options_are_refused_before_a_task_begins(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hybrid(**options)
