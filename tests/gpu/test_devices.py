"""Layers on two CUDA devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from tiny import prompt, tiny_model
from transformers import PreTrainedModel

from hf_offload import HybridCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def generate(model: PreTrainedModel, **knobs: Any) -> tuple[torch.Tensor, HybridCache]:
    ids, mask = (tensor.to("cuda:0") for tensor in prompt(2, 75))
    cache = HybridCache(
        model, "scout", budget=64, sinks=8, recent=16, block_size=8, resident=64, synchronous_layers=(0,), **knobs
    )
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=24, do_sample=False)
    return out, cache


@pytest.mark.parametrize("lookahead", ["off", "select", "attend"])
def test_layers_on_two_devices_give_the_tokens_of_one(lookahead: str) -> None:
    want = generate(tiny_model("llama").to("cuda:0"), lookahead=lookahead)[0]
    model = tiny_model("llama").to("cpu")
    places: dict[str, Any] = {f"model.layers.{i}": i // 2 for i in range(4)}
    places |= dict.fromkeys(("model.embed_tokens", "model.rotary_emb"), 0) | dict.fromkeys(("model.norm", "lm_head"), 1)
    tokens, cache = generate(dispatch_model(model, places), lookahead=lookahead)
    assert [layer.device.index for layer in cache.layers] == [0, 0, 1, 1]
    assert [layer.resident.pool.device.index for layer in cache.layers] == [0, 0, 1, 1]
    assert torch.equal(tokens, want)
