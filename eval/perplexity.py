"""Perplexity of whole texts, every token of which is decoded through the cache (HGCA, Table 1).

    python eval/perplexity.py
    python eval/perplexity.py --rows hgca-0.1-1,window-0.1,scout-512 --tokens 2048 --texts prose --prose novel.txt
    python eval/perplexity.py --row scout:budget=1024 --row h2o:heavy=0.1,recent=0.1

Teacher forcing from the first token on: nothing is taken in as a prompt, so that each token but the first is predicted
by a decode step. `hgca` attends a share of the text's length densely, its newest tokens, rounded up to whole blocks
(the paper's GPU ratio), and what has left that window as its filter lets it (β). The other rows get as many tokens.
Full attention is computed in one forward, chunk by chunk. Each token's loss is compared with full attention's for the
same token: standard errors take tokens as independent of each other. `kept_share`, of the host's tokens those that the
CPU attends, is that at the end, over all texts of a run.

All sequences (`--batch` of each text, one after the other) are decoded as one batch in one cache. A full grid is
--tokens × 16 steps, whatever the batch: at 65 ms a step (SmolLM2, bf16, two cores) 4,096 tokens take 75 minutes, and
more sequences cost only their attention. A run that was stopped goes on where it was: every --save-every tokens the
cache and the losses are saved beside the CSV; when all is done that is removed. A line a sequence (OUT.jsonl), a table
(OUT.md) and a picture (OUT.png) go beside the CSV, too.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tqdm import tqdm
from transformers import PreTrainedModel

import hf_offload
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
    TierOption,
    check_rows,
    choose,
    command,
    decimals,
    kinds_of,
    load,
    markdown,
    origin,
    show,
    text_of,
    window,
    write_csv,
)
from resume import Progress
from tasks.rows import CONTROL, parse_rows

BLOCK_SIZE = 32


@dataclass(frozen=True)
class Cell(Row):
    """A row at a share of the text's length that is attended densely (`ratio`) and, of hgca, a filter (`beta`)."""

    ratio: float | None = None
    beta: float | None = None


def make_rows(
    tokens: int, ratios: list[float], betas: list[float], tier: str | None, learns: dict[str, Any] | None = None
) -> list[Row]:
    """The rows to choose from: the grid of hgca first, which `learns` so, then those to compare it with."""
    memory = {"block_size": BLOCK_SIZE} | ({} if tier is None else {"tier": tier})
    newest = {ratio: math.ceil(ratio * tokens / BLOCK_SIZE) * BLOCK_SIZE for ratio in ratios}

    def hgca(ratio: float, beta: float) -> Row:
        knobs = {"window": newest[ratio], "beta": beta} | (learns or {}) | memory
        return Cell(f"hgca-{ratio:g}-{beta:g}", "hgca", knobs, ratio, beta)

    return [
        *(hgca(ratio, beta) for ratio in ratios for beta in betas),
        *(Cell(f"window-{ratio:g}", "window", {"budget": newest[ratio]} | memory, ratio) for ratio in ratios),
        *(Cell(f"scout-{budget}", "scout", {"budget": budget} | memory) for budget in (256, 512, 1024, 2048)),
        Cell("full-decoded", "full", memory),
    ]


@dataclass
class Losses:
    """What a row has reached.

    Attributes:
        nll: negative log-likelihood of each token, natural, `[B, T]` float64.
        kept: share of the host's tokens that the CPU attends now (None: not a thing of this row, or there are none).
        seconds: that the decode steps have taken.
    """

    nll: torch.Tensor
    kept: float | None = None
    seconds: float = 0.0

    def write(self, folder: Path) -> None:
        """Write into a folder."""
        np.save(folder / "nll.npy", self.nll.numpy())
        (folder / "sums.json").write_text(json.dumps({"kept": self.kept, "seconds": self.seconds}), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Losses:
        """What `write` wrote."""
        sums = json.loads((folder / "sums.json").read_text(encoding="utf-8"))
        return cls(torch.from_numpy(np.load(folder / "nll.npy")), **sums)


def loss(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood `[B, T]` float64 of tokens `[B, T]` under logits `[B, T, V]`."""
    return -logits.float().log_softmax(-1).gather(-1, following[..., None])[..., 0].cpu().double()


def reference(model: PreTrainedModel, ids: torch.Tensor, chunk: int) -> Losses:
    """Losses of full attention for tokens 1… of each sequence `[B, T + 1]`, one sequence after the other."""
    started, rows = time.perf_counter(), []
    for row in tqdm(ids, desc="full attention", unit="text", delay=5, leave=False):
        cache, parts = FULL.make_cache(model), []
        for part, following in zip(row[None, :-1].split(chunk, 1), row[None, 1:].split(chunk, 1), strict=True):
            parts.append(loss(model(part, past_key_values=cache).logits, following))
        rows.append(torch.cat(parts, 1))
    return Losses(torch.cat(rows), seconds=time.perf_counter() - started)


def decode(
    model: PreTrainedModel, row: Row, ids: torch.Tensor, progress: Progress, every: int, bar: tqdm[Any]
) -> Losses:
    """Losses of a row for tokens 1… of the sequences `[B, T + 1]`, decoded one by one as a batch.

    Args:
        progress: where the row goes on from, and where it is saved.
        every: tokens between two states that are saved.
        bar: shows the tokens.
    """
    steps, found = ids.shape[1] - 1, progress.latest(row.name)
    before = Losses(torch.empty(len(ids), 0, dtype=torch.float64)) if found is None else Losses.read(found)
    start = before.nll.shape[1]
    bar.update(start)
    if start == steps:
        return before
    row.activate(model)
    cache = row.make_cache(model) if found is None else hf_offload.HybridCache.load(found / "cache", model)
    new, seconds = [before.nll], before.seconds
    for done in range(start + 1, steps + 1):
        began = time.perf_counter()
        logits = model(ids[:, done - 1, None], past_key_values=cache).logits
        new.append(loss(logits, ids[:, done, None]))
        seconds += time.perf_counter() - began
        bar.update()
        if done % every and done != steps:
            continue
        now = Losses(torch.cat(new, 1), cache.stats().as_dict().get("kept_share"), seconds)
        new = [now.nll]

        def write(folder: Path, now: Losses = now, whole: bool = done == steps) -> None:
            now.write(folder)
            if not whole:
                cache.save(folder / "cache")

        progress.save(row.name, done, write)
    return now


def record(row: Row, kind: str, mine: Losses, full: Losses, sequences: slice) -> dict[str, Any]:
    """One line: a row's losses on the sequences of one text, against full attention's."""
    nll, less = mine.nll[sequences], mine.nll[sequences] - full.nll[sequences]
    perplexity, steps = float(nll.mean().exp()), nll.shape[1]
    return {
        "row": row.name,
        "kind": kind,
        "ratio": getattr(row, "ratio", None),
        "beta": getattr(row, "beta", None),
        "attended": row.options.get("window", row.options.get("budget")),
        "perplexity": perplexity,
        "perplexity_se": perplexity * standard_error(nll),
        "perplexity_full": float(full.nll[sequences].mean().exp()),
        "nll_more": float(less.mean()),
        "nll_more_se": standard_error(less),
        "kept_share": mine.kept,
        "ms_per_step": 1000 * mine.seconds / steps,
        "tokens": steps,
        "sequences": len(nll),
    }


def each(row: Row, places: dict[str, slice], mine: Losses, full: Losses) -> list[dict[str, Any]]:
    """A line a sequence: a row's mean loss and full attention's, in nats a token."""
    return [
        {
            "row": row.name,
            "kind": kind,
            "sequence": number - place.start,
            "tokens": mine.nll.shape[1],
            "nll": float(mine.nll[number].mean()),
            "nll_full": float(full.nll[number].mean()),
        }
        for kind, place in places.items()
        for number in range(place.start, place.stop)
    ]


def standard_error(values: torch.Tensor) -> float:
    """Of the mean of independent values."""
    return float(values.std() / values.numel() ** 0.5)


def table_one(records: list[dict[str, Any]], kind: str) -> list[dict[str, str]]:
    """The grid of a kind as in the paper: a line a ratio, a column a β; perplexity and what it is more than full's."""
    grid = [r for r in records if r["kind"] == kind and r["beta"] is not None]
    betas = sorted({r["beta"] for r in grid})
    lines: dict[float, dict[str, str]] = {}
    for r in grid:
        more, error = r["perplexity"] - r["perplexity_full"], r["perplexity"] * r["nll_more_se"]
        cell = f"{r['perplexity']:.2f} ({more:+.3f} ± {error:.3f})"
        none = {"GPU ratio": f"{r['ratio']:g}"} | dict.fromkeys((f"β = {beta:g}" for beta in betas), "–")
        lines.setdefault(r["ratio"], none)[f"β = {r['beta']:g}"] = cell
    return list(lines.values())


def told(records: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A line a row, and for each kind of text what its perplexity is more than full attention's, in percent."""
    lines: dict[str, dict[str, str]] = {}
    for r in records:
        if r["row"] != FULL.name:
            cell = f"{100 * math.expm1(r['nll_more']):+.2f} ± {100 * r['nll_more_se']:.2f} %"
            title = f"{r['kind']} (full: {r['perplexity_full']:.4g})"
            lines.setdefault(r["row"], {"row": r["row"]})[title] = cell
    return list(lines.values())


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Draw what each row's perplexity is more than full attention's, with standard errors."""
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(r["kind"] for r in records))
    rows = list(dict.fromkeys(r["row"] for r in records if r["row"] != FULL.name))
    figure, axes = plt.subplots(figsize=(8, 0.35 * len(rows) + 1.5), layout="constrained")
    for number, kind in enumerate(kinds):
        mine = [r for r in records if r["kind"] == kind and r["row"] != FULL.name]
        more, errors = [100 * math.expm1(r["nll_more"]) for r in mine], [100 * r["nll_more_se"] for r in mine]
        places = [rows.index(r["row"]) + 0.15 * (number - (len(kinds) - 1) / 2) for r in mine]
        axes.errorbar(more, places, xerr=errors, fmt="o", capsize=3, label=kind)
    axes.axvline(0, color="gray", linewidth=1)
    axes.set(xlabel="perplexity, % more than full attention's", yticks=range(len(rows)), yticklabels=rows)
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")


def main(
    texts: Annotated[str, typer.Option(help=f"Kinds of text, of {', '.join(OFFSETS)}.")] = "prose,code",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a sequence that are predicted.")] = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of each text.")] = 1,
    ratios: Annotated[str, typer.Option(help="Shares of the length that are attended densely.")] = "0.1,0.25,0.5,0.75",
    betas: Annotated[str, typer.Option(help="Filters of hgca.")] = "0.25,0.5,0.75,1",
    alpha: Annotated[float | None, typer.Option(help="How fast hgca forgets [default: its own].")] = None,
    steps: Annotated[str | None, typer.Option(help='"max" or "mean" of the weights [default: its own].')] = None,
    rows: Annotated[
        str | None, typer.Option(help="By name, comma-separated; a wrong one lists them [default: hgca's grid].")
    ] = None,
    row: Annotated[
        list[str] | None,
        typer.Option(help='A policy and knobs of it and of HybridCache, "scout:budget=512"; give it again.'),
    ] = None,
    save_every: Annotated[int, typer.Option(min=1, help="Tokens between two saved states.")] = 512,
    tier: TierOption = None,
    prose: ProseOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = "bfloat16",
    chunk: Annotated[int, typer.Option(min=1, help="Tokens that full attention takes in at a time.")] = 512,
    threads: ThreadsOption = 0,
    out: OutOption = RESULTS / "perplexity.csv",
) -> None:
    """Measure the perplexity of texts that are decoded token by token."""
    shares, filters, kinds = decimals(ratios), decimals(betas), kinds_of(texts)
    learns = {name: value for name, value in (("alpha", alpha), ("steps", steps)) if value is not None}
    every_row = make_rows(tokens, shares, filters, tier, learns)
    given = [Cell(one.name, one.policy, one.options) for one in parse_rows(row or [])]
    if CONTROL in (one.policy for one in given):
        raise typer.BadParameter(f"--row {CONTROL}: full attention is what all rows are compared with; leave it out")
    grid_alone = [] if given else every_row[: len(shares) * len(filters)]
    chosen = [*(grid_alone if rows is None else choose(every_row, rows)), *given]
    settings = {
        "texts": kinds, "tokens": tokens, "batch": batch, "tier": tier, "model": model, "dtype": dtype,
        "learns": learns,
        "prose": None if prose is None else [prose.name, prose.stat().st_size],
        "files": {one.name: files for one in given if (files := one.files)},
    }  # fmt: skip
    progress = Progress(out.with_suffix(".state"), settings)
    language_model, tokenizer = load(model, dtype, threads)
    ids = torch.cat(
        [
            window(text_of(kind, prose), tokenizer, OFFSETS[kind][0] + number * tokens, tokens + 1)
            for kind in kinds
            for number in range(batch)
        ]
    ).to(language_model.device)
    places = {kind: slice(number * batch, (number + 1) * batch) for number, kind in enumerate(kinds)}
    records: list[dict[str, Any]] = []
    sequences: list[dict[str, Any]] = []
    with torch.inference_mode(), tqdm(total=len(chosen) * tokens, desc="full attention", unit="tokens") as bar:
        full = reference(language_model, ids, chunk)
        records += [record(FULL, kind, full, full, place) for kind, place in places.items()]
        check_rows(given, language_model)
        for one in chosen:
            bar.set_description(one.name)
            mine = decode(language_model, one, ids, progress, save_every, bar)
            records += [record(one, kind, mine, full, place) for kind, place in places.items()]
            write_csv(out, records)
            sequences += each(one, places, mine, full)
    out.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in sequences), encoding="utf-8")
    above = "What perplexity is more than full attention's, with the standard error of the difference."
    table = markdown(told(records))
    out.with_suffix(".md").write_text(f"# Perplexity\n\n{origin()}\n\n{above}\n\n{table}\n", encoding="utf-8")
    plot(records, out.with_suffix(".png"))
    progress.remove()
    columns = ("row", "perplexity", "perplexity_se", "nll_more", "nll_more_se", "kept_share", "ms_per_step")
    for kind in kinds:
        of_kind = [r for r in records if r["kind"] == kind]
        show(f"{kind}: nats a token more than full attention", [{c: r[c] for c in columns} for r in of_kind])
        if grid := table_one(records, kind):
            title = f"{kind}: perplexity (more than full attention's {of_kind[0]['perplexity']:.2f})"
            print(f"{title}\n\n{markdown(grid)}")


if __name__ == "__main__":
    command(main)()
