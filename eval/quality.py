"""What does each policy and budget lose against full attention, and what does it cost: which is the best choice where?

    python eval/quality.py
    python eval/quality.py --rows budgets --contexts 2k,6k --kinds prose --windows 1 --prose novel.txt
    python eval/quality.py --row scout:samples=512 --kinds prose,table8,table16 --noise 1e-7 --noise-seed 2
    python eval/quality.py --row scout:budget=1024,block_size=16 --row scout:samples=512 --contexts 32k --read 6k

Full attention reads a window of real text; every row takes that over (`hgca` and others that learn from a prompt read
it themselves) and is fed what follows, token by token, as if it had been generated: KL(full‖row) and how often the most
likely token is the same. With `--read` longer contexts repeat a shorter text (see `context_attention.py`). Beside that
stands what a step costs:

read    KiB of keys, values and digests that a KV head of a layer reads, by arithmetic
host    MiB that a step reads in host memory: what the CPU attends, what is brought to the device, digests there
device  MiB of keys, values and digests in the device's memory
ms      median of a step

`attended` is the mean number of tokens that a row and KV head attends, where keys are drawn. With `--needles` stands
`found` beside it, the share of hidden numbers: of those that full attention finds (see `needle.py`).

Without a GPU `host` and `device` come from two memories on the CPU (`tier="split"`), as `kl_split` does, and all else
from one memory, where a row allows that and `--tier` asks for no other. A row is on the front of a cost if none is
nearer to full attention for less of it. At the end a table says which row is cheapest below each KL. A run that was
stopped goes on where it was.

Besides the texts there are tables, `table8` and `table16`, whose rows have exactly so many tokens: attention with a
period. `--noise x` multiplies each query of a row's decode steps by 1 + x · normal, as rounding does.

`methods` are some rows of each method; `variants` the rows of ScoutAttention: choosing and attending a layer ahead,
int8, the paper's form; `budgets` many of each policy.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerBase

import common
import needle
from context_attention import WARM_UP, Context, read_bytes
from hf_offload.model.model_support import NAME
from hf_offload.tools import measuring
from hf_offload.tools.measuring import divergence
from plotting import lines, plot
from tasks.answers import Reading, answer
from tasks.prompts import Prompt, Prompter
from tasks.samples import Sample

PAPER = {
    "digest": "quest", "join": "raw", "synchronous_layers": (0,), "correction": False, "smoothing": 0.0,
    "attend_resident": "selected", "dense": False,
}  # fmt: skip
"""`Scout.paper()`, but for its budget and lookahead."""
VARIANTS: dict[str, dict[str, Any]] = {
    "scout-off": {"lookahead": "off"},
    "scout-off-int8": {"lookahead": "off", "host_dtype": "int8"},
    "scout-select": {"lookahead": "select"},
    "scout-select-sync0": {"lookahead": "select", "synchronous_layers": (0,)},
    "scout-attend": {"lookahead": "attend"},
    "scout-attend-sync0": {"lookahead": "attend", "synchronous_layers": (0,)},
    "scout-attend-uncorrected": {"lookahead": "attend", "correction": False},
    "paper": PAPER | {"lookahead": "attend"},
    "paper-off": PAPER | {"lookahead": "off"},
}
METHODS = (
    *(f"scout:budget={budget}" for budget in (512, 1024, 2048)),
    *(f"scout:samples={samples}" for samples in (128, 256, 512, 1024)),
    "scout:samples=512,host_dtype=int8",
    "quest:budget=1024",
    *(f"hgca:gpu_ratio=0.25,rescue={samples}" for samples in (0, 128, 512)),
    "fixed_hybrid:budget=0.1",
    "window:budget=1024",
)
BUDGETS = (
    "full",
    "full:host=fetch",
    *(f"window:budget={budget}" for budget in (512, 1024, 2048)),
    *(f"scout:budget={budget}" for budget in (256, 512, 1024, 2048)),
    *(f"scout:samples={samples}" for samples in (64, 128, 256, 512, 1024)),
    *(f"quest:budget={budget}" for budget in (512, 1024, 2048)),
    *(f"infinigen:alpha={alpha}" for alpha in (2, 4, 6)),
    *(f"h2o:heavy={share},recent={share}" for share in (0.05, 0.1, 0.2)),
    *(f"hgca:gpu_ratio={ratio}" for ratio in (0.05, 0.1, 0.25)),
    *(f"fixed_hybrid:budget={share}" for share in (0.02, 0.05, 0.1, 0.2)),
)
COSTS = {
    "read": "KiB read, a head and step",
    "host": "MiB read of the host, a step",
    "device": "MiB on the device",
    "ms": "ms a step",
}
TABLES = {"table8": 8, "table16": 16}
"""Kinds of tables, and the tokens of a row."""
LIMITS = (0.1, 0.05, 0.02, 0.01, 0.005, 0.002)


def variants(budget: int) -> dict[str, common.Row]:
    """ScoutAttention's rows at a budget, and a window of it."""
    rows = {"window": common.Row("window", "window", {"budget": budget})}
    for name, knobs in VARIANTS.items():
        two = {} if knobs["lookahead"] == "off" else {"tier": "split"}  # a predicted query needs two memories
        rows[name] = common.Row(name, "scout", {"budget": budget} | knobs | two)
    return rows


def table_of(width: int, tokenizer: PreTrainedTokenizerBase, seed: int, tokens: int) -> torch.Tensor:
    """Token ids `[1, tokens]` of a table of random numbers: in each row a name, then numbers of two digits."""
    draw = random.Random(seed)

    def one(text: str) -> int:
        return int(tokenizer(text, add_special_tokens=False)["input_ids"][-1])

    names = [one(f" {name}") for name in ("north", "south", "east", "west", "spring", "summer", "autumn", "winter")]
    digits, colon, comma, end = [one(str(digit)) for digit in range(10)], one(":"), one(","), one("\n")
    ids: list[int] = []
    while len(ids) < tokens:
        cells = [token for _ in range(width) for token in (draw.choice(digits), draw.choice(digits), comma)]
        ids += [draw.choice(names), colon, *cells[: width - 3], end]
    return torch.tensor([ids[:tokens]])


@contextmanager
def noisy(noise: float, seed: int) -> Iterator[None]:
    """Multiply the queries of decode steps under `hybrid_sparse` by 1 + noise · normal."""
    attend, generator = AttentionInterface()[NAME], torch.Generator().manual_seed(seed)

    def disturbed(module: Any, query: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if query.shape[2] == 1:
            normal = torch.randn(query.shape, generator=generator, dtype=torch.float32).to(query.device)
            query = (query.float() * (1 + noise * normal)).to(query.dtype)
        return attend(module, query, *rest, **named)

    AttentionInterface.register(NAME, disturbed)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, attend)


class Needles:
    """Numbers hidden in texts of one kind that full attention finds; each text is read once for most rows.

    Args:
        model, tokenizer: who is asked.
        text, kind: where the numbers are hidden.
        tokens: of each prompt.
        count: numbers to hide.

    Raises:
        typer.BadParameter: the model has too few positions.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, kind: str, tokens: int, count: int
    ) -> None:
        self.tokenizer, prompter = tokenizer, Prompter(model, tokenizer, None, chat=True)
        samples = needle.samples_of(text, kind, range(count), tokenizer, tokens)
        prompts = [prompter(sample, needle.NEW_TOKENS) for sample in samples]
        if any(prompt.whole > prompt.ids.shape[1] for prompt in prompts):
            raise typer.BadParameter(
                f"{tokens} tokens, a question and its answer exceed the model's {prompter.positions} positions: give "
                "shorter --contexts, or no --needles"
            )
        readings = [Reading(model, prompt.ids.to(model.device)) for prompt in prompts]
        every = zip(readings, prompts, samples, strict=True)
        self.known = [one for one in every if self._finds(common.row_of("full"), *one)]

    def found(self, row: common.Row) -> float | None:
        """The share of the numbers that a row finds, too; None: full attention finds none."""
        return statistics.mean(self._finds(row, *one) for one in self.known) if self.known else None

    def _finds(self, row: common.Row, reading: Reading, prompt: Prompt, sample: Sample) -> bool:
        found = answer(reading, row, "dense", prompt, sample, self.tokenizer, needle.NEW_TOKENS)
        return bool(found["score"] > 0)


def measure(
    context: Context,
    row: common.Row,
    full: torch.Tensor,
    steps: int,
    tier: str | None,
    hidden: Needles | None = None,
    noise: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """What one row loses and costs in one context; full attention's log-probabilities are `[N, B, V]`."""
    model = context.model
    tiers = [tier] if tier or model.device.type != "cpu" else ["split", "one"]
    tiers = [row.options["tier"]] if "tier" in row.options else tiers
    line: dict[str, Any] = {}
    for one in tiers:
        options = {**row.options, **({} if one is None else {"tier": one})}
        try:
            cache: Any = context.make_cache(common.Row(row.name, row.policy, options))
        except ValueError:
            if len(tiers) == 1 or one == "one":
                raise
            continue  # a method that needs one memory
        with noisy(noise, seed) if noise else nullcontext():
            times, mine = context.decode(row, cache, 0, steps)
        kl, top1 = divergence(mine, full)
        host, stats = measuring.host_bytes(cache), cache.stats().as_dict()
        if host is not None:
            line |= {"kl_split": float(kl.mean()), "host": host / 2**20, "device": stats["device_bytes"] / 2**20}
        lines = cache.layers[0].store.num_kv_heads * len(cache.layers)
        line |= {"kl": float(kl.mean()), "top1": top1, "ms": statistics.median(times["step"])}
        line |= {"read": read_bytes(model, row, cache)[0] / lines / 2**10, "attended": stats["attended_tokens"]}
    if hidden is None:
        return line
    asked = row if tier is None else common.Row(row.name, row.policy, {"tier": tier, **row.options})
    return line | {"found": hidden.found(asked)}


def fronts(found: list[dict[str, Any]]) -> None:
    """Note in each line on which fronts it is: nothing is nearer to full attention at no more of that cost."""
    for line in found:
        line["front"] = " ".join(
            cost
            for cost in COSTS
            if line[cost] is not None
            and not any(
                other["kl"] <= line["kl"] and other[cost] <= line[cost]
                and (other["kl"], other[cost]) != (line["kl"], line[cost])
                for other in found
                if other[cost] is not None
            )
        )  # fmt: skip


def best(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cheapest row of those below each KL, for each cost."""
    table = []
    for limit in LIMITS:
        if near := [line for line in found if line["kl"] <= limit]:
            told = {}
            for cost in COSTS:
                costly = [line for line in near if line[cost] is not None]
                least = min(costly, key=lambda line: line[cost], default=None)
                told[cost] = None if least is None else f"{least['row']} ({least[cost]:.4g})"
            table.append({"KL at most": limit} | told)
    return table


def main(
    rows: common.RowsOption = ["methods"],  # noqa: B006
    budget: Annotated[int, typer.Option(help="Tokens that a step of the variants attends.")] = 1024,
    contexts: common.ContextsOption = "6k",
    read: Annotated[
        str | None, typer.Option(help="Tokens of text in a longer context, which repeats them.", show_default="all")
    ] = None,
    steps: common.StepsOption = 192,
    windows: Annotated[int, typer.Option(min=1, max=3, help="Windows of each kind.")] = 1,
    kinds: Annotated[
        str, typer.Option(help=f"Kinds of text, of {', '.join((*common.assets.KINDS, *TABLES))}.")
    ] = common.KINDS,
    noise: Annotated[float, typer.Option(min=0, help="Of queries, relative.")] = 0.0,
    noise_seed: Annotated[int, typer.Option(help="Another seed, other noise.")] = 0,
    tier: common.TierOption = None,
    needles: Annotated[int, typer.Option(min=0, help="Numbers to hide in each kind of text.")] = 0,
    *,
    setting: common.TextSetting = common.EXACT_TEXT,
) -> None:
    """Compare policies with full attention, teacher-forced, and say what they cost."""
    own = variants(budget)
    known = own | {"variants": tuple(own), "budgets": BUDGETS, "methods": METHODS}
    chosen, lengths = common.rows_of(rows, tier, known=known), common.numbers(contexts)
    most = max(lengths) if read is None else common.numbers(read)[0]
    places = [
        (length, kind, start)
        for length in lengths
        for kind in common.kinds_of(kinds, tuple(TABLES))
        for start in common.OFFSETS.get(kind, (0, 1, 2))[:windows]
    ]
    size = {"text_tokens": most, "steps": steps, "tier": tier}
    size |= {"noise": noise, "noise_seed": noise_seed} if noise else {}
    if needles and any(kind in TABLES for _, kind, _ in places):
        raise typer.BadParameter(f"--needles {needles}: no number is hidden in a table")
    if needles and max(lengths) > most:
        raise typer.BadParameter(
            f"--needles {needles}: no number is hidden in a text of {most} tokens that is repeated"
        )
    records = setting.records(
        ("row", "context", "kind", "start"), chosen, **size, budget=budget, needles=needles, prose=setting.source
    )
    model, tokenizer = setting.load()
    model.set_attn_implementation("hybrid_sparse")
    common.check_rows(chosen, model)
    with tqdm(total=len(places) * len(chosen)) as bar, torch.inference_mode():
        for length, kind, start in places:
            context: Context | None = None
            full: torch.Tensor | None = None
            hidden: Needles | None = None
            for row in chosen:
                bar.set_description(f"{length:,} tokens of {kind}, {row.name}")
                key = {"row": row.name, "context": length, "kind": kind, "start": start}
                if context is None and records.key(key) not in records.found:
                    if needles and start == common.OFFSETS[kind][0]:
                        hidden = Needles(model, tokenizer, setting.text(kind), kind, length, needles)
                    count = min(length, most) + steps + WARM_UP
                    if kind in TABLES:
                        ids = table_of(TABLES[kind], tokenizer, start, count)
                    else:
                        ids = setting.window(tokenizer, kind, start, count)
                    context = Context(model, ids.to(model.device), [length], most)
                    full = context.decode(common.FULL, context.make_cache(common.FULL), 0, steps + WARM_UP)[1]
                records.once(
                    key,
                    lambda row=row, context=context, full=full, hidden=hidden: measure(
                        context, row, full, steps + WARM_UP, tier, hidden, noise, noise_seed
                    ),
                )
                bar.update()
            setting.write([record | size for record in records.found.values()])
    found = []
    for length in lengths:
        here = []
        for row in chosen:
            mine = [r for r in records.found.values() if (r["row"], r["context"]) == (row.name, length)]
            each = {
                c: [r[c] for r in mine if r.get(c) is not None] for c in ("kl", "top1", "found", "attended", *COSTS)
            }
            means = {c: statistics.mean(values) if values else None for c, values in each.items()}
            here.append({"context": length, "row": row.name, **means})
        fronts(here)
        common.show(f"against full attention at {length:,} tokens, means over the texts", here)
        if table := best(here):
            common.show("the cheapest row below each KL", table)
        found += here
    draw(found, setting.beside(".png"))
    records.remove()


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """KL against what a head reads, a plot a context, and against the time of a step; a line a method."""
    points = sorted(({**line, "method": _method(line["row"])} for line in found), key=lambda one: one["kl"])
    contexts = list(dict.fromkeys(line["context"] for line in found))
    panels = [(length, cost) for cost in ("read", "ms") for length in contexts]
    with plot(path, 2, len(contexts), figsize=(5.5 * len(contexts), 8), sharey=True, squeeze=False) as axes:
        for one, (length, cost) in zip(axes.flat, panels, strict=True):
            lines(one, [point for point in points if point["context"] == length], cost, "kl", by="method")
            one.set(xscale="log", yscale="log", xlabel=COSTS[cost], title=f"{length:,} tokens")
        axes[0, 0].set(ylabel="KL to full attention")
        axes[0, 0].legend(fontsize="small")


def _method(row: str) -> str:
    """The name of a row's curve: its policy, and whether keys are drawn."""
    policy, _, knobs = row.partition(":")
    return policy + next((f", {knob}" for knob in ("samples", "rescue") if f"{knob}=" in knobs), "")


if __name__ == "__main__":
    common.command(main)()
