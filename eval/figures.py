"""Write the measured numbers of README.md and docs/ from the CSVs in eval/results.

    python eval/figures.py
    python eval/figures.py --check
    python eval/figures.py docs/results.md

A figure stands between two comments, the first of which has its template: `<!--fig:{saved().load_s}-->1.1<!--/fig-->`.
A template's fields are expressions of what this file has, each with a format (see `number`). The comments of a table
stand on lines of their own. The first has a data frame, and a line for each column, of title and template, whose fields
are expressions of the frame's columns, too:

    <!--fig:rows('serve')
    way | {way}
    the first token, ms | {1000 * first_token_s:3}
    -->
    <!--/fig-->

To add a figure, write the comments into a page and run this script. `--check` changes nothing, names what differs and
exits with 1; a test runs it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache, partial
from numbers import Integral
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


def number(value: float | None, spec: str = "") -> str:
    """A number as pages write it.

    Without a format it has two significant digits, an integer all of them; `3` is three, never an exponent; `.1%` is a
    share, `94.2 %`; `+.1f` a difference with its sign, `−2.5`. None and NaN are `–`.
    """
    if pd.isna(value):
        return "–"
    if isinstance(value, Integral) and not spec:
        return f"{value:,}"
    if spec and not spec.isdigit():
        return format(float(value), spec).replace("%", " %").replace("-", "−")
    digits = int(spec or 2)
    rounded = float(f"{value:.{digits}g}")
    if abs(rounded) >= 1:
        return f"{rounded:,.{max(0, digits - len(str(int(abs(rounded)))))}f}"
    return f"{rounded:.10f}".rstrip("0").rstrip(".") or "0"


def tell(template: str, **columns: Any) -> str:
    """A template with its fields filled in; they are expressions of these columns and of what this module has."""

    def field(found: re.Match[str]) -> str:
        value = eval(found[1], globals(), columns)
        return value if isinstance(value, str) else number(value, found[2] or "")

    return FIELD.sub(field, template)


def lines(titles: str, found: Iterable[str], words: int = 1) -> str:
    """A Markdown table of `a | b` lines, whose first columns hold words; the numbers in the others are on the right."""
    ruler = ["---"] * words + ["---:"] * (titles.count(" | ") + 1 - words)
    return "\n".join([f"| {titles} |", f"|{'|'.join(ruler)}|", *(f"| {line} |" for line in found)])


def table(frame: pd.DataFrame, *columns: str) -> str:
    """A Markdown table with a line for each row; columns are a title and a template: `ms a token | {p50:3}`."""
    titles, cells = (" | ".join(part) for part in zip(*(one.split(" | ") for one in columns), strict=True))
    return lines(titles, [tell(cells, **one) for one in frame.to_dict("records")])


def wide(frame: pd.DataFrame, down: str | list[str], across: str) -> pd.DataFrame:
    """A row for each value of the columns `down`; column `kl` becomes `kl_prose`, `kl_code`, … by the values across."""
    found = frame.pivot_table(index=down, columns=across, aggfunc="first", sort=False)
    names = [re.sub(r"\W", "_", f"{column}_{value}") for column, value in found]
    return found.set_axis(names, axis=1).reset_index()


# Beside the alternatives


def processor(cpu: str) -> str:
    """A processor's name, with the generation that virtual machines hide behind family and model."""
    name, _, rest = cpu.replace("(R)", "").replace(" Processor", "").partition(" (")
    return name + {"family 25": " (Zen 4)", "family 26": " (Zen 5)"}.get(rest.partition(",")[0], "")


def peers_cpu() -> str:
    """What the comparison ran on."""
    return f"{peer().threads} threads of {processor(peer().cpu)}"


def times(way: str) -> float:
    """How many times as long a token takes as with hf_offload."""
    return float(peer(way).p50 / peer().p50)


def peer(way: str = "hf_offload") -> pd.Series:
    """The row of a way at 32k."""
    return row("peers", way=way, context=32768)


def peers_slower() -> str:
    """The longest context up to which llama.cpp decodes faster."""
    ms = rows("peers").pivot(index="context", columns="way", values="p50")
    return f"{ms.index[ms['llama.cpp'] < ms['hf_offload']].max() // 1024}k tokens"


def peers_summary() -> str:
    """Times at 8k and 32k; that of an answer of 300 tokens is computed from the others, not measured."""
    columns = [" | {way}"]
    for size, name in (8192, "8k"), (32768, "32k"):
        columns += [
            f"{name}: ms a token | {{p50_{size}:3}}",
            f"{name}: prompt, s | {{prefill_s_{size}:3}}",
            f"{name}: prompt + 300 × a token, s | {{prefill_s_{size} + 300 * p50_{size} / 1000:3}}",
        ]
    return table(wide(rows("peers", context=[8192, 32768]), "way", "context"), *columns)


def batches() -> pd.DataFrame:
    """Milliseconds of a step, by threads, length of a row (`length`) and rows at once (`batch`), a column for each row;
    `drawn`: with `samples=512` to those with `budget=1024`.
    """
    frame = wide(rows("context_attention_samples"), ["threads", "context"], "row")
    contexts = frame.context.str.split("+")
    ratio = frame.step_scout_samples_512 / frame.step_scout_budget_1024
    return frame.assign(length=contexts.str[0].astype(int), batch=contexts.str.len(), drawn=ratio)


def serve_table() -> str:
    """The first token of a server that was killed, and its tokens a second by chats at once."""
    return table(
        rows("serve"),
        " | {way}",
        "tokens | {tokens}",
        "first token after a kill, s | {first_token_s}",
        "the same by hand, s | {by_hand_s}",
        "tokens/s, 1 chat | {tokens_per_s_1}",
        "tokens/s, 4 chats | {tokens_per_s_4}",
        "tokens/s, 8 chats | {tokens_per_s_8}",
    )


# What policies find and lose

DEFAULTS = {"infinigen": "infinigen:alpha=4", "h2o": "h2o:heavy=0.1,recent=0.1"}
"""Rows of `ruler.csv` that are named by the policy alone, with the knobs that they ran with."""


def losses(policy: str) -> str:
    """What each setting of a policy loses, on running text and in RULER."""
    text, needles = rows("pareto"), rows("ruler", task="average").replace({"row": DEFAULTS})
    both = pd.concat([text, needles]).groupby("row", sort=False).first().reset_index()
    found = table(
        both[both.row.str.match(rf"{policy}\b")],
        "setting | `{row}`",
        "KL to full attention | {kl:.4f}",
        "same top token | {top1:.0%}",
        "needles | {score:.1f}",
    )
    first, full = text.iloc[0], needles.iloc[0]
    return (
        f"{found}\n\nKL (nats) and top token: {first.steps} tokens after {first.tokens:,} of prose and of code, in "
        f"bfloat16 (`pareto.csv`). Needles: eight RULER tasks at 4k, {full.samples} samples, score from 0 to 100; "
        f"`full` scores {full.score:.1f} (`ruler.csv`)."
    )


def difference(name: str) -> str:
    """A row's difference to full attention in RULER, with its 95 % interval."""
    return tell("{more:+.1f} ({low:+.1f} to {high:+.1f})", **ruler(row=name))


def hidden_numbers(name: str, file: str = "needle") -> str:
    """How many of the hidden numbers a row finds."""
    return tell("{score * samples / 100:.0f} of {samples:.0f}", **row(file, row=name, task="average"))


def lost_numbers(name: str) -> int:
    """At most how many of the numbers that full attention finds a row loses.

    Its answers that differ from those of full attention are the numbers that it loses, those that only it finds, and
    others; it finds `more` of them.
    """
    one = row("needle_samples", row=name, task="average")
    differ, more = round(one.samples * (1 - one.same)), round(one.samples * one.more / 100)
    return (differ - more) // 2


def second_turn(name: str) -> str:
    """How many of the numbers that full attention finds in a second turn a row finds, too."""
    full, mine = (rows("second_turn", row=one, found=1)[["kind", "seed"]] for one in ("dynamic", name))
    return f"{len(mine.merge(full))} of {len(full)}"


def trained() -> pd.DataFrame:
    """What train_fluxion.json says of the predictor, by deviation τ; of budgets by length of a run."""
    quality = json.loads((RESULTS / "train_fluxion.json").read_text(encoding="utf-8"))["quality"]
    return pd.json_normalize(list(quality.values()), sep="_").set_index(pd.Index(quality, name="tau"))


def retrieval(context: int) -> str:
    """Milliseconds of prediction, choice and attention, of fluxion and its baseline; and the bytes that they choose."""
    base, ours = (
        row("context_attention_fluxion_32k", row=name, context=context) for name in ("fixed-0.05", "fluxion-0.1")
    )
    template = (
        "{ours.retrieval} against {base.retrieval} ms, with {ours.chosen_MiB / base.chosen_MiB} of the bytes chosen"
    )
    return tell(template, ours=ours, base=base)


def recalls() -> pd.DataFrame:
    """By row: the CPU's share of the budget (mean over steps and layers), and steps between two recalls: all layers'
    steps over all their recalls; NaN: there was none.
    """
    frame = rows("cpu_ratio_layers")
    by_row = frame.assign(steps=frame.recall_interval * frame.recalls).groupby("row", sort=False)
    interval = by_row.steps.first() * by_row.size() / by_row.recalls.sum()
    return pd.DataFrame({"share": by_row.cpu_ratio.mean(), "interval": interval})


def growth(name: str) -> float:
    """By how many bytes a step the process grows over the second half of a long run."""
    mine = rows("soak", row=name)[["step", "rss_bytes"]]
    change = mine.iloc[-1] - mine.iloc[len(mine) // 2]
    return change.rss_bytes / change.step


# GPUs

FULL = "full-resident-graph"


def decode(machine: str, name: str, context: int = 32, batch: int = 1, **columns: Any) -> pd.Series:
    """A row of decoding on a GPU; the context in units of 1,024 tokens."""
    return row(f"{machine}/decode", row=name, context=1024 * context, batch=batch, **columns)


# Model types

SHORTER = {
    r"\s+": " ",
    r".*because (?:it has |its )?(.*?): (?:it is|they are) exact.*": r"\1",
    r"^with Transformers' own cache:.*": "a tiny model does not run with Transformers' own cache",
    r"^\w+Error: |; use DynamicCache.*": "",
    r"list of \d+": "list of",
    "<": "&lt;",
}
"""What a message becomes without what only one type has: patterns, and what stands for them."""


def reason(one: Mapping[str, Any]) -> str:
    """What the types of one list have in common: layers held, or the message in short."""
    if one["status"] == "exact":
        return f"{one['held']} of {one['layers']} layers held"
    if not one["model"]:
        return "a tiny model could not be built"
    message = one["message"].replace(one["model"], "the model")
    for pattern, short in SHORTER.items():
        message = re.sub(pattern, short, message)
    return message


def model_types(*statuses: str) -> str:
    """The types with one of these results, in lists by reason, the longest first."""
    groups: dict[str, list[str]] = {}
    for one in rows("families").astype(object).fillna("").to_dict("records"):
        if one["status"] in statuses:
            groups.setdefault(reason(one), []).append(f"`{one['model_type']}`")
    longest = sorted(groups.items(), key=lambda group: -len(group[1]))
    return "\n\n".join(f"**{reason}** ({len(types)}): {', '.join(types)}." for reason, types in longest)


def exact_types() -> int:
    """How many types give the logits of eager attention."""
    return int(rows("families").status.str.startswith("exact").sum())


def model_counts() -> pd.DataFrame:
    """How many causal language models and multimodal models have which result."""
    from tiny_configs import causal_types  # whose import takes seconds

    frame = rows("families")
    kind = frame.model_type.isin(causal_types()).map({True: "causal", False: "multimodal"})
    results = ["exact", "exact by stock fallback", "refused", "not run", "wrong", "error"]
    counts = pd.crosstab(frame.status, kind)
    return counts.reindex(index=results, columns=["causal", "multimodal"], fill_value=0).reset_index()


def sources(files: str) -> str:
    """What the CSVs of these names come from."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for path in sorted(RESULTS.glob(files)):
        name = path.relative_to(RESULTS).with_suffix("").as_posix()
        frame = rows(name)
        first = frame.iloc[0]
        cpu = ", ".join(dict.fromkeys(map(processor, frame.cpu)))
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


# Rows that pages name several times

h100 = partial(decode, "h100")
h200 = partial(decode, "h200", commit="d172962")
saved = partial(row, "save_load", row="scout-1024", tokens=8192)
turn = partial(row, "save_load", row="scout-1024", tokens=32768)
recall = partial(rows, "cpu_ratio_layers", row="recall-1.5")
perplexity = partial(row, "perplexity", row="hgca-0.25-1")
ruler = partial(row, "ruler", task="average")
steady = partial(row, "decode_steady")
long = partial(row, "context_attention_32k")
tau = partial(row, "context_attention_tau")


def pages() -> list[Path]:
    """The pages that may hold figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def write(text: str) -> str:
    """A page with its figures made anew."""

    def fill(mark: re.Match[str]) -> str:
        start, template, old, end = mark.groups()
        if "<!--fig:" in old:
            raise ValueError(f"the figure {template} has no <!--/fig-->")
        first, *columns = template.strip().split("\n")
        try:
            made = table(eval(first), *columns) if columns else tell(template)
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
