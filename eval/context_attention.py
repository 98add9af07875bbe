"""Attention's share of a decode step in a long context: time, bytes read, and how far from full attention it is.

    python eval/context_attention.py
    python eval/context_attention.py --contexts 8k --rows hgca-0.1,scout-1024 --steps 64 --prose novel.txt
    python eval/context_attention.py --contexts 6k --rows fixed-0.05,fluxion-0.1 --predictor predictor.safetensors
    python eval/context_attention.py --contexts 32k --read 6k --rows full-hybrid,hgca-0.1

All rows hold the keys and values of the same real text: full attention's cache reads it, the sparse ones take that
over, and `hgca` and `fluxion`, which learn from a prompt, read it too. Then the rows take turns over the
text's next tokens: some steps of warm-up, then those that count. What they compute at each is compared with full
attention (KL, top token), so that rows can be compared at equal fidelity and not at equal budgets; `full-hybrid`, which
attends everything, shows what rounding alone makes of it.

`attention` is the time in the attention function and in the cache's `update`, all layers, `step` that of the whole
forward: milliseconds, medians; `retrieval`, with one memory, the part of `attention` in which the CPU predicts what
heads of `fixed` and `fluxion` need of the host, chooses blocks and attends them. `read` is what the CPU reads of keys,
values and digests at each step, by arithmetic: everything for full attention, the budget and all digests for `scout`,
the window and the kept share of the rest for `hgca`; for `fixed` and `fluxion` sinks, newest tokens, the digests that
were looked at, and what the CPU chose. `chosen` is the part of the keys and values that is not always read: what was
kept or chosen. Beyond the length that a model was trained for a text has its size but has lost its order; whether
`kept` and `kl` there are like those of shorter contexts tells what such times are worth. With `--read` longer contexts
hold the keys and values of so many tokens again and again, and queries have the positions that they would have behind
the first of them: every token shares its weight with its copies, so that selections are like those of the shorter text,
and nobody has to read a long one. All rows then take the repeated part over and read the last tokens themselves (`hgca`
as the end of a prompt). Memory: each row holds the context.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import typer
from tqdm import tqdm
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel

import hf_offload
from common import (
    FULL,
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
    percentiles,
    prefill,
    show,
    synchronize,
    text_of,
    token_bytes,
    window,
    write_csv,
)
from hf_offload.cpu.launch import LaunchSequence
from hf_offload.measuring import divergence
from hf_offload.policies.fluxion.predictor import read_about

WARM_UP = 2
BLOCK_SIZE = 32
RETRIEVAL = ("the needs of the heads", "the choice of host blocks", "counts of the choice", "attention to the host")
"""What the CPU does of a step to choose and attend blocks of the host."""
TIMES = ("attention", "retrieval", "step")
TURN = 128
"""Tokens behind a context that is filled by repetition, which all rows read themselves."""
AS_PROMPT = {"append": "mean", "append_run": 0}
"""With these knobs `hgca` learns from such an append what it learns from the end of a prompt."""


def make_rows(tier: str | None, predictor: Path | None = None) -> list[Row]:
    """The rows to choose from, beside full attention; `fluxion` with a predictor alone, for all that it knows."""
    tiers = {} if tier is None else {"tier": tier}
    taus = [] if predictor is None else sorted(float(tau) for tau in read_about(predictor)["predictors"])
    memory = {"block_size": BLOCK_SIZE} | tiers
    return [
        Row("full-hybrid", "full", memory),
        *(Row(f"hgca-{ratio:g}", "hgca", {"gpu_ratio": ratio, "beta": 1.0} | memory) for ratio in (0.05, 0.1, 0.25)),
        *(Row(f"scout-{n}", "scout", {"budget": n} | memory) for n in (256, 512, 1024, 2048)),
        *(Row(f"window-{n}", "window", {"budget": n} | memory) for n in (1024, 2048)),
        *(Row(f"fixed-{share:g}", "fixed_hybrid", {"budget": share} | tiers) for share in (0.02, 0.05, 0.1, 0.2)),
        *(Row(f"fluxion-{tau:g}", "fluxion", {"predictor": predictor, "tau": tau} | tiers) for tau in taus),
    ]


class Watch:
    """A stopwatch that runs while attention is computed.

    Attributes:
        seconds: that it has run; retrieving: of them, while the CPU predicted, chose and attended blocks of the host.
    """

    def __init__(self) -> None:
        self.seconds = self.retrieving = 0.0

    def timed(self, work: Callable[..., Any], hand: str = "seconds") -> Callable[..., Any]:
        """The same function, with one of the watch's hands running inside."""

        def run(*args: Any, **kwargs: Any) -> Any:
            synchronize()
            start = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                synchronize()
                setattr(self, hand, getattr(self, hand) + time.perf_counter() - start)

        return run

    @contextmanager
    def watching(self, name: str, cache: Cache) -> Iterator[None]:
        """Let the watch run in the attention function of a name and in a cache's `update`."""
        attend, run = AttentionInterface()[name], LaunchSequence.run
        parts: WeakKeyDictionary[LaunchSequence, list[tuple[bool, LaunchSequence]]] = WeakKeyDictionary()
        retrieve = self.timed(run, "retrieving")

        def run_parts(sequence: LaunchSequence) -> None:
            if sequence not in parts:
                groups = groupby(sequence.launches, lambda launch: launch.label.startswith(RETRIEVAL))
                parts[sequence] = [(timed, LaunchSequence(launches)) for timed, launches in groups]
            for timed, part in parts[sequence]:
                (retrieve if timed else run)(part)

        AttentionInterface.register(name, self.timed(attend))
        LaunchSequence.run = run_parts
        cache.update = self.timed(cache.update)
        try:
            yield
        finally:
            AttentionInterface.register(name, attend)
            LaunchSequence.run = run
            del cache.update  # the class's own is behind it


def feed(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, shift: int) -> torch.Tensor:
    """The last logits `[V]` after ids `[1, N]`, at positions that are `shift` less than what the cache holds."""
    past = cache.get_seq_length() - shift
    positions = torch.arange(past, past + ids.shape[1], device=ids.device)[None]
    logits: torch.Tensor = model(ids, past_key_values=cache, position_ids=positions, logits_to_keep=1).logits[0, -1]
    return logits


def repeated(model: PreTrainedModel, cache: Cache, tokens: int) -> Cache:
    """A cache with another's keys and values again and again, `tokens` in all."""
    made = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        times = -(-tokens // layer.keys.shape[2])
        made.update(*(x.repeat(1, 1, times, 1)[:, :, :tokens] for x in (layer.keys, layer.values)), index)
    return made


def fill(
    model: PreTrainedModel, rows: list[Row], ids: torch.Tensor, length: int, say: Callable[[str], None]
) -> dict[str, Cache]:
    """Caches of full attention and of rows, with `length` tokens made of the context `[1, N]`."""
    shift = length - ids.shape[1]
    own = TURN if shift else 0
    full = FULL.make_cache(model)
    prefill(model, full, ids[:, : ids.shape[1] - own], chunk=2048)
    if shift:
        full = repeated(model, full, length - own)
    caches: dict[str, Cache] = {}
    for row in rows:
        say(f"{length} tokens: {row.name} reads")
        cache = row.make_cache(model)
        if cache.policy.requirements.learns_from_prompts and not shift:
            prefill(model, cache, ids, chunk=2048)
            caches[row.name] = cache
            continue
        knobs = AS_PROMPT if shift and row.policy == "hgca" else {}
        caches[row.name] = hf_offload.HybridCache.from_cache(full, model, row.policy, **row.options, **knobs)
        if shift:
            feed(model, caches[row.name], ids[:, -own:], shift)
    if shift:
        FULL.activate(model)
        feed(model, full, ids[:, -own:], shift)
    return {FULL.name: full, **caches}


def decode(
    model: PreTrainedModel, row: Row, cache: Cache, ids: torch.Tensor, shift: int
) -> tuple[dict[str, list[float]], torch.Tensor]:
    """`feed` ids `[1, N]` one by one: milliseconds of the steps after the warm-up, and log-probabilities `[N, V]`."""
    row.activate(model)
    times: dict[str, list[float]] = {name: [] for name in TIMES}
    logits, watch = [], Watch()
    with watch.watching(model.config._attn_implementation, cache):
        for token in ids.split(1, 1):
            synchronize()
            watch.seconds, watch.retrieving, start = 0.0, 0.0, time.perf_counter()
            logits.append(feed(model, cache, token, shift))
            synchronize()
            times["step"].append(1000 * (time.perf_counter() - start))
            times["attention"].append(1000 * watch.seconds)
            times["retrieval"].append(1000 * watch.retrieving)
    return {name: values[WARM_UP:] for name, values in times.items()}, torch.stack(logits).float().log_softmax(-1).cpu()


def read_bytes(model: PreTrainedModel, row: Row, cache: Cache) -> tuple[float, float | None]:
    """Bytes that a step reads, all layers, and those of them that are chosen; with the tokens that the cache holds."""
    tokens, each = cache.get_seq_length(), token_bytes(model, len(cache.layers))
    if row is FULL:
        return float(tokens * each), None
    stats = cache.stats().as_dict()
    if stats["retrievals"]:
        near = min(cache.policy.requirements.sinks + cache.policy.requirements.recent, tokens)
        told = stats["retrievals"]
        chosen = told["retrieved_share"] * (tokens - near) * each
        digests = chosen * told["scored_bytes"] / max(told["retrieved_bytes"], 1)
        return near * each + chosen + digests, chosen
    if "gpu_ratio" in row.options:
        newest = math.ceil(row.options["gpu_ratio"] * tokens / BLOCK_SIZE) * BLOCK_SIZE
        chosen = stats["kept_share"] * (tokens - newest) * each
        return newest * each + chosen, chosen
    return min(tokens, row.options.get("budget", tokens)) * each + stats["digest_bytes"], None


def compare(mine: torch.Tensor, full: torch.Tensor) -> tuple[float, float]:
    """Mean KL(full‖mine) and how often the most likely token is the same, of log-probabilities `[N, V]`."""
    kl, top1 = divergence(mine, full)
    return float(kl.mean()), top1


def measure(
    model: PreTrainedModel, rows: list[Row], ids: torch.Tensor, length: int, read: int, rounds: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """One line a row, full attention first, after a context of `length` tokens.

    Args:
        ids: the first `read` tokens of the context and what follows `[1, read + rounds * steps]`.
        say: tells what is being done.
    """
    say(f"{length} tokens: full attention reads")
    caches = fill(model, rows, ids[:, :read], length, say)
    every = [FULL, *rows]
    times: dict[str, dict[str, list[float]]] = {row.name: {name: [] for name in TIMES} for row in every}
    apart: dict[str, list[tuple[float, float]]] = {row.name: [] for row in every}
    for number, tokens in enumerate(ids[:, read:].chunk(rounds, 1)):
        say(f"{length} tokens: round {number + 1} of {rounds}")
        seen = {}
        for row in every:
            found, seen[row.name] = decode(model, row, caches[row.name], tokens, length - read)
            apart[row.name].append(compare(seen[row.name], seen[FULL.name]))
            for name, values in found.items():
                times[row.name][name] += values
    lines, base = [], {name: percentiles(values)["p50"] for name, values in times[FULL.name].items()}
    everything = read_bytes(model, FULL, caches[FULL.name])[0]
    for row in every:
        attention, step = (percentiles(times[row.name][name]) for name in ("attention", "step"))
        kl, top = np.mean(apart[row.name], axis=0).tolist()
        taken, chosen = read_bytes(model, row, caches[row.name])
        stats = {} if row is FULL else caches[row.name].stats().as_dict()
        lines.append(
            {
                "context": length,
                "row": row.name,
                "attention": attention["p50"],
                "attention_ratio": attention["p50"] / base["attention"],
                "step": step["p50"],
                "step_ratio": step["p50"] / base["step"],
                "retrieval": percentiles(times[row.name]["retrieval"])["p50"] or None,
                "read_MiB": taken / 2**20,
                "read_ratio": taken / everything,
                "chosen_MiB": None if chosen is None else chosen / 2**20,
                "kept": stats.get("kept_share"),
                "kl": kl,
                "top1": top,
                **{f"attention_{name}": attention[name] for name in ("p20", "p80")},
                **{f"step_{name}": step[name] for name in ("p20", "p80")},
            }
        )
    return lines


def main(
    contexts: Annotated[str, typer.Option(help="Context lengths, comma-separated; k is 1,024.")] = "6k,32k",
    rows: Annotated[str, typer.Option(help="By name, comma-separated; a wrong one lists them.")] = (
        "full-hybrid,hgca-0.1,scout-512,scout-1024,scout-2048"
    ),
    steps: Annotated[int, typer.Option(min=1, help="Steps that count, per round.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which the rows take turns.")] = 4,
    read: Annotated[
        str | None, typer.Option(help="Tokens of text in a longer context, which repeats them.", show_default="all")
    ] = None,
    kind: Annotated[str, typer.Option(help="prose, documentation or code.")] = "code",
    tier: TierOption = None,
    predictor: Annotated[
        Path | None, typer.Option(help="A file of hf-offload train-fluxion, for the rows fluxion-TAU.")
    ] = None,
    prose: ProseOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = "bfloat16",
    threads: ThreadsOption = 0,
    out: OutOption = RESULTS / "context_attention.csv",
) -> None:
    """Measure attention in long contexts."""
    lengths, chosen, (name,) = sorted(numbers(contexts)), choose(make_rows(tier, predictor), rows), kinds_of(kind)
    most = max(lengths) if read is None else numbers(read)[0]
    if read is not None and most < 2 * TURN:
        raise typer.BadParameter(f"read={most} leaves nothing to repeat before the last {TURN} tokens; raise it")
    following = rounds * (WARM_UP + steps)
    language_model, tokenizer = load(model, dtype, threads)
    ids = window(text_of(name, prose), tokenizer, 0, min(max(lengths), most) + following).to(language_model.device)
    size = {"steps": steps * rounds, "kind": name, "dtype": dtype, "tier": tier, "text_tokens": most}
    records: list[dict[str, Any]] = []
    with torch.inference_mode(), tqdm(total=len(lengths)) as progress:
        for length in lengths:
            part = min(length, most)
            lines = measure(
                language_model, chosen, ids[:, : part + following], length, part, rounds, progress.set_description
            )
            records += [line | size for line in lines]
            write_csv(out, records)
            gc.collect()
            progress.update()
    title = "ms a token, MiB that a step reads, and both against full attention"
    show(title, [dict(list(r.items())[:13]) for r in records])


if __name__ == "__main__":
    command(main)()
