"""Write the measured numbers of README.md and docs/ from the CSVs in eval/results.

    python eval/figures.py
    python eval/figures.py --check
    python eval/figures.py docs/results.md

A figure stands between two comments, the first of which has its template: `<!--fig:{saved().load_s}-->1.1<!--/fig-->`.
A template's fields are expressions of what this file has. A table has the comments on lines of their own, and a
function as the field: `<!--fig:{losses('scout')}-->`. To add a figure, write the comments into a page and run this
script. `--check` changes nothing, names what differs and exits with 1; a test runs it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from functools import cache, partial
from os.path import commonprefix
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "eval" / "results"
FIELD = re.compile(r"\{(.*?)(?::([\d,.+%f]*))?\}")
MARK = re.compile(r"(<!--fig:(.*?)-->)(.*?)(<!--/fig-->)", re.DOTALL)

# Rows of CSVs, numbers and tables


@cache
def read(name: str) -> pd.DataFrame:
    """All rows of `NAME.csv`."""
    return pd.read_csv(RESULTS / f"{name}.csv", dtype={"commit": str}, keep_default_na=False, na_values=[""])


def rows(name: str, **columns: Any) -> pd.DataFrame:
    """The rows of `NAME.csv` whose columns have these values, in the file's order, or in that of a list of values."""
    found = read(name)
    for column, value in columns.items():
        found = pd.concat([found[found[column] == one] for one in (value if isinstance(value, list) else [value])])
    if found.empty:
        raise ValueError(f"{name}.csv has no row with {columns}")
    return found.copy()


def row(name: str, **columns: Any) -> pd.Series:
    """The one row of `NAME.csv` whose columns have these values."""
    found = rows(name, **columns)
    if len(found) != 1:
        raise ValueError(f"{name}.csv has {len(found)} rows with {columns}; name more columns")
    return found.iloc[0]


class Number(float):
    """A number as pages write it.

    `{:3}` has three significant digits and no exponent, `{}` two; `{:.1%}` is a share, `94.2 %`; `{:+.1f}` a difference
    with its sign, `−2.5`. None and NaN are `–`.
    """

    def __format__(self, spec: str) -> str:
        if math.isnan(self):
            return "–"
        if spec and not spec.isdigit():
            return super().__format__(spec).replace("%", " %").replace("-", "−")
        digits = int(spec or 2)
        rounded = float(super().__format__(f".{digits}g"))
        if abs(rounded) >= 1:
            return f"{rounded:,.{max(0, digits - len(str(int(abs(rounded)))))}f}"
        return f"{rounded:.10f}".rstrip("0").rstrip(".") or "0"


def tell(template: str, *values: float, **columns: Any) -> str:
    """A template with its numbers, which come in order (`{:.1%}`) or from the columns of a row.

    Fields are expressions of these columns and of what this module has: `{disk_bytes / 2**20:.0f}`.
    """
    left = iter(values)

    def field(found: re.Match[str]) -> str:
        value = eval(found[1], globals(), columns) if found[1] else next(left)
        return value if isinstance(value, str) else format(Number("nan" if value is None else value), found[2] or "")

    return FIELD.sub(field, template)


def between(values: Iterable[float], spec: str = "", unit: str = "") -> str:
    """The least and the largest of some values."""
    return f"{Number(min(values)):{spec}}{unit} to {Number(max(values)):{spec}}{unit}"


def lines(titles: str, found: Iterable[str], words: int = 1) -> str:
    """A Markdown table of `a | b` lines, whose first columns hold words; the numbers in the others are on the right."""
    ruler = ["---"] * words + ["---:"] * (titles.count(" | ") + 1 - words)
    return "\n".join([f"| {titles} |", f"|{'|'.join(ruler)}|", *(f"| {line} |" for line in found)])


def table(frame: pd.DataFrame, columns: str, words: int = 1) -> str:
    """A Markdown table with a line for each row, of titles and templates: `ms a token: {p50:3} | KL: {kl}`."""
    cells = columns.split(" | ")
    titles = [cell.partition("{")[0].rpartition(": ")[0] for cell in cells]
    line = " | ".join(cell.removeprefix(f"{title}: ") for title, cell in zip(titles, cells, strict=True))
    return lines(" | ".join(titles), [tell(line, **one) for one in frame.to_dict("records")], words)


def wide(frame: pd.DataFrame, down: str, across: str) -> pd.DataFrame:
    """A row for each value of the column `down`; column `kl` becomes `kl_prose`, `kl_code`, … by the values across."""
    found = frame.pivot(index=down, columns=across).reindex(frame[down].unique())
    return found.set_axis([f"{column}_{value}" for column, value in found], axis=1).reset_index()


def each(names: Iterable[Any], columns: str) -> str:
    """Columns of a `wide` table: for each name the same ones, with the name in place of `@`."""
    return " | ".join(columns.replace("@", str(name)) for name in names)


# Beside the alternatives

OURS, DYNAMIC, STATIC, LLAMA = "hf_offload", "DynamicCache", "StaticCache", "llama.cpp"
ANSWER = 300
"""Tokens of an answer: for the time of a prompt and an answer, computed from both, not timed together."""


def processor(cpu: str) -> str:
    """A processor's name, with the generation that virtual machines hide behind family and model."""
    name, _, rest = cpu.partition(" (")
    return name + {"family 25": " (Zen 4)", "family 26": " (Zen 5)"}.get(rest.partition(",")[0], "")


def peers_machine() -> str:
    """What the comparison ran on."""
    first = peer(way=OURS)
    return f"{first.threads} threads of an {processor(first.cpu).replace(' (', ' processor (')}"


def times(way: str) -> float:
    """How many times as long a token takes as with hf_offload."""
    return float(peer(way=way).p50 / peer(way=OURS).p50)


def peers_slower() -> str:
    """The longest context up to which llama.cpp decodes faster."""
    ms = rows("peers").pivot(index="context", columns="way", values="p50")
    return f"{ms.index[ms[LLAMA] < ms[OURS]].max() // 1024}k tokens"


def peers_table() -> str:
    return table(
        rows("peers"),
        "way: {way} | context: {context:,.0f} | prompt, s: {prefill_s:3} | ms a token: {p50:3} | "
        "peak, MiB: {peak_mib:3} | KL: {None if way == DYNAMIC else kl}",
    )


def peers_summary() -> str:
    frame = rows("peers", context=[8192, 32768]).replace({"context": {8192: "8k", 32768: "32k"}})
    times = "@: ms a token: {p50_@:3} | @: prompt, s: {prefill_s_@:3} | "
    times += f"@: prompt + {ANSWER} × a token, s: {{prefill_s_@ + ANSWER * p50_@ / 1000:3}}"
    way = "{way if ' ' in way or way == LLAMA else '`' + way + '`'}"
    return table(wide(frame, "way", "context"), f": {way} | {each(('8k', '32k'), times)}")


def linear_speed() -> str:
    """Products of one row: GB/s of weights, and the share of what a plain read reaches."""
    ours, torchs = (rows("bench_cpu_linear", case=case, batch=1) for case in ("linear", "torch: linear"))
    return table(
        ours.merge(torchs, on=["model", "dtype"], suffixes=("", "_torch"), validate="1:1"),
        "weights of: {model} | dtype: {dtype} | torch, GB/s: {gb_per_s_torch} ({of_limit_torch:.0%}) | "
        "`fast_linear`, GB/s: {gb_per_s} ({of_limit:.0%}) | ratio: {gb_per_s / gb_per_s_torch}×",
        words=2,
    )


def gguf_dtypes() -> str:
    return table(
        rows("gguf_dtypes"), "loaded: {way} | layers: {layers} | prompt, s: {prompt_s:3} | ms a token: {p50:3}", words=2
    )


def batches(threads: int = 2) -> pd.DataFrame:
    """Milliseconds a step of several rows at once: by length of a row and their number; dynamic, budget, samples."""
    ways = {"dynamic": "dynamic", "scout:budget=1024": "budget", "scout:samples=512": "samples"}
    frame = rows("context_attention_samples", threads=threads)
    contexts = frame.context.astype(str)
    frame = frame.assign(length=contexts.str.partition("+")[0].astype(int), batch=contexts.str.count(r"\+") + 1)
    return frame.pivot(index=["length", "batch"], columns="row", values="step").rename(columns=ways)


def batches_table() -> str:
    columns = "context: {length:,.0f} | rows: {batch:.0f} | `DynamicCache`: {dynamic:3} | `budget=1024`: {budget:3} | "
    return table(batches().reset_index(), columns + "`samples=512`: {samples:3}")


def samples_time(length: int) -> str:
    """The time of a step with samples to that with a budget, over threads and batches."""
    found = pd.concat([batches(threads).loc[length] for threads in (1, 2)])
    return between(found.samples / found.budget, ".2f") + " times"


# What policies find and lose

DEFAULTS = {"infinigen": "infinigen:alpha=4", "h2o": "h2o:heavy=0.1,recent=0.1"}
"""Rows that results name by the policy alone, with the knobs that they ran with."""
MORE = "{more:+.1f} ({low:+.1f} to {high:+.1f})"
"""The difference to full attention with its 95 % interval."""
KINDS = ("prose", "documentation", "code")


def setting(name: str) -> tuple[str, str]:
    """Policy and knobs of a row's name, `scout:budget=512`; without a predictor's file."""
    policy, _, knobs = DEFAULTS.get(name, name).partition(":")
    if policy == "hgca" and "rescue=" not in knobs:  # measured when it was off by default
        knobs += ",rescue=0"
    return policy, ", ".join(knob for knob in knobs.split(",") if knob and not knob.startswith("predictor="))


def lost(one: pd.Series) -> str:
    """What the perplexity is more than full attention's, with its standard error."""
    return tell("{100 * nll_more:+.2f} ± {100 * nll_more_se:.2f} %", **one)


def called(name: str) -> str:
    """A row's policy and knobs as tables write them."""
    policy, knobs = setting(name)
    return f"{policy}, `{knobs}`" if knobs else policy


def by_setting(name: str, **columns: Any) -> pd.DataFrame:
    """The rows of `NAME.csv` whose columns have these values, by policy and knobs, which are columns, too."""
    frame = rows(name, **columns)
    frame[["policy", "knobs"]] = [setting(one) for one in frame.row]
    return frame.set_index(["policy", "knobs"], drop=False)


def losses(policy: str) -> str:
    """What each setting of a policy loses, on running text and in RULER."""
    text, needles = by_setting("pareto"), by_setting("ruler", task="average")
    both = text[["kl", "top1"]].reindex(text.index.union(needles.index, sort=False)).join(needles.score)
    found = table(
        both.loc[[policy]].reset_index(),
        "setting: {'`' + knobs + '`' if knobs else 'default'} | KL to full attention: {kl:.4f} | "
        "same top token: {top1:.0%} | needles: {score:.1f}",
    )
    first, full = text.iloc[0], needles.loc["full", ""]
    return (
        f"{found}\n\nKL (nats) and top token: {first.steps} tokens after {first.tokens:,} of prose and of code, in "
        f"bfloat16 (`pareto.csv`). Needles: eight RULER tasks at 4k, {full.samples} samples, score from 0 to 100; "
        f"`full` scores {full.score:.1f} (`ruler.csv`)."
    )


def quality_table() -> str:
    """What a KV head reads, of all methods."""
    frame = rows("quality")
    frame = frame[~frame.row.str.contains("host_dtype")]
    found = "numbers found: {(found_prose + found_documentation + found_code) / 3:.0%}"
    columns = each(KINDS, "KL, @: {kl_@} | KiB: {read_@:,.0f}")
    return table(wide(frame, "row", "kind"), f": {{called(row)}} | {columns} | {found}")


def lengths_table() -> str:
    """KL and KiB by the length of the context."""
    frame = rows("quality_lengths")
    each_context = (f"KL, {n:,} tokens: {{kl_{n}}} | KiB: {{read_{n}:,.0f}}" for n in sorted(frame.context.unique()))
    return table(wide(frame, "row", "context"), f": {{called(row)}} | {' | '.join(each_context)}")


def samples_table() -> str:
    """The tokens that `scout` attends."""
    frame = by_setting("quality").loc["scout"]
    frame["attended"] = frame.attended.fillna(frame.knobs.str.extract(r"=(\d+)$")[0].astype(float))
    columns = each(KINDS, "KL, @: {kl_@} | tokens: {attended_@:,.0f}")
    return table(wide(frame, "knobs", "kind"), f": `{{knobs}}` | {columns}")


def extraction_table() -> str:
    """Shares of an answer's tokens, means over the lists."""
    frame = rows("extraction").groupby("row", sort=False)[["kept", "right"]].mean().reset_index()
    return table(frame, ": {called(row)} | tokens of full attention kept: {kept:.1%} | tokens right: {right:.1%}")


def needles_table() -> str:
    frame = rows("needle").replace({"task": {"average": "all"}})
    found = each((*KINDS, "all"), "@: {score_@ * pairs_@ / 100:.0f} ({full_@ * pairs_@ / 100:.0f})")
    return table(wide(frame[frame.row != "full"], "row", "task"), f"found (by full attention): {{row}} | {found}")


def hidden_numbers(name: str, file: str = "needle") -> str:
    """How many of the hidden numbers a row finds."""
    mine = rows(file, row=name)
    mine = mine[~mine.task.str.startswith("average")]
    return f"{(mine.score * mine.samples).sum() / 100:.0f} of {mine.samples.sum()}"


def lost_drawn_numbers() -> str:
    """That drawn keys lose none of the numbers that full attention finds: each other answer is one more found."""
    for samples in (512, 256):
        line = row("needle_samples", row=f"scout:samples={samples}", task="average")
        if round((1 - line.same) * line.samples) != round(line.more * line.samples / 100):
            raise ValueError(f"needle_samples.csv: samples={samples} may lose a number")
    return "none is lost"


def second_turn(name: str) -> str:
    """How many of the numbers that full attention finds in a second turn a row finds, too."""
    full, mine = (rows("second_turn", row=one, found=1)[["kind", "seed"]] for one in ("dynamic", name))
    return f"{len(mine.merge(full))} of {len(full)}"


FIDELITY = {
    "scout-off": 'scout, real query (`lookahead="off"`)',
    "scout-off-int8": "the same over int8 blocks",
    "scout-select": 'scout, blocks chosen a layer ahead (`"select"`)',
    "scout-attend": 'scout, attended a layer ahead (`"attend"`)',
    "scout-attend-uncorrected": '`"attend"` without the first-order correction',
    "paper-off": "paper's digest, real query",
    "paper": "paper: attended with the predicted query",
    "window": "window",
}


def fidelity_table() -> str:
    frame = rows("fidelity", row=[*FIDELITY]).groupby(["row", "kind"], sort=False)[["kl", "top1"]].median()
    columns = each(("prose", "code"), "KL, @: {kl_@} | same top token: {top1_@:.0%}")
    return table(wide(frame.reset_index(), "row", "kind"), f"row: {{FIDELITY[row]}} | {columns}")


def digest_kl() -> pd.Series:
    """How many times as large the KL is with the paper's digest, by text."""
    kl = rows("fidelity").pivot(index=["kind", "start"], columns="row", values="kl")
    return kl["paper-off"] / kl["scout-off"]


def perplexity_table() -> str:
    frame = rows("perplexity", beta=1)
    frame["lost"] = frame.apply(lost, axis=1)
    columns = "window, share of the text: {ratio_code} | code: {lost_code} | prose: {lost_prose} | "
    return table(wide(frame, "row", "kind"), columns + "host tokens kept: {kept_share_code:.0%}")


def by_policy(name: str) -> str:
    """Scores in RULER and differences to full attention, the best first."""
    return table(
        ruler(name).sort_values("score", ascending=False, kind="stable"),
        "policy: `{policy}`{knobs and ', `' + knobs + '`'} | score: {score:.1f} | difference to `full`: {less}",
    )


def ruler_table() -> str:
    """Scores in RULER and differences to full attention, in the order of the file."""
    columns = "row: {row.replace('predictor=predictor.safetensors,', '')} | score: {score:.1f} | "
    return table(ruler(), columns + "difference to full attention: {less}")


def ruler(name: str = "ruler") -> pd.DataFrame:
    """Averages over RULER's tasks by policy and knobs; `less`, the difference to full attention as text."""
    frame = by_setting(name, task="average")
    frame["less"] = ["–" if one["policy"] == "full" else tell(MORE, **one) for one in frame.to_dict("records")]
    return frame


# Long contexts, Fluxion

FLUXION = {"fixed-0.05": "fixed_hybrid, 0.05", "fluxion-0.1": "fluxion, τ = 0.1"}


def fluxion_table() -> str:
    frame = pd.concat([rows(f"context_attention_fluxion_{kind}", row=[*FLUXION]) for kind in ("code", "prose")])
    columns = "text: {kind} | row: {FLUXION[row]} | chosen, MiB a token: {chosen_MiB:3} | KL: {kl} | "
    return table(frame, columns + "same top token: {top1:.0%}", words=2)


def context_table() -> str:
    columns = "row: {row} | attention, ms: {attention:3} | step, ms: {step:3} | read: {read_ratio:.0%} | KL: {kl}"
    return table(rows("context_attention_32k"), columns)


def taus() -> str:
    """What fluxion chooses and loses by τ."""
    frame = rows("context_attention_tau").iloc[1:]
    return tell("{}, {}, {} MiB chosen, KL {}, {}, {}", *frame.chosen_MiB, *frame.kl)


def trained() -> pd.DataFrame:
    """What train_fluxion.json says of the predictor, by deviation; of budgets by length of a run, `needed_16`."""
    quality = json.loads((RESULTS / "train_fluxion.json").read_text(encoding="utf-8"))["quality"]
    flat = pd.json_normalize(list(quality.values())).set_index(pd.Index(quality))
    return flat.rename(columns=lambda name: re.sub(r"budgets\.(\d+)\.(\w+)", r"\2_\1", name))


def train_table() -> str:
    cells = {
        "share of streaming heads": "{streaming_share:.0%}",
        "precision, recall of their prediction": "{streaming_precision:.2f}, {streaming_recall:.2f}",
        **{
            f"mean budget for runs of {n} tokens: needed, predicted": f"{{needed_{n}:.1%}}, {{predicted_{n}:.1%}}"
            for n in (16, 32, 128)
        },
        "heads whose budget for runs of 32 tokens suffices": "{enough_32:.0%}",
    }
    by_tau = trained().to_dict("index")
    found = [" | ".join([title, *(tell(cell, **one) for one in by_tau.values())]) for title, cell in cells.items()]
    return lines(f" | {each(by_tau, 'τ = @')}", found)


def retrieval(context: int) -> str:
    """The time of prediction, choice and attention, of fluxion and its baseline; and the bytes that they choose."""
    base, ours = (row("context_attention_fluxion_32k", row=name, context=context) for name in FLUXION)
    times = tell("{} against {} ms", ours.retrieval, base.retrieval)
    return f"{times} at {context // 1024}k, with {Number(ours.chosen_MiB / base.chosen_MiB)} of the chosen bytes"


# Residency, saving, steadiness, kernels


def recalls() -> pd.DataFrame:
    """By row: the CPU's share of the budget (mean over steps and layers), and steps between two recalls: all layers'
    steps over all their recalls; NaN: there was none.
    """
    frame = rows("cpu_ratio_layers")
    by_row = frame.groupby("row", sort=False)
    steps = (frame.recall_interval * frame.recalls).groupby(frame.row, sort=False).first()
    interval = steps * by_row.size() / by_row.recalls.sum()
    return pd.DataFrame({"share": by_row.cpu_ratio.mean(), "interval": interval}).rename_axis("row")


def recalls_table() -> str:
    columns = "recall, resident set in budgets: {row} | CPU ratio: {share:.1%} | steps between recalls: {interval}"
    return table(recalls().reset_index(), columns)


def saving_table() -> str:
    columns = "row: {row} | prefill, s: {prefill_s} | save, s: {save_s} | load, s: {load_s} | "
    columns += "prefill / (save + load): {speedup}× | host memory with three forks / without: {fork_bytes:.3f}"
    return table(rows("save_load", tokens=8192), columns)


def serve_tokens() -> int:
    """Tokens of the text that the server is asked about."""
    return int(rows("serve").tokens.iloc[0])


def serve_table() -> str:
    counts = sorted(int(name.rpartition("_")[2]) for name in rows("serve") if name.startswith("tokens_per_s_"))
    columns = ": {way} | first token after a kill, s: {first_token_s} | the same by hand, s: {by_hand_s}"
    rates = (f" | tokens/s, {n} chat{'s' * (n > 1)}: {{tokens_per_s_{n}}}" for n in counts)
    return table(rows("serve"), columns + "".join(rates))


def steady_table() -> str:
    growth = []
    for name, mine in rows("soak").groupby("row", sort=False):
        first, last = mine.iloc[len(mine) // 2], mine.iloc[-1]
        growth.append(f"{name}: {(last.rss_bytes - first.rss_bytes) / (last.step - first.step):.0f}")
    steady = table(rows("decode_steady"), "row: {row} | p50, ms: {p50:3} | p99, ms: {p99:3} | p99 / p50: {p99_p50:.2f}")
    return f"{steady}\n\nGrowth of the process, bytes a step: {', '.join(growth)}."


def kernels_table() -> str:
    shape = {"section": "decode", "case": "blocks", "dim": 128, "group": 4, "block_size": 32, "batch": 1}
    frame = rows("bench_cpu", dtype=["bf16", "fp16", "fp32", "int8"], **shape)
    frame = wide(frame.drop_duplicates(["dtype", "kernel_threads"]), "dtype", "kernel_threads")
    columns = "dtype: {dtype} | GB/s, 1 thread: {gb_per_s_1:.1f} ({of_limit_1:.0%}) | "
    return table(frame, columns + "GB/s, 2 threads: {gb_per_s_2:.1f} ({of_limit_2:.0%})")


def tuned() -> str:
    text = (RESULTS / "tune.txt").read_text(encoding="utf-8")
    said = r"takes ([\d.]+) ms a token \(Transformers' own cache: ([\d.]+)\) at a KL of ([\d.]+ ± [\d.]+)"
    found = re.search(said, text)
    if found is None:
        raise ValueError("tune.txt does not say what was chosen")
    return f"{found[1]} ms a token (`DynamicCache`: {found[2]} ms) at a KL of {found[3]}"


# GPUs


BY_DEFAULT = {"full": "all resident, attended", "chosen": "all resident, chosen from", "split": "few blocks resident"}
"""What a cache takes by default, by the model of a step."""
FULL, DEFAULT = "full-resident-graph", "default-graph"
CACHES = {
    "dynamic": "`DynamicCache`", "offloading": "`DynamicCache`, offloaded", "full-resident": "all KV resident",
    "scout": "`scout`", "scout-no-recall": "`scout`, `recall=0`", "scout-off": '`scout`, `lookahead="off"`',
    "scout-quest": '`scout`, `digest="quest"`', "default": "`scout`, all resident (the default)",
}  # fmt: skip


def cache_of(row: str, replay: str) -> str:
    """What a row of decoding on a GPU is called."""
    name = row.removesuffix("-graph")
    return CACHES[name] + ", graph" * (name != row) + ", by a script" * (replay != "none")


def defaults_table() -> str:
    columns = "card: {card} | context: {context:,.0f} | rows: {batch:.0f} | by default: "
    columns += "{BY_DEFAULT.get(default, default)} | attend all: {full_ms:3} | choose: {chosen_ms:3} | "
    return table(rows("h100/defaults"), columns + "few resident: {split_ms:3} | `DynamicCache`: {stock_ms:3}")


def gpu_table(machine: str) -> str:
    """Decoding on a GPU. Rows that did not fit are left out, and on an H200 those whose code was changed later."""
    frame = rows(f"{machine}/decode").dropna(subset="p50").sort_values(["context", "batch"], kind="stable")
    if machine == "h200":
        frame = frame[(frame.row != DEFAULT) | (frame.batch == 1)]
    columns = "cache: {cache_of(row, replay)} | context: {context:,.0f} | rows: {batch:.0f} | ms a step: {p50:3} | "
    columns += "tokens/s: {tokens_per_s:3} | KV on the device, GiB: {device_kv_gib} | CPU: {cpu_ratio:.0%}"
    return table(frame, columns + " | commit: {commit}" * (frame.commit.nunique() > 1))


def gpu(row_: str, context: int, batch: int = 1) -> pd.Series:
    """A row of decoding on a GPU, its blocks chosen by the model; the context in units of 1,024 tokens."""
    return row("h100/decode", row=row_, context=1024 * context, batch=batch, replay="none")


def h200(row_: str, context: int = 32, batch: int = 1, commit: str = "d172962") -> pd.Series:
    """A row of decoding on an H200; the context in units of 1,024 tokens."""
    return row("h200/decode", row=row_, context=1024 * context, batch=batch, commit=commit)


def ms(row_: str, *size: int, commit: str = "d172962") -> float:
    """Milliseconds of a step on an H200; `size` is the context in units of 1,024 tokens (32), and the rows (1)."""
    return float(h200(row_, *size, commit=commit).p50)


def slower(row_: str, other: str, context: int, batch: int = 1) -> float:
    """How many times as long a row's step takes as another's."""
    return float(gpu(row_, context, batch).p50 / gpu(other, context, batch).p50)


def asking_ms() -> float:
    """Milliseconds of a full cache's step on a GPU that go into asking a CPU that has nothing to attend."""
    kernels = rows("h100/step_kernels", row=FULL, context=65536).set_index("kernel").us_per_step
    return kernels[["hand_over_kernel", "wait_kernel", "merge_kernel"]].sum() / 1000


def gpu_floor(operation: str, **columns: Any) -> str:
    """How many times as long operations take as their bytes do."""
    ratios = rows("h100/kernels", operation=operation, **columns).of_floor
    return f"{Number(ratios.iloc[0])}×" if len(ratios) == 1 else between(ratios, unit="×")


def gpu_tests(machine: str) -> str:
    """How many tests passed on a GPU, and how many did not."""
    passed, failed = rows(f"{machine}/correctness")[["passed", "failed"]].sum()
    return f"{passed} tests passed, {failed or 'none'} failed"


# Model types

FALLBACK = re.compile(r"because (?:it has |its )?(.*?): (?:it is|they are) exact")
"""What the warning gives as the reason why layers keep Transformers' own cache."""


def walked() -> pd.Series:
    """What the walk over the model types depended on."""
    return rows("families").iloc[0]


def code(text: str) -> str:
    """A text as code."""
    return f"`{text}`"


def exact_types() -> int:
    """How many types give the logits of eager attention."""
    return int(rows("families").status.str.startswith("exact").sum())


def model_counts() -> str:
    """How many types have which result, and those that show a bug."""
    from walk.configs import causal_types  # whose import takes seconds

    frame, found = rows("families"), []
    causal = frame.model_type.isin(causal_types())
    for status in ("exact", "exact by stock fallback", "refused", "not run", "wrong", "error"):
        mine = frame.status == status
        if mine.any() or status == "wrong":
            found.append(f"{status} | {(mine & causal).sum()} | {(mine & ~causal).sum()}")
    counts = lines("result | causal language models | multimodal models", found, words=3)
    return "\n\n".join(filter(None, [counts, model_types("wrong"), model_types("error")]))


def model_types(status: str) -> str:
    """The types with a result, in lists by reason, the longest first."""
    groups: dict[str, list[str]] = {}
    for one in rows("families").astype(object).fillna("").to_dict("records"):
        if one["status"] == status:
            groups.setdefault(reason_of(one), []).append(code(one["model_type"]))
    longest = sorted(groups.items(), key=lambda group: -len(group[1]))
    return "\n\n".join(f"**{reason}** ({len(types)}): {', '.join(types)}." for reason, types in longest)


def reason_of(row: Mapping[str, Any]) -> str:
    """What the types of one list have in common: layers held, or the message without what only this type has."""
    message = " ".join(row["message"].split())
    if row["status"] == "exact":
        return f"{row['held']} of {row['layers']} layers held" + (f"; {message}" if message else "")
    if found := FALLBACK.search(message):
        return found[1]
    if row["status"] == "not run":
        if not row.get("model"):
            return "a tiny model could not be built"
        return "a tiny model does not run with Transformers' own cache" if "own cache" in message else message
    message = re.sub(r"^\w+Error: |; use DynamicCache.*", "", message).replace("<", "&lt;")
    return re.sub(r"list of \d+", "list of", message.replace(row["model"], "the model"))


def sources(files: str) -> str:
    """What the CSVs of these names come from."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(RESULTS.glob(files)):
        name = path.relative_to(RESULTS).with_suffix("").as_posix()
        frame = rows(name)
        first = frame.iloc[0]
        cpu = ", ".join(dict.fromkeys(map(processor, frame.cpu))).replace("(R)", "").replace(" Processor", "")
        if first.gpu != "none":
            cpu += f", {first.gpu.split()[1]}"
        script = first.command.removeprefix("python ").removeprefix("-m ").split()[0]
        script = script.removeprefix("eval/").removesuffix(".py")
        commit = ", ".join(one[:7] + "+" * one.endswith("+changes") for one in frame.commit.unique())
        groups.setdefault((script, commit, cpu, first.omp_wait_policy), []).append(name)
    found = []
    for (script, *others), stems in groups.items():
        shared = commonprefix(stems)  # noqa: RUF071 (of names, not of paths)
        named = "" if shared.startswith(script) else script
        found.append(" | ".join([f"`{shared}{'*' if stems[1:] else ''}`", named, *others]))
    return lines("files | script, if not of that name | commit | processor | `OMP_WAIT_POLICY`", found, words=5)


peer = partial(row, "peers", context=32768)
saved = partial(row, "save_load", row="scout-1024", tokens=8192)
turn = partial(row, "save_load", row="scout-1024", tokens=32768)
recall = partial(rows, "cpu_ratio_layers", row="recall-1.5")
perplexity = partial(row, "perplexity", row="hgca-0.25-1")
wiki = partial(row, "longbench", task="2wikimqa")
newest = partial(row, "attention_stats", first=1, newest=512)
steady = partial(row, "decode_steady")
long = partial(row, "context_attention_32k")
mixed = partial(row, "context_attention_batches", row="fluxion-0.1")
pinned = partial(row, "h200/pieces")
handoff = partial(rows, "h100/handoff")
heads = partial(rows, "attention_stats_heads")
idle = partial(row, "h100/decode", row="scout-graph", batch=16)
merged = partial(row, "h100/kernels", operation="merge_with_host", batch=1)


def pages() -> list[Path]:
    """The pages that may hold figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def write(text: str) -> str:
    """A page with its figures made anew."""

    def fill(mark: re.Match[str]) -> str:
        start, template, old, end = mark.groups()
        if "<!--fig:" in old:
            raise ValueError(f"the figure {template} has no <!--/fig-->")
        try:
            made = tell(template)
        except Exception as error:
            raise ValueError(f"the figure {template} cannot be made: {error!r}") from error
        return f"{start}\n{made}\n{end}" if old.startswith("\n") else f"{start}{made}{end}"

    return MARK.sub(fill, text)


def main(
    paths: Annotated[list[Path] | None, typer.Argument(exists=True, help="Pages [default: all].")] = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit with 1 if a page is old.")] = False,
) -> None:
    """Write the measured numbers of README.md and docs/ from the CSVs."""
    stale = []
    for page in map(Path.resolve, paths or pages()):
        text = page.read_text(encoding="utf-8")
        try:
            made = write(text)
        except ValueError as error:
            raise typer.BadParameter(f"{page}: {error}") from None
        if made != text:
            stale.append(page.relative_to(ROOT))
            if not check:
                page.write_text(made, encoding="utf-8")
    if stale:
        print(("out of date: " if check else "wrote ") + ", ".join(map(str, stale)))
    if check and stale:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
