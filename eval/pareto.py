"""What each policy and budget loses, and what it costs: which one is the best choice where.

    python eval/pareto.py
    python eval/pareto.py --row full --row scout:budget=1024,block_size=16 --row quest:budget=1024

Each row is a policy with options. Full attention reads a text; every row takes that over (`hgca` and others that learn
from a prompt read it themselves) and is fed what follows, token by token: KL to full attention and top token. And each
is asked for numbers that are hidden in texts, of those that full attention finds. Beside that stands what a step costs:

host    MiB that a step reads in host memory: what the CPU attends, what is brought to the device, digests there
device  MiB of keys, values and digests in the device's memory
ms      median of a step

Without a GPU the first two come from two memories on the CPU (`tier="split"`), where KL and needles are measured, too,
and the time from one memory. A row is on the front of a cost if none is nearer to full attention for less of it. At the
end a table says which row is cheapest below each KL. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from common import (
    OFFSETS,
    RESULTS,
    DtypeOption,
    ModelOption,
    OutOption,
    ProseOption,
    ThreadsOption,
    check_rows,
    command,
    kinds_of,
    load,
    row_of,
    show,
    text_of,
    window,
    write_csv,
)
from hf_offload import assets, measuring
from hf_offload.plan import parse_setting
from hf_offload.policies.registry import POLICIES
from resume import Progress

ROWS = (
    "full",
    "full:host=fetch",
    *(f"window:budget={budget}" for budget in (512, 1024, 2048)),
    *(f"scout:budget={budget}" for budget in (256, 512, 1024, 2048)),
    *(f"quest:budget={budget}" for budget in (512, 1024, 2048)),
    *(f"infinigen:alpha={alpha}" for alpha in (2, 4, 6)),
    *(f"h2o:heavy={share},recent={share}" for share in (0.05, 0.1, 0.2)),
    *(f"hgca:gpu_ratio={ratio}" for ratio in (0.05, 0.1, 0.25)),
    *(f"fixed_hybrid:budget={share}" for share in (0.02, 0.05, 0.1, 0.2)),
)
COSTS = {"host": "MiB read of the host, a step", "device": "MiB on the device", "ms": "ms a step"}
LIMITS = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002)
TAIL = 64
"""Tokens at the end of a needle's prompt, the question among them, that every row reads itself."""


def measured(progress: Progress, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What some work gives, or gave before a run was stopped."""
    known = progress.latest(name)
    if known is None:
        found = work()
        progress.save(name, 0, lambda folder: _write(folder / "found.json", found))
        return found
    return dict(json.loads((known / "found.json").read_text(encoding="utf-8")))


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found), encoding="utf-8")


def follow(model: PreTrainedModel, setting: str, reading: measuring.Reading) -> dict[str, Any]:
    """What one row loses and costs behind one reading."""
    policy, options = parse_setting(setting)
    if model.device.type != "cpu":
        both = measuring.cost(model, policy, options, reading)
        return _line(both, both.seconds)
    two = measuring.cost(model, policy, options | {"tier": "split"}, reading)
    return _line(two, measuring.cost(model, policy, options | {"tier": "one"}, reading).seconds)


def _line(cost: measuring.Cost, seconds: float) -> dict[str, Any]:
    host = 0.0 if cost.host_bytes is None else cost.host_bytes
    return {
        "kl": float(cost.kl.mean()),
        "top1": cost.top1,
        "host": host / 2**20,
        "device": cost.device_bytes / 2**20,
        "ms": 1000 * seconds,
    }


def ask(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: torch.Tensor, cache: Cache) -> str:
    """The answer to a prompt `[1, N]`, the beginning of which a cache holds."""
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=24, do_sample=False
    )
    return str(tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)).strip()


def find(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: list[str], needle: assets.Needle
) -> dict[str, Any]:
    """Which rows find a hidden number; none is asked if full attention does not find it (`full` is False)."""
    prompt = needle.prompt.to(model.device)
    full = measuring.read(model, prompt, TAIL)
    tier = {"tier": "split"} if model.device.type == "cpu" else {}

    hit = needle.found_in(ask(model, tokenizer, prompt, full.cache))
    full.cache.crop(full.context.shape[1] - full.cache.get_seq_length())
    rows = {}
    for setting in settings if hit else ():
        policy, options = parse_setting(setting)
        cache = measuring.hold(model, policy, options | tier, full)
        rows[setting] = needle.found_in(ask(model, tokenizer, prompt, cache))
    return {"full": hit, "rows": rows}


def fronts(lines: list[dict[str, Any]]) -> None:
    """Note in each line on which fronts it is: nothing is nearer to full attention at no more of that cost."""
    for line in lines:
        line["front"] = " ".join(
            cost
            for cost in COSTS
            if not any(
                other["kl"] <= line["kl"] and other[cost] <= line[cost]
                and (other["kl"], other[cost]) != (line["kl"], line[cost])
                for other in lines
            )
        )  # fmt: skip


def best(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cheapest row of those below each KL, for each cost."""
    table = []
    for limit in LIMITS:
        near = [line for line in lines if line["kl"] <= limit]
        if near:
            cheapest = {cost: min(near, key=lambda line: line[cost]) for cost in COSTS}
            table.append({"KL at most": limit} | {c: f"{line['row']} ({line[c]:.4g})" for c, line in cheapest.items()})
    return table


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """KL against each cost; a line a policy."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(COSTS), figsize=(13, 4.5), layout="constrained", sharey=True)
    policies = list(dict.fromkeys(line["row"].partition(":")[0] for line in lines))
    for axis, (cost, label) in zip(axes, COSTS.items(), strict=True):
        for policy in policies:
            mine = [line for line in lines if line["row"].partition(":")[0] == policy]
            mine.sort(key=lambda line: line["kl"])
            axis.plot([line[cost] for line in mine], [line["kl"] for line in mine], marker="o", label=policy)
        axis.set(xscale="symlog" if cost == "host" else "log", yscale="log", xlabel=label)
    axes[0].set(ylabel="KL to full attention")
    axes[0].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")


def main(
    row: Annotated[
        list[str] | None, typer.Option(help="A policy with options; may be repeated [default: some of each].")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Context that is read first.")] = 6144,
    steps: Annotated[int, typer.Option(min=1, help="Tokens that are fed one by one.")] = 128,
    kinds: Annotated[str, typer.Option(help="Kinds of text, one window each.")] = "prose,code",
    needles: Annotated[int, typer.Option(min=0, help="Hidden numbers to ask for.")] = 8,
    prose: ProseOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = "bfloat16",
    threads: ThreadsOption = 0,
    out: OutOption = RESULTS / "pareto.csv",
) -> None:
    """Measure what policies lose and cost, and plot it."""
    settings = list(dict.fromkeys(row or ROWS))
    rows = {setting: row_of(setting) for setting in settings}
    if len({one.name for one in rows.values()}) < len(rows):
        raise typer.BadParameter("two --row have files of the same name in different folders: rename one of them")
    if unknown := {one.policy for one in rows.values()} - POLICIES.keys():
        raise typer.BadParameter(f"unknown policies {', '.join(unknown)}: choose among {', '.join(POLICIES)}")
    names = kinds_of(kinds)
    size = {"tokens": tokens, "steps": steps, "kinds": kinds, "dtype": dtype}
    run = {**size, "rows": settings, "model": model, "prose": prose and prose.name}
    run |= {"files": {setting: files for setting, one in rows.items() if (files := one.files)}}
    progress = Progress(out.with_suffix(".state"), run)
    language_model, tokenizer = load(model, dtype, threads)
    language_model.set_attn_implementation("hybrid_sparse")
    check_rows(rows.values(), language_model)
    found: dict[str, list[dict[str, Any]]] = {setting: [] for setting in settings}
    hits: dict[str, list[bool]] = {setting: [] for setting in settings}
    with tqdm(total=len(names) * len(settings) + needles) as bar:
        for kind in names:
            reading: measuring.Reading | None = None
            for setting in settings:
                bar.set_description(f"{kind}, {setting}")
                unit = f"{kind}-{setting}"
                if progress.latest(unit) is None and reading is None:
                    ids = window(text_of(kind, prose), tokenizer, OFFSETS[kind][0], tokens + steps)
                    reading = measuring.read(language_model, ids.to(language_model.device), steps)

                def work(setting: str = setting, reading: measuring.Reading | None = reading) -> dict[str, Any]:
                    assert reading is not None
                    return follow(language_model, setting, reading)

                found[setting].append(measured(progress, unit, work))
                bar.update()
        for seed in range(needles):
            bar.set_description(f"needle {seed + 1} of {needles}")

            def hunt(seed: int = seed) -> dict[str, Any]:
                kind = names[seed % len(names)]
                needle = assets.random_needle(text_of(kind, prose), tokenizer, seed, tokens=tokens)
                return find(language_model, tokenizer, settings, needle)

            answer = measured(progress, f"needle {seed}", hunt)
            for setting, hit in answer["rows"].items():
                hits[setting].append(hit)
            bar.update()
    lines = []
    for setting in settings:
        mean = {key: statistics.mean(part[key] for part in found[setting]) for key in found[setting][0]}
        asked = {"found": sum(hits[setting]), "of": len(hits[setting])}
        lines.append({"row": rows[setting].name, **mean, **asked, **size})
    fronts(lines)
    write_csv(out, lines)
    plot(lines, out.with_suffix(".png"))
    shown = ("row", "kl", "top1", *COSTS, "found", "of", "front")
    show("against full attention, means over the texts", [{c: line[c] for c in shown} for line in lines])
    if table := best(lines):
        show("the cheapest row below each KL", table)
    progress.remove()


if __name__ == "__main__":
    command(main)()
