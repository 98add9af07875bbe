"""What does each policy and budget lose against full attention, and what does it cost?

    python eval/quality.py
    python eval/quality.py --rows budgets --contexts 2k,6k --kinds prose --prose novel.txt
    python eval/quality.py --ask needle --limit 8 --row full --row scout:budget=512
    python eval/quality.py --ask extraction --row scout:samples=512 --records 200 --limit 8
    python eval/quality.py --ask second-turn --rows hgca-0.1,hgca-0.1-once
    python eval/quality.py --ask error --row scout:samples=128 --row scout:samples=512

Full attention reads a text; every row takes that over (`hgca` and others that learn from a prompt read it themselves)
and is fed what follows, token by token.

text: what follows in a real text. `kl` is KL(full‖row), `top1` how often the most likely token is the same. Beside that
stands what a step costs: `read`, KiB of keys, values and digests that a KV head of a layer reads, by arithmetic;
`host`, MiB that a step reads in host memory; `device`, MiB of keys, values and digests in the device's memory; `ms`,
median of a step. `attended` is the mean number of tokens that a row and KV head attends, where keys are drawn; `found`,
with `--needles`, the share of hidden numbers that full attention finds and the row, too. Without a GPU `host` and
`device` come from two memories on the CPU (`tier="split"`), as `kl_split` does, and all else from one memory. The rows
`methods` are some of each method, `variants` those of ScoutAttention (a layer ahead, int8, the paper's form), `budgets`
many of each policy.

needle: 7-digit numbers at a random depth of a random stretch of a text. A kind of text is a task; scores, differences
and resuming are those of longbench.py; a found number scores 100.

extraction: records copied out of a long list as JSON: every token of the answer hangs on another place of the context,
which no summary of it can hold. `kept` is the share of the answer's tokens for which a row's most likely token is full
attention's, `right` that for which it is the answer's own (`right_full`: of full attention).

second-turn: a long text with a hidden number and a question of something else, which full attention answers. Then the
second turn asks for the number, on the same cache: a policy that has chosen by the first turn's attention what to keep
must choose anew (HGCA, §3.2.2); `hgca-…-once` is the control that does not. Numbers that full attention (row `dynamic`)
does not find, or gives away in its first answer, are not asked of the others.

error: with `check_every=1` each step compares one layer with full attention. For each query head the relative error of
the softmax's sum is estimated from the drawn keys alone, and true: the share of them `within` three times the estimate,
and both in the mean square.

A run that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import torch
import typer
from transformers import Cache, PreTrainedTokenizerBase

import common
import hf_offload
from context_attention import read_bytes
from hf_offload.tools import assets, measuring
from plotting import plot
from records import RESULTS, show
from tasks.answers import Reading, answer
from tasks.prompts import Prompt, Prompter
from tasks.run import Asking, run
from tasks.samples import Sample

VARIANTS: dict[str, dict[str, Any]] = {
    "scout-off": {"lookahead": "off"},
    "scout-off-int8": {"lookahead": "off", "host_dtype": "int8"},
    "scout-select": {"lookahead": "select"},
    "scout-select-sync0": {"lookahead": "select", "synchronous_layers": (0,)},
    "scout-attend": {"lookahead": "attend"},
    "scout-attend-sync0": {"lookahead": "attend", "synchronous_layers": (0,)},
    "scout-attend-uncorrected": {"lookahead": "attend", "correction": False},
    "paper": vars(hf_offload.Scout.paper(budget=1024, lookahead="attend")),
    "paper-off": vars(hf_offload.Scout.paper(budget=1024, lookahead="off")),
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
KNOWN: dict[str, Any] = {"methods": METHODS, "budgets": BUDGETS, "variants": ("window-1024", *VARIANTS)}
for _name, _knobs in VARIANTS.items():
    _two = {} if _knobs["lookahead"] == "off" else {"tier": "split"}  # a predicted query needs two memories
    KNOWN[_name] = common.Row(_name, "scout", {"budget": 1024} | _knobs | _two)


@dataclass(frozen=True)
class Options(common.TextSetting):
    """What is asked for, of which model and texts."""

    rows: common.RowsOption = field(default_factory=list)
    contexts: Annotated[str | None, typer.Option(help="Lengths; k is 1,024 [default: 6k, or 6500].")] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Tokens that rows are fed [default: by --ask].")] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Windows or numbers of each kind, or lists [default: by --ask].")
    ] = None
    kinds: common.KindsOption = common.KINDS
    tier: common.TierOption = None
    picture: Annotated[Path | None, typer.Option(help="text: where the plot goes [default: none].")] = None
    needles: Annotated[int, typer.Option(min=0, help="text: numbers to hide in each kind of text.")] = 0
    records: Annotated[int, typer.Option(min=10, max=240, help="extraction: records of a list.")] = 200


Place = dict[str, Any]
"""Which text: columns of the results."""
Lines = list[dict[str, Any]]
"""Further columns of the results."""


class Ask:
    """What is asked of every row about some texts; by default with these rows, contexts, steps and limit.

    A subclass has `places()`, the texts, `read(place)`, what all rows share of one, and `measure(read, row)`, what a
    row makes of that.
    """

    FILE: str
    ROWS: str
    CONTEXTS, STEPS, LIMIT = "6k", 192, 8

    def __init__(self, options: Options) -> None:
        self.options = replace(options, out=RESULTS / self.FILE) if options.out == common.OUT else options
        self.kinds, self.contexts = common.kinds_of(options.kinds), common.numbers(options.contexts or self.CONTEXTS)
        self.steps, self.limit = options.steps or self.STEPS, options.limit or self.LIMIT
        self.rows = common.rows_of(options.rows or [self.ROWS], options.tier, known=KNOWN)

    def run(self) -> None:
        """Ask every row about every text, and report."""
        options = self.options
        self.model, self.tokenizer = options.load()
        common.check_rows(self.rows, self.model)
        about = {"ask": self.FILE, "steps": self.steps, "records": options.records, "needles": options.needles}
        about |= {"tier": options.tier, "prose": options.source}
        self.report(common.over_texts(options, self.rows, list(self.places()), self.read, self.measure, **about))

    def report(self, lines: Lines) -> None:
        """Tell what has been found."""
        frame = pd.DataFrame(lines).drop(columns=["start", "seed", "list", "steps", "number"], errors="ignore")
        by = ["context", "row"] if "context" in frame else ["row"]
        show("means over the texts", frame.groupby(by, sort=False).mean(numeric_only=True).reset_index())

    def decode(
        self, row: common.Row, reading: measuring.Reading, **knobs: Any
    ) -> tuple[hf_offload.HybridCache, torch.Tensor, dict[str, Any]]:
        """Let a row decode what follows a reading: its cache, log-probabilities `[N, V]`, and columns of results."""
        cache = measuring.hold(self.model, row.policy, {**row.options, **knobs}, reading)
        logprobs, seconds = measuring.follow(self.model, cache, reading.following)
        kl, top1 = measuring.divergence(logprobs, reading.full)
        pace = 1000 * statistics.median(seconds[measuring.WARM_UP :] or seconds)
        attended = cache.stats().as_dict()["attended_tokens"]
        return cache, logprobs, {"kl": float(kl.mean()), "top1": top1, "ms": pace, "attended": attended}


COSTS = {"read": "KiB read, a head and step", "ms": "ms a step"}


def draw(lines: Lines, path: Path) -> None:
    """Draw KL against what a head reads, and against the time of a step.

    A plot for each context; a curve for each method, and one for each form of the host's blocks.
    """
    frame = pd.DataFrame(lines).groupby(["context", "row"], sort=False)[["kl", *COSTS]].mean().reset_index()
    drawn = frame.row.str.extract(r"\b(samples|rescue|host_dtype=int8)\b.*?(host_dtype=int8)?$").fillna("")
    frame["method"] = frame.row.str.partition(":")[0] + drawn.agg(lambda each: "".join(f", {x}" for x in each if x), 1)
    frame["method"] = frame.method.str.replace("host_dtype=", "")
    contexts, methods = frame.context.unique(), list(frame.method.unique())
    with plot(path, 2, len(contexts), figsize=(6 * len(contexts), 8), squeeze=False) as axes:
        for row_of_axes, (cost, title) in zip(axes, COSTS.items(), strict=True):
            for one, context in zip(row_of_axes, contexts, strict=True):
                one.set(yscale="log", xlabel=title, ylabel="KL to full attention", title=f"{context:,} tokens")
                one.yaxis.set_major_formatter("{x:g}")
                shown = frame[frame.context == context].dropna(subset=[cost])
                for method, mine in shown.sort_values("kl").groupby("method", sort=False):
                    color, end = f"C{methods.index(method)}", (mine[cost].iloc[0], mine.kl.iloc[0])
                    one.plot(mine[cost], mine.kl, "o-", color=color)
                    one.annotate(method, end, (5, 5), textcoords="offset points", color=color)
                one.margins(x=0.15, y=0.1)


class Text(Ask):
    """KL on running text, and what a step costs."""

    FILE, ROWS, LIMIT = "quality.csv", "methods", 1

    def places(self) -> Iterator[Place]:
        for length in self.contexts:
            for kind in self.kinds:
                for start in common.OFFSETS[kind][: self.limit]:
                    yield {"context": length, "kind": kind, "start": start}

    def read(self, place: Place) -> tuple[measuring.Reading, list[Any]]:
        length, kind, start = place.values()
        ids = self.options.window(self.tokenizer, kind, start, length + self.steps).to(self.model.device)
        seeds = range(self.options.needles if start == common.OFFSETS[kind][0] else 0)
        numbers = [self.number(kind, length, seed) for seed in seeds]
        found_by_full = [number for number in numbers if self.finds(common.row_of("full"), *number)]
        return measuring.read(self.model, ids, self.steps), found_by_full

    def number(self, kind: str, tokens: int, seed: int) -> tuple[Reading, Prompt, Sample]:
        """A hidden number, with what its prompt is for all rows."""
        sample = number_in(self.options.text(kind), kind, seed, self.tokenizer, tokens)
        prompt = Prompter(self.model, self.tokenizer, None, chat=True)(sample)
        if prompt.whole > prompt.ids.shape[1]:
            raise typer.BadParameter(
                f"--needles: a prompt of {tokens} tokens exceeds the model's positions; shorten it"
            )
        return Reading(self.model, prompt.ids.to(self.model.device)), prompt, sample

    def finds(self, row: common.Row, reading: Reading, prompt: Prompt, sample: Sample) -> bool:
        """Whether a row's answer has a hidden number."""
        return bool(answer(reading, row, "dense", prompt, sample, self.tokenizer)["score"] > 0)

    def measure(self, context: Any, row: common.Row) -> Lines:
        (reading, numbers), line = context, {}
        both = "tier" not in row.options and self.model.device.type == "cpu"
        for knobs in ({"tier": "split"}, {"tier": "one"}) if both else ({},):
            cache, _, told = self.decode(row, reading, **knobs)
            host, device = measuring.host_bytes(cache), cache.stats().as_dict()["device_bytes"]
            if host is not None:
                line |= {"kl_split": told["kl"], "host": host / 2**20, "device": device / 2**20}
            heads = cache.layers[0].store.num_kv_heads * len(cache.layers)
            line |= told | {"read": read_bytes(self.model, row, cache)[0] / heads / 2**10}
        if self.options.needles:
            line["found"] = statistics.mean(self.finds(row, *one) for one in numbers) if numbers else None
        return [line | {"text_tokens": max(self.contexts), "steps": self.steps, "tier": self.options.tier}]

    def report(self, lines: Lines) -> None:
        super().report(lines)
        if self.options.picture is not None:
            draw(lines, self.options.picture)


NEW_TOKENS = 24


def number_in(text: str, kind: str, seed: int, tokenizer: PreTrainedTokenizerBase, tokens: int) -> Sample:
    """A hidden number, in a prompt of about so many tokens."""
    needle = assets.random_needle(text, tokenizer, seed, tokens=tokens)

    def score(answer: str) -> float:
        return 100.0 * needle.found_in(answer)

    return Sample(kind, str(seed), needle.content, assets.QUESTION, NEW_TOKENS, score)


class Needle(Ask):
    """Hidden numbers, in the tables and with the intervals of the benchmarks."""

    FILE, CONTEXTS = "needle.csv", "6500"
    ROWS = "full,scout:budget=1024,scout:budget=512,window:budget=1024"

    def run(self) -> None:
        kinds, tokens = self.kinds, self.contexts[0]

        def hidden(kind: str, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
            seeds = range(kinds.index(kind), self.limit * len(kinds), len(kinds))
            return [number_in(self.options.text(kind), kind, seed, tokenizer, tokens) for seed in seeds]

        asking = Asking(rows=self.options.rows or [self.ROWS], limit=self.limit)
        run("Needles", kinds, hidden, asking, self.options, kinds=kinds, tokens=tokens, prose=self.options.source)


class Extraction(Ask):
    """Records copied out of a long list."""

    FILE, ROWS = "extraction.csv", "full,methods"
    FIRST = "amber bitter calm dusty early fallen gentle hollow iron jade keen lunar misty narrow olive pale"
    SECOND = "anchor bridge canyon drum engine ferry garden harbor island jungle kettle lantern meadow needle orchard"

    def places(self) -> Iterator[Place]:
        yield from ({"list": seed} for seed in range(self.limit))

    def read(self, place: Place) -> tuple[measuring.Reading, torch.Tensor]:
        question, told = self.question(place["list"])
        said = [{"role": "user", "content": question}]
        text = str(self.tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False))
        prompt, right = (common.ids_of(self.tokenizer, part, self.model.device) for part in (text, told))
        # Fed are the prompt's last token and all of the answer but its own.
        ids = torch.cat([prompt, right], 1)[:, :-1]
        return measuring.read(self.model, ids, right.shape[1]), right[0].cpu()

    def question(self, seed: int) -> tuple[str, str]:
        """A question over a list of records, and its answer: JSON with the asked keys in the order of the question."""
        chance = random.Random(seed)
        names = [f"{one} {two}" for one in self.FIRST.split() for two in self.SECOND.split()]
        keys = chance.sample(names, self.options.records)
        held = {key: f"{chance.choice('ABCDEFGH')}{chance.randrange(10**5):05d}" for key in keys}
        wanted = chance.sample(keys, self.options.records // 10)
        listed = "\n".join(f"- {key}: {value}" for key, value in held.items())
        question = (
            f"Here is a list of {self.options.records} records, each with a key and a value.\n\n{listed}\n\n"
            f"Write a JSON object with the values of these keys, in this order: {', '.join(wanted)}."
        )
        return question, json.dumps({key: held[key] for key in wanted}, indent=0)

    def measure(self, context: Any, row: common.Row) -> Lines:
        reading, right = context
        _, logprobs, told = self.decode(row, reading)
        mine, full = ((found.argmax(-1) == right).float().mean().item() for found in (logprobs, reading.full))
        line = {"kept": told["top1"], "right": mine, "right_full": full, "kl": told["kl"], "attended": told["attended"]}
        asked = self.options.records // 10
        return [line | {"records": self.options.records, "asked": asked, "tier": self.options.tier}]


class SecondTurn(Ask):
    """A number that only the second turn asks for."""

    FILE, ROWS, CONTEXTS, STEPS = "second_turn.csv", "hgca-0.1,hgca-0.1-once,scout-1024", "6500", 48
    FIRST = "What is this text about? Answer in one sentence."

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.rows = [common.FULL, *self.rows]

    def places(self) -> Iterator[Place]:
        for seed in range(self.limit * len(self.kinds)):
            yield {"kind": self.kinds[seed % len(self.kinds)], "seed": seed}

    def read(self, place: Place) -> tuple[assets.Needle, torch.Tensor, dict[str, Any]]:
        """A number, full attention's answer to the first turn `[1, steps]`, and what it makes of both turns."""
        kind, seed = place.values()
        text, tokens = self.options.text(kind), self.contexts[0]
        needle = assets.random_needle(text, self.tokenizer, seed, tokens=tokens, question=self.FIRST)
        cache = common.FULL.make_cache(self.model)
        first, spoken = self.generate(cache, needle.prompt.to(self.model.device), self.steps, self.steps)
        return needle, first, self.second(needle, first, cache) | {"first_answer": spoken}

    def measure(self, context: Any, row: common.Row) -> Lines:
        needle, first, full = context
        if row is common.FULL:
            return [full]
        if not full["found"] or needle.found_in(full["first_answer"]):
            return []
        cache: Any = row.make_cache(self.model)
        common.prefill(self.model, cache, needle.prompt.to(first.device))
        common.decode(self.model, cache, first[:, :-1])
        return [self.second(needle, first, cache) | {"kept_share": cache.stats().as_dict().get("kept_share")}]

    def second(self, needle: assets.Needle, first: torch.Tensor, cache: Cache) -> dict[str, Any]:
        """The answer to the second turn of a cache that holds the first one."""
        following = common.ids_of(self.tokenizer, self.next_turn(), first.device)
        ids = torch.cat([needle.prompt.to(first.device), first, following], 1)
        _, text = self.generate(cache, ids, NEW_TOKENS)
        told = {"tokens": needle.prompt.shape[1], "number": needle.number}
        return told | {"found": int(needle.found_in(text)), "answer": text}

    def next_turn(self) -> str:
        """What follows an answer: its end, the next question, and the start of its answer."""
        if not self.tokenizer.chat_template:
            return f"\n\n{assets.QUESTION}\n"
        answer = "An answer of 1234567 words."
        said = zip(("user", "assistant", "user"), ("Hello.", answer, assets.QUESTION), strict=True)
        turns = [{"role": role, "content": content} for role, content in said]
        text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return str(text).partition(answer)[2]

    def generate(self, cache: Cache, ids: torch.Tensor, most: int, least: int = 0) -> tuple[torch.Tensor, str]:
        """New tokens `[1, ≤ most]` after ids `[1, N]`, of which the cache holds a beginning, and their text."""
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
            max_new_tokens=most, min_new_tokens=least,
        )[:, ids.shape[1] :]  # fmt: skip
        return out, self.tokenizer.decode(out[0], skip_special_tokens=True).strip()


class Error(Text):
    """The error that drawn keys tell of themselves."""

    FILE, ROWS, STEPS = "error_estimate.csv", "scout:samples=128,scout:samples=512", 300
    FACTOR = 3.0

    def measure(self, context: Any, row: common.Row) -> Lines:
        cache, *_ = self.decode(row, context[0], check_every=1)
        return [
            {"samples": row.options["samples"], "layer": layer["layer"], "estimated": estimated, "true": true}
            for layer in cache.stats().as_dict()["layers"]
            for estimated, true in layer["checked_errors"]
        ]

    def report(self, lines: Lines) -> None:
        """Write lines by samples and layer in place of the points."""
        points = pd.DataFrame(lines)
        points["within"] = points.true <= self.FACTOR * points.estimated
        groups = pd.concat([points.assign(layer="all"), points]).groupby(["samples", "layer"], sort=False)
        found = pd.DataFrame({"points": groups.size(), "within": groups.within.mean()})
        for name in ("estimated", "true"):
            found[name] = groups[name].agg(lambda each: math.sqrt((each**2).mean()))
        contexts = (self.options.contexts or self.CONTEXTS).replace(",", " ")
        found = found.reset_index().assign(contexts=contexts, kinds=" ".join(self.kinds), steps=self.steps)
        self.options.write(found.to_dict("records"))
        show("errors of the softmax's sum", found[found.layer == "all"])


ASKS = {"text": Text, "needle": Needle, "extraction": Extraction, "second-turn": SecondTurn, "error": Error}


def main(
    ask: Annotated[Literal[*ASKS], typer.Option(help="What is asked.")] = "text",
    *,
    options: Options = Options(dtype="float32"),
) -> None:
    """Compare policies with full attention, and say what they cost."""
    ASKS[ask](options).run()


if __name__ == "__main__":
    common.command(main)()
