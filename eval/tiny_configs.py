"""Tiny configs for every model type: what most types name alike, and what some need besides."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

LAYERS = 4
WINDOW = 8

SIZES: tuple[tuple[Any, str], ...] = (
    (64, "hidden_size n_embd d_model emb_dim word_embed_proj_dim"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
    (4, "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads"),
    (16, "head_dim v_head_dim index_head_dim query_pre_attn_scalar kv_lora_rank"),
    (8, "qk_rope_head_dim qk_nope_head_dim hidden_size_per_layer_input"),
    (96, "intermediate_size n_inner ffn_dim ffn_hidden_size intermediate_size_mlp decoder_ffn_dim encoder_ffn_dim"),
    (512, "max_position_embeddings n_positions max_seq_len n_ctx"),
    (160, "vocab_size vocab_size_per_layer_input"),
    (WINDOW, "sliding_window attention_chunk_size index_topk"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads laurel_rank"),
    (2, "num_key_value_heads num_experts_per_tok moe_topk moe_k moe_top_k"),
    (32, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size"),
    (1, "n_group topk_group first_k_dense_replace n_shared_experts zero_expert_num moe_layer_start_index"),
    (2, "index_n_heads num_kv_shared_layers altup_num_inputs linear_num_key_heads mamba_n_groups n_groups"),
    (16, "linear_key_head_dim linear_value_head_dim"),
    (24, "q_lora_rank"),
    (0.0, "resid_pdrop embd_pdrop attn_pdrop layerdrop decoder_layerdrop dropout activation_dropout attention_dropout"),
    (0.0, "hidden_dropout embedding_dropout hidden_dropout_prob attention_probs_dropout_prob"),
    (True, "is_decoder use_cache"),
)
"""Sizes by the names that configs give them; a config takes those that it knows."""
COMMON = {name: value for value, names in SIZES for name in names.split()}
COMMON |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

ROTATION = {"rope_type": "default", "rope_theta": 10000.0}
"""Rotary positions. An `mrope_section` makes them three kinds: time, height, width, of 16 channels or half of them."""

SPECIAL: dict[str, dict[str, Any]] = {
    **{
        f"{name}_text": {"rope_parameters": ROTATION | {"mrope_section": [2, 3, 3]}}
        for name in ("glm4v", "glm_ocr", "paddleocr_vl", "qwen2_vl", "qwen2_5_vl", "qwen2_5_omni")
    },
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8},
    **{name: {"rotary_dim": 8} for name in ("codegen", "gptj")},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW,
        "rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), ROTATION),
    },
    "glm4v_moe_text": {"rope_parameters": ROTATION | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 16,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "prophetnet": {"num_encoder_layers": 2, "num_decoder_layers": LAYERS},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
        "indexer_compress_ratio": 4,
    },
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What single model types need besides."""


def causal_types() -> dict[str, str]:
    """Model types with a causal LM, and the name of its class."""
    return dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def multimodal_types() -> dict[str, str]:
    """Model types that generate text from images and text and are no causal LM themselves, and their classes."""
    named = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return {name: cls for name, cls in named.items() if name not in causal_types()}


def tiny_config(model_type: str, kind: type[PreTrainedConfig] | None = None) -> PreTrainedConfig:
    """A config of a few small layers, of each kind that the type mixes at least one that is full attention.

    `kind` is the config's class, for parts of models whose type names none.
    """
    kind, special = kind or CONFIG_MAPPING[model_type], SPECIAL.get(model_type, {})
    standard = kind()
    values = {name: value for name, value in COMMON.items() if _takes(standard, name)}
    for alias, name in kind.attribute_map.items():
        if name in values:
            values.pop(alias, None)
    if "kv_lora_rank" in values:  # latents: each head has its own keys, and head_dim is that of their rotary part
        values |= {"num_key_value_heads": values["num_attention_heads"], "head_dim": values["qk_rope_head_dim"]}
    if _takes(standard, "layer_types") and standard.layer_types:
        # All kinds that the type has, in turn, the rarest last; full attention twice.
        kinds = list(dict.fromkeys(standard.layer_types))
        values["layer_types"] = [kinds[index % len(kinds)] for index in range(LAYERS)]
    # A window for all layers would leave no full attention.
    if "sliding_window" in values and "sliding" not in str(values.get("layer_types")):
        fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}
        if standard.sliding_window is None or "None" in fields.get("sliding_window", ""):
            values["sliding_window"] = None
    for name in kind.sub_configs:
        part = getattr(standard, name, None)
        if part is not None and not isinstance(special.get(name), dict):
            values[name] = tiny_config(part.model_type, type(part))
    return kind(**values | special)


def _takes(config: PreTrainedConfig, name: str) -> bool:
    """Whether a config has a value of that name, and one that can be set."""
    try:
        setattr(config, name, getattr(config, name))
    except Exception:  # there is none, it is computed, or the config refuses to compute or set it
        return False
    return True
