"""Write the measured numbers of README.md and docs/ from the CSVs in eval/results.

    python eval/figures.py
    python eval/figures.py --check
    python eval/figures.py docs/results.md

A number stands between two comments, `<!--fig:NAME-->16×<!--/fig-->`; a table between the same two on lines of their
own. NAME is a key of `FIGURES`, at the end of this file: to add one, put a function there that returns the text, and
the empty comments into the page, and run this script. `--check` changes nothing, names what differs and exits with 1;
a test runs it.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from os.path import commonprefix
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "eval" / "results"
MARK = re.compile(r"(<!--fig:([\w.-]+)-->)(.*?)(<!--/fig-->)", re.DOTALL)

Line = Mapping[str, str]
Cell = Callable[[Line], str]

# --- Rows of CSVs ----------------------------------------------------------------------------------------------------


@cache
def _file(name: str) -> tuple[dict[str, str], ...]:
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def rows(name: str, **columns: object) -> list[dict[str, str]]:
    """The rows of `NAME.csv` whose columns have these values, in the file's order.

    Raises:
        ValueError: there is none.
    """
    found = [one for one in _file(name) if all(one[column] == str(value) for column, value in columns.items())]
    if not found:
        raise ValueError(f"{name}.csv has no row with {columns}")
    return found


def row(name: str, **columns: object) -> dict[str, str]:
    """The one row of `NAME.csv` whose columns have these values.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = rows(name, **columns)
    if len(found) != 1:
        raise ValueError(f"{name}.csv has {len(found)} rows with {columns}; name more columns")
    return found[0]


def names(found: Iterable[Line]) -> list[str]:
    """The names of rows, each once."""
    return list(dict.fromkeys(one["row"] for one in found))


def mean(found: Iterable[Line], column: str) -> float:
    """Mean of a column; rows without a number are left out."""
    return statistics.fmean(float(one[column]) for one in found if one[column])


# --- Numbers and tables ----------------------------------------------------------------------------------------------


def number(value: float | str, digits: int = 2) -> str:
    """A number with so many significant digits, and no exponent."""
    rounded = float(f"{float(value):.{digits}g}")
    if abs(rounded) >= 1:
        return f"{rounded:,.{max(0, digits - len(str(int(abs(rounded)))))}f}"
    return f"{rounded:.10f}".rstrip("0").rstrip(".") or "0"


def times(ratio: float) -> str:
    """A ratio, `16×`; two significant digits."""
    return f"{number(ratio, 2)}×"


def percent(share: float | str, digits: int = 0) -> str:
    """A share, `94 %`."""
    return f"{float(share):.{digits}%}".replace("%", " %")


def signed(value: float | str, places: int = 1) -> str:
    """A difference with its sign, `−2.5`."""
    return f"{float(value):+.{places}f}".replace("-", "−")


def with_error(one: Line) -> str:
    """The difference in perplexity with its standard error."""
    return f"{signed(100 * float(one['nll_more']), 2)} ± {100 * float(one['nll_more_se']):.2f} %"


def more_than_full(one: Line) -> str:
    """The difference to full attention with its 95 % interval."""
    return f"{signed(one['more'])} ({signed(one['low'])} to {signed(one['high'])})"


def between(values: Sequence[float], text: Callable[[float], str]) -> str:
    """The least and the largest of some values."""
    return f"{text(min(values))} to {text(max(values))}"


def cell(column: str, digits: int = 2) -> Cell:
    """A column's number."""
    return lambda one: number(one[column], digits)


def fixed(column: str, places: int) -> Cell:
    """A column's number with so many places."""
    return lambda one: f"{float(one[column]):.{places}f}"


def share(column: str, digits: int = 0) -> Cell:
    """A column's share."""
    return lambda one: percent(one[column], digits)


def table(titles: Sequence[str], lines: Iterable[Sequence[str]], words: int = 1) -> str:
    """A Markdown table whose first columns hold words; the numbers in the others stand on the right."""
    ruler = ["---" if column < words else "---:" for column in range(len(titles))]
    first, *others = (f"| {' | '.join(cells)} |" for cells in (titles, *lines))
    return "\n".join([first, f"|{'|'.join(ruler)}|", *others])


def listing(found: Iterable[Line], columns: Mapping[str, Cell | str], words: int = 1) -> str:
    """A table of rows; each title has the column that stands under it, or what makes a cell of a row."""
    makers = [(lambda one, name=make: one[name]) if isinstance(make, str) else make for make in columns.values()]
    return table(list(columns), [[make(one) for make in makers] for one in found], words)


# --- Beside the alternatives -----------------------------------------------------------------------------------------

OURS, STOCK, DYNAMIC = "hf_offload", "hf_offload with stock layers", "DynamicCache"
STATIC, LLAMA = "StaticCache", "llama.cpp"
ANSWER = 300
"""Tokens of an answer: for the time of a prompt and an answer, computed from both, not timed together."""
MEASURES: dict[str, Callable[[Line], float]] = {
    "decoding": lambda one: float(one["p50"]),
    "prefill": lambda one: float(one["prefill_s"]),
    "both": lambda one: float(one["prefill_s"]) + ANSWER * float(one["p50"]) / 1000,
}


def peer_ratio(way: str, context: int, measure: str) -> float:
    """How many times as long a way takes as hf_offload."""
    theirs, ours = (MEASURES[measure](row("peers", way=name, context=context)) for name in (way, OURS))
    return theirs / ours


def processor(cpu: str) -> str:
    """A processor's name, with the generation that virtual machines hide behind family and model."""
    name, _, rest = cpu.partition(" (")
    return name + {"family 25": " (Zen 4)", "family 26": " (Zen 5)"}.get(rest.partition(",")[0], "")


def peers_caption() -> str:
    ratios = {way: times(peer_ratio(way, 32768, "decoding")) for way in (DYNAMIC, STATIC, LLAMA)}
    contexts = sorted({int(one["context"]) for one in rows("peers")})
    faster = [context for context in contexts if peer_ratio(LLAMA, context, "decoding") < 1]
    shorter = (
        f" Up to {faster[-1] // 1024}k tokens llama.cpp decodes faster, because its bare step costs less than that of "
        "Transformers."
        if faster
        else ""
    )
    first = rows("peers")[0]
    name, _, zen = processor(first["cpu"]).partition(" (")
    machine = f"{first['threads']} threads of an {name} processor{zen and f' ({zen}'}"
    return (
        f"*SmolLM2-135M in bfloat16 on {machine}: same weights, prompt and threads, in turns (`eval/peers.py`). "
        f"At 32k tokens, `scout` with `fast_linear` decodes {ratios[DYNAMIC]} as fast as `DynamicCache`, "
        f"{ratios[STATIC]} as fast as `StaticCache` and {ratios[LLAMA]} as fast as llama.cpp.{shorter}*"
    )


def peers_summary() -> str:
    columns = {"ms a token": "decoding", "prompt, s": "prefill", f"prompt + {ANSWER} × a token, s": "both"}
    contexts = {"8k": 8192, "32k": 32768}
    lines = []
    for way in (OURS, STOCK, DYNAMIC, STATIC, LLAMA):
        found = [row("peers", way=way, context=context) for context in contexts.values()]
        cells = [number(MEASURES[measure](one), 3) for one in found for measure in columns.values()]
        lines.append([way if way in (STOCK, LLAMA) else f"`{way}`", *cells])
    return table(["", *(f"{context}: {title}" for context in contexts for title in columns)], lines)


def peers_table() -> str:
    columns = {"prompt, s": "prefill_s", "ms a token": "p50", "peak, MiB": "peak_mib"}
    return listing(
        rows("peers"),
        {"way": "way", "context": lambda one: f"{int(one['context']):,}"}
        | {title: cell(column, 3) for title, column in columns.items()}
        | {"KL": lambda one: number(one["kl"]) if one["way"] != DYNAMIC else "–"},
    )


def linear_speed() -> str:
    """Products of one row: GB/s of weights, and the share of what a plain read reaches."""
    lines = []
    for one in rows("bench_cpu_linear", case="linear", batch=1):
        theirs = row("bench_cpu_linear", **{"case": "torch: linear"} | {k: one[k] for k in ("model", "dtype", "batch")})
        ratio = times(float(one["gb_per_s"]) / float(theirs["gb_per_s"]))
        both = (f"{number(each['gb_per_s'])} ({percent(each['of_limit'])})" for each in (theirs, one))
        lines.append([one["model"], one["dtype"], *both, ratio])
    return table(["weights of", "dtype", "torch, GB/s", "`fast_linear`, GB/s", "ratio"], lines, words=2)


def gguf_dtypes() -> str:
    columns = {"loaded": "way", "layers": "layers", "prompt, s": cell("prompt_s", 3), "ms a token": cell("p50", 3)}
    return listing(rows("gguf_dtypes"), columns, words=2)


BATCH_ROWS = {"`DynamicCache`": "dynamic", "`budget=1024`": "scout:budget=1024", "`samples=512`": "scout:samples=512"}


def batch_ms(context: int, batch: int, threads: int = 2) -> list[float]:
    """Milliseconds a step of so many rows at once, of `BATCH_ROWS`."""
    place = {"context": "+".join([str(context)] * batch), "threads": threads}
    return [float(row("context_attention_samples", row=name, **place)["step"]) for name in BATCH_ROWS.values()]


def batch_table() -> str:
    found = {(context, batch): batch_ms(context, batch) for context in (8192, 32768) for batch in (1, 4)}
    lines = [[f"{c:,}", str(b), *(number(one, 3) for one in ms)] for (c, b), ms in found.items()]
    return table(["context", "rows", *BATCH_ROWS], lines)


def samples_time(context: int) -> str:
    """The time of a step with samples to that with a budget, over threads and batches."""
    found = [batch_ms(context, batch, threads) for batch in (1, 4) for threads in (1, 2)]
    ratios = [samples / budget for _, budget, samples in found]
    return f"{min(ratios):.2f} to {max(ratios):.2f} times"


def samples_repeated() -> str:
    """KL at 32k, of a text that is repeated."""
    found = {"budget=1024": "scout-1024", "samples=512": "scout:samples=512", "samples=256": "scout:samples=256"}
    kl = {knob: number(row("context_attention_32k", row=name)["kl"]) for knob, name in found.items()}
    return ", ".join(f"{one} with `{knob}`" for knob, one in kl.items())


# --- What policies find and lose -------------------------------------------------------------------------------------

DEFAULTS = {"infinigen": "infinigen:alpha=4", "h2o": "h2o:heavy=0.1,recent=0.1"}
"""Rows that results name by the policy alone, with the knobs that they ran with."""


def setting(name: str) -> tuple[str, str]:
    """Policy and knobs of a row's name, `scout:budget=512`; without a predictor's file."""
    policy, _, knobs = DEFAULTS.get(name, name).partition(":")
    if policy == "hgca" and "rescue=" not in knobs:  # measured when it was off by default
        knobs += ",rescue=0"
    return policy, ", ".join(knob for knob in knobs.split(",") if knob and not knob.startswith("predictor="))


def by_setting(name: str, **columns: object) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of `NAME.csv` whose columns have these values, by policy and knobs."""
    return {setting(one["row"]): one for one in rows(name, **columns)}


def losses(policy: str) -> str:
    """What each setting of a policy loses, on running text and in RULER."""
    text = {setting(name): rows("pareto", row=name) for name in names(rows("pareto"))}
    needles = by_setting("ruler", task="average")
    lines = []
    for key in dict.fromkeys(key for key in (*text, *needles) if key[0] == policy):
        kl, same = (f"{mean(text[key], 'kl'):.4f}", percent(mean(text[key], "top1"))) if key in text else ("–", "–")
        score = f"{float(needles[key]['score']):.1f}" if key in needles else "–"
        lines.append([f"`{key[1]}`" if key[1] else "default", kl, same, score])
    first, full = rows("pareto")[0], needles["full", ""]
    return (
        f"{table(['setting', 'KL to full attention', 'same top token', 'needles'], lines)}\n\n"
        f"KL (nats) and top token: {first['steps']} tokens after {int(first['tokens']):,} of prose and of code, in "
        f"bfloat16 (`pareto.csv`). Needles: eight RULER tasks at 4k, {full['samples']} samples, score from 0 to 100; "
        f"`full` scores {float(full['score']):.1f} (`ruler.csv`)."
    )


def budget_kl() -> str:
    kl = {knobs: float(one["kl"]) for (policy, knobs), one in by_setting("pareto").items() if policy == "scout"}
    return table(
        ["", *(f"`{knobs}`" for knobs in kl)], [["KL to full attention", *(f"{one:.4f}" for one in kl.values())]]
    )


def by_text(
    found: Iterable[str], label: Callable[[str, str], str], unit: str, amount: Callable[[Line, str], str], *last: str
) -> str:
    """KL and one more column for each text, of rows of `quality.csv`.

    Args:
        found: names of the rows; label: makes a line's first cell of policy and knobs.
        unit: title of the other column; amount: makes its cell of a line and the knobs.
        last: title of a last column, of the numbers found; none: no such column.
    """
    kinds, lines = ("prose", "documentation", "code"), []
    for name in found:
        policy, knobs = setting(name)
        each = [row("quality", row=name, kind=kind) for kind in kinds]
        cells = [cell for one in each for cell in (number(one["kl"]), amount(one, knobs))]
        lines.append([label(policy, knobs), *cells, *(percent(mean(each, "found")) for _ in last)])
    return table(["", *(title for kind in kinds for title in (f"KL, {kind}", unit)), *last], lines)


def quality_table() -> str:
    """What a KV head reads, of all methods."""
    every = [name for name in names(rows("quality")) if "host_dtype" not in name]
    return by_text(
        every, lambda policy, knobs: f"{policy}, `{knobs}`", "KiB", lambda one, _: f"{float(one['read']):,.0f}",
        "numbers found",
    )  # fmt: skip


def lengths_table() -> str:
    """KL and KiB by the length of the context."""
    found = rows("quality_lengths")
    contexts = sorted({int(one["context"]) for one in found})
    lines = []
    for name in names(found):
        policy, knobs = setting(name)
        each = [row("quality_lengths", row=name, context=context) for context in contexts]
        cells = (cell for one in each for cell in (number(one["kl"]), f"{float(one['read']):,.0f}"))
        lines.append([f"{policy}, `{knobs}`", *cells])
    return table(["", *(title for context in contexts for title in (f"KL, {context:,} tokens", "KiB"))], lines)


def samples_table() -> str:
    """The tokens that `scout` attends."""
    return by_text(
        [name for name in names(rows("quality")) if name.startswith("scout:")],
        lambda _, knobs: f"`{knobs}`",
        "tokens",
        lambda one, knobs: f"{float(one['attended'] or knobs.partition('=')[2]):,.0f}",
    )


def extraction_table() -> str:
    """Shares of an answer's tokens, means over the lists."""
    lines = []
    for name in names(rows("extraction")):
        (policy, knobs), mine = setting(name), rows("extraction", row=name)
        lines.append(
            [f"{policy}, `{knobs}`" if knobs else policy, *(percent(mean(mine, c), 1) for c in ("kept", "right"))]
        )
    return table(["", "tokens of full attention kept", "tokens right"], lines)


def needles_table() -> str:
    def found(name: str, task: str) -> str:
        one = row("needle", row=name, task=task)
        return "{:.0f} ({:.0f})".format(*(float(one[c]) * float(one["pairs"]) / 100 for c in ("score", "full")))

    tasks = {"prose": "prose", "documentation": "documentation", "code": "code", "all": "average"}
    lines = [[name, *(found(name, task) for task in tasks.values())] for name in names(rows("needle"))[1:]]
    return table(["found (by full attention)", *tasks], lines)


def hidden_numbers(name: str, file: str = "needle") -> str:
    """How many of the hidden numbers a row finds."""
    tasks = [one for one in rows(file, row=name) if not one["task"].startswith("average")]
    samples = sum(int(one["samples"]) for one in tasks)
    return f"{sum(float(one['score']) * int(one['samples']) for one in tasks) / 100:.0f} of {samples}"


def lost_drawn_numbers() -> str:
    """That drawn keys lose none of the numbers that full attention finds: each other answer is one more found.

    Raises:
        ValueError: there may be one that is lost.
    """
    for samples in (512, 256):
        line = row("needle_samples", row=f"scout:samples={samples}", task="average")
        count = int(line["samples"])
        if round((1 - float(line["same"])) * count) != round(float(line["more"]) * count / 100):
            raise ValueError(f"needle_samples.csv: samples={samples} may lose a number")
    return "none is lost"


def second_turn(name: str) -> str:
    """How many of the numbers that full attention finds in a second turn a row finds, too."""
    full, mine = (
        {(one["kind"], one["seed"]) for one in rows("second_turn", row=n, found="1")} for n in ("dynamic", name)
    )
    return f"{len(mine & full)} of {len(full)}"


def second_turn_table() -> str:
    said = {"hgca": "hgca-0.1", "hgca, `reevaluate=False`": "hgca-0.1-once"}
    return table(["row", "found"], [[name, second_turn(one)] for name, one in said.items()])


def fidelity_table() -> str:
    said = {
        "scout-off": 'scout, real query (`lookahead="off"`)',
        "scout-off-int8": "the same over int8 blocks",
        "scout-select": 'scout, blocks chosen a layer ahead (`"select"`)',
        "scout-attend": 'scout, attended a layer ahead (`"attend"`)',
        "scout-attend-uncorrected": '`"attend"` without the first-order correction',
        "paper-off": "paper's digest, real query",
        "paper": "paper: attended with the predicted query",
        "window": "window",
    }

    def median(name: str, kind: str, column: str) -> float:
        return statistics.median(float(one[column]) for one in rows("fidelity", row=name, kind=kind))

    columns: dict[str, Callable[[float], str]] = {"kl": number, "top1": percent}
    lines = []
    for name, text in said.items():
        cells = [make(median(name, kind, column)) for kind in ("prose", "code") for column, make in columns.items()]
        lines.append([text, *cells])
    return table(["row", "KL, prose", "same top token", "KL, code", "same top token"], lines)


def paper_digest() -> str:
    kl = {(one["row"], one["kind"], one["start"]): float(one["kl"]) for one in rows("fidelity")}
    ratios = [value / kl["scout-off", kind, start] for (name, kind, start), value in kl.items() if name == "paper-off"]
    return times(statistics.median(ratios))


def perplexity_table() -> str:
    lines = []
    for ratio in ("0.1", "0.25", "0.5", "0.75"):
        mine = [row("perplexity", row=f"hgca-{ratio}-1", kind=kind) for kind in ("code", "prose")]
        lines.append([ratio, *map(with_error, mine), percent(mine[0]["kept_share"])])
    return table(["window, share of the text", "code", "prose", "host tokens kept"], lines)


def ruler_table() -> str:
    columns: dict[str, Cell] = {
        "row": lambda one: one["row"].replace("predictor=predictor.safetensors,", ""),
        "score": fixed("score", 1),
        "difference to full attention": lambda one: "–" if one["row"] == "full" else more_than_full(one),
    }
    return listing(rows("ruler", task="average"), columns)


def ruler_policies(name: str = "ruler") -> str:
    found = sorted(by_setting(name, task="average").items(), key=lambda item: -float(item[1]["score"]))
    lines = [
        [f"`{policy}`" + (f", `{knobs}`" if knobs else ""), fixed("score", 1)(one),
         "–" if policy == "full" else more_than_full(one)]
        for (policy, knobs), one in found
    ]  # fmt: skip
    return table(["policy", "score", "difference to `full`"], lines)


def wikimqa() -> str:
    said = {"full": "full", "1,024": "scout:budget=1024", "512": "scout:budget=512"}
    scores = {text: row("longbench", row=name, task="2wikimqa") for text, name in said.items()}
    return ", ".join(f"{float(one['score']):.1f} ({text})" for text, one in scores.items())


# --- Long contexts, Fluxion ------------------------------------------------------------------------------------------


def context_table() -> str:
    columns = {"row": "row", "attention, ms": cell("attention", 3), "step, ms": cell("step", 3)}
    return listing(rows("context_attention_32k"), columns | {"read": share("read_ratio"), "KL": cell("kl")})


def attention_32k() -> str:
    said = {"hgca": "hgca-0.1", "full": "full", "sdpa": "dynamic"}
    found = {text: row("context_attention_32k", row=name)["attention"] for text, name in said.items()}
    return ", ".join(f"{number(ms, 3)} ms ({text})" for text, ms in found.items())


def fluxion_table() -> str:
    said = {"fixed-0.05": "fixed_hybrid, 0.05", "fluxion-0.1": "fluxion, τ = 0.1"}
    found = [
        row(f"context_attention_fluxion_{kind}", row=name) | {"text": kind, "said": text}
        for kind in ("code", "prose")
        for name, text in said.items()
    ]
    columns = {"text": "text", "row": "said", "chosen, MiB a token": cell("chosen_MiB", 3), "KL": cell("kl")}
    return listing(found, columns | {"same top token": share("top1")}, words=2)


def needles_fluxion() -> str:
    needles = by_setting("ruler", task="average")
    keys = (("fluxion", "tau=0.1"), ("fixed_hybrid", "budget=0.05"), ("full", ""))
    return "{} where its baseline scores {} and `full` {}".format(*(fixed("score", 1)(needles[key]) for key in keys))


def trained() -> dict[str, Any]:
    """What train_fluxion.json says of the predictor, by deviation."""
    quality: dict[str, Any] = json.loads((RESULTS / "train_fluxion.json").read_text(encoding="utf-8"))["quality"]
    return quality


def train_table() -> str:
    quality = list(trained().values())
    pairs = [f"{one['streaming_precision']:.2f}, {one['streaming_recall']:.2f}" for one in quality]
    lines = [
        ["share of streaming heads", *(percent(one["streaming_share"]) for one in quality)],
        ["precision, recall of their prediction", *pairs],
    ]
    for size in ("16", "32", "128"):
        budgets = [one["budgets"][size] for one in quality]
        said = [f"{percent(one['needed'], 1)}, {percent(one['predicted'], 1)}" for one in budgets]
        lines.append([f"mean budget for runs of {size} tokens: needed, predicted", *said])
    enough = [percent(one["budgets"]["32"]["enough"]) for one in quality]
    lines.append(["heads whose budget for runs of 32 tokens suffices", *enough])
    return table(["", "τ = 0.05", "τ = 0.1", "τ = 0.2"], lines)


def needed_budgets() -> str:
    budgets = trained()["0.1"]["budgets"]
    return ", ".join(f"{percent(budgets[size]['needed'], 1)} ({size})" for size in ("16", "32", "128"))


def retrieval() -> str:
    found = []
    for context, said in ((6144, "6k"), (32768, "32k")):
        ours, base = (
            row("context_attention_fluxion_32k", row=name, context=context) for name in ("fluxion-0.1", "fixed-0.05")
        )
        ms = [number(one["retrieval"], 2) for one in (ours, base)]
        less = number(float(ours["chosen_MiB"]) / float(base["chosen_MiB"]), 2)
        found.append(f"{ms[0]} against {ms[1]} ms at {said}, with {less} of the chosen bytes")
    return "; ".join(found)


def mixed() -> str:
    found = [row("context_attention_batches", context=c, row="fluxion-0.1") for c in ("4096+512", "4096+4096")]
    return " against ".join(f"{number(one['attention'], 3)} ms" for one in found)


def tau() -> str:
    found = rows("context_attention_tau")[1:]
    chosen, kl = (", ".join(number(one[column]) for one in found) for column in ("chosen_MiB", "kl"))
    return f"{chosen} MiB chosen, KL {kl}"


# --- Residency, saving, steadiness, kernels --------------------------------------------------------------------------


def recall_interval(name: str) -> float | None:
    """Steps between two recalls: all layers' steps over all their recalls; None: there was none."""
    found = rows("cpu_ratio_layers", row=name)
    steps = [float(one["recall_interval"]) * int(one["recalls"]) for one in found if one["recall_interval"]]
    return len(found) * steps[0] / sum(int(one["recalls"]) for one in found) if steps else None


def cpu_ratio(name: str, digits: int = 0) -> str:
    """The CPU's share of the budget, the mean over steps and layers."""
    return percent(mean(rows("cpu_ratio_layers", row=name), "cpu_ratio"), digits)


def ratio_table() -> str:
    lines = []
    for name in names(rows("cpu_ratio_layers")):
        interval = recall_interval(name)
        lines.append([name, cpu_ratio(name, 1), number(interval) if interval else "–"])
    return table(["recall, resident set in budgets", "CPU ratio", "steps between recalls"], lines)


def cosines() -> str:
    found = [float(one["query_cosine"]) for one in rows("cpu_ratio_layers", row="recall-1.5") if one["query_cosine"]]
    return between(found, number)


def save_table() -> str:
    columns = {"prefill, s": "prefill_s", "save, s": "save_s", "load, s": "load_s"}
    return listing(
        [one for one in rows("save_load") if one["tokens"] == "8192"],
        {"row": "row"}
        | {title: cell(column) for title, column in columns.items()}
        | {"prefill / (save + load)": lambda one: times(float(one["speedup"]))}
        | {"host memory with three forks / without": fixed("fork_bytes", 3)},
    )


def turn_seconds(source: str) -> str:
    return f"{number(row('save_load', row='scout-1024', tokens='32768')[f'turn_{source}_s'])} s"


def serve_table() -> str:
    counts = sorted(int(name.rpartition("_")[2]) for name in rows("serve")[0] if name.startswith("tokens_per_s_"))
    return listing(
        rows("serve"),
        {"": "way", "first token after a kill, s": cell("first_token_s"), "the same by hand, s": cell("by_hand_s")}
        | {f"tokens/s, {n} chat{'s' * (n > 1)}": cell(f"tokens_per_s_{n}") for n in counts},
    )


def saved_mib(name: str) -> str:
    return f"{float(row('save_load', row=name, tokens='8192')['disk_bytes']) / 2**20:.0f} MiB"


def steady_table() -> str:
    columns = {"row": "row", "p50, ms": cell("p50", 3), "p99, ms": cell("p99", 3), "p99 / p50": fixed("p99_p50", 2)}
    growth = []
    for name in names(rows("soak")):
        mine = rows("soak", row=name)
        first, last = mine[len(mine) // 2], mine[-1]
        grown, steps = (int(last[column]) - int(first[column]) for column in ("rss_bytes", "step"))
        growth.append(f"{name}: {grown / steps:.0f}")
    return f"{listing(rows('decode_steady'), columns)}\n\nGrowth of the process, bytes a step: {', '.join(growth)}."


def steady(column: str, text: str) -> str:
    """A number of hgca beside full attention's over a long generation, as `text` of both says it."""
    full, ours = (float(row("decode_steady", row=name)[column]) for name in ("dynamic", "hgca-1024"))
    return text.format(ours, full)


def kernels_table() -> str:
    def speed(dtype: str, threads: int) -> str:
        shape = {"dtype": dtype, "dim": 128, "group": 4, "block_size": 32, "batch": 1, "kernel_threads": threads}
        one = rows("bench_cpu", section="decode", case="blocks", **shape)[0]
        return f"{float(one['gb_per_s']):.1f} ({percent(one['of_limit'])})"

    lines = [[dtype, speed(dtype, 1), speed(dtype, 2)] for dtype in ("bf16", "fp16", "fp32", "int8")]
    return table(["dtype", "GB/s, 1 thread", "GB/s, 2 threads"], lines)


def window_weight() -> str:
    found = [row("attention_stats", layer=layer, first=1, newest=512) for layer in (0, 15, 29)]
    return ", ".join(f"{percent(one['weight'])} (layer {one['layer']})" for one in found)


def heads_share(text: str) -> str:
    """Share of the tokens that hold 99 % of a head's weight, over the heads."""
    found = [float(one["share"]) for one in rows("attention_stats_heads", text=text)]
    return between(found, partial(percent, digits=1))


def tuned() -> str:
    text = (RESULTS / "tune.txt").read_text(encoding="utf-8")
    said = r"takes ([\d.]+) ms a token \(Transformers' own cache: ([\d.]+)\) at a KL of ([\d.]+ ± [\d.]+)"
    found = re.search(said, text)
    if found is None:
        raise ValueError("tune.txt does not say what was chosen")
    return f"{found[1]} ms a token (`DynamicCache`: {found[2]} ms) at a KL of {found[3]}"


def gpu_defaults() -> str:
    """What a cache takes by default, by the model of a step."""
    names = {"full": "all resident, attended", "chosen": "all resident, chosen from", "split": "few blocks resident"}

    def told(column: str) -> Callable[[Line], str]:
        return lambda one: number(one[column], 3) if one[column] else "–"

    return listing(
        _file("h100/defaults"),
        {
            "card": lambda one: one["card"], "context": lambda one: f"{int(one['context']):,}",
            "rows": lambda one: one["batch"], "by default": lambda one: names.get(one["default"], one["default"]),
            "attend all": told("full_ms"), "choose": told("chosen_ms"), "few resident": told("split_ms"),
            "`DynamicCache`": told("stock_ms"),
        },
    )  # fmt: skip


def gpu_h200() -> str:
    """Decoding on an H200; the rows by default whose code was changed after it are left out."""
    found = [one for one in _file("h200/decode") if one["p50"]]
    return gpu_table([one for one in found if not (one["row"] == "default-graph" and int(one["batch"]) > 1)])


def gpu_idle_time(what: str) -> str:
    """Milliseconds of a step of a full cache and of the default on an H200 in which the device computes, or idles."""
    told = []
    for name in ("full-resident-graph", "default-graph"):
        one = row("h200/decode", row=name, context=32768, batch=1, commit="d172962")
        spent = float(one["busy"]) * float(one["profiled"]) if what == "busy" else float(one["between"])
        told.append(number(spent, 2))
    return " and ".join(told) + " ms"


def gpu_table(found: list[Line] | None = None) -> str:
    """Decoding on a GPU; rows that did not fit are left out."""
    found = [one for one in _file("h100/decode") if one["p50"]] if found is None else found
    found.sort(key=lambda one: (int(one["context"]), int(one["batch"])))
    ways = {
        "dynamic": "`DynamicCache`", "offloading": "`DynamicCache`, offloaded", "full-resident": "all KV resident",
        "scout": "`scout`", "scout-no-recall": "`scout`, `recall=0`", "scout-off": '`scout`, `lookahead="off"`',
        "scout-quest": '`scout`, `digest="quest"`', "default": "`scout`, all resident (the default)",
    }  # fmt: skip

    def way(one: Line) -> str:
        graph = ", graph" if one["row"].endswith("-graph") else ""
        script = ", by a script" if one["replay"] != "none" else ""
        return ways[one["row"].removesuffix("-graph")] + graph + script

    columns = {
        "cache": way, "context": lambda one: f"{int(one['context']):,}", "rows": lambda one: one["batch"],
        "ms a step": cell("p50", 3), "tokens/s": cell("tokens_per_s", 3),
        "KV on the device, GiB": cell("device_kv_gib"),
        "CPU": lambda one: percent(one["cpu_ratio"]) if one["cpu_ratio"] else "–",
    }  # fmt: skip
    if len({one["commit"] for one in found}) > 1:
        columns["commit"] = lambda one: one["commit"]
    return listing(found, columns)


def gpu(row_: str, context: int, batch: int = 1) -> dict[str, str]:
    """A row of decoding on a GPU, its blocks chosen by the model."""
    return row("h100/decode", row=row_, context=context, batch=batch, replay="none")


def gpu_ratio(column: str, over: dict[str, str], under: dict[str, str]) -> str:
    """How many times as much one row has in a column as another."""
    return times(float(over[column]) / float(under[column]))


def gpu_steps() -> str:
    """One row of scout beside one of a full cache that fits, both in graphs."""
    ours, full = gpu("scout-graph", 32768), gpu("full-resident-graph", 32768)
    return f"{number(ours['p50'])} ms beside {number(full['p50'])} ms"


def gpu_for_nothing() -> str:
    """What of a full cache's step on a GPU goes into asking a CPU that has nothing to attend."""
    step = gpu("full-resident-graph", 65536)
    spent = 0.0
    for name in ("hand_over", "wait", "merge"):
        kernel = row("h100/step_kernels", row=step["row"], context=65536, kernel=f"{name}_kernel")
        spent += float(kernel["us_per_step"]) / 1000
    return f"{number(spent)} of its {number(step['p50'])} ms"


def gpu_hand_over() -> str:
    """Microseconds a layer, of nothing and of some work by all threads."""
    found = rows("h100/handoff")
    nothing = min(float(one["p50"]) for one in found if one["work"] == "nothing")
    *_, work = found
    some = f"{number(work['p50'])} µs with {work['work'].replace('a head', 'for each KV head')}"
    return f"{number(nothing)} µs if the work is nothing, {some}"


def gpu_idle() -> str:
    """Of 16 rows whose blocks a script chose: shares of the time that the device waits, and has nothing to run."""
    one = row("h100/decode", row="scout-graph", batch=16)
    waits = float(one["waiting"]) + float(one["moving"])
    return f"{percent(waits, 1)} of the time it waits, {percent(one['gaps'])} it has nothing to run"


def gpu_floor(operation: str, **columns: object) -> str:
    """How many times as long operations take as their bytes do."""
    ratios = [float(one["of_floor"]) for one in rows("h100/kernels", operation=operation, **columns)]
    return times(ratios[0]) if len(ratios) == 1 else between(ratios, times)


def gpu_merge() -> str:
    """A merge with a host partial, beside the time of its bytes."""
    merge = row("h100/kernels", operation="merge_with_host", batch=1)
    return f"{number(merge['p50'])} µs in place of {number(merge['floor'], 1)} µs"


def gpu_ablation() -> str:
    """What scout's step takes without a part of it, one row at 32k."""
    whole = gpu("scout-graph", 32768)
    parts = ("pre-computation", "scout-off-graph"), ("recall", "scout-no-recall-graph")
    return ", ".join(f"{name} {float(gpu(row_, 32768)['p50']) / float(whole['p50']):.2f}×" for name, row_ in parts)


def gpu_tests() -> str:
    """How many tests passed on a GPU, and how many did not."""

    def told(name: str) -> str:
        passed, failed = (sum(int(one[kind]) for one in rows(f"{name}/correctness")) for kind in ("passed", "failed"))
        return f"{passed} tests passed, {failed or 'none'} failed"

    return f"{told('h100')}; on an H200 {told('h200')}, as many as there was time for"


def sources(files: str) -> str:
    """What the CSVs of these names come from."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(RESULTS.glob(files)):
        name = path.relative_to(RESULTS).with_suffix("").as_posix()
        first = rows(name)[0]
        cpus = dict.fromkeys(processor(one["cpu"]) for one in rows(name))
        cpu = ", ".join(cpus).replace("(R)", "").replace(" Processor", "")
        if first["gpu"] != "none":
            cpu += f", {first['gpu'].split()[1]}"
        script = first["command"].removeprefix("python ").removeprefix("-m ").split()[0]
        script = script.removeprefix("eval/").removesuffix(".py")
        commits = dict.fromkeys(one["commit"] for one in rows(name))
        commit = ", ".join(one[:7] + "+" * one.endswith("+changes") for one in commits)
        groups.setdefault((script, commit, cpu, first["omp_wait_policy"]), []).append(name)
    lines = []
    for (script, *others), stems in groups.items():
        shared = commonprefix(stems)  # noqa: RUF071 (of names, not of paths)
        named = "" if shared.startswith(script) else script
        lines.append([f"`{shared}{'*' if stems[1:] else ''}`", named, *others])
    titles = ["files", "script, if not of that name", "commit", "processor", "`OMP_WAIT_POLICY`"]
    return table(titles, lines, words=5)


FIGURES: dict[str, Callable[[], str]] = {
    # README.md and docs/results.md
    "peers-caption": peers_caption,
    "peers-summary": peers_summary,
    "results-peers": peers_table,
    "linear-speed": linear_speed,
    "gguf-dtypes": gguf_dtypes,
    "results-batch": batch_table,
    "results-needles": needles_table,
    "results-second-turn": second_turn_table,
    "results-fidelity": fidelity_table,
    "scout-samples": samples_table,
    "samples-time-8k": partial(samples_time, 8192),
    "samples-time-32k": partial(samples_time, 32768),
    "samples-repeated": samples_repeated,
    "choosing-quality": quality_table,
    "choosing-lengths": lengths_table,
    "results-context": context_table,
    "results-perplexity": perplexity_table,
    "results-ruler": ruler_table,
    "results-fluxion": fluxion_table,
    "results-ratio": ratio_table,
    "results-save": save_table,
    "results-steady": steady_table,
    "results-kernels": kernels_table,
    "results-sources": partial(sources, "*.csv"),
    # docs/policies, docs/choosing.md, docs/long-documents.md and docs/chat.md
    **{
        f"losses-{policy}": partial(losses, policy)
        for policy in ("full", "window", "scout", "quest", "hgca", "fixed_hybrid", "h2o", "infinigen")
    },
    "losses-fluxion": fluxion_table,
    "needles-fluxion": needles_fluxion,
    "train-fluxion": train_table,
    "extraction": extraction_table,
    "hidden-numbers-drawn": partial(hidden_numbers, "scout:samples=512", "needle_samples"),
    "hidden-numbers-drawn-256": partial(hidden_numbers, "scout:samples=256", "needle_samples"),
    "hidden-numbers-drawn-full": partial(hidden_numbers, "full", "needle_samples"),
    "hidden-numbers-drawn-lost": lost_drawn_numbers,
    "ruler-policies": ruler_policies,
    "ruler-samples": partial(ruler_policies, "ruler_samples"),
    "hidden-numbers-full": partial(hidden_numbers, "full"),
    "hidden-numbers-scout-1024": partial(hidden_numbers, "scout:budget=1024"),
    "hidden-numbers-scout-512": partial(hidden_numbers, "scout:budget=512"),
    "hidden-numbers-window-1024": partial(hidden_numbers, "window:budget=1024"),
    "paper-digest": paper_digest,
    "budget-kl": budget_kl,
    "cpu-ratio-1": partial(cpu_ratio, "recall-1"),
    "cpu-ratio-1-and-a-half": partial(cpu_ratio, "recall-1.5"),
    "second-turn-hgca": partial(second_turn, "hgca-0.1"),
    "second-turn-hgca-once": partial(second_turn, "hgca-0.1-once"),
    "hgca-perplexity": lambda: " and ".join(
        with_error(row("perplexity", row="hgca-0.25-1", kind=kind)) for kind in ("code", "prose")
    ),
    "tuned": tuned,
    "saved-prefill": lambda: f"{number(row('save_load', row='scout-1024', tokens='8192')['prefill_s'])} s",
    "saved-load": lambda: f"{number(row('save_load', row='scout-1024', tokens='8192')['load_s'])} s",
    "store-tokens": lambda: f"{int(row('save_load', row='scout-1024', tokens='32768')['tokens']):,}",
    "store-none": partial(turn_seconds, "none"),
    "store-ram": partial(turn_seconds, "ram"),
    "store-disk": partial(turn_seconds, "disk"),
    "store-cold": partial(turn_seconds, "cold_disk"),
    "serve": serve_table,
    "serve-tokens": lambda: f"{int(rows('serve')[0]['tokens']):,}",
    "saved-bytes": partial(saved_mib, "scout-1024"),
    "saved-bytes-int8": partial(saved_mib, "scout-1024-int8"),
    "forked-bytes": lambda: f"{float(row('save_load', row='scout-1024', tokens='8192')['fork_bytes']):.2f}×",
    # docs/concepts.md and docs/papers.md
    "papers-cosine": lambda: number(mean(rows("cpu_ratio_layers", row="recall-1.5"), "query_cosine")),
    "papers-cosine-range": cosines,
    "papers-overlap": lambda: percent(mean(rows("cpu_ratio_layers", row="recall-1.5"), "selection_overlap")),
    "papers-cpu-ratio-never": partial(cpu_ratio, "never-1", 1),
    **{
        f"papers-{name}": lambda name=name: f"{cpu_ratio(name, 1)}, every {number(recall_interval(name) or 0)} steps"
        for name in ("recall-1", "recall-1.5")
    },
    "papers-2wikimqa": wikimqa,
    "papers-batch": lambda: times(batch_ms(32768, 4)[0] / batch_ms(32768, 4)[1]),
    "papers-window-weight": window_weight,
    "papers-heads-prose": partial(heads_share, "prose"),
    "papers-heads-code": partial(heads_share, "code"),
    "papers-normality": lambda: number(
        min(float(one["quantile_correlation"]) for one in rows("attention_stats_scores")), 3
    ),
    "papers-steady": partial(steady, "p50", "{:.0f} ms a token; full attention {:.0f} ms"),
    "papers-steady-tail": partial(steady, "p99_p50", "{:.2f}; full attention {:.2f}"),
    "papers-attention-32k": attention_32k,
    "papers-needed": needed_budgets,
    "papers-streaming": lambda: percent(trained()["0.1"]["streaming_share"]),
    **{
        f"papers-ruler-{name}": lambda key=key: more_than_full(by_setting("ruler", task="average")[key])
        for name, key in {"fluxion": ("fluxion", "tau=0.1"), "fixed": ("fixed_hybrid", "budget=0.05")}.items()
    },
    "papers-retrieval": retrieval,
    "papers-mixed": mixed,
    "papers-predictor-share": lambda: percent(row("context_attention_predict", context=8192)["predict_share"], 1),
    "papers-tau": tau,
    # docs/gpu-results.md, docs/scale.md, docs/papers.md and README.md
    "gpu-sources": partial(sources, "h[12]00/*.csv"),
    "gpu-defaults": gpu_defaults,
    "gpu-h200": gpu_h200,
    "gpu-first-token": lambda: number(row("h200/prompt", row="default")["first"], 2) + " s",
    "gpu-busy": lambda: gpu_idle_time("busy"),
    "gpu-between": lambda: gpu_idle_time("between"),
    "gpu-chosen-before": lambda: " and ".join(
        number(row("h200/decode", row="default-graph", context=context, batch=8)["p50"], 3)
        for context in (32768, 65536)
    ),
    "gpu-filled": lambda: " and ".join(
        number(row("h200/decode", row="full-resident-graph", batch=8, commit=commit)["fill_s"], 2) + " s"
        for commit in ("81ec37f", "d172962")
    ),
    "gpu-stock-h200": lambda: number(row("h200/decode", row="dynamic")["p50"], 3) + " ms",
    "gpu-pinning": lambda: " and ".join(
        number(row("h200/pieces", variant=f"{pages}, pinning")["gb_per_s"], 2) for pages in ("ordinary", "huge")
    ),
    "gpu-full-h200": lambda: " and ".join(
        number(row("h200/decode", row="full-resident-graph", batch=batch, commit="d172962")["p50"], 3)
        for batch in (1, 8)
    ),
    "gpu-scout-h200": lambda: " and ".join(
        number(row("h200/decode", row="scout-graph", context=context, batch=8, commit="d172962")["p50"], 3)
        for context in (32768, 65536)
    ),
    "gpu-decode": gpu_table,
    "gpu-tests": gpu_tests,
    "gpu-gain": lambda: gpu_ratio("tokens_per_s", gpu("scout-graph", 65536, 8), gpu("full-resident-graph", 65536)),
    "gpu-steps": gpu_steps,
    "gpu-for-nothing": gpu_for_nothing,
    "gpu-dynamic": lambda: gpu_ratio("p50", gpu("dynamic", 65536), gpu("full-resident-graph", 65536)),
    "gpu-offloaded": lambda: gpu_ratio("p50", gpu("offloading", 32768, 8), gpu("scout-graph", 32768, 8)),
    "gpu-eager": lambda: " and ".join(
        gpu_ratio("p50", gpu("scout", 32768, batch), gpu("scout-graph", 32768, batch)) for batch in (1, 8)
    ),
    "gpu-hand-over": gpu_hand_over,
    "gpu-idle": gpu_idle,
    "gpu-floor-long": partial(gpu_floor, "paged_attention", batch=1, tokens=32768),
    "gpu-floor-short": partial(gpu_floor, "paged_attention", batch=1, tokens=2048),
    "gpu-floor-scores": partial(gpu_floor, "score_submeans"),
    "gpu-merge": gpu_merge,
    "gpu-ablation": gpu_ablation,
    "families-count": lambda: str(sum(one["status"].startswith("exact") for one in rows("families"))),
}
"""The text of each name."""


def pages() -> list[Path]:
    """The pages that may hold figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def write(text: str) -> str:
    """A page with its figures made anew.

    Raises:
        ValueError: a figure of an unknown name.
    """

    def fill(mark: re.Match[str]) -> str:
        start, name, old, end = mark.groups()
        if name not in FIGURES:
            raise ValueError(f"figure {name!r} is unknown; add a function for it to eval/figures.py")
        made = FIGURES[name]()
        return f"{start}\n{made}\n{end}" if old.startswith("\n") else f"{start}{made}{end}"

    return MARK.sub(fill, text)


def main(
    paths: Annotated[list[Path] | None, typer.Argument(exists=True, help="Pages [default: all].")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit with 1 if a page is out of date.")
    ] = False,
) -> None:
    """Write the measured numbers of README.md and docs/ from the CSVs."""
    stale = []
    for page in map(Path.resolve, paths or pages()):
        text = page.read_text(encoding="utf-8")
        made = write(text)
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
