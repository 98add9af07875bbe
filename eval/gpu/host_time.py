"""What a replayed step costs the host: the parts of its way to the launch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from statistics import median
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from gpu import models
from gpu.options import Options
from gpu.supervise import NotApplicable
from hf_offload import HybridCache, Scout
from hf_offload.graph import cuda_graph
from hf_offload.graph.cuda_graph import StepGraph

MARKS = ("mask", "prepare", "copies", "launch", "returned", "done")
"""Ends of: reading the arguments, the mask among them; preparing the step; copying its inputs; `replay()`; the model's
forward; the step on the device."""
POLICIES: dict[str, Any] = {"full": "full", "scout": Scout(budget=256, recall=1)}
LAYERS, PROMPT, BLOCK = 36, 1024, 32
WARM_UP, STEPS = 4, 24  # within a block


def marked_step(graph: StepGraph, step: Callable[[], Any], synchronize: Callable[[], None]) -> dict[str, float]:
    """Seconds from the start of a replayed step to the end of each of its parts."""
    at: dict[str, float] = {}

    def around(function: Callable[..., Any], before: str | None, behind: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                at[before] = time.perf_counter()
            result = function(*args, **kwargs)
            at[behind] = time.perf_counter()
            return result

        return call

    parts = (
        (cuda_graph, "_split_arguments", None, "mask"),
        (StepGraph, "prepare", None, "prepare"),
        (type(graph._recorded), "replay", "copies", "launch"),
    )
    with ExitStack() as stack:
        for owner, name, before, behind in parts:
            stack.enter_context(mock.patch.object(owner, name, around(getattr(owner, name), before, behind)))
        start = time.perf_counter()
        step()
        at["returned"] = time.perf_counter()
        synchronize()
        at["done"] = time.perf_counter()
    return {name: at[name] - start for name in MARKS}


def replay(options: Options, policy: str) -> Iterator[dict[str, Any]]:
    """Microseconds from a step's start to each of `MARKS`, medians; a small model with as many layers as a large one.

    What the host does depends on the layers, not on their width.
    """
    if not options.on_gpu:
        raise NotApplicable("a CUDA graph needs a GPU")
    model = small_model(options)
    resident = 2 * PROMPT if policy == "full" else 256
    cache = HybridCache(model, POLICIES[policy], block_size=BLOCK, resident=resident, cuda_graph=True)
    yield {"variant": policy, "layers": LAYERS, **marks_of(options, model, cache)}
    cache.drain()


def small_model(options: Options) -> PreTrainedModel:
    """A narrow model with random weights and the layers of a large one."""
    torch.manual_seed(0)
    with torch.device(options.device):
        config = models.narrow_config(LAYERS)
        model = AutoModelForCausalLM.from_config(config, dtype=options.dtype, attn_implementation="hybrid_sparse")
    return model.eval()


def marks_of(options: Options, model: PreTrainedModel, cache: HybridCache, steps: int = STEPS) -> dict[str, float]:
    """Medians of the marks of replayed steps behind a prompt, microseconds; steps are called as `generate()` does."""
    length = PROMPT + 1  # the steps end within a block
    ids = torch.randint(model.config.vocab_size, (1, length + WARM_UP + steps), device=options.device)
    mask = torch.ones_like(ids)
    model(input_ids=ids[:, :length], attention_mask=mask[:, :length], past_key_values=cache)
    found = []
    for place in range(length, ids.shape[1]):

        def step(place: int = place) -> None:
            model(ids[:, place : place + 1], attention_mask=mask[:, : place + 1], past_key_values=cache)

        if place < length + WARM_UP:
            step()
            continue
        options.synchronize()
        assert cache.graph is not None
        found.append(marked_step(cache.graph, step, options.synchronize))
    return {name: 1e6 * median(each[name] for each in found) for name in MARKS}
