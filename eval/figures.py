"""Write the measured numbers of README.md and docs/ from the CSVs in eval/results.

    python eval/figures.py
    python eval/figures.py --check
    python eval/figures.py docs/results.md

A number stands between two comments, `<!--fig:NAME-->16×<!--/fig-->`; a table between the same two on lines of their
own. NAME is a function below, decorated with `@figure("NAME")`, that returns the text. To add one, write such a
function from `rows` or `row`, put the empty comments into the page and run this script. `--check` changes nothing,
names what differs and exits with 1; a test runs it.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from os.path import commonprefix
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "eval" / "results"
MARK = re.compile(r"(<!--fig:([\w.-]+)-->)(.*?)(<!--/fig-->)", re.DOTALL)
FIGURES: dict[str, Callable[[], str]] = {}


def figure(name: str) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Register the function that makes the text of a name.

    Raises:
        ValueError: the name is taken.
    """

    def register(make: Callable[[], str]) -> Callable[[], str]:
        if name in FIGURES:
            raise ValueError(f"figure {name!r} is there already")
        FIGURES[name] = make
        return make

    return register


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


def number(value: float | str, digits: int = 2) -> str:
    """A number with so many significant digits, and no exponent."""
    value = float(value)
    rounded = float(f"{value:.{digits}g}")
    places = max(0, digits - len(str(int(abs(rounded))))) if abs(rounded) >= 1 else None
    if places is not None:
        return f"{rounded:,.{places}f}"
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


def table(titles: Sequence[str], lines: Sequence[Sequence[str]], words: int = 1) -> str:
    """A Markdown table whose first columns hold words; the numbers in the others stand on the right."""
    ruler = ["---" if column < words else "---:" for column in range(len(titles))]
    first, *others = (f"| {' | '.join(cells)} |" for cells in (titles, *lines))
    return "\n".join([first, f"|{'|'.join(ruler)}|", *others])


# --- README.md and docs/results.md -----------------------------------------------------------------------------------

OURS, DYNAMIC, STATIC, LLAMA = "hf_offload", "DynamicCache", "StaticCache", "llama.cpp"
ANSWER = 300
"""Tokens of an answer that follows a prompt, where both together are timed."""

MEASURES: dict[str, Callable[[Mapping[str, str]], float]] = {
    "decoding": lambda row: float(row["p50"]),
    "prefill": lambda row: float(row["prefill_s"]),
    "both": lambda row: float(row["prefill_s"]) + ANSWER * float(row["p50"]) / 1000,
}


def peer_ratio(way: str, context: int, measure: str) -> float:
    """How many times as long a way takes as hf_offload."""
    theirs, ours = (MEASURES[measure](row("peers", way=name, context=context)) for name in (way, OURS))
    return theirs / ours


def peer_machine() -> str:
    first = rows("peers")[0]
    return f"{first['threads']} threads of an {first['cpu'].partition(' (')[0]} processor{zen(first['cpu'])}"


def zen(cpu: str) -> str:
    """The generation of an AMD processor, which virtual machines hide behind family and model."""
    return {"family 25": " (Zen 4)", "family 26": " (Zen 5)"}.get(cpu.partition("(")[2].partition(",")[0], "")


@figure("peers-caption")
def _() -> str:
    ratios = {way: times(peer_ratio(way, 32768, "decoding")) for way in (DYNAMIC, STATIC, LLAMA)}
    contexts = sorted({int(one["context"]) for one in rows("peers")})
    faster = [context for context in contexts if peer_ratio(LLAMA, context, "decoding") < 1]
    shorter = (
        f" Up to {faster[-1] // 1024}k, llama.cpp decodes faster, because its bare step costs less "
        "than that of Transformers."
        if faster
        else ""
    )
    return (
        f"*SmolLM2-135M in bfloat16 on {peer_machine()}: same weights, prompt and threads, in turns (`eval/peers.py`). "
        f"At 32k tokens, `scout` decodes {ratios[DYNAMIC]} as fast as `DynamicCache`, {ratios[STATIC]} as fast as "
        f"`StaticCache` and {ratios[LLAMA]} as fast as llama.cpp. It attends 1,024 tokens in each step.{shorter}*"
    )


@figure("peers-summary")
def _() -> str:
    found = []
    for way in (OURS, DYNAMIC, STATIC, LLAMA):
        cells = [way if way == LLAMA else f"`{way}`"]
        for context in (8192, 32768):
            one = row("peers", way=way, context=context)
            cells += [
                number(float(one["p50"]), 3),
                number(float(one["prefill_s"]), 3),
                number(MEASURES["both"](one), 3),
            ]
        found.append(cells)
    titles = [
        f"{context}: {title}"
        for context in ("8k", "32k")
        for title in ("ms a token", "prompt, s", f"prompt + {ANSWER} tokens, s")
    ]
    return table(["", *titles], found)


@figure("results-peers")
def _() -> str:
    found = [
        [
            one["way"],
            f"{int(one['context']):,}",
            *(number(one[column], 3) for column in ("prefill_s", "p50", "peak_mib")),
            number(one["kl"], 2) if one["way"] != DYNAMIC else "–",
        ]
        for one in rows("peers")
    ]
    return table(["way", "context", "prompt, s", "ms a token", "peak, MiB", "KL"], found)


@figure("results-peers-ratios")
def _() -> str:
    found = [
        [
            f"{context // 1024}k",
            measure,
            *(times(peer_ratio(way, context, measure)) for way in (DYNAMIC, STATIC, LLAMA)),
        ]
        for context in (8192, 32768)
        for measure in MEASURES
    ]
    return table(["context", "measure", "`DynamicCache`", "`StaticCache`", "llama.cpp"], found, words=2)


@figure("results-batch")
def _() -> str:
    found = []
    for context in (128, 8192, 32768):
        full, ours = (row("decode_batch4", row=name, context=context) for name in ("dynamic", "scout-1024"))
        ms = [float(one["p50"]) for one in (full, ours)]
        found.append([f"{context:,}", *(number(value, 3) for value in ms), times(ms[0] / ms[1])])
    return table(["context", "`DynamicCache`", "scout, 1,024", "ratio"], found)


@figure("results-needles")
def _() -> str:
    found = []
    for name in dict.fromkeys(one["row"] for one in rows("needle") if one["row"] != "full"):
        cells = []
        for task in ("prose", "documentation", "code", "average"):
            one = row("needle", row=name, task=task)
            share = float(one["pairs"]) / 100
            cells.append(f"{float(one['score']) * share:.0f} ({float(one['full']) * share:.0f})")
        found.append([name, *cells])
    return table(["found (by full attention)", "prose", "documentation", "code", "all"], found)


@figure("results-second-turn")
def _() -> str:
    full = {(one["kind"], one["seed"]) for one in rows("second_turn", row="full", found="1")}
    found = []
    for name, said in (("hgca-0.1", "hgca"), ("hgca-0.1-once", "hgca, `reevaluate=False`")):
        mine = {(one["kind"], one["seed"]) for one in rows("second_turn", row=name, found="1")}
        found.append([said, f"{len(mine & full)} of {len(full)}"])
    return table(["row", "found"], found)


@figure("results-fidelity")
def _() -> str:
    names = {
        "scout-off": 'scout, real query (`lookahead="off"`)',
        "scout-off-int8": "the same over int8 blocks",
        "scout-select": 'scout, blocks chosen a layer ahead (`"select"`)',
        "scout-attend": 'scout, attended a layer ahead (`"attend"`)',
        "scout-attend-uncorrected": '`"attend"` without the first-order correction',
        "paper-off": "paper's digest, real query",
        "paper": "paper: attended with the predicted query",
        "window": "window",
    }
    found = []
    for name, said in names.items():
        cells = []
        for kind in ("prose", "code"):
            mine = rows("fidelity", row=name, kind=kind)
            kl, same = (statistics.median(float(one[column]) for one in mine) for column in ("kl", "top1"))
            cells += [number(kl, 2), percent(same)]
        found.append([said, *cells])
    return table(["row", "KL, prose", "same top token", "KL, code", "same top token"], found)


@figure("results-context")
def _() -> str:
    found = [
        [
            one["row"],
            number(float(one["attention"]), 3),
            number(float(one["step"]), 3),
            percent(one["read_ratio"]),
            number(float(one["kl"]), 2),
        ]
        for one in rows("context_attention_32k")
    ]
    return table(["row", "attention, ms", "step, ms", "read", "KL"], found)


@figure("results-perplexity")
def _() -> str:
    found = []
    for ratio in ("0.1", "0.25", "0.5", "0.75"):
        mine = [row("perplexity", row=f"hgca-{ratio}-1", kind=kind) for kind in ("code", "prose")]
        cells = [f"{signed(100 * float(one['nll_more']), 2)} ± {100 * float(one['nll_more_se']):.2f} %" for one in mine]
        found.append([ratio, *cells, percent(mine[0]["kept_share"])])
    return table(["window, share of the text", "code", "prose", "host tokens kept"], found)


@figure("results-ruler")
def _() -> str:
    found = []
    for one in rows("ruler", task="average"):
        name = one["row"].replace("predictor=predictor.safetensors,", "").replace("sparse_fetch", "quest")
        more = "–" if one["row"] == "full" else f"{signed(one['more'])} ({signed(one['low'])} to {signed(one['high'])})"
        found.append([name, f"{float(one['score']):.1f}", more])
    return table(["row", "score", "difference to full attention"], found)


@figure("results-fluxion")
def _() -> str:
    found = []
    for kind in ("code", "prose"):
        for name, said in (("fixed-0.05", "fixed_hybrid, 0.05"), ("fluxion-0.1", "fluxion, τ = 0.1")):
            one = row(f"context_attention_fluxion_{kind}", row=name)
            found.append(
                [
                    kind,
                    said,
                    number(float(one["chosen_MiB"]), 3),
                    number(float(one["kl"]), 2),
                    percent(one["top1"]),
                ]
            )
    return table(["text", "row", "chosen, MiB a token", "KL", "same top token"], found, words=2)


def recall_interval(name: str) -> float | None:
    """Steps between two recalls: all layers' steps over all their recalls; None: there was none."""
    recalls = {one["layer"]: int(one["recalls"]) for one in rows("cpu_ratio_layers", row=name)}
    steps = [
        float(one["recall_interval"]) * recalls[one["layer"]]
        for one in rows("cpu_ratio_layers", row=name)
        if one["recall_interval"]
    ]
    return len(recalls) * steps[0] / sum(recalls.values()) if steps else None


@figure("results-ratio")
def _() -> str:
    found = []
    for name in dict.fromkeys(one["row"] for one in rows("cpu_ratio_layers")):
        mine = rows("cpu_ratio_layers", row=name)
        ratio = statistics.fmean(float(one["cpu_ratio"]) for one in mine)
        between = recall_interval(name)
        found.append([name, percent(ratio, 1), number(between, 2) if between else "–"])
    return table(["recall, resident set in budgets", "CPU ratio", "steps between recalls"], found)


@figure("results-save")
def _() -> str:
    found = [
        [
            one["row"],
            *(number(float(one[c]), 2) for c in ("prefill_s", "save_s", "load_s")),
            times(float(one["speedup"])),
            f"{float(one['fork_bytes']):.3f}",
        ]
        for one in rows("save_load")
    ]
    return table(
        [
            "row",
            "prefill, s",
            "save, s",
            "load, s",
            "prefill / (save + load)",
            "host memory with three forks / without",
        ],
        found,
    )


@figure("results-steady")
def _() -> str:
    found = [
        [one["row"], number(float(one["p50"]), 3), number(float(one["p99"]), 3), f"{float(one['p99_p50']):.2f}"]
        for one in rows("steady")
    ]
    growth = []
    for name in dict.fromkeys(one["row"] for one in rows("soak")):
        mine = rows("soak", row=name)
        half = mine[len(mine) // 2 :]
        grown = (int(half[-1]["rss_bytes"]) - int(half[0]["rss_bytes"])) / (
            int(half[-1]["step"]) - int(half[0]["step"])
        )
        growth.append(f"{name}: {grown:.0f}")
    steady = table(["row", "p50, ms", "p99, ms", "p99 / p50"], found)
    return f"{steady}\n\nGrowth of the process, bytes a step: {', '.join(growth)}."


@figure("results-kernels")
def _() -> str:
    found = []
    for dtype in ("bf16", "fp16", "fp32", "int8"):
        cells = []
        for threads in (1, 2):
            shape = {"dtype": dtype, "dim": 128, "group": 4, "block_size": 32, "batch": 1}
            one = rows("bench_cpu", section="decode", case="sparse_decode", kernel_threads=threads, **shape)[0]
            cells.append(f"{float(one['gb_per_s']):.1f} ({percent(one['of_limit'])})")
        found.append([dtype, *cells])
    return table(["dtype", "GB/s, 1 thread", "GB/s, 2 threads"], found)


@figure("results-sources")
def _() -> str:
    groups: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(RESULTS.glob("*.csv")):
        first = rows(path.stem)[0]
        cpu = first["cpu"].partition(" (")[0].replace("(R)", "").replace(" Processor", "") + zen(first["cpu"])
        script = first["command"].split()[1].removeprefix("eval/").removesuffix(".py")
        commits = dict.fromkeys(row["commit"] for row in rows(path.stem))
        commit = ", ".join(one[:7] + "+" * one.endswith("+changes") for one in commits)
        key = (script, commit, cpu, first["omp_wait_policy"])
        groups.setdefault(key, []).append(path.stem)
    found = []
    for key, names in groups.items():
        shared = commonprefix(names)  # noqa: RUF071 (of names, not of paths)
        found.append([f"`{shared}{'*' if names[1:] else ''}`", *key])
    return table(["files", "script in `eval/`", "commit", "processor", "`OMP_WAIT_POLICY`"], found, words=5)


# --- docs/policies, docs/choosing.md and docs/long-documents.md ------------------------------------------------------

DEFAULTS = {"infinigen": "infinigen:alpha=4", "h2o": "h2o:heavy=0.1,recent=0.1"}
"""Rows that results name by the policy alone, with the knobs that they ran with."""


def setting(name: str) -> tuple[str, str]:
    """Policy and knobs of a row's name, `scout:budget=512`; without a predictor's file."""
    policy, _, knobs = DEFAULTS.get(name, name).partition(":")
    shown = [knob for knob in knobs.split(",") if knob and not knob.startswith("predictor=")]
    return "quest" if policy == "sparse_fetch" else policy, ", ".join(shown)


def by_setting(name: str, **columns: object) -> dict[tuple[str, str], dict[str, str]]:
    """The rows of `NAME.csv` whose columns have these values, by policy and knobs."""
    return {setting(one["row"]): one for one in rows(name, **columns)}


def more_than_full(one: Mapping[str, str]) -> str:
    """The difference to full attention with its 95 % interval."""
    return f"{signed(one['more'])} ({signed(one['low'])} to {signed(one['high'])})"


def losses(policy: str) -> str:
    """What each setting of a policy loses, on running text and in RULER."""
    text, needles = by_setting("pareto"), by_setting("ruler", task="average")
    found = []
    for key in dict.fromkeys(key for key in (*text, *needles) if key[0] == policy):
        kl, same, score = "–", "–", "–"
        if key in text:
            kl, same = f"{float(text[key]['kl']):.4f}", percent(text[key]["top1"])
        if key in needles:
            score = f"{float(needles[key]['score']):.1f}"
        found.append([f"`{key[1]}`" if key[1] else "default", kl, same, score])
    first, full = rows("pareto")[0], needles["full", ""]
    return (
        f"{table(['setting', 'KL to full attention', 'same top token', 'needles'], found)}\n\n"
        f"KL (nats) and top token: {first['steps']} tokens after {int(first['tokens']):,} of prose and of code, in "
        f"bfloat16 (`pareto.csv`). Needles: eight RULER tasks at 4k, {full['samples']} samples, score from 0 to 100; "
        f"`full` scores {float(full['score']):.1f} (`ruler.csv`)."
    )


for _policy in ("full", "window", "scout", "quest", "hgca", "fixed_hybrid", "h2o", "infinigen"):
    figure(f"losses-{_policy}")(partial(losses, _policy))


@figure("losses-fluxion")
def _() -> str:
    names = {"fixed-0.05": "`fixed_hybrid`, `budget=0.05`", "fluxion-0.1": "`fluxion`, `tau=0.1`"}
    found = []
    for kind in ("code", "prose"):
        for name, said in names.items():
            one = row(f"context_attention_fluxion_{kind}", row=name)
            found.append(
                [kind, said, f"{float(one['kl']):.3f}", percent(one["top1"]), f"{float(one['chosen_MiB']):.1f}"]
            )
    titles = ["text", "setting", "KL to full attention", "same top token", "chosen blocks, MiB a token"]
    return table(titles, found, words=2)


@figure("needles-fluxion")
def _() -> str:
    needles = by_setting("ruler", task="average")
    fluxion, fixed, full = (
        f"{float(needles[key]['score']):.1f}"
        for key in (("fluxion", "tau=0.1"), ("fixed_hybrid", "budget=0.05"), ("full", ""))
    )
    return f"{fluxion} where its baseline scores {fixed} and `full` {full}"


@figure("train-fluxion")
def _() -> str:
    quality = json.loads((RESULTS / "train_fluxion.json").read_text(encoding="utf-8"))["quality"].values()
    found = [
        ["share of streaming heads", *(percent(one["streaming_share"]) for one in quality)],
        [
            "precision, recall of their prediction",
            *(f"{one['streaming_precision']:.2f}, {one['streaming_recall']:.2f}" for one in quality),
        ],
    ]
    for tokens in ("16", "32", "128"):
        budgets = [one["budgets"][tokens] for one in quality]
        said = [f"{percent(one['needed'], 1)}, {percent(one['predicted'], 1)}" for one in budgets]
        found.append([f"mean budget for runs of {tokens} tokens: needed, predicted", *said])
    found.append(
        [
            "heads whose budget for runs of 32 tokens suffices",
            *(percent(one["budgets"]["32"]["enough"]) for one in quality),
        ]
    )
    return table(["", "τ = 0.05", "τ = 0.1", "τ = 0.2"], found)


@figure("ruler-policies")
def _() -> str:
    needles = sorted(by_setting("ruler", task="average").items(), key=lambda item: -float(item[1]["score"]))
    found = [
        [
            f"`{policy}`" + (f", `{knobs}`" if knobs else ""),
            f"{float(one['score']):.1f}",
            "–" if policy == "full" else more_than_full(one),
        ]
        for (policy, knobs), one in needles
    ]
    return table(["policy", "score", "difference to `full`"], found)


def hidden_numbers(name: str) -> str:
    """How many of the hidden numbers a row finds."""
    tasks = [one for one in rows("needle", row=name) if not one["task"].startswith("average")]
    samples = sum(int(one["samples"]) for one in tasks)
    return f"{sum(float(one['score']) * int(one['samples']) for one in tasks) / 100:.0f} of {samples}"


for _name, _row in {
    "full": "full", "scout-1024": "scout:budget=1024", "scout-512": "scout:budget=512",
    "window-1024": "window:budget=1024",
}.items():  # fmt: skip
    figure(f"hidden-numbers-{_name}")(partial(hidden_numbers, _row))


@figure("paper-digest")
def _() -> str:
    kl = {(one["row"], one["kind"], one["start"]): float(one["kl"]) for one in rows("fidelity")}
    ratios = [value / kl["scout-off", kind, start] for (name, kind, start), value in kl.items() if name == "paper-off"]
    return times(statistics.median(ratios))


@figure("budget-kl")
def _() -> str:
    kl = {knobs: float(one["kl"]) for (policy, knobs), one in by_setting("pareto").items() if policy == "scout"}
    return table(
        ["", *(f"`{knobs}`" for knobs in kl)], [["KL to full attention", *(f"{one:.4f}" for one in kl.values())]]
    )


def cpu_ratio(name: str) -> str:
    """The CPU's share of the budget, the mean over steps and layers."""
    return percent(statistics.fmean(float(one["cpu_ratio"]) for one in rows("cpu_ratio", row=name)))


figure("cpu-ratio-1")(partial(cpu_ratio, "recall-1"))
figure("cpu-ratio-1-and-a-half")(partial(cpu_ratio, "recall-1.5"))


def second_turn(name: str) -> str:
    """How many of the numbers that full attention finds in a second turn a row finds, too."""
    full, mine = ({(one["kind"], one["seed"]) for one in rows("second_turn", row=n, found="1")} for n in ("full", name))
    return f"{len(mine & full)} of {len(full)}"


figure("second-turn-hgca")(partial(second_turn, "hgca-0.1"))
figure("second-turn-hgca-once")(partial(second_turn, "hgca-0.1-once"))


@figure("hgca-perplexity")
def _() -> str:
    mine = [row("perplexity", row="hgca-0.25-1", kind=kind) for kind in ("code", "prose")]
    return " and ".join(
        f"{signed(100 * float(one['nll_more']), 2)} ± {100 * float(one['nll_more_se']):.2f} %" for one in mine
    )


@figure("tuned")
def _() -> str:
    text = (RESULTS / "tune.txt").read_text(encoding="utf-8")
    found = re.search(
        r"takes ([\d.]+) ms a token \(Transformers' own cache: ([\d.]+)\) at a KL of ([\d.]+ ± [\d.]+)", text
    )
    if found is None:
        raise ValueError("tune.txt does not say what was chosen")
    return f"{found[1]} ms a token (`DynamicCache`: {found[2]} ms) at a KL of {found[3]}"


@figure("saved-prefill")
def _() -> str:
    return f"{number(row('save_load', row='scout')['prefill_s'])} s"


@figure("saved-load")
def _() -> str:
    return f"{number(row('save_load', row='scout')['load_s'])} s"


@figure("saved-bytes")
def _() -> str:
    return f"{float(row('save_load', row='scout')['disk_bytes']) / 2**20:.0f} MiB"


@figure("saved-bytes-int8")
def _() -> str:
    return f"{float(row('save_load', row='scout-int8')['disk_bytes']) / 2**20:.0f} MiB"


@figure("forked-bytes")
def _() -> str:
    return f"{float(row('save_load', row='scout')['fork_bytes']):.2f}×"


# --- docs/concepts.md and docs/papers.md -----------------------------------------------------------------------------


def layers_mean(name: str, column: str) -> float:
    """Mean over layers of a column of cpu_ratio_layers.csv; layers without a number are left out."""
    return statistics.fmean(float(one[column]) for one in rows("cpu_ratio_layers", row=name) if one[column])


def between(values: Sequence[float], text: Callable[[float], str]) -> str:
    """The least and the largest of some values."""
    return f"{text(min(values))} to {text(max(values))}"


@figure("papers-cosine")
def _() -> str:
    return number(layers_mean("recall-1.5", "query_cosine"), 2)


@figure("papers-cosine-range")
def _() -> str:
    found = [float(one["query_cosine"]) for one in rows("cpu_ratio_layers", row="recall-1.5") if one["query_cosine"]]
    return between(found, lambda value: number(value, 2))


@figure("papers-overlap")
def _() -> str:
    return percent(layers_mean("recall-1.5", "selection_overlap"))


@figure("papers-cpu-ratio-never")
def _() -> str:
    return percent(layers_mean("never-1", "cpu_ratio"), 1)


def recalled(name: str) -> str:
    return f"{percent(layers_mean(name, 'cpu_ratio'), 1)}, every {number(recall_interval(name) or 0, 2)} steps"


figure("papers-recall-1")(lambda: recalled("recall-1"))
figure("papers-recall-1.5")(lambda: recalled("recall-1.5"))


@figure("papers-2wikimqa")
def _() -> str:
    scores = {
        said: float(row("longbench", row=name, task="2wikimqa")["score"])
        for said, name in (("full", "full"), ("1,024", "scout:budget=1024"), ("512", "scout:budget=512"))
    }
    return ", ".join(f"{score:.1f} ({said})" for said, score in scores.items())


@figure("papers-batch")
def _() -> str:
    full, ours = (float(row("decode_batch4", row=name, context=32768)["p50"]) for name in ("dynamic", "scout-1024"))
    return times(full / ours)


@figure("papers-window-weight")
def _() -> str:
    found = [row("attention_stats", layer=layer, first=1, newest=512) for layer in (0, 15, 29)]
    return ", ".join(f"{percent(one['weight'])} (layer {one['layer']})" for one in found)


def heads_share(text: str) -> str:
    """Share of the tokens that hold 99 % of a head's weight, over the heads."""
    return between([float(one["share"]) for one in rows("attention_stats_heads", text=text)], lambda x: percent(x, 1))


figure("papers-heads-prose")(lambda: heads_share("prose"))
figure("papers-heads-code")(lambda: heads_share("code"))
figure("papers-normality")(
    lambda: number(min(float(one["quantile_correlation"]) for one in rows("attention_stats_scores")), 3)
)


@figure("papers-steady")
def _() -> str:
    ours = next(one for one in rows("steady") if one["row"] != "full")
    return f"{number(ours['p50'], 2)} ms a token; full attention {number(row('steady', row='full')['p50'], 2)} ms"


@figure("papers-steady-tail")
def _() -> str:
    ours = next(one for one in rows("steady") if one["row"] != "full")
    return f"{float(ours['p99_p50']):.2f}; full attention {float(row('steady', row='full')['p99_p50']):.2f}"


@figure("papers-attention-32k")
def _() -> str:
    names = (("hgca-0.1", "hgca"), ("full-hybrid", "full"), ("full", "sdpa"))
    return ", ".join(
        f"{number(row('context_attention_32k', row=name)['attention'], 3)} ms ({said})" for name, said in names
    )


def trained() -> dict[str, Any]:
    """What train_fluxion.json says of the predictor for a deviation of 0.1."""
    report = json.loads((RESULTS / "train_fluxion.json").read_text(encoding="utf-8"))
    quality: dict[str, Any] = report["quality"]["0.1"]
    return quality


figure("papers-needed")(
    lambda: ", ".join(f"{percent(trained()['budgets'][size]['needed'], 1)} ({size})" for size in ("16", "32", "128"))
)
figure("papers-streaming")(lambda: percent(trained()["streaming_share"]))


def ruler_loss(name: str) -> str:
    one = row("ruler", row=name, task="average")
    return f"{signed(one['more'])} ({signed(one['low'])} to {signed(one['high'])})"


figure("papers-ruler-fluxion")(lambda: ruler_loss("fluxion:predictor=predictor.safetensors,tau=0.1"))
figure("papers-ruler-fixed")(lambda: ruler_loss("fixed_hybrid:budget=0.05"))


@figure("papers-retrieval")
def _() -> str:
    found = []
    for context, said in ((6144, "6k"), (32768, "32k")):
        ours, fixed = (
            row("context_attention_fluxion_32k", row=name, context=context) for name in ("fluxion-0.1", "fixed-0.05")
        )
        ms = [number(one["retrieval"], 2) for one in (ours, fixed)]
        share = number(float(ours["chosen_MiB"]) / float(fixed["chosen_MiB"]), 2)
        found.append(f"{ms[0]} against {ms[1]} ms at {said}, with {share} of the chosen bytes")
    return "; ".join(found)


@figure("papers-mixed")
def _() -> str:
    mixed, equal = (
        number(row("fluxion_report", section="mixed", lengths=lengths, row="fluxion")["attention"], 3)
        for lengths in ("4096+512", "4096+4096")
    )
    return f"{mixed} ms against {equal} ms"


figure("papers-predictor-share")(lambda: percent(row("predictor_share", context=8192)["share"], 1))


@figure("papers-tau")
def _() -> str:
    found = [row("fluxion_report", section="tau", row=f"tau {tau}") for tau in ("0.05", "0.1", "0.2")]
    bytes_read, kl = (", ".join(number(one[column], 2) for one in found) for column in ("chosen_MiB", "kl"))
    return f"{bytes_read} MiB chosen, KL {kl}"


@figure("families-count")
def _() -> str:
    return str(sum(one["status"].startswith("exact") for one in rows("families")))


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
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
