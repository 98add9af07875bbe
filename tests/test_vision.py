"""Vision-language models with an image: the decoder with a `HybridCache`, the vision tower unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import SIZES, prompt, tiny_model
from transformers import AutoModelForImageTextToText, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.models.clip import CLIPVisionConfig
from transformers.models.gemma3 import Gemma3Config
from transformers.models.llava import LlavaConfig
from transformers.models.mllama import MllamaConfig
from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig

from hf_offload import HybridCache
from hf_offload.cache.layer import HybridLayer

IMAGE, START = 151, 152
"""Tokens that stand for a piece of the image, and for its start."""
TEXT: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def config(family: str) -> PreTrainedConfig:
    if family == "llava":
        tower = CLIPVisionConfig(**TOWER, image_size=16, patch_size=8)
        return LlavaConfig(vision_config=tower, text_config={"model_type": "llama", **TEXT}, image_token_index=IMAGE)
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        text = {**TEXT, "sliding_window": 8, "layer_types": kinds, "query_pre_attn_scalar": 16}
        tower = {**TOWER, "image_size": 32, "patch_size": 8}
        return Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, image_token_index=IMAGE)
    if family == "qwen2_5_vl":
        tower = {
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "window_size": 16,
            "fullatt_block_indexes": [1], "out_hidden_size": 64,
        }  # fmt: skip
        text = {**TEXT, "rope_parameters": ROPE}
        del text["head_dim"]
        return Qwen2_5_VLConfig(
            text_config=text, vision_config=tower, image_token_id=IMAGE, vision_start_token_id=START
        )
    text = {**TEXT, "cross_attention_layers": [1]}
    del text["head_dim"]
    tower = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1,
        "attention_heads": 2, "image_size": 16, "patch_size": 8, "max_num_tiles": 1, "intermediate_layers_indices": [0],
        "vision_output_dim": 64, "supported_aspect_ratios": [[1, 1]],
    }  # fmt: skip
    return MllamaConfig(text_config=text, vision_config=tower, image_token_index=IMAGE)


def inputs(family: str) -> dict[str, torch.Tensor]:
    """Two rows of 60 tokens, the second padded; each shows an image of its own (Mllama: beside the text)."""
    ids, mask = prompt(2, 60)
    pixels = torch.randn((2, 3, 16, 16), generator=torch.Generator().manual_seed(5))
    if family == "mllama":
        ids[:, 20] = IMAGE
        ones = torch.ones(2, 1, dtype=torch.long)
        seen = torch.ones(2, 60, 1, 1, dtype=torch.long)
        seen[:, :20] = 0
        return {
            "input_ids": ids, "attention_mask": mask, "pixel_values": pixels[:, None, None],
            "aspect_ratio_ids": ones, "aspect_ratio_mask": ones[:, :, None], "cross_attention_mask": seen,
        }  # fmt: skip
    ids[:, 19], ids[:, 20:24] = START, IMAGE
    picture = (ids == IMAGE).long()
    found = {"input_ids": ids, "attention_mask": mask}
    if family == "llava":
        return {**found, "pixel_values": pixels}
    if family == "gemma3":
        return {**found, "pixel_values": pixels.repeat(1, 1, 2, 2), "token_type_ids": picture}
    patches = torch.randn((2 * 16, 3 * 2 * 4 * 4), generator=torch.Generator().manual_seed(5))
    grid = torch.tensor([[1, 4, 4]] * 2)
    return {**found, "pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": picture}


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "gemma3", "mllama"])
def test_an_image_is_seen_as_with_eager_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = (
        tiny_model(config(family), attention, kind=AutoModelForImageTextToText)
        for attention in ("eager", "hybrid_sparse")
    )
    given = {name: x.to(ours.device) for name, x in inputs(family).items()}
    knobs: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    knobs |= {"output_logits": True}

    def run(model: PreTrainedModel, cache: Any, **changed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = model.generate(**{**given, **changed}, past_key_values=cache, **knobs)
        return out.sequences, torch.stack(out.logits, 1)

    tokens, logits = run(eager, DynamicCache(config=eager.config))
    scale = logits.abs().max()
    other = run(eager, DynamicCache(config=eager.config), pixel_values=-given["pixel_values"])[1]
    assert (other[:, 0] - logits[:, 0]).abs().max() > 1e-2 * scale  # the image matters
    monkeypatch.setattr(HybridLayer, "gather", lambda self: pytest.fail("keys or values were read"))  # Mllama asks
    ahead = {"budget": 256, "sinks": 8, "recent": 0, "tier": "split", "resident": 32, "lookahead": "select"}
    for policy, knobs_of_it in (("full", {}), ("scout", ahead)):
        cache = HybridCache(ours, policy, block_size=8, prefill_tile=16, **knobs_of_it)
        got = run(ours, cache)
        assert torch.equal(got[0], tokens)
        assert (got[1] - logits).abs().max() <= 1e-5 * scale
        held = [row["layer"] for row in cache.stats().as_dict()["layers"] if row["host_bytes"]]
        assert held == {"gemma3": [1, 3], "mllama": [0, 2, 3]}.get(family, [0, 1, 2, 3])
    monkeypatch.undo()
    keys = [layer.keys for layer in cache.layers if isinstance(layer, HybridLayer)]
    assert all(x.device == ours.device and x.shape[2] == 71 for x in keys)  # between forwards they are there
