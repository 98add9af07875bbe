"""The folder that Transformers loads by `custom_generate=`: from its path, and from a model's own folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ONE_MEMORY, prompt, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel, dynamic_module_utils

from hf_offload import HybridCache

FOLDER = Path(__file__).parents[2] / "integrations" / "transformers"
KNOBS: dict[str, Any] = {"block_size": 16, **ONE_MEMORY}


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Transformers copies the code to."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("llama", "sdpa")


GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}


def generate(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> Any:
    return model.generate(ids, custom_generate=str(FOLDER), trust_remote_code=True, **GREEDY, **options)


def cache_of(output: Any) -> Any:
    return output.get("past_key_values", output.get("cache"))


def test_it_is_loaded_from_its_path(model: PreTrainedModel) -> None:
    ids, mask = prompt(2, 60)
    want = model.generate(ids, attention_mask=mask, **GREEDY).sequences
    got = generate(model, ids, attention_mask=mask, policy="scout", knobs={"budget": 512, **KNOBS})
    assert torch.equal(got.sequences, want)
    assert isinstance(cache_of(got), HybridCache)
    assert model.config._attn_implementation == "sdpa"
    assert not {"generate", "_prepare_cache_for_generation"} & set(vars(model))


def test_a_turn_goes_on_with_the_cache_of_the_one_before(model: PreTrainedModel) -> None:
    ids = prompt(1, 60)[0].clamp(min=3)
    first = generate(model, ids, policy="full", knobs=KNOBS)
    more = torch.cat([first.sequences, ids[:, :9]], 1)
    second = generate(model, more, policy="full", knobs=KNOBS, past_key_values=cache_of(first))
    assert torch.equal(second.sequences, model.generate(more, **GREEDY).sequences)
    assert cache_of(second) is cache_of(first)


def test_a_knob_that_cannot_be_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="budget=-1"):
        generate(model, prompt(1, 20)[0], knobs={"budget": -1})
    assert model.config._attn_implementation == "sdpa"


def test_a_model_whose_folder_has_it_generates_so_by_itself(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    shutil.copytree(FOLDER / "custom_generate", tmp_path / "model" / "custom_generate")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True).eval()
    ids = prompt(1, 60)[0].clamp(min=3)
    for given in ({"inputs": ids}, {}):
        got = loaded.generate(*(() if given else (ids,)), policy="full", knobs=KNOBS, **given, **GREEDY)
        assert isinstance(cache_of(got), HybridCache)
        assert torch.equal(got.sequences, model.generate(ids, **GREEDY).sequences)
