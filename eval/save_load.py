"""A prompt's cache saved, loaded and forked: seconds against the prefill that they spare, bytes, and whether the
continuations are the same bit by bit.

    python eval/save_load.py
    python eval/save_load.py --rows scout,scout-int8 --kind code --tokens 4k

A row's prompt is taken in, in chunks, and its cache saved. Before each load, with checksums compared and without, the
system is asked to drop the file from its memory. What is loaded goes on greedily beside a fork of the cache that was
saved. Then three more forks take in a question each and answer; the blocks of all four caches are counted, shared ones
once.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_offload
from common import (
    RESULTS,
    DtypeOption,
    ModelOption,
    OutOption,
    ProseOption,
    Row,
    ThreadsOption,
    TierOption,
    choose,
    command,
    kinds_of,
    load,
    numbers,
    prefill,
    show,
    synchronize,
    text_of,
    window,
    write_csv,
)
from hf_offload.cache.layer import HybridLayer

QUESTIONS = (
    "\n\nQuestion: What is this text about?\nAnswer:",
    "\n\nQuestion: Which names does the text mention?\nAnswer:",
    "\n\nQuestion: How does the text end?\nAnswer:",
)


@contextmanager
def timed(times: list[float]) -> Iterator[None]:
    """Append the seconds that the inside takes."""
    synchronize()
    start = time.perf_counter()
    yield
    synchronize()
    times.append(time.perf_counter() - start)


def make_rows(tier: str | None) -> list[Row]:
    """The rows to choose from."""
    memory = {} if tier is None else {"tier": tier}
    return [
        Row("scout", "scout", {"budget": 1024} | memory),
        Row("scout-int8", "scout", {"budget": 1024, "host_dtype": "int8"} | memory),
        Row("full", "full", memory),
    ]


def go_on(model: PreTrainedModel, cache: Any, token: torch.Tensor, steps: int) -> tuple[torch.Tensor, list[float]]:
    """Greedy steps after a token `[1, 1]`: their logits `[steps, V]`, and the seconds that each took."""
    logits, times = [], []
    for _ in range(steps):
        with timed(times):
            logits.append(model(token, past_key_values=cache).logits[:, -1])
        token = logits[-1].argmax(-1, keepdim=True)
    return torch.cat(logits), times


def layers_of(cache: Any) -> list[HybridLayer]:
    """The layers of a cache that hold blocks."""
    return [layer for layer in cache.layers if isinstance(layer, HybridLayer)]


def pool_bytes(caches: list[Any]) -> int:
    """Bytes of the blocks in use by some caches; pools and blocks that they share count once."""
    pools = {id(layer.store.pool): layer.store.pool for cache in caches for layer in layers_of(cache)}
    return sum(pool.used_bytes for pool in pools.values())


def forget_file(path: Path) -> None:
    """Ask the system to drop a file from its memory, so that reading it means reading the disk."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: Any, steps: int
) -> tuple[float, list[Any]]:
    """Fork a cache for every question and answer it: bytes held by all against one, and the forks."""
    one, forks = pool_bytes([cache]), []
    for question in QUESTIONS:
        ids = tokenizer(question, return_tensors="pt", add_special_tokens=False)["input_ids"].to(model.device)
        forks.append(cache.fork())
        token = prefill(model, forks[-1], ids).argmax(-1, keepdim=True)
        go_on(model, forks[-1], token, steps)
    return pool_bytes([cache, *forks]) / one, forks


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: Row, ids: torch.Tensor, steps: int, repeats: int
) -> dict[str, Any]:
    """Everything of one row."""
    cache = row.make_cache(model)
    before, saving, loading, mapping = [], [], [], []
    with timed(before):
        token = prefill(model, cache, ids, chunk=2048).argmax(-1, keepdim=True)
    want, warm = go_on(model, cache.fork(), token, steps)
    same = True
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "cache"
        for _ in range(repeats):
            with timed(saving):
                cache.save(folder)
            for times, verify in ((mapping, False), (loading, True)):
                forget_file(folder / "blocks.safetensors")
                with timed(times):
                    loaded = hf_offload.HybridCache.load(folder, model, verify=verify)
                got, cold = go_on(model, loaded, token, steps)
                same = same and torch.equal(got, want)
        size = sum(path.stat().st_size for path in folder.iterdir())
        del loaded
    ratio, _ = answers(model, tokenizer, cache, steps)
    save_s, load_s = float(np.median(saving)), float(np.median(loading))
    return {
        "row": row.name, "tokens": ids.shape[1], "prefill_s": before[0], "save_s": save_s, "load_s": load_s,
        "speedup": before[0] / (save_s + load_s), "unverified_load_s": float(np.median(mapping)), "identical": same,
        "disk_bytes": size,
        "first_step_ms": 1000 * cold[0], "fork_first_step_ms": 1000 * warm[0],
        "step_ms": 1000 * float(np.median(cold[1:])), "fork_bytes": ratio,
    }  # fmt: skip


def main(
    tokens: Annotated[str, typer.Option(help="Tokens of the prompt; k is 1,024.")] = "8k",
    rows: Annotated[
        str, typer.Option(help="By name, comma-separated; a wrong one lists them.")
    ] = "scout,scout-int8,full",
    kind: Annotated[str, typer.Option(help="prose, documentation or code.")] = "documentation",
    prose: ProseOption = None,
    steps: Annotated[int, typer.Option(min=2, help="Greedy steps of each continuation and answer.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Times that a cache is saved and loaded.")] = 3,
    tier: TierOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = "bfloat16",
    threads: ThreadsOption = 0,
    out: OutOption = RESULTS / "save_load.csv",
) -> None:
    """Measure saving, loading and forking."""
    chosen, (name,), (length,) = choose(make_rows(tier), rows), kinds_of(kind), numbers(tokens)
    net, tokenizer = load(model, dtype, threads)
    ids = window(text_of(name, prose), tokenizer, 0, length).to(net.device)
    with torch.inference_mode():
        records = [measure(net, tokenizer, row, ids, steps, repeats) for row in tqdm(chosen, disable=None)]
    write_csv(out, [{"kind": name, "dtype": dtype, "tier": tier, "steps": steps, **record} for record in records])
    short = ("row", "prefill_s", "save_s", "load_s", "speedup", "unverified_load_s", "identical", "fork_bytes")
    title = f"{length} tokens ({name}); bytes held by a cache and three forks, against those of the cache"
    show(title, [{key: record[key] for key in short} for record in records])


if __name__ == "__main__":
    command(main)()
