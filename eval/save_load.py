"""What do saving, loading and forking a prompt's cache cost, beside the prefill that they spare?

    python eval/save_load.py
    python eval/save_load.py --rows scout-1024,scout-1024-int8 --kind code --tokens 4k

A row's prompt is taken in, in chunks, and its cache saved. Before each load, with checksums compared and without, the
system is asked to drop the file from its memory. What is loaded goes on greedily beside a fork of the cache that was
saved: whether the continuations are the same bit by bit. Then three more forks take in a question each and answer; the
blocks of all four caches are counted, shared ones once.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import common
import hf_offload
from inside import used_bytes

QUESTIONS = (
    "\n\nQuestion: What is this text about?\nAnswer:",
    "\n\nQuestion: Which names does the text mention?\nAnswer:",
    "\n\nQuestion: How does the text end?\nAnswer:",
)


def go_on(model: PreTrainedModel, cache: Any, token: torch.Tensor, steps: int) -> tuple[torch.Tensor, list[float]]:
    """Greedy steps after a token `[1, 1]`: their logits `[steps, V]`, and the seconds that each took."""
    logits, seconds = [], []
    for _ in range(steps):
        with common.clock(seconds):
            logits.append(model(token, past_key_values=cache).logits[:, -1])
        token = logits[-1].argmax(-1, keepdim=True)
    return torch.cat(logits), seconds


def forget_file(path: Path) -> None:
    """Ask the system to drop a file from its memory, so that reading it means reading the disk."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fork_bytes(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: Any, steps: int) -> float:
    """Fork a cache for every question and answer it: bytes held by all against one."""
    one, forks = used_bytes([cache]), []
    for question in QUESTIONS:
        ids = tokenizer(question, return_tensors="pt", add_special_tokens=False)["input_ids"].to(model.device)
        forks.append(cache.fork())
        go_on(model, forks[-1], common.prefill(model, forks[-1], ids).argmax(-1, keepdim=True), steps)
    return used_bytes([cache, *forks]) / one


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: common.Row, ids: torch.Tensor, steps: int,
    repeats: int,
) -> dict[str, Any]:  # fmt: skip
    """Everything of one row."""
    cache: Any = row.make_cache(model)
    seconds: dict[str, list[float]] = {"prefill_s": [], "save_s": [], "load_s": [], "unverified_load_s": []}
    with common.clock(seconds["prefill_s"]):
        token = common.prefill(model, cache, ids, chunk=2048).argmax(-1, keepdim=True)
    want, warm = go_on(model, cache.fork(), token, steps)
    same = True
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "cache"
        for _ in range(repeats):
            with common.clock(seconds["save_s"]):
                cache.save(folder)
            for name, verify in (("unverified_load_s", False), ("load_s", True)):
                forget_file(folder / "blocks.safetensors")
                with common.clock(seconds[name]):
                    loaded = hf_offload.HybridCache.load(folder, model, verify=verify)
                got, cold = go_on(model, loaded, token, steps)
                same = same and torch.equal(got, want)
        size = sum(path.stat().st_size for path in folder.iterdir())
        del loaded
    found = {name: float(np.median(values)) for name, values in seconds.items()}
    return {
        "row": row.name, "tokens": ids.shape[1], **found,
        "speedup": found["prefill_s"] / (found["save_s"] + found["load_s"]), "identical": same, "disk_bytes": size,
        "first_step_ms": 1000 * cold[0], "fork_first_step_ms": 1000 * warm[0],
        "step_ms": 1000 * float(np.median(cold[1:])), "fork_bytes": fork_bytes(model, tokenizer, cache, steps),
    }  # fmt: skip


def main(
    tokens: Annotated[str, typer.Option(help="Tokens of the prompt; k is 1,024.")] = "8k",
    rows: common.RowsOption = ["scout-1024,scout-1024-int8,full"],  # noqa: B006
    kind: common.KindOption = "documentation",
    steps: Annotated[int, typer.Option(min=2, help="Greedy steps of each continuation and answer.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Times that a cache is saved and loaded.")] = 3,
    tier: common.TierOption = None,
    *,
    setting: common.TextSetting,
) -> None:
    """Measure saving, loading and forking."""
    chosen, (text,), (length,) = common.rows_of(rows, tier), common.kinds_of(kind), common.numbers(tokens)
    model, tokenizer = setting.load()
    ids = setting.window(tokenizer, text, 0, length).to(model.device)
    with torch.inference_mode():
        records = [measure(model, tokenizer, row, ids, steps, repeats) for row in tqdm(chosen, disable=None)]
    setting.write([record | {"kind": text, "tier": tier, "steps": steps} for record in records])
    columns = ("row", "prefill_s", "save_s", "load_s", "speedup", "unverified_load_s", "identical", "fork_bytes")
    common.show("bytes held by a cache and three forks, against those of the cache", records, columns)


if __name__ == "__main__":
    common.command(main)()
