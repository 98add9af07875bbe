"""The time between tokens over a long generation, and the memory at its end (HGCA, Figure 15).

    python eval/steady.py
    python eval/steady.py --rows full,hgca-512,scout-1024 --prompt 2000 --steps 2000 --runs 1

Every row takes in the same prompt and is fed the same tokens of a text one by one. The rows take turns of --turn steps,
forth and back, so that whatever else the machine does meets all of them alike; the first steps of a turn, which find
another row's data in the CPU's caches, are not counted. `p99_p50` says how steady a row is, `unsteady` how much less
so than the first row. What a row gets slower by as the context grows is in it, and most in full attention's:
`p99_turn`, `unsteady_turn` are the same of times divided by the median of their own turn. `cpu_…` is in CPU time of the
whole process, which other programs hardly touch. Each number is the median over the runs. At 80 ms a step, 4,000 steps
of two rows and three runs take half an hour.

Bytes are those at the end, beside what follows from sizes alone: all tokens in whole blocks on the host, the window
and a block being filled in a device's memory, and of the host's tokens the share that the CPU keeps (`context`).
"""

from __future__ import annotations

import gc
import itertools
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tqdm import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

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
    kv_bytes,
    load,
    prefill,
    show,
    synchronize,
    text_of,
    token_bytes,
    window,
    write_csv,
)
from hf_offload.attention.hooks import hybrid_layers

AFTER_SWITCH = 2  # steps of a turn that are not counted
BLOCK_SIZE = 32
RESIDENT = 2048  # tokens, of a policy that has no window or budget


def make_rows(tier: str | None) -> list[Row]:
    """The rows to choose from."""
    memory = {"block_size": BLOCK_SIZE} | ({} if tier is None else {"tier": tier})
    return [
        Row("full", "dynamic"),
        Row("full-hybrid", "full", memory),
        *(Row(f"hgca-{n}", "hgca", {"window": n, "beta": 1.0} | memory) for n in (512, 1024, 2048)),
        *(Row(f"scout-{n}", "scout", {"budget": n} | memory) for n in (512, 1024, 2048)),
        *(Row(f"window-{n}", "window", {"budget": n} | memory) for n in (512, 1024, 2048)),
    ]


def time_turn(model: PreTrainedModel, row: Row, cache: Cache, ids: torch.Tensor) -> np.ndarray:
    """Decode ids `[1, N]` one by one; returns milliseconds `[N, 2]`, of the clock and of CPU time."""
    row.activate(model)
    times = []
    for token in ids.split(1, 1):
        synchronize()
        cpu, wall = time.process_time(), time.perf_counter()
        model(token, past_key_values=cache)
        synchronize()
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return 1000 * np.array(times)


def run(
    model: PreTrainedModel, rows: list[Row], ids: torch.Tensor, prompt: int, turn: int, bar: tqdm[Any]
) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
    """One run: milliseconds `[steps, 2]` of each row, and what it holds at the end.

    Args:
        ids: the text `[1, prompt + steps]`.
    """
    caches = {row.name: row.make_cache(model) for row in rows}
    for row in rows:
        row.activate(model)
        prefill(model, caches[row.name], ids[:, :prompt], chunk=2048)
    times: dict[str, list[np.ndarray]] = {row.name: [] for row in rows}
    for number, tokens in enumerate(ids[:, prompt:].split(turn, 1)):
        for row in rows if number % 2 == 0 else rows[::-1]:
            times[row.name].append(time_turn(model, row, caches[row.name], tokens))
            bar.update(tokens.shape[1])
    held = {row.name: memory(model, row, caches[row.name]) for row in rows}
    return {name: np.concatenate(parts) for name, parts in times.items()}, held


def memory(model: PreTrainedModel, row: Row, cache: Cache) -> dict[str, Any]:
    """Bytes that a cache holds, each with what its tokens must take (`…_due`)."""
    tokens = cache.get_seq_length()
    if isinstance(cache, DynamicCache):
        return {"device_bytes": kv_bytes(cache), "device_due": tokens * token_bytes(model, len(cache.layers))}
    layers = hybrid_layers(cache)
    each, stats = token_bytes(model, len(layers)), cache.stats().as_dict()
    whole, budget = (
        -(-tokens // BLOCK_SIZE) * BLOCK_SIZE,
        row.options.get("window", row.options.get("budget", RESIDENT)),
    )
    found = {
        "device_bytes": stats["resident_bytes"],
        "device_due": min(whole, budget + BLOCK_SIZE) * each if layers[0].has_slots else 0,
        "host_bytes": stats["host_bytes"],
        "host_due": whole * each,
    }
    if stats.get("kept_share") is not None:
        found |= {
            "context_bytes": stats.get("context_bytes"),
            "context_due": round(stats["kept_share"] * (tokens - budget) * each),
            "kept_share": stats["kept_share"],
        }
    return found


def counted(steps: int, turn: int) -> np.ndarray:
    """Which steps count, `[steps]` bool."""
    return np.arange(steps) % turn >= AFTER_SWITCH


def within_turns(times: np.ndarray, turn: int) -> np.ndarray:
    """The steps `[steps]` that count, each as a multiple of the median of its own turn."""
    parts = (times[start : start + turn] for start in range(0, len(times), turn))
    kept = (part[counted(len(part), turn)] for part in parts)
    return np.concatenate([part / np.median(part) for part in kept if len(part)])


def summary(runs: list[np.ndarray], turn: int) -> dict[str, float]:
    """Percentiles of the steps that count, of the clock's time and of CPU time: medians over runs `[steps, 2]`."""
    found: dict[str, list[float]] = {}
    for times in runs:
        for kind, every in zip(("", "cpu_"), times.T, strict=True):
            values, p99_turn = every[counted(len(every), turn)], np.percentile(within_turns(every, turn), 99)
            p50, p95, p99 = np.percentile(values, [50, 95, 99])
            line = {
                "p50": p50, "p95": p95, "p99": p99, "max": values.max(), "p99_p50": p99 / p50, "p99_turn": p99_turn,
            }  # fmt: skip
            for name, value in line.items():
                found.setdefault(kind + name, []).append(float(value))
    return {name: float(np.median(values)) for name, values in found.items()}


def by_turn(name: str, runs: list[np.ndarray], prompt: int, turn: int) -> list[dict[str, Any]]:
    """For each turn: the context at its end, the median and greatest time of its steps, and tokens a second."""
    times, use = np.stack(runs)[..., 0], counted(len(runs[0]), turn)
    lines = []
    for start in range(0, times.shape[1], turn):
        if not use[start : start + turn].any():
            continue
        steps = times[:, start : start + turn][:, use[start : start + turn]]
        lines.append(
            {
                "row": name,
                "context": prompt + min(start + turn, times.shape[1]),
                "p50": float(np.median(steps)),
                "max": float(np.median(steps.max(1))),
                "tokens_per_second": float(np.median(1000 / steps.mean(1))),
            }
        )
    return lines


def plot(lines: list[dict[str, Any]], last: dict[str, np.ndarray], prompt: int, turn: int, path: Path) -> None:
    """Draw tokens a second and the time between tokens (each step of the last run) over the context."""
    import matplotlib.pyplot as plt

    figure, (rate, between) = plt.subplots(2, figsize=(7, 6), sharex=True, layout="constrained")
    for name, times in last.items():
        mine = [line for line in lines if line["row"] == name]
        (curve,) = rate.plot([r["context"] for r in mine], [r["tokens_per_second"] for r in mine], label=name)
        use = counted(len(times), turn)
        contexts = prompt + 1 + np.arange(len(times))[use]
        between.plot(contexts, times[use, 0], ".", markersize=1, color=curve.get_color())
        between.plot([r["context"] for r in mine], [r["p50"] for r in mine], color=curve.get_color(), label=name)
    rate.set(ylabel="tokens a second", ylim=(0, None))
    between.set(ylabel="ms between tokens", yscale="log", xlabel="context, tokens")
    rate.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"wrote {path}")


def main(
    rows: Annotated[str, typer.Option(help="By name, comma-separated; a wrong one lists them.")] = "full,hgca-1024",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 4000,
    steps: Annotated[int, typer.Option(min=AFTER_SWITCH + 1, help="Tokens that are decoded.")] = 4000,
    turn: Annotated[int, typer.Option(min=AFTER_SWITCH + 1, help="Steps a row has before the next one's turn.")] = 50,
    runs: Annotated[int, typer.Option(min=1, help="Times that all is done.")] = 3,
    kind: Annotated[str, typer.Option(help="prose, documentation or code.")] = "prose",
    tier: TierOption = None,
    prose: ProseOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = "bfloat16",
    threads: ThreadsOption = 0,
    out: OutOption = RESULTS / "steady.csv",
) -> None:
    """Measure how steadily tokens come over a long generation."""
    chosen, (name,) = choose(make_rows(tier), rows), kinds_of(kind)
    language_model, tokenizer = load(model, dtype, threads)
    ids = window(text_of(name, prose), tokenizer, 0, prompt + steps).to(language_model.device)
    times: dict[str, list[np.ndarray]] = {row.name: [] for row in chosen}
    size = {"prompt": prompt, "steps": steps, "turn": turn, "kind": name, "dtype": dtype, "tier": tier}
    with torch.inference_mode(), tqdm(total=runs * len(chosen) * steps, unit="tokens") as bar:
        for number in range(runs):
            bar.set_description(f"run {number + 1} of {runs}")
            found, held = run(language_model, chosen, ids, prompt, turn, bar)
            for row in chosen:
                times[row.name].append(found[row.name])
            gc.collect()
            lines = [summary(times[row.name], turn) for row in chosen]
            records = [
                {"row": row.name, **line, "slower": line["p50"] / lines[0]["p50"]}
                | {"unsteady": line["p99_p50"] / lines[0]["p99_p50"]}
                | {"unsteady_turn": line["p99_turn"] / lines[0]["p99_turn"]}
                | {**held[row.name], "runs": number + 1, **size}
                for row, line in zip(chosen, lines, strict=True)
            ]
            write_csv(out, records)
    turns = [by_turn(row.name, times[row.name], prompt, turn) for row in chosen]
    series = list(itertools.chain.from_iterable(turns))
    write_csv(out.with_name(f"{out.stem}_turns.csv"), series)
    plot(series, found, prompt, turn, out.with_suffix(".png"))
    columns = (
        "row", "p50", "p95", "p99", "max", "p99_p50", "unsteady", "p99_turn", "unsteady_turn", "cpu_p50",
        "cpu_p99_p50", "slower",
    )  # fmt: skip
    show(f"ms between tokens, {prompt} + {steps} tokens", [{c: r[c] for c in columns} for r in records])
    sizes = [k for k in dict.fromkeys(k for r in records for k in r) if k.endswith(("_bytes", "_due"))]
    table = [{"row": r["row"]} | {k: None if r.get(k) is None else r[k] / 2**20 for k in sizes} for r in records]
    show("MiB at the end, and as sizes have it", table)


if __name__ == "__main__":
    command(main)()
