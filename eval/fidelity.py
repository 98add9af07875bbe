"""How far decoding with a sparse cache is from full attention, token by token.

    python eval/fidelity.py
    python eval/fidelity.py --rows scout-off,window --budgets 512,1024 --windows 1 --prose novel.txt

A window of real text is read as a prompt, and its last tokens are then fed one by one, as if they had been generated
(teacher forcing). Each step's distribution over the next token is compared with the one that full attention gives,
computed for the whole window in one dense forward: mean KL(full‖policy), agreement of the most likely token, and the
perplexity of both. Windows stand at fixed token offsets and are decoded as one batch; the table shows the median over
the windows of a kind.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm
from transformers import PreTrainedModel

from common import (
    FULL,
    OFFSETS,
    RESULTS,
    DtypeOption,
    ModelOption,
    OutOption,
    ProseOption,
    Row,
    ThreadsOption,
    choose,
    command,
    kinds_of,
    load,
    numbers,
    prefill,
    show,
    text_of,
    window,
    write_csv,
)
from hf_offload import Scout


def make_rows(budget: int, memory: dict[str, Any]) -> list[Row]:
    """The rows to choose from, at one budget; those that predict queries need two memories."""

    def scout(name: str, **knobs: Any) -> Row:
        return Row(name, Scout(budget=budget, **knobs), memory)

    predicting = [
        scout("scout-select", lookahead="select"),
        scout("scout-select-sync0", lookahead="select", synchronous_layers=(0,)),
        scout("scout-attend", lookahead="attend"),
        scout("scout-attend-sync0", lookahead="attend", synchronous_layers=(0,)),
        scout("scout-attend-uncorrected", lookahead="attend", correction=False),
        Row("paper", Scout.paper(budget=budget), memory),
    ]
    return [
        scout("scout-off", lookahead="off"),
        Row("scout-off-int8", Scout(budget=budget, lookahead="off"), {"host_dtype": "int8"} | memory),
        *(predicting if memory["tier"] == "split" else []),
        Row("paper-off", Scout.paper(budget=budget, lookahead="off"), memory),
        Row("window", "window", {"budget": budget} | memory),
    ]


def reference(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> torch.Tensor:
    """Log-probabilities `[W, steps, V]` of full attention after each of the tokens that are fed one by one."""
    FULL.activate(model)
    # The last token of a window is only predicted. One window at a time: dense attention is large.
    logits = [model(row[None, :-1], use_cache=False, logits_to_keep=steps).logits for row in ids]
    return torch.cat(logits).float().log_softmax(-1)


def decode(model: PreTrainedModel, row: Row, ids: torch.Tensor, full: torch.Tensor, chunk: int) -> list[dict[str, Any]]:
    """Feed the windows' last tokens through a row's cache, all windows as one batch, and compare with full attention.

    Args:
        ids: token ids of the windows `[W, N]`.
        full: what `reference` returned for them `[W, steps, V]`.
        chunk: tokens of the prompts that are taken in at a time.

    Returns:
        One record a window; what the cache counts (CPU ratio, …) is over all of them.
    """
    windows, steps = full.shape[:2]
    start = ids.shape[1] - 1 - steps
    cache = row.make_cache(model)
    prefill(model, cache, ids[:, :start], chunk)
    kl, agree, nll, nll_full = torch.zeros(4, windows, dtype=torch.float64)
    began = time.perf_counter()
    for step in tqdm(range(steps), desc=row.name, unit="step", delay=5, leave=False):
        token, following = ids[:, start + step], ids[:, start + step + 1, None]
        mine = model(token[:, None], past_key_values=cache).logits[:, -1].float().log_softmax(-1).cpu()
        theirs = full[:, step]
        kl += (theirs.exp() * (theirs - mine)).sum(-1)
        agree += theirs.argmax(-1) == mine.argmax(-1)
        nll_full -= theirs.gather(1, following.cpu())[:, 0]
        nll -= mine.gather(1, following.cpu())[:, 0]
    stats = cache.stats().as_dict()
    common = {key: stats[key] for key in ("cpu_ratio", "recall_interval", "query_cosine", "selection_overlap")}
    common["ms_per_step"] = (time.perf_counter() - began) * 1000 / steps
    return [
        {
            "kl": float(kl[i]) / steps,
            "top1": float(agree[i]) / steps,
            "perplexity": float((nll[i] / steps).exp()),
            "perplexity_full": float((nll_full[i] / steps).exp()),
            **common,
        }
        for i in range(windows)
    ]


def main(
    tokens: Annotated[int, typer.Option(help="Length of a window, decoded tokens included.")] = 6400,
    steps: Annotated[int, typer.Option(min=1, help="Tokens that are fed one by one.")] = 512,
    windows: Annotated[int, typer.Option(min=1, max=3, help="Windows of each kind.")] = 3,
    kinds: Annotated[str, typer.Option(help=f"Kinds of text, of {', '.join(OFFSETS)}.")] = "prose,code",
    rows: Annotated[str | None, typer.Option(help="What to compare, by name, comma-separated; all by default.")] = None,
    budgets: Annotated[str, typer.Option(help="Budgets in tokens, comma-separated.")] = "1024",
    tier: Annotated[str, typer.Option(help='"one" memory or "split", which layer-ahead needs.')] = "split",
    resident: Annotated[int | None, typer.Option(help="Tokens resident on the device (the budget by default).")] = None,
    prose: ProseOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = "float32",
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens taken in at a time.")] = 1024,
    threads: ThreadsOption = 0,
    out: OutOption = RESULTS / "fidelity.csv",
) -> None:
    """Compare decoding with sparse caches against full attention, teacher-forced."""
    if steps >= tokens:
        raise typer.BadParameter(f"{steps} steps leave nothing of {tokens} tokens for the prompt: give fewer steps")
    memory = {"tier": tier} | ({} if resident is None else {"resident": resident})
    chosen = [(budget, row) for budget in numbers(budgets) for row in choose(make_rows(budget, memory), rows)]
    places = [(kind, start) for kind in kinds_of(kinds) for start in OFFSETS[kind][:windows]]
    size = {"tokens": tokens, "steps": steps, "tier": tier, "resident": resident}
    language_model, tokenizer = load(model, dtype, threads)
    records = []
    with tqdm(total=len(chosen) + 1, desc="full attention") as progress, torch.inference_mode():
        texts = [window(text_of(kind, prose), tokenizer, start, tokens + 1) for kind, start in places]
        ids = torch.cat(texts).to(language_model.device)
        full = reference(language_model, ids, steps).cpu()
        progress.update()
        for budget, row in chosen:
            progress.set_description(f"{row.name} {budget}")
            results = decode(language_model, row, ids, full, chunk)
            for (kind, start), result in zip(places, results, strict=True):
                key = {"row": row.name, "budget": budget, "kind": kind, "start": start}
                records.append({**key, **size, **result})
            write_csv(out, records)  # after each row: a long run that is stopped has not been for nothing
            progress.update()
    for kind in kinds_of(kinds):
        show(f"{kind}: median over windows", [summary(records, row.name, budget, kind) for budget, row in chosen])


def summary(records: list[dict[str, Any]], row: str, budget: int, kind: str) -> dict[str, Any]:
    """One line of a table: the medians over the windows of a kind."""
    mine = [r for r in records if (r["row"], r["budget"], r["kind"]) == (row, budget, kind)]
    columns = ("kl", "top1", "perplexity", "perplexity_full")
    return {"row": row, "budget": budget} | {c: statistics.median(r[c] for r in mine) for c in columns}


if __name__ == "__main__":
    command(main)()
