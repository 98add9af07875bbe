"""The CPU's share of the budget, step by step, with and without recall (ScoutAttention, Figure 6 and Table 1).

    python eval/cpu_ratio.py
    python eval/cpu_ratio.py --kind prose --prose novel.txt --steps 512

A text is read as a prompt and its next tokens are fed one by one. The rows differ in recall and in how much stays
resident. "every-step-1" recalls at each step, with as many resident tokens as the budget: the CPU's share is then that
of the chosen blocks which the step before had not chosen: the floor under any recall interval.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tqdm import tqdm
from transformers import PreTrainedModel

from common import (
    RESULTS,
    DtypeOption,
    ModelOption,
    OutOption,
    ProseOption,
    Row,
    ThreadsOption,
    command,
    kinds_of,
    load,
    prefill,
    show,
    text_of,
    window,
    write_csv,
)
from hf_offload import Scout

START = 5_000  # token of the text where the window begins


def make_rows(budget: int) -> list[Row]:
    """With and without recall, with 1.5 budgets resident and with one, and the floor."""

    def row(name: str, recall: str | int, resident: int) -> Row:
        policy = Scout(budget=budget, lookahead="attend", recall=recall)
        return Row(name, policy, {"tier": "split", "resident": resident})

    return [
        row("recall-1.5", "adaptive", budget * 3 // 2),
        row("recall-1", "adaptive", budget),
        row("never-1.5", 0, budget * 3 // 2),
        row("never-1", 0, budget),
        row("every-step-1", 1, budget),
    ]


def decode(model: PreTrainedModel, row: Row, ids: torch.Tensor, steps: int) -> dict[str, Any]:
    """Feed the last `steps` tokens of ids `[1, N]` one by one; returns the statistics of the row's cache."""
    cache = row.make_cache(model)
    prefill(model, cache, ids[:, :-steps])
    for token in tqdm(ids[0, -steps:], desc=row.name, leave=False):
        model(token.view(1, 1), past_key_values=cache)
    return cache.stats().as_dict()


def plot(curves: dict[str, np.ndarray], budget: int, path: Path) -> None:
    """Draw the mean CPU ratio over the layers by decode step."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, curve in curves.items():
        axes.plot(100 * curve, label=name, linewidth=1)
    axes.set(xlabel="decode step", ylabel=f"computed on the CPU, % of {budget} tokens", ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def main(
    budget: Annotated[int, typer.Option(help="Tokens that each step attends.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Length of the window, decoded tokens included.")] = 6400,
    steps: Annotated[int, typer.Option(min=2, help="Tokens that are fed one by one.")] = 256,
    kind: Annotated[str, typer.Option(help="prose, documentation or code.")] = "documentation",
    prose: ProseOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = "bfloat16",
    threads: ThreadsOption = 0,
    out: OutOption = RESULTS / "cpu_ratio.csv",
) -> None:
    """Trace the CPU compute ratio with and without recall."""
    kinds_of(kind)
    rows = make_rows(budget)
    language_model, tokenizer = load(model, dtype, threads)
    ids = window(text_of(kind, prose), tokenizer, START, tokens).to(language_model.device)
    with torch.inference_mode():
        stats = {row.name: decode(language_model, row, ids, steps) for row in tqdm(rows)}

    key = {"kind": kind, "start": START, "tokens": tokens, "budget": budget}
    curves, by_step, by_layer = {}, [], []
    for name, all_layers in stats.items():
        layers = [layer for layer in all_layers["layers"] if layer["cpu_ratio_by_step"]]
        ratios = np.array([layer["cpu_ratio_by_step"] for layer in layers])  # [layers, steps]
        curves[name] = ratios.mean(0)
        by_step += [{"row": name, **key, "step": i, "cpu_ratio": float(v)} for i, v in enumerate(curves[name])]
        columns = ("layer", "cpu_ratio", "query_cosine", "selection_overlap", "recalls", "recall_interval")
        by_layer += [{"row": name, **key, **{c: layer[c] for c in columns}} for layer in layers]
    write_csv(out, by_step)
    write_csv(out.with_name(f"{out.stem}_layers.csv"), by_layer)
    plot(curves, budget, out.with_suffix(".png"))

    first = stats[rows[0].name]["layers"]
    show("predicted query, by layer", [{c: layer[c] for c in columns[:4]} for layer in first])
    overall = ("cpu_ratio", "query_cosine", "selection_overlap", "recall_interval", "recall_bytes")
    show("mean over layers and steps", [{"row": n, **{c: s[c] for c in overall}} for n, s in stats.items()])


if __name__ == "__main__":
    command(main)()
