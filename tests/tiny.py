"""Tiny random models of the tested families, with attention that is not uniform."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

import hf_offload

DEVICE = os.environ.get("HF_OFFLOAD_TEST_DEVICE", "cpu")
"""Where models and inputs lie: "cpu", or "cuda" for two real memories."""

FAST_LINEAR = os.environ.get("HF_OFFLOAD_TEST_FAST_LINEAR") == "1"
"""Whether `fast_linear` serves the layers of all models that are not stock."""

ONE_MEMORY: dict[str, Any] = {"tier": "one"} if DEVICE == "cpu" else {}
"""Options of a cache with one memory, where a model can have that."""

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _config(family: str) -> PreTrainedConfig:
    if family == "llama":
        return LlamaConfig(**SIZES, num_key_value_heads=2, head_dim=16)
    if family == "qwen3":
        return Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)
    if family == "gemma3":
        kinds = ["sliding_attention", "full_attention"] * 2
        return Gemma3TextConfig(
            **SIZES, num_key_value_heads=2, head_dim=16, sliding_window=8, layer_types=kinds, query_pre_attn_scalar=16
        )
    if family == "gpt_neox":
        return GPTNeoXConfig(**SIZES)
    if family == "opt":
        sizes = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
        return OPTConfig(**sizes, ffn_dim=96, word_embed_proj_dim=64, dropout=0.0, attention_dropout=0.0)
    raise ValueError(f"no tiny model of family {family!r}")


FAMILIES = ("llama", "qwen3", "gemma3", "gpt_neox", "opt")


def tiny_model(
    family: str | PreTrainedConfig, attn_implementation: Any = "hybrid_sparse", seed: int = 0, kind: Any = None
) -> Any:
    """A random model in eval mode; the same weights for the same seed, whatever the attention implementation.

    It is of a family or of a config, and of an auto class, which is `AutoModelForCausalLM` unless another is given.
    """
    config = _config(family) if isinstance(family, str) else copy.deepcopy(family)
    torch.manual_seed(seed)
    with torch.device("cpu"):
        model = (kind or AutoModelForCausalLM).from_config(
            config, attn_implementation=attn_implementation, dtype=torch.float32
        )
    if FAST_LINEAR and attn_implementation == "hybrid_sparse":
        hf_offload.fast_linear(model)
    return spread_weights(model)


def spread_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Weights under which attention is not uniform, in eval mode, with a generation that never stops by itself.

    The model ends up on `DEVICE`, with the weights that it has elsewhere.
    """
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.15)
            elif "norm" in name or "ln" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(DEVICE)


def in_memory(tier: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """Knobs of a policy that looks a layer ahead where there are two memories; with one that is refused."""
    one = tier == "one" and knobs.get("lookahead") in ("attend", "select")
    return knobs | {"lookahead": "off"} if one else knobs


def prompt(batch: int, length: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask `[batch, length]`; rows after the first are left padded by more and more."""
    generator = torch.Generator("cpu").manual_seed(seed)
    ids = torch.randint(3, 150, (batch, length), generator=generator, device="cpu")
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : row * (length // 4)] = 0
    return ids.masked_fill(mask == 0, 0).to(DEVICE), mask.to(DEVICE)


@torch.no_grad()
def forward(
    model: PreTrainedModel, cache: Any, ids: torch.Tensor, mask: torch.Tensor, first: int, stop: int
) -> torch.Tensor:
    """Logits `[B, stop - first, V]` of tokens that come at once, behind `first` that are cached."""
    mask = mask[:, :stop]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, first:]
    out = model(ids[:, first:stop], attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
    logits: torch.Tensor = out.logits
    return logits


def feed(
    model: PreTrainedModel, cache: Any, ids: torch.Tensor, mask: torch.Tensor, cuts: Iterable[int]
) -> list[torch.Tensor]:
    """Let a cache take in the tokens between cuts, piece by piece; the logits `[B, n, V]` of each."""
    return [forward(model, cache, ids, mask, first, stop) for first, stop in itertools.pairwise(cuts)]


def prefill(model: PreTrainedModel, cache: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Run a prompt and return the next token `[B, 1]`."""
    return forward(model, cache, ids, mask, 0, ids.shape[1])[:, -1].argmax(-1, keepdim=True)


def decode(
    model: PreTrainedModel, cache: Any, token: torch.Tensor, mask: torch.Tensor, steps: int = 22
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy tokens and logits after `token`; `mask` covers what is cached."""
    tokens, logits = [], []
    with torch.no_grad():
        for _ in range(steps):
            mask = torch.cat([mask, torch.ones_like(token)], 1)
            positions = mask.sum(-1, keepdim=True) - 1
            out = model(token, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
            logits.append(out.logits[:, -1])
            token = logits[-1].argmax(-1, keepdim=True)
            tokens.append(token)
    return torch.cat(tokens, 1), torch.stack(logits, 1)


def begin(
    model: PreTrainedModel, cache: Any, batch: int, length: int, steps: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take a prompt in and some steps; the token and the mask that follow."""
    ids, mask = prompt(batch, length)
    token = prefill(model, cache, ids, mask)
    if steps:
        token = decode(model, cache, token, mask, steps)[0][:, -1:]
        mask = torch.cat([mask, mask.new_ones(batch, steps)], 1)
    return token, mask
