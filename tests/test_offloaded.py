"""Models whose weights accelerate loads for each module's forward, with query prediction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import AlignDevicesHook, SequentialHook, add_hook_to_module, attach_align_device_hook
from tiny import DEVICE, prompt, tiny_model
from torch import nn
from transformers import PreTrainedModel

from hf_offload import HybridCache, hybrid_cache
from hf_offload.cache import conversion as takeover
from hf_offload.cpu import cores
from hf_offload.model import model_support as spread
from hf_offload.model.lookahead import make_adapter

SMALL: dict[str, Any] = {"budget": 64, "sinks": 8, "recent": 16, "block_size": 8, "synchronous_layers": (0,)}
AHEAD: dict[str, Any] = {"tier": "split", "lookahead": "attend", "resident": 64}


def _by_attention(model: PreTrainedModel, folder: Path) -> None:
    """Attention modules are brought as a whole: their projections have no hooks of their own."""
    attach_align_device_hook(
        model, torch.device(DEVICE), offload=True, preload_module_classes=["LlamaAttention", "GPTNeoXAttention"]
    )


WAYS: dict[str, Callable[[PreTrainedModel, Path], Any]] = {
    "cpu_offload": lambda model, folder: cpu_offload(model, execution_device=torch.device(DEVICE)),
    "disk_offload": lambda model, folder: disk_offload(model, str(folder), execution_device=torch.device(DEVICE)),
    "by_attention": _by_attention,
}


def generate(model: PreTrainedModel, mode: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any], HybridCache]:
    ids, mask = prompt(2, 75)
    cache = HybridCache(model, "scout", **SMALL, **mode)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False)
    return out, cache.stats().as_dict(), cache


@pytest.mark.slow
@pytest.mark.parametrize(("family", "way"), [*(("llama", way) for way in WAYS), ("gpt_neox", "by_attention")])
def test_offloaded_weights_change_nothing(tmp_path: Path, family: str, way: str) -> None:
    model = tiny_model(family)
    want, wanted, _ = generate(model, AHEAD)
    WAYS[way](model, tmp_path)
    away = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert away
    out, stats, cache = generate(model, AHEAD)
    assert torch.equal(out, want)
    assert stats["query_cosine"] == pytest.approx(wanted["query_cosine"], abs=1e-5)  # the same queries were predicted
    short_cuts = [predictor.adapter is not None for predictor in cache._attachment.predictors]
    assert any(short_cuts) == (way != "by_attention")
    assert [name for name, parameter in model.named_parameters() if parameter.is_meta] == away


def test_weights_that_nothing_brings_are_refused() -> None:
    model = tiny_model("llama")
    layer = model.model.layers[1]
    there = layer.self_attn.q_proj.weight
    layer.self_attn.q_proj.weight = nn.Parameter(torch.empty_like(there, device="meta"))
    # Brought for the real forward alone, which a prediction does not go through.
    layer.register_forward_pre_hook(lambda *_: setattr(layer.self_attn.q_proj, "weight", there))
    layer.register_forward_hook(lambda *_: setattr(layer.self_attn.q_proj, "weight", nn.Parameter(there.to("meta"))))
    generate(model, {"tier": "split", "lookahead": "off", "resident": 64})
    with pytest.raises(ValueError, match=r"LlamaDecoderLayer has offloaded weights.*lookahead='off'"):
        generate(model, AHEAD)


def test_where_a_model_computes_is_where_its_weights_are_brought_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert spread.compute_devices(model) == {torch.device("cpu")}
    assert not spread.on_device(model)
    hook = AlignDevicesHook(torch.device("cuda", 1), offload=True, weights_map={})
    add_hook_to_module(model[1], SequentialHook(hook))
    assert spread.compute_devices(model) == {torch.device("cpu"), torch.device("cuda", 1)}
    assert spread.on_device(model)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)  # tensors always name theirs, and are compared with it
    for given, found in (("cuda", ("cuda", 1)), ("cuda:0", ("cuda", 0)), ("cpu", ("cpu",))):
        layer = nn.Linear(4, 4, device="meta")
        add_hook_to_module(layer, AlignDevicesHook(torch.device(given), offload=True, weights_map={}))
        assert takeover.device_of(layer) == torch.device(*found)


def test_a_prediction_for_a_layer_on_another_device_brings_the_positions_there() -> None:
    model = tiny_model("llama").to("cpu")
    layer = model.model.layers[1].to("meta")
    adapter = make_adapter(layer)
    assert adapter is not None
    tables = model.model.rotary_emb(torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.long))
    query = adapter(torch.zeros(1, 1, 64, device="meta"), {"position_embeddings": tables})
    assert query.is_meta
    assert query.shape == (1, 4, 1, 16)


def test_cores_are_divided_among_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for own, launcher, ranks, want in (
        (16, 16, None, 16),
        (16, 16, "4", 4),  # all share all
        (4, 16, "4", 4),  # bound to cores of its own
        (8, 16, "4", 4),  # bound to a socket that two share
        (2, 2, "4", 1),
        (4, 1, "2", 2),  # started by somebody who is bound himself
    ):
        with monkeypatch.context() as patch:
            patch.setattr(cores, "_allowed", lambda process, own=own, all_of=launcher: all_of if process else own)
            patch.delenv(cores.LOCAL_RANKS, raising=False)
            if ranks is not None:
                patch.setenv(cores.LOCAL_RANKS, ranks)
            assert cores.cores() == want
    for told in ("abc", "0", "9" * 5000):
        monkeypatch.setenv(cores.LOCAL_RANKS, told)
        with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE=.* is not a number of processes; .*, or unset it"):
            cores.cores()


def test_threads_beside_a_model_on_a_device_are_those_of_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(cores, "_allowed", lambda process: 16)
    monkeypatch.setenv(cores.LOCAL_RANKS, "2")
    monkeypatch.setattr(hybrid_cache, "on_device", lambda model: True)
    assert hybrid_cache.default_threads(model) == 7
    monkeypatch.setattr(hybrid_cache, "on_device", lambda model: False)
    assert hybrid_cache.default_threads(model) == 1
