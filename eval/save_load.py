"""What do saving, loading and forking a prompt's cache cost, beside the prefill that they spare?

    python eval/save_load.py --tokens 8k,32k
    python eval/save_load.py --rows scout-1024,scout-1024-int8 --kind code --tokens 4k

A row's prompt is taken in, in chunks, and its cache saved. Before each load, with checksums compared and without, the
system is asked to drop the file from its memory. What is loaded goes on with the text beside a fork of the cache that
was saved: whether the logits are the same bit by bit. Then three more forks take in a question each, and tokens for an
answer; the blocks of all four caches are counted, shared ones once.

Last, a chat: a `PrefixStore` reads text and question and answers, and the seconds to the first token of a second turn
are measured: from memory, from disk with the files in the system's page cache and without, and with no store.
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
from hf_offload.model.hooks import cache_argument
from records import show

QUESTIONS = (
    "\n\nQuestion: What is this text about?\nAnswer:",
    "\n\nQuestion: Which names does the text mention?\nAnswer:",
    "\n\nQuestion: How does the text end?\nAnswer:",
)
TURNS = ("turn_none_s", "turn_ram_s", "turn_disk_s", "turn_cold_disk_s")


def forget_files(folder: Path) -> None:
    """Ask the system to drop a folder's files from its memory, so that reading them means reading the disk; Linux."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def turns(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: common.Row, ids: torch.Tensor, repeats: int
) -> dict[str, float]:
    """Seconds to the first token of a second turn, by where the first one is found, and bytes of the store."""
    seconds: dict[str, list[float]] = {name: [] for name in TURNS}

    def opened(min_seconds: float) -> hf_offload.PrefixStore:
        return hf_offload.PrefixStore(scratch, model, row.policy, min_seconds=min_seconds, **row.options)

    def and_then(ids: torch.Tensor, text: str) -> torch.Tensor:
        return torch.cat([ids, common.ids_of(tokenizer, text, ids.device)], 1)

    def ask(name: str, store: hf_offload.PrefixStore, prompt: torch.Tensor, source: str | None) -> None:
        with common.clock(seconds[name]), store.open(prompt) as found:
            assert found.source == source
            if source is None:
                found.read(chunk=2048)
            given = cache_argument(model, found.cache)
            model.generate(prompt, attention_mask=torch.ones_like(prompt), **given, max_new_tokens=1, pad_token_id=0)

    first = and_then(ids, QUESTIONS[0])
    with tempfile.TemporaryDirectory() as scratch:
        with opened(0) as store:
            ask("turn_none_s", store, first, None)
        for turn in range(repeats):
            with opened(1e9) as store:  # saves nothing more
                ask("turn_disk_s", store, and_then(first, f"{QUESTIONS[1]} {turn}"), "disk")
                ask("turn_ram_s", store, and_then(first, f"{QUESTIONS[2]} {turn}"), "ram")
            forget_files(Path(scratch))
            with opened(1e9) as store:
                ask("turn_cold_disk_s", store, and_then(first, f"{QUESTIONS[1]} cold {turn}"), "disk")
        size = store.disk_bytes
    return {name: float(np.median(values)) for name, values in seconds.items()} | {"store_bytes": size}


def fork_bytes(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cache: Any, answer: torch.Tensor) -> float:
    """Fork a cache for every question with its answer `[1, N]`: bytes held by all, shared ones once, against one."""
    one = total = cache.stats().as_dict()["host_bytes"]
    forks = [cache.fork() for _ in QUESTIONS]
    for question, fork in zip(QUESTIONS, forks, strict=True):
        common.prefill(model, fork, common.ids_of(tokenizer, question, model.device))
        common.decode(model, fork, answer)
        told = fork.stats().as_dict()
        total += told["host_bytes"] - told["shared_bytes"]
    return total / one


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: common.Row, ids: torch.Tensor, steps: int,
    repeats: int,
) -> dict[str, Any]:  # fmt: skip
    """Everything of one row, with a prompt and tokens behind it, `ids`."""
    ids, answer = ids[:, :-steps], ids[:, -steps:]
    cache: Any = row.make_cache(model)
    seconds: dict[str, list[float]] = {"prefill_s": [], "save_s": [], "load_s": [], "unverified_load_s": []}
    with common.clock(seconds["prefill_s"]):
        common.prefill(model, cache, ids, chunk=2048)
    warm, want = common.decode(model, cache.fork(), answer)
    same = True
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "cache"
        for _ in range(repeats):
            with common.clock(seconds["save_s"]):
                cache.save(folder)
            for name, verify in (("unverified_load_s", False), ("load_s", True)):
                loaded = None  # what is mapped cannot be forgotten
                forget_files(folder)
                with common.clock(seconds[name]):
                    loaded = hf_offload.HybridCache.load(folder, model, verify=verify)
                cold, got = common.decode(model, loaded, answer)
                same = same and torch.equal(got, want)
        size = sum(path.stat().st_size for path in folder.iterdir())
        loaded = None
    found = {name: float(np.median(values)) for name, values in seconds.items()}
    return {
        "row": row.name, "tokens": ids.shape[1], **found,
        "speedup": found["prefill_s"] / (found["save_s"] + found["load_s"]), "identical": same, "disk_bytes": size,
        "first_step_ms": cold[0], "fork_first_step_ms": warm[0],
        "step_ms": float(np.median(cold[1:])), "fork_bytes": fork_bytes(model, tokenizer, cache, answer),
        **turns(model, tokenizer, row, ids, repeats),
    }  # fmt: skip


def main(
    tokens: Annotated[str, typer.Option(help="Tokens of the prompts; k is 1,024.")] = "8k",
    rows: common.RowsOption = ["scout-1024,scout-1024-int8,full"],  # noqa: B006
    kind: common.KindOption = "documentation",
    steps: Annotated[int, typer.Option(min=2, help="Steps of each continuation and answer.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Times that a cache is saved and loaded.")] = 3,
    tier: common.TierOption = None,
    *,
    setting: common.TextSetting,
) -> None:
    """Measure saving, loading and forking."""
    chosen, (text,), lengths = common.rows_of(rows, tier), common.kinds_of(kind), common.numbers(tokens)
    model, tokenizer = setting.load()
    records = []
    with torch.inference_mode():
        for length in lengths:
            ids = setting.window(tokenizer, text, 0, length + steps).to(model.device)
            records += [measure(model, tokenizer, row, ids, steps, repeats) for row in tqdm(chosen, disable=None)]
    setting.write([record | {"kind": text, "tier": tier, "steps": steps} for record in records])
    columns = ("row", "tokens", "prefill_s", "save_s", "load_s", "speedup", "identical", "fork_bytes", *TURNS)
    show("seconds; bytes held by a cache and three forks, against those of the cache", records, columns)


if __name__ == "__main__":
    common.command(main)()
