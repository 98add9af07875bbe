"""Memory over thousands of decode steps: what the process, the pools and Python hold, sampled as the steps go by.

    python eval/soak.py
    python eval/soak.py --steps 2000 --rows scout-split,full-one --model smollm2

A chat that never ends: tokens are decoded one by one; from time to time a turn of several tokens comes, and whenever
the context has reached its bound most of it is dropped again. Every row runs in a process of its own, since what an
earlier one left in the allocator would blur the curve. The slope is that of a straight line through the samples of the
second half.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import torch
import typer
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import hf_offload
from common import RESULTS, OutOption, Row, ThreadsOption, choose, command, load, show, write_csv
from hf_offload.attention.hooks import hybrid_layers

TURN_EVERY, TURN_TOKENS = 97, 29
POLICIES: dict[str, dict[str, Any]] = {"scout": {"budget": 256, "recent": 64}, "window": {"budget": 256}, "full": {}}
TIERS: dict[str, dict[str, Any]] = {"one": {"tier": "one"}, "split": {"tier": "split", "resident": 256}}
ROWS = [Row(f"{name}-{tier}", name, knobs | TIERS[tier]) for name, knobs in POLICIES.items() for tier in TIERS]


def tiny() -> PreTrainedModel:
    """A random Llama of two layers: the memory of a cache does not depend on what a model has learnt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=1 << 16,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="hybrid_sparse").eval()


def sample(cache: hf_offload.HybridCache, step: int, start: float) -> dict[str, Any]:
    """What is held now, in bytes and objects."""
    stats = cache.stats().as_dict()
    pools = [layer.store.pool for layer in hybrid_layers(cache) if layer.store is not None]
    slabs = sum(slab.nbytes for pool in pools for slab in (*pool.slabs, *pool.packed_slabs))
    gc.collect()
    return {
        "step": step,
        "seconds": time.perf_counter() - start,
        "context": cache.get_seq_length(),
        "rss_bytes": psutil.Process().memory_info().rss,
        "slab_bytes": slabs,
        "host_bytes": stats["host_bytes"],
        "digest_bytes": stats["digest_bytes"],
        "resident_bytes": stats["resident_bytes"],
        "objects": len(gc.get_objects()),
    }


@torch.inference_mode()
def soak(row: Row, model_name: str, steps: int, context: int, every: int, threads: int) -> list[dict[str, Any]]:
    """Run one row; returns its samples."""
    if threads:
        torch.set_num_threads(threads)
    model = (
        tiny() if model_name == "tiny" else load(None if model_name == "smollm2" else model_name, "bf16", threads)[0]
    )
    cache, chance = row.make_cache(model), random.Random(0)
    assert isinstance(cache, hf_offload.HybridCache)
    vocabulary, start, samples = model.config.vocab_size, time.perf_counter(), []

    def turn(tokens: int) -> torch.Tensor:
        ids = torch.tensor([[chance.randrange(3, vocabulary) for _ in range(tokens)]])
        return model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)

    token = turn(context // 4)
    for step in tqdm(range(1, steps + 1), desc=row.name, unit="step"):
        if cache.get_seq_length() >= context:
            cache.crop(context // 4 - cache.get_seq_length())
        if step % TURN_EVERY == 0:
            token = turn(TURN_TOKENS)
        token = model(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        if step % every == 0:
            samples.append({"row": row.name, "model": model_name} | sample(cache, step, start))
    return samples


def slope(samples: list[dict[str, Any]], key: str) -> float:
    """Growth a step, of a straight line through the second half of the samples."""
    half = samples[len(samples) // 2 :]
    return float(np.polyfit([s["step"] for s in half], [s[key] for s in half], 1)[0])


def plot(samples: list[dict[str, Any]], path: Path) -> None:
    """Draw what each row's process and pools hold, over the steps."""
    import matplotlib.pyplot as plt

    figure, (process, pools, objects) = plt.subplots(3, figsize=(7, 8), sharex=True, layout="constrained")
    for name in dict.fromkeys(s["row"] for s in samples):
        mine = [s for s in samples if s["row"] == name]
        steps = [s["step"] for s in mine]
        grown = slope(mine, "rss_bytes")
        process.plot(steps, [s["rss_bytes"] / 2**20 for s in mine], label=f"{name}: {grown:+.0f} bytes a step")
        (line,) = pools.plot(steps, [s["slab_bytes"] / 2**20 for s in mine], label=f"{name}: slabs")
        used = [s["host_bytes"] / 2**20 for s in mine]
        pools.plot(steps, used, color=line.get_color(), linewidth=0.5, label=f"{name}: in use")
        objects.plot(steps, [s["objects"] / 1000 for s in mine], label=name)
    for axes, title in (
        (process, "process, MiB"),
        (pools, "blocks on the host, MiB"),
        (objects, "Python objects, thousands"),
    ):
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    objects.set_xlabel("decode steps")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(
    rows: Annotated[str, typer.Option(help=f"Which rows to run, of {', '.join(row.name for row in ROWS)}.")] = (
        "scout-one,scout-split"
    ),
    model: Annotated[str, typer.Option(help='"tiny" (random weights), "smollm2", or a path or name.')] = "tiny",
    steps: Annotated[int, typer.Option(help="Decode steps a row.", min=8)] = 10_000,
    context: Annotated[int, typer.Option(help="Tokens at which the context is cropped to a quarter.", min=512)] = 2048,
    every: Annotated[int, typer.Option(help="Steps between two samples.", min=1)] = 50,
    threads: ThreadsOption = 0,
    out: OutOption = RESULTS / "soak.csv",
) -> None:
    """Measure what stays in memory over thousands of decode steps."""
    chosen = choose(ROWS, rows)
    samples: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        for row in chosen:
            samples += processes.apply(soak, (row, model, steps, context, every, threads))
    write_csv(out, samples)
    plot(samples, out.with_suffix(".png"))
    table = []
    for row in chosen:
        mine = [s for s in samples if s["row"] == row.name]
        table.append(
            {"row": row.name, "steps": steps, "RSS MiB at the end": mine[-1]["rss_bytes"] / 2**20}
            | {f"{name} a step": slope(mine, key) for name, key in (("RSS bytes", "rss_bytes"), ("objects", "objects"))}
        )
    show(f"Growth a step in the second half of {steps:,} steps, context up to {context:,} tokens", table)


if __name__ == "__main__":
    command(main)()
