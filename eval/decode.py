"""Time per token at several context lengths, against Transformers' own caches, in one run.

    python eval/decode.py
    python eval/decode.py --contexts 2k,8k --rows dynamic,scout-2048 --threads 2

Each row's cache is filled once per context. Transformers' own caches are filled with random keys and values, on whose
content their speed does not depend; a sparse cache reads a real text, in chunks, so that its choice of blocks is a real
one (beyond the model's trained context the text has lost its order, not its size). Then the rows take turns for some
rounds: two steps of warm-up, then the steps that count.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm
from transformers import Cache, PreTrainedModel

import hf_offload
from common import (
    RESULTS,
    DtypeOption,
    ModelOption,
    OutOption,
    Row,
    ThreadsOption,
    TierOption,
    choose,
    command,
    load,
    numbers,
    percentiles,
    prefill,
    show,
    synchronize,
    text_of,
    window,
    write_csv,
)
from turns import turn

WARM_UP = 2
ROW_OFFSET = 997  # tokens from where one row of a batch begins in the text to where the next does


def make_rows(length: int, tier: str | None) -> list[Row]:
    """The rows to choose from; the static cache holds `length` tokens."""
    memory = {} if tier is None else {"tier": tier}
    return [
        Row("dynamic", "dynamic"),
        Row("static", "static", {"max_cache_len": length}),
        *(Row(f"scout-{budget}", "scout", {"budget": budget} | memory) for budget in (1024, 2048)),
        Row("scout-1024-int8", "scout", {"budget": 1024, "host_dtype": "int8"} | memory),
        Row("full", "full", memory),
        Row("full-int8", "full", {"host_dtype": "int8"} | memory),
        Row("hgca", "hgca", memory),
        Row("fixed_hybrid", "fixed_hybrid", memory),
        # Needs no trained predictor; what a network takes is not in it (eval/predictor_share.py has that).
        Row("fluxion", "fluxion", {"predictor": hf_offload.ConstantPredictor(budget0=0.05)} | memory),
    ]


def fill(model: PreTrainedModel, row: Row, ids: torch.Tensor) -> Cache:
    """Make a row's cache and fill it with the contexts `[B, N]`."""
    cache = row.make_cache(model)
    if row.policy not in ("dynamic", "static"):
        prefill(model, cache, ids, chunk=2048)
        return cache
    # One real token first tells the shapes (and lets the layers make their buffers).
    model(ids[:, :1], past_key_values=cache)
    for index, layer in enumerate(cache.layers):
        heads, size = layer.keys.shape[1], layer.keys.shape[3]
        shape = (ids.shape[0], heads, ids.shape[1] - 1, size)
        cache.update(
            torch.randn(shape, dtype=model.dtype, device=model.device),
            torch.randn(shape, dtype=model.dtype, device=model.device),
            index,
        )
    return cache


def time_steps(model: PreTrainedModel, row: Row, cache: Cache, ids: torch.Tensor, steps: int) -> list[float]:
    """Decode and time each step after the warm-up; returns milliseconds."""
    row.activate(model)
    times = []
    for token in ids[:, : WARM_UP + steps].unbind(1):
        synchronize()
        start = time.perf_counter()
        model(token[:, None], past_key_values=cache)
        synchronize()
        times.append((time.perf_counter() - start) * 1000)
    return times[WARM_UP:]


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the median time per token, with its 20th and 80th percentile, over the context length."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name in dict.fromkeys(r["row"] for r in records):
        mine = [r for r in records if r["row"] == name]
        contexts, medians = [r["context"] for r in mine], [r["p50"] for r in mine]
        axes.plot(contexts, medians, marker="o", label=name)
        axes.fill_between(contexts, [r["p20"] for r in mine], [r["p80"] for r in mine], alpha=0.2)
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="ms per token")
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def main(
    contexts: Annotated[str, typer.Option(help="Context lengths, comma-separated; k is 1,024.")] = "128,2k,8k,32k",
    rows: Annotated[str, typer.Option(help="By name, comma-separated; a wrong one lists them.")] = (
        "dynamic,static,scout-1024"
    ),
    batch: Annotated[int, typer.Option(min=1, help="Rows that are decoded at once.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count, per round.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which the rows take turns.")] = 3,
    tier: TierOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = "bfloat16",
    threads: ThreadsOption = 0,
    out: OutOption = RESULTS / "decode.csv",
) -> None:
    """Measure the time per token."""
    lengths, round_steps = sorted(numbers(contexts)), WARM_UP + steps
    choose(make_rows(0, tier), rows)  # a wrong name is reported before anything is loaded
    language_model, tokenizer = load(model, dtype, threads)
    starts = [ROW_OFFSET * row for row in range(batch)]
    ids = torch.cat([window(text_of("code"), tokenizer, start, max(lengths) + round_steps) for start in starts])
    ids = ids.to(language_model.device)
    records: list[dict[str, Any]] = []
    bare: float | None = None  # a step without context to speak of, which no cache can beat
    with torch.inference_mode(), tqdm(total=len(lengths) * rounds) as progress:
        for length in lengths:
            progress.set_description(f"{length} tokens: filling")
            chosen = choose(make_rows(length + rounds * round_steps, tier), rows)
            caches = {row.name: fill(language_model, row, ids[:, :length]) for row in chosen}
            times: dict[str, list[float]] = {row.name: [] for row in chosen}
            progress.set_description(f"{length} tokens")
            for _ in range(rounds):
                turn()
                for row in chosen:
                    tokens = ids[:, length : length + round_steps]
                    times[row.name] += time_steps(language_model, row, caches[row.name], tokens, steps)
                progress.update()
            base = percentiles(times["dynamic"])["p50"] if "dynamic" in times else None
            if length == min(lengths):
                bare = base
            for row in chosen:
                summary = percentiles(times[row.name])
                ratio = None if base is None else base / summary["p50"]
                beyond = None if bare is None else summary["p50"] - bare
                size = {"batch": batch, "steps": steps * rounds, "dtype": dtype, "tier": tier}
                records.append(
                    {"context": length, "row": row.name, **summary, "speedup": ratio, "beyond_bare": beyond, **size}
                )
            del caches
            gc.collect()
    write_csv(out, records)
    plot(records, out.with_suffix(".png"))
    title = "ms per token; speedup against DynamicCache; ms beyond DynamicCache at the shortest context"
    show(title, [dict(list(r.items())[:7]) for r in records])


if __name__ == "__main__":
    command(main)()
