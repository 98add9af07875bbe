"""Tensor parallelism: two processes with half of the heads each, against one process."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace
from typing import Any

import _ranks
import pytest
import torch
import torch.distributed as dist
from launching import TESTS, torchrun
from tiny import DEVICE, SIZES, tiny_model
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config

from hf_offload import HybridCache

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE != "cpu", reason="the ranks here are processes on the CPU"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """One launch for all tests here: starting two Pythons costs more than what they compute."""
    folder = tmp_path_factory.mktemp("ranks")
    heads = {**SIZES, "num_key_value_heads": 2}
    models = {family: tiny_model(family) for family in ("llama", "qwen3")}
    models["olmo2"] = tiny_model(Olmo2Config(**heads))
    odd = LlamaConfig(**{**SIZES, "hidden_size": 48, "num_attention_heads": 3}, num_key_value_heads=3, head_dim=16)
    AutoModelForCausalLM.from_config(odd).save_pretrained(folder / "odd")
    for family, model in models.items():
        model.to("cpu").save_pretrained(folder / family)
        tokens = {case: _ranks.generate(model, case)[0] for case in _ranks.FAMILIES[family]}
        torch.save(tokens, folder / family / "tokens.pt")
    result = torchrun(2, str(TESTS / "_ranks.py"), str(folder))
    files = [folder / f"rank{rank}.json" for rank in range(2)]
    assert all(file.exists() for file in files), result.stderr
    return result, [json.loads(file.read_text()) for file in files]


def test_tokens_are_those_of_one_rank(run: Any) -> None:
    for family, cases in _ranks.FAMILIES.items():
        for case in cases:
            found = [rank[f"{family} {case}"] for rank in run[1]]
            assert [rank["equal"] for rank in found] == [True, True], (family, case)
            assert [rank["kv_heads"] for rank in found] == ([2, 2] if family == "olmo2" else [1, 1])
            assert "attend" not in case or all(0 < rank["cosine"] < 1 for rank in found)  # queries were predicted


def test_heads_that_ranks_cannot_share_are_refused(run: Any) -> None:
    for rank in run[1]:
        assert "LlamaForCausalLM has num_attention_heads=3, which 2 ranks of tensor parallelism cannot" in rank["odd"]


def test_a_fault_on_one_rank_ends_all(run: Any) -> None:
    assert run[0].returncode != 0
    assert "no memory on this rank" in run[0].stderr


def test_layers_on_other_processes_and_captured_steps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(model, "_tp_size", 2)
    with pytest.raises(ValueError, match=r"cuda_graph=True: LlamaForCausalLM is spread over 2 ranks"):
        HybridCache(model, cuda_graph=True)
    model.config.distributed_config = SimpleNamespace(pp_size=2)
    with pytest.raises(ValueError, match=r"pp_size=2.*use tp_plan, or device_map"):
        HybridCache(model)


def test_weights_that_fsdp_gathers_are_not_there_for_a_prediction() -> None:
    model = tiny_model("llama").to("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for layer in model.model.layers:
            fully_shard(layer)
        assert _ranks.generate(model, "off")[1].get_seq_length() == 75 + _ranks.STEPS - 1
        with pytest.raises(ValueError, match=r"is sharded by FSDP.*use lookahead='off'"):
            _ranks.generate(model, "attend")
    finally:
        dist.destroy_process_group()
