"""Helpers for tests of CUDA graphs on CPU tensors: caches whose steps are recorded and replayed, and their logits."""

from __future__ import annotations

from typing import Any

import torch
from recording import CpuRecorder
from transformers import PreTrainedModel

from hf_offload import HybridCache
from hf_offload.graph.cuda_graph import StepGraph, graphed

KNOBS: dict[str, Any] = {"block_size": 16, "resident": 96, "tier": "split"}
SCOUT: dict[str, Any] = {"budget": 96, "sinks": 16, "recent": 16}
SELECTED: dict[str, Any] = {**SCOUT, "attend_resident": "selected"}
"""What is attended does not depend on what is resident, which a step that is undone may change."""


def graph_cache(model: PreTrainedModel, policy: str, *, auto: bool = False, **knobs: Any) -> HybridCache:
    """A cache whose steps are replayed, as `cuda_graph=True` (with `auto`, `"auto"`) makes it on a GPU."""
    cache = HybridCache(model, policy, **(KNOBS | knobs))
    cache.graph, cache._graphed = StepGraph(cache, CpuRecorder, auto=auto), graphed(model)
    return cache


def logits_of(model: PreTrainedModel, cache: HybridCache, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Teacher-forced: a prompt of 150 tokens, the others one by one."""
    rows = []
    with torch.no_grad():
        model(ids[:, :150], attention_mask=mask[:, :150], past_key_values=cache)
        for i in range(150, ids.shape[1]):
            positions = mask[:, : i + 1].sum(-1, keepdim=True) - 1
            step = {"input_ids": ids[:, i : i + 1], "attention_mask": mask[:, : i + 1], "position_ids": positions}
            rows.append(model(**step, past_key_values=cache).logits)
    return torch.cat(rows, 1)
