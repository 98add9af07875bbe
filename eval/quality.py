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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
import torch
import typer
from tqdm import tqdm
from transformers import Cache, PreTrainedTokenizerBase

import common
import hf_offload
from context_attention import read_bytes
from hf_offload.tools import assets, measuring
from plotting import plot
from tasks.answers import Reading, answer
from tasks.prompts import Prompter
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

Place = dict[str, Any]
"""Which text: columns of the results."""


@dataclass(frozen=True)
class Options:
    """What is asked for, beside a model and texts."""

    rows: common.RowsOption = field(default_factory=list)
    contexts: Annotated[str | None, typer.Option(help="Lengths; k is 1,024 [default: 6k, or 6500].")] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Tokens that rows are fed [default: by --ask].")] = None
    limit: Annotated[
        int | None, typer.Option(min=1, help="Windows or numbers of each kind, or lists [default: by --ask].")
    ] = None
    kinds: common.KindsOption = common.KINDS
    tier: common.TierOption = None
    needles: Annotated[int, typer.Option(min=0, help="text: numbers to hide in each kind of text.")] = 0
    records: Annotated[int, typer.Option(min=10, max=240, help="extraction: records of a list.")] = 200


class Ask:
    """What is asked of every row, on some texts; by default with these rows, contexts, steps and limit."""

    FILE: str
    ROWS: str
    CONTEXTS, STEPS, LIMIT = "6k", 192, 8
    SIZES: tuple[str, ...] = ()
    """Columns that are the same in all rows of the results."""

    def __init__(self, options: Options, setting: common.TextSetting) -> None:
        self.options, self.tier, self.kinds = options, options.tier, common.kinds_of(options.kinds)
        self.setting = setting if setting.out != common.OUT else replace(setting, out=common.RESULTS / self.FILE)
        self.contexts = common.numbers(options.contexts or self.CONTEXTS)
        self.steps, self.limit = options.steps or self.STEPS, options.limit or self.LIMIT

    def rows(self) -> list[common.Row]:
        """The rows that are asked."""
        return common.rows_of(self.options.rows or [self.ROWS], self.tier, known=KNOWN)

    def places(self) -> Iterator[Place]:
        """The texts."""
        raise NotImplementedError

    def read(self, place: Place) -> Any:
        """What all rows share of a text."""
        raise NotImplementedError

    def measure(self, context: Any, row: common.Row) -> dict[str, Any] | None:
        """What a row makes of it; None: it is not asked."""
        raise NotImplementedError

    def run(self) -> None:
        """Ask every row about every text, and report."""
        rows, sizes = self.rows(), {"steps": self.steps, "tier": self.tier, "records": self.options.records}
        about = sizes | {"ask": self.FILE, "needles": self.options.needles, "prose": self.setting.source}
        kept = self.setting.records(("row", "place"), rows, **about)
        sizes |= {"text_tokens": max(self.contexts), "asked": self.options.records // 10}
        same = {name: sizes[name] for name in self.SIZES}
        self.model, self.tokenizer = self.setting.load()
        self.model.set_attn_implementation("hybrid_sparse")
        common.check_rows(rows, self.model)
        places = list(self.places())
        with tqdm(total=len(places) * len(rows)) as bar, torch.inference_mode():
            for place in places:
                context, called = None, ", ".join(map(str, place.values()))
                for row in rows:
                    bar.set_description(f"{called}: {row.name}")
                    key = {"row": row.name, "place": called}
                    if kept.key(key) not in kept.found:
                        context = self.read(place) if context is None else context
                        if (found := self.measure(context, row)) is not None:
                            kept.add(key | place | found)
                    bar.update()
                lines = [{k: v for k, v in r.items() if k != "place"} | same for r in kept.found.values()]
                self.setting.write(lines)
        self.report(lines)
        kept.remove()

    def report(self, lines: list[dict[str, Any]]) -> None:
        """Tell what has been found."""
        means = pd.DataFrame(lines).drop(columns=["start", "seed", "list", "tier", "steps", "number"], errors="ignore")
        by = ["context", "row"] if "context" in means else ["row"]
        table = means.groupby(by, sort=False).mean(numeric_only=True).reset_index()
        common.show("means over the texts", table.astype(object).where(table.notna(), None).to_dict("records"))


COSTS = {"read": "KiB read, a head and step", "ms": "ms a step"}


def draw(source: Path) -> None:
    """Draw a CSV beside it: KL against what a head reads, and against the time of a step.

    A plot for each context; a curve for each method, and one for each form of the host's blocks.
    """
    frame = pd.read_csv(source).groupby(["context", "row"], sort=False)[["kl", *COSTS]].mean().reset_index()
    drawn = frame.row.str.extract(r"\b(samples|rescue|host_dtype=int8)\b.*?(host_dtype=int8)?$").fillna("")
    frame["method"] = frame.row.str.partition(":")[0] + drawn.agg(lambda each: "".join(f", {x}" for x in each if x), 1)
    frame["method"] = frame.method.str.replace("host_dtype=", "")
    contexts, methods = frame.context.unique(), list(frame.method.unique())
    with plot(source.with_suffix(".png"), 2, len(contexts), figsize=(6 * len(contexts), 8), squeeze=False) as axes:
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

    FILE, ROWS, LIMIT, SIZES = "quality.csv", "methods", 1, ("text_tokens", "steps", "tier")

    def places(self) -> Iterator[Place]:
        for length in self.contexts:
            for kind in self.kinds:
                for start in common.OFFSETS[kind][: self.limit]:
                    yield {"context": length, "kind": kind, "start": start}

    def read(self, place: Place) -> tuple[measuring.Reading, list[Any] | None]:
        length, kind, start = place.values()
        hidden = None
        if self.options.needles and start == common.OFFSETS[kind][0]:
            hidden = self._found_by_full(kind, length)
        ids = self.setting.window(self.tokenizer, kind, start, length + self.steps).to(self.model.device)
        return measuring.read(self.model, ids, self.steps), hidden

    def measure(self, context: Any, row: common.Row) -> dict[str, Any]:
        (reading, hidden), model = context, self.model
        tier = row.options.get("tier", self.tier)
        tiers = [tier] if tier or model.device.type != "cpu" else ["split", "one"]
        line: dict[str, Any] = {}
        for one in tiers:
            options = {**row.options, **({} if one is None else {"tier": one})}
            try:
                cache = measuring.hold(model, row.policy, options, reading)
            except ValueError:
                if one != "split" or len(tiers) == 1:
                    raise
                continue  # a method that needs one memory
            logprobs, seconds = measuring.follow(model, cache, reading.following)
            kl, top1 = measuring.divergence(logprobs, reading.full)
            host, stats = measuring.host_bytes(cache), cache.stats().as_dict()
            if host is not None:
                line |= {"kl_split": float(kl.mean()), "host": host / 2**20, "device": stats["device_bytes"] / 2**20}
            lines = cache.layers[0].store.num_kv_heads * len(cache.layers)
            pace = 1000 * statistics.median(seconds[measuring.WARM_UP :] or seconds)
            line |= {"kl": float(kl.mean()), "top1": top1, "ms": pace, "attended": stats["attended_tokens"]}
            line["read"] = read_bytes(model, row, cache)[0] / lines / 2**10
        if hidden is None:
            return line
        asked = row if self.tier is None else replace(row, options={"tier": self.tier, **row.options})
        found = [self._finds(asked, *one) for one in hidden]
        return line | {"found": sum(found) / len(found) if found else None}

    def report(self, lines: list[dict[str, Any]]) -> None:
        super().report(lines)
        draw(self.setting.out)

    def _found_by_full(self, kind: str, tokens: int) -> list[Any]:
        """The hidden numbers that full attention finds, with what their prompts are for all rows."""
        prompter = Prompter(self.model, self.tokenizer, None, chat=True)
        samples = numbers_in(self.setting.text(kind), kind, range(self.options.needles), self.tokenizer, tokens)
        prompts = [prompter(sample) for sample in samples]
        if any(prompt.whole > prompt.ids.shape[1] for prompt in prompts):
            raise typer.BadParameter(
                f"{tokens} tokens, a question and its answer exceed the model's {prompter.positions} positions: give "
                "shorter --contexts, or no --needles"
            )
        readings = [Reading(self.model, prompt.ids.to(self.model.device)) for prompt in prompts]
        every = zip(readings, prompts, samples, strict=True)
        return [one for one in every if self._finds(common.row_of("full"), *one)]

    def _finds(self, row: common.Row, reading: Reading, prompt: Any, sample: Sample) -> bool:
        return bool(answer(reading, row, "dense", prompt, sample, self.tokenizer)["score"] > 0)


NEW_TOKENS = 24


def numbers_in(
    text: str, kind: str, seeds: Iterable[int], tokenizer: PreTrainedTokenizerBase, tokens: int
) -> list[Sample]:
    """A hidden number for each seed, in prompts of about so many tokens."""
    found = []
    for seed in seeds:
        try:
            needle = assets.random_needle(text, tokenizer, seed, tokens=tokens)
        except ValueError as error:
            raise typer.BadParameter(f"{kind}: {error}") from None

        def score(answer: str, needle: assets.Needle = needle) -> float:
            return 100.0 * needle.found_in(answer)

        found.append(Sample(kind, str(seed), needle.content, assets.QUESTION, NEW_TOKENS, score))
    return found


class Needle(Ask):
    """Hidden numbers, in the tables and with the intervals of the benchmarks."""

    FILE, CONTEXTS = "needle.csv", "6500"
    ROWS = "full,scout:budget=1024,scout:budget=512,window:budget=1024"

    def run(self) -> None:
        kinds, tokens = self.kinds, self.contexts[0]

        def hidden(kind: str, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
            seeds = range(kinds.index(kind), self.limit * len(kinds), len(kinds))
            return numbers_in(self.setting.text(kind), kind, seeds, tokenizer, tokens)

        asking = Asking(rows=self.options.rows or [self.ROWS], limit=self.limit)
        source = {"kinds": kinds, "tokens": tokens, "prose": self.setting.source}
        run("Needles", kinds, hidden, asking, self.setting, **source)


class Extraction(Ask):
    """Records copied out of a long list."""

    FILE, SIZES = "extraction.csv", ("records", "asked", "tier")
    ROWS = (
        "full,scout:budget=1024,scout:budget=2048,scout:samples=128,scout:samples=256,scout:samples=512,"
        "quest:budget=1024,hgca:gpu_ratio=0.25,rescue=0,hgca:gpu_ratio=0.25,rescue=128,fixed_hybrid:budget=0.1,"
        "window:budget=1024"
    )
    FIRST = "amber bitter calm dusty early fallen gentle hollow iron jade keen lunar misty narrow olive pale"
    SECOND = "anchor bridge canyon drum engine ferry garden harbor island jungle kettle lantern meadow needle orchard"

    def places(self) -> Iterator[Place]:
        yield from ({"list": seed} for seed in range(self.limit))

    def read(self, place: Place) -> tuple[measuring.Reading, torch.Tensor]:
        question, told = self.question(place["list"])
        said = [{"role": "user", "content": question}]
        prompt = self.tokenizer.apply_chat_template(
            said, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        right = self.tokenizer(told, return_tensors="pt", add_special_tokens=False)["input_ids"]
        # Fed are the prompt's last token and all of the answer but its own.
        ids = torch.cat([prompt, right], 1)[:, :-1].to(self.model.device)
        return measuring.read(self.model, ids, right.shape[1]), right[0]

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

    def measure(self, context: Any, row: common.Row) -> dict[str, Any]:
        reading, right = context
        cache = measuring.hold(self.model, row.policy, dict(row.options), reading)
        logprobs, _ = measuring.follow(self.model, cache, reading.following)
        kl, kept = measuring.divergence(logprobs, reading.full)
        mine, full = ((found.argmax(-1) == right).float().mean().item() for found in (logprobs, reading.full))
        told = {"kept": kept, "right": mine, "right_full": full, "kl": float(kl.mean())}
        return told | {"attended": cache.stats().as_dict()["attended_tokens"]}


class SecondTurn(Ask):
    """A number that only the second turn asks for."""

    FILE, ROWS, CONTEXTS, STEPS = "second_turn.csv", "hgca-0.1,hgca-0.1-once,scout-1024", "6500", 48
    FIRST = "What is this text about? Answer in one sentence."

    def rows(self) -> list[common.Row]:
        return [common.FULL, *super().rows()]

    def places(self) -> Iterator[Place]:
        for seed in range(self.limit * len(self.kinds)):
            yield {"kind": self.kinds[seed % len(self.kinds)], "seed": seed}

    def read(self, place: Place) -> dict[str, Any]:
        kind, seed = place.values()
        text, tokens = self.setting.text(kind), self.contexts[0]
        needle = assets.random_needle(text, self.tokenizer, seed, tokens=tokens, question=self.FIRST)
        prompt, cache = needle.prompt.to(self.model.device), common.FULL.make_cache(self.model)
        first = self._generate(cache, prompt, self.steps, self.steps)
        context = {"needle": needle, "prompt": prompt, "first": first}
        context["full"] = self._second(context, common.FULL, cache)
        return context | {"spoken": self.tokenizer.decode(first[0], skip_special_tokens=True).strip()}

    def measure(self, context: Any, row: common.Row) -> dict[str, Any] | None:
        if row is common.FULL:
            return context["full"] | {"first_answer": context["spoken"]}
        if not context["full"]["found"] or context["needle"].found_in(context["spoken"]):
            return None
        cache: Any = row.make_cache(self.model)
        common.prefill(self.model, cache, context["prompt"])
        for token in context["first"][:, :-1].split(1, 1):
            self.model(token, past_key_values=cache)
        return self._second(context, row, cache) | {"kept_share": cache.stats().as_dict().get("kept_share")}

    def _second(self, context: dict[str, Any], row: common.Row, cache: Cache) -> dict[str, Any]:
        """The answer to the second turn."""
        row.activate(self.model)
        ids = torch.cat([context["prompt"], context["first"], self.next_turn().to(self.model.device)], 1)
        text = self.tokenizer.decode(self._generate(cache, ids, NEW_TOKENS)[0], skip_special_tokens=True).strip()
        needle = context["needle"]
        found = {"tokens": context["prompt"].shape[1], "number": needle.number}
        return found | {"found": int(needle.found_in(text)), "answer": text}

    def next_turn(self) -> torch.Tensor:
        """Token ids `[1, N]` of what follows an answer: its end, the next question, and the start of its answer."""
        following, answer = f"\n\n{assets.QUESTION}\n", "An answer of 1234567 words."
        if self.tokenizer.chat_template:
            said = zip(("user", "assistant", "user"), ("Hello.", answer, assets.QUESTION), strict=True)
            turns = [{"role": role, "content": content} for role, content in said]
            text = str(self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
            following = text.partition(answer)[2]
        return self.tokenizer(following, add_special_tokens=False, return_tensors="pt")["input_ids"]

    def _generate(self, cache: Cache, ids: torch.Tensor, most: int, least: int = 0) -> torch.Tensor:
        """New tokens `[1, ≤ most]` after ids `[1, N]`, of which the cache holds a beginning."""
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
            max_new_tokens=most, min_new_tokens=least,
        )  # fmt: skip
        return out[:, ids.shape[1] :]


class Error(Text):
    """The error that drawn keys tell of themselves."""

    FILE, ROWS, STEPS, SIZES = "error_estimate.csv", "scout:samples=128,scout:samples=512", 300, ()
    FACTOR = 3.0

    def measure(self, context: Any, row: common.Row) -> dict[str, Any]:
        reading, _ = context
        cache = measuring.hold(self.model, row.policy, {**row.options, "check_every": 1}, reading)
        measuring.follow(self.model, cache, reading.following)
        layers = cache.stats().as_dict()["layers"]
        return {"points": [[layer["layer"], *pair] for layer in layers for pair in layer["checked_errors"]]}

    def report(self, lines: list[dict[str, Any]]) -> None:
        """Write lines by samples and layer in place of the points, and draw these."""
        columns = ["samples", "layer", "estimated", "true"]
        rows = [[int(r["row"].partition("samples=")[2].split(",")[0]), *point] for r in lines for point in r["points"]]
        points, lines = pd.DataFrame(rows, columns=columns), []
        for samples, mine in points.groupby("samples"):
            for layer, each in [("all", mine), *mine.groupby("layer")]:
                within = (each.true <= self.FACTOR * each.estimated).mean()
                roots = {name: math.sqrt((each[name] ** 2).mean()) for name in ("estimated", "true")}
                lines.append({"samples": samples, "layer": layer, "points": len(each), "within": within} | roots)
        contexts = " ".join(f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in self.contexts)
        size = {"contexts": contexts, "kinds": " ".join(self.kinds), "steps": self.steps}
        self.setting.write([line | size for line in lines])
        common.show("errors of the softmax's sum", [line for line in lines if line["layer"] == "all"])
        each = list(points.groupby("samples"))
        with plot(self.setting.beside(".png"), 1, len(each), figsize=(5.5 * len(each), 5), squeeze=False) as axes:
            for one, (samples, mine) in zip(axes.flat, each, strict=True):
                one.scatter(mine.estimated.clip(1e-6), mine.true.clip(1e-6), c=mine.layer, s=2)
                for factor, style in ((1.0, "solid"), (self.FACTOR, "dashed")):
                    one.plot([1e-5, 1.0], [1e-5 * factor, factor], color="black", linewidth=1, linestyle=style)
                title = f"samples={samples}; dashed: {self.FACTOR:g} times the estimate"
                one.set(xscale="log", yscale="log", xlabel="estimated error", ylabel="true error", title=title)


ASKS = {"text": Text, "needle": Needle, "extraction": Extraction, "second-turn": SecondTurn, "error": Error}


def main(
    ask: Annotated[Literal[*ASKS], typer.Option(help="What is asked.")] = "text",
    *,
    options: Options,
    setting: common.TextSetting = common.EXACT_TEXT,
) -> None:
    """Compare policies with full attention, and say what they cost."""
    ASKS[ask](options, setting).run()


if __name__ == "__main__":
    common.command(main)()
