"""Which share of the budget does the CPU attend, with and without recall (ScoutAttention, Figure 6 and Table 1)?

    python eval/cpu_ratio.py
    python eval/cpu_ratio.py --kind prose --prose novel.txt --steps 512

A text is read as a prompt and its next tokens are fed one by one. The rows differ in recall and in how much stays
resident. "every-step-1" recalls at each step, with as many resident tokens as the budget: the CPU's share is then that
of the chosen blocks which the step before had not chosen: the floor under any recall interval.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from tqdm import tqdm

import common
from hf_offload.cache.stats import KEEP_STEPS
from records import show

START = 5_000  # token of the text where the window begins
KNOBS = {"tier": "split", "lookahead": "attend", "attend_resident": "selected"}
"""The paper's: only with `attend_resident="selected"` is it known what the real query selects."""
ROWS = {
    "recall-1.5": ("adaptive", 1.5),
    "recall-1": ("adaptive", 1),
    "never-1.5": (0, 1.5),
    "never-1": (0, 1),
    "every-step-1": (1, 1),
}
"""Recall, and how many budgets stay resident."""


def main(
    budget: Annotated[int, typer.Option(help="Tokens that each step attends.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Length of the window, decoded tokens included.")] = 6400,
    steps: Annotated[int, typer.Option(min=2, max=KEEP_STEPS, help="Tokens that are fed one by one.")] = 256,
    kind: common.KindOption = "documentation",
    *,
    setting: common.TextSetting,
) -> None:
    """Trace the CPU compute ratio with and without recall."""
    (text,) = common.kinds_of(kind)
    model, tokenizer = setting.load()
    ids = setting.window(tokenizer, text, START, tokens).to(model.device)
    key = {"kind": text, "start": START, "tokens": tokens, "budget": budget}
    columns = ("layer", "cpu_ratio", "query_cosine", "selection_overlap", "recalls", "recall_interval")
    by_step: list[dict[str, Any]] = []
    by_layer: list[dict[str, Any]] = []
    for name, (recall, resident) in tqdm(ROWS.items()):
        knobs = KNOBS | {"budget": budget, "recall": recall, "resident": int(budget * resident)}
        with torch.inference_mode():
            cache: Any = common.Row(name, "scout", knobs).make_cache(model)
            common.prefill(model, cache, ids[:, :-steps])
            common.decode(model, cache, ids[:, -steps:])
        layers = [layer for layer in cache.stats().as_dict()["layers"] if layer["cpu_ratio_by_step"]]
        curve = np.mean([layer["cpu_ratio_by_step"] for layer in layers], axis=0)
        by_step += [{"row": name, **key, "step": step, "cpu_ratio": float(v)} for step, v in enumerate(curve)]
        by_layer += [{"row": name, **key, **{c: layer[c] for c in columns}} for layer in layers]
        setting.write(by_step)
        setting.write(by_layer, "_layers")
    means = pd.DataFrame(by_layer).groupby("row", sort=False)[list(columns[1:])].mean()
    show("mean over layers and steps", means.reset_index().to_dict("records"))


if __name__ == "__main__":
    common.command(main)()
