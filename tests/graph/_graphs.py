"""Helpers for tests of CUDA graphs on CPU tensors: caches whose steps are recorded and replayed, and their logits."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from recording import CpuRecorder
from tiny import SIZES, prompt, spread_weights
from transformers import AutoConfig, AutoModelForCausalLM

from hf_offload import HybridCache
from hf_offload.graph.cuda_graph import StepGraph, graphed

KNOBS: dict[str, Any] = {"block_size": 16, "resident": 96, "tier": "split"}
SCOUT: dict[str, Any] = {"budget": 96, "sinks": 16, "recent": 16}
AHEAD: dict[str, Any] = {**SCOUT, "lookahead": "attend"}
SELECTED: dict[str, Any] = {**SCOUT, "attend_resident": "selected"}
"""What is attended does not depend on what is resident, which a step that is undone may change."""
DRAWN: dict[str, Any] = {"samples": 60, "sinks": 16, "recent": 16, "synchronous_layers": (0,)}

_WINDOWS: dict[str, Any] = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gemma3": ("gemma3_text", {**_WINDOWS, "query_pre_attn_scalar": 16}),
    "qwen2": ("qwen2", {"sliding_window": None}),
    "mistral": ("mistral", {"sliding_window": None}),
    "gemma2": ("gemma2", {**_WINDOWS, "query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {"sliding_window": None}),
    "gemma2-full": ("gemma2", {"layer_types": ["full_attention"] * 4, "query_pre_attn_scalar": 16}),
    "qwen3-windows": ("qwen3", {**_WINDOWS, "use_sliding_window": True}),
    "gpt_oss": ("gpt_oss", {**_WINDOWS, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "opt": ("opt", {"word_embed_proj_dim": 64}),
}


def model_of(family: str, **sizes: Any) -> Any:
    """A random model of four layers; those of some families have windows of 24 tokens."""
    torch.manual_seed(0)
    name, more = FAMILIES[family]
    config = AutoConfig.for_model(name, **SIZES | {"num_key_value_heads": 2, "head_dim": 16} | more | sizes)
    return spread_weights(AutoModelForCausalLM.from_config(config, attn_implementation="hybrid_sparse"))


def graph_cache(model: Any, policy: str, *, auto: bool = False, **knobs: Any) -> Any:
    """A cache whose steps are replayed, as `cuda_graph=True` (with `auto`, `"auto"`) makes it on a GPU."""
    cache = HybridCache(model, policy, **(KNOBS | knobs))
    cache.graph, cache._graphed = StepGraph(cache, CpuRecorder, auto=auto), graphed(model)
    return cache


def eager_cache(model: Any, policy: str, **knobs: Any) -> Any:
    return HybridCache(model, policy, **(KNOBS | knobs))


def run(
    model: Any, cache: Any, *turns: tuple[int, int], rows: int = 1, mask: torch.Tensor | None = None, **given: Any
) -> torch.Tensor:
    """Logits `[B, steps, V]` of single steps in turns `(tokens in all before the steps, steps)`.

    One row without a mask is called with its tokens alone; other rows as `generate` calls a model, ragged.
    """
    ids, whole = prompt(rows, 240)
    ids, masked = ids.clamp(min=3).to(model.device), rows > 1 or mask is not None
    mask = (whole if mask is None else mask).to(model.device)

    def forward(first: int, stop: int) -> torch.Tensor:
        seen = mask[:, :stop]
        positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, first:]
        more = {"attention_mask": seen, "position_ids": positions} if masked else {}
        found: torch.Tensor = model(ids[:, first:stop], past_key_values=cache, **more, **given).logits
        return found

    found = []
    with torch.no_grad():
        for length, count in turns:
            if length > cache.get_seq_length():
                found.append(forward(cache.get_seq_length(), length)[:, :0])
            found += [forward(i, i + 1) for i in range(length, length + count)]
    return torch.cat(found, 1)


@contextmanager
def told_of() -> Iterator[list[str]]:
    """The warnings of steps that run eagerly."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in found if warning.category is RuntimeWarning]


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often a step is recorded (`record`) and replayed (`replay`)."""
    counts: Counter[str] = Counter()
    record, replay = CpuRecorder.record, CpuRecorder.replay

    def recorded(self: CpuRecorder, step: Any) -> Any:
        counts["record"] += 1
        return record(self, step)

    def replayed(self: CpuRecorder) -> None:
        counts["replay"] += 1
        replay(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuRecorder, "record", recorded)
        patch.setattr(CpuRecorder, "replay", replayed)
        yield counts
