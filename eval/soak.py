"""What stays in memory over thousands of decode steps: in the process, in the pools, in Python?

    python eval/soak.py
    python eval/soak.py --steps 2000 --rows scout:budget=256,tier=split,resident=256,full

A chat that never ends: tokens are decoded one by one; from time to time a turn of several tokens comes, and whenever
the context has reached its bound most of it is dropped again. Every row runs in a process of its own, since what an
earlier one left in the allocator would blur the curve. The slope is that of a straight line through the samples of the
second half. The model is a random Llama of two layers: a cache's memory does not depend on what a model has learnt.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import time
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from tqdm.auto import tqdm

import common
from inside import slab_bytes
from records import RESULTS, show, write_csv

TURN_EVERY, TURN_TOKENS = 97, 29
SCOUT = {"budget": 256, "recent": 64}
ROWS = {
    "scout-one": common.Row("scout-one", "scout", SCOUT | {"tier": "one"}),
    "scout-split": common.Row("scout-split", "scout", SCOUT | {"tier": "split", "resident": 256}),
}


@torch.inference_mode()
def soak(row: common.Row, steps: int, context: int, every: int) -> list[dict[str, Any]]:
    """Run one row; returns its samples, in bytes and objects."""
    model = common.random_llama(vocab_size=256, num_hidden_layers=2)
    cache, chance = row.make_cache(model), random.Random(0)
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
            stats = cache.stats().as_dict()
            gc.collect()
            held = {name: stats[name] for name in ("host_bytes", "digest_bytes", "resident_bytes")}
            told = {"row": row.name, "model": "tiny", "step": step, "seconds": time.perf_counter() - start}
            told |= {"context": cache.get_seq_length(), "rss_bytes": common.resident_bytes()}
            samples.append(told | {"slab_bytes": slab_bytes(cache), **held, "objects": len(gc.get_objects())})
    return samples


def main(
    rows: common.RowsOption = ["scout-one,scout-split"],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Decode steps a row.", min=8)] = 10_000,
    context: Annotated[int, typer.Option(help="Tokens at which the context is cropped to a quarter.", min=512)] = 2048,
    every: Annotated[int, typer.Option(help="Steps between two samples.", min=1)] = 50,
    out: common.OutOption = RESULTS / "soak.csv",
) -> None:
    """Measure what stays in memory over thousands of decode steps."""
    samples, table = [], []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        for row in common.rows_of(rows, known=ROWS):
            mine = processes.apply(soak, (row, steps, context, every))
            samples += mine
            table.append({"row": row.name, "MiB at the end": mine[-1]["rss_bytes"] / 2**20})
            half = pd.DataFrame(mine[len(mine) // 2 :])
            for what in ("rss_bytes", "objects"):
                table[-1][f"{what} a step"] = float(np.polyfit(half.step, half[what], 1)[0])
    write_csv(out, samples)
    show(f"Growth in the second half of {steps:,} steps, context up to {context:,} tokens", table)


if __name__ == "__main__":
    common.command(main)()
