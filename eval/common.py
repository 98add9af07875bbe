"""What the evaluation scripts share: options, rows, models and texts, turns, memory, and runs that go on."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import numpy as np
import psutil
import torch
import typer
from tqdm.auto import tqdm
from transformers import (
    Cache,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StaticCache,
)

import hf_offload
from hf_offload.policies.registry import POLICIES, make_policy
from hf_offload.tools import assets
from hf_offload.tools.plan import CACHE_KNOBS, parse_setting
from records import RESULTS, Records, environment, write_csv
from turns import turn

Item = TypeVar("Item")
OUT = RESULTS / f"{Path(sys.argv[0]).stem}.csv"
"""Where the results of the script that runs go."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OFFSETS = {"prose": (2_000, 20_000, 40_000), "code": (5_000, 30_000, 60_000), "documentation": (5_000, 30_000, 60_000)}
"""Tokens at which the windows of a text begin."""

# --- Options ---------------------------------------------------------------------------------------------------------

RowsOption = Annotated[
    list[str],
    typer.Option(
        "--row", "--rows",
        help="Rows, comma-separated or given again: a policy with knobs of it and of HybridCache "
        "(scout:budget=512,tier=split), or short scout-512, window-512, hgca-0.1, fixed-0.05, fluxion-0.1.",
    ),
]  # fmt: skip
ContextsOption = Annotated[str, typer.Option(help="Context lengths, comma-separated; k is 1,024.")]
KINDS = ",".join(assets.KINDS)
KindOption = Annotated[str, typer.Option(help=f"Of {', '.join(assets.KINDS)}.")]
KindsOption = Annotated[str, typer.Option(help=f"Kinds of text, of {', '.join(assets.KINDS)}.")]
StepsOption = Annotated[int, typer.Option(min=1, help="Decode steps that count, per round.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="Rounds in which the rows take turns.")]
TierOption = Annotated[str | None, typer.Option(help='"one" or "split" memory; the default follows the device.')]
ReadOption = Annotated[str | None, typer.Option(help="Tokens of text, which longer contexts repeat [all].")]
ThreadsOption = Annotated[int, typer.Option(min=0, help="CPU threads of torch; 0 leaves torch's own choice.")]
OutOption = Annotated[Path, typer.Option(help="Where the CSV goes; what else is written goes beside it.")]


@dataclass(frozen=True)
class Setting:
    """The options of a script that loads a model. `command` makes them of a parameter of this type."""

    model: Annotated[str | None, typer.Option(help="Hub name, folder or GGUF file; SmolLM2-135M by default.")] = None
    dtype: Annotated[Literal[*DTYPES], typer.Option(help="Weights and activations.")] = "bfloat16"
    threads: ThreadsOption = 0
    out: OutOption = OUT

    def load(self, device: torch.device | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Set the number of threads (0: torch's own choice) and load the model and its tokenizer."""
        if self.threads:
            torch.set_num_threads(self.threads)
        return assets.load_demo_model(self.model, dtype=DTYPES[self.dtype], device=device)

    def write(self, records: Sequence[Mapping[str, Any]], part: str = "") -> None:
        """Write the CSV, or `OUT_part.csv` beside it; every row gets the dtype."""
        write_csv(self.beside(f"{part}.csv"), [{**record, "dtype": self.dtype} for record in records])

    def beside(self, end: str) -> Path:
        """The path of a further result: `end` in place of `.csv`."""
        return self.out.with_name(self.out.stem + end)


@dataclass(frozen=True)
class TextSetting(Setting):
    """The options of a script that reads texts, too."""

    prose: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A book as the prose.")] = None

    def text(self, kind: str) -> str:
        """The text of a kind."""
        return self.prose.read_text(encoding="utf-8") if kind == "prose" and self.prose else assets.demo_text(kind)

    def window(self, tokenizer: PreTrainedTokenizerBase, kind: str, start: int, tokens: int) -> torch.Tensor:
        """Token ids `[1, tokens]` of a kind of text from token `start` on."""
        return window(self.text(kind), tokenizer, start, tokens)

    @property
    def source(self) -> list[Any] | None:
        """Name and size of the prose, for the settings of `Records`."""
        return None if self.prose is None else [self.prose.name, self.prose.stat().st_size]


EXACT_TEXT = TextSetting(dtype="float32")


def command(main: Callable[..., None]) -> typer.Typer:
    """Make a command line of a script's function (with plain tracebacks: those of a model's forward are long).

    A parameter that is a dataclass stands for its fields.
    """
    options, groups = [], {}
    for name, one in signature(main, eval_str=True).parameters.items():
        if is_dataclass(one.annotation):
            usual = groups[name] = one.annotation() if one.default is one.empty else one.default
            hints = get_type_hints(one.annotation, include_extras=True).items()
            options += [Parameter(f, Parameter.KEYWORD_ONLY, default=getattr(usual, f), annotation=x) for f, x in hints]
        else:
            options.append(one.replace(kind=Parameter.KEYWORD_ONLY))

    @functools.wraps(main)
    def run(**given: Any) -> None:
        for name, usual in groups.items():
            given[name] = replace(usual, **{field: given.pop(field) for field in vars(usual)})
        main(**given)

    run.__signature__ = Signature(options)  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(run)
    return app


def listed(text: str, allowed: Iterable[str], what: str) -> list[str]:
    """Parse a comma-separated list of names, each once."""
    names, allowed = list(dict.fromkeys(text.replace(" ", "").split(","))), list(allowed)
    if unknown := [name for name in names if name not in allowed]:
        raise typer.BadParameter(f"unknown {what} {', '.join(unknown)}: choose among {', '.join(allowed)}")
    return names


def kinds_of(names: str) -> list[str]:
    """Parse a list of kinds of text."""
    return listed(names, assets.KINDS, "kinds")


def numbers(text: str) -> list[int]:
    """Parse a comma-separated list of whole numbers; `k` is 1,024 ("128,2k" → [128, 2048])."""
    try:
        return [int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in text.replace(" ", "").split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers like 128,2k") from None


# --- Rows ------------------------------------------------------------------------------------------------------------

STOCK = ("dynamic", "static")
"""Transformers' own caches, under sdpa."""
SHORT = {
    "^([^:]+)-int8$": r"\1,host_dtype=int8",
    "^([^:]+)-once$": r"\1,reevaluate=False",
    r"^(scout|window)-(\d+)": r"\1:budget=\2",
    r"^hgca-(0?\.\d+)": r"hgca:beta=1.0,gpu_ratio=\1",
    r"^hgca-(\d+)": r"hgca:beta=1.0,window=\1",
    r"^fixed-([\d.]+)": r"fixed_hybrid:budget=\1",
    r"^fluxion-([\d.]+)": r"fluxion:tau=\1",
}
"""Short names of rows, as expressions, and what they stand for; one after the other."""
_BETWEEN_ROWS = re.compile(r",(?!\s*\w+\s*=)")
"""A comma that no knob follows."""


@dataclass(frozen=True)
class Row:
    """One row of a comparison: how to make its cache.

    Attributes:
        name: its name in tables and results.
        policy: of `STOCK`, or one of the policies of hf_offload, by name or as an instance.
        options: what else the cache is given.
    """

    name: str
    policy: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def make_cache(self, model: PreTrainedModel, length: int | None = None) -> Cache:
        """Make an empty cache (a static one of so many tokens) and set the attention that goes with it."""
        self.activate(model)
        if self.policy == "dynamic":
            return DynamicCache(config=model.config)
        if self.policy == "static":
            return StaticCache(config=model.config, max_cache_len=length)
        return hf_offload.HybridCache(model, self.policy, **{**self._chooses, **self.options})

    @property
    def _chooses(self) -> dict[str, bool]:
        """What keeps a policy from attending all while all is resident: its choice is what a row measures."""
        named = POLICIES.get(self.policy) if isinstance(self.policy, str) else None
        return {"dense": False} if named is not None and "dense" in named.__dataclass_fields__ else {}

    def activate(self, model: PreTrainedModel) -> None:
        """Set the attention implementation that goes with this row's caches."""
        wanted = "sdpa" if self.policy in STOCK else "hybrid_sparse"
        if model.config._attn_implementation != wanted:
            model.set_attn_implementation(wanted)

    @functools.cached_property
    def files(self) -> dict[str, str]:
        """Checksums of the files that its knobs name: the row's name does not tell what is in them."""
        named = {knob: Path(x) for knob, x in self.options.items() if isinstance(x, str | Path) and Path(x).is_file()}
        return {knob: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for knob, path in named.items()}


FULL = Row("dynamic", "dynamic")
"""Full attention as Transformers computes it."""


def row_of(text: str, predictor: Path | None = None) -> Row:
    """The row of a policy with knobs or of a short name. In its name a knob's file has no folder.

    `predictor` is a file for `fluxion` if its knobs name none.
    """
    setting = text
    for short, long in SHORT.items():
        setting = re.sub(short, long, setting)
    try:
        policy, options = parse_setting(setting)
        if policy == "fluxion" and predictor is not None:
            options = {"predictor": str(predictor), **options}
        make_policy(policy, {knob: value for knob, value in options.items() if knob not in CACHE_KNOBS})
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise typer.BadParameter(f"--row {text}: {error}") from None
    return Row(re.sub("=[^,=]*/", "=", text), policy, options)


def rows_of(
    texts: Sequence[str],
    tier: str | None = None,
    predictor: Path | None = None,
    known: Mapping[str, Any] | None = None,
) -> list[Row]:
    """The rows of a `RowsOption`, by `row_of`, or `known`: a script's own rows by name, or names of several.

    `tier` is that of caches whose knobs say nothing of it.
    """

    def find(text: str) -> list[Row]:
        own = (known or {}).get(text) or row_of(text, predictor)
        return [own] if isinstance(own, Row) else [row for one in own for row in find(one)]

    rows = [row for each in texts for part in _BETWEEN_ROWS.split(each) for row in find(part.strip())]
    if tier is not None:
        rows = [replace(row, options={"tier": tier, **row.options}) for row in rows]
    if len({row.name for row in rows}) < len(rows):
        raise typer.BadParameter(f"a --row is there twice: {', '.join(row.name for row in rows)}")
    return rows


def check_rows(rows: Iterable[Row], model: PreTrainedModel) -> None:
    """Make a cache of each row once: what cannot be run is told before hours of work on the others."""
    for row in rows:
        row.make_cache(model)


# --- Models, texts and steps -----------------------------------------------------------------------------------------


def window(text: str, tokenizer: PreTrainedTokenizerBase, start: int, tokens: int) -> torch.Tensor:
    """Return token ids `[1, tokens]` of a text from token `start` on."""
    # Seven characters a token is more than any ordinary text needs; it spares tokenizing a whole book.
    ids = tokenizer(text[: 7 * (start + tokens)], add_special_tokens=False)["input_ids"][start : start + tokens]
    if len(ids) < tokens:
        raise typer.BadParameter(f"the text has {start + len(ids)} tokens; a window at {start} needs {tokens} more")
    return torch.tensor([ids])


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str, device: torch.device) -> torch.Tensor:
    """Token ids `[1, N]` of a text, and nothing else."""
    ids: torch.Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    return ids.to(device)


def prefill(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, chunk: int | None = None) -> torch.Tensor:
    """Run a prompt `[1, N]` through a model into a cache, in chunks if asked; returns the last logits `[1, V]`."""
    for part in tqdm(ids.split(chunk or ids.shape[1], dim=1), desc="prompt", unit="chunk", delay=5, leave=False):
        logits = model(part, past_key_values=cache, logits_to_keep=1).logits
    return logits[:, -1]


def decode(model: PreTrainedModel, cache: Cache | None, ids: torch.Tensor) -> tuple[list[float], torch.Tensor]:
    """Feed tokens `[B, N]` one by one: milliseconds of each step, and logits `[N, B, V]`."""
    milliseconds, logits = [], []
    for token in ids.split(1, 1):
        with clock() as seconds:
            logits.append(model(token, past_key_values=cache).logits[:, -1])
        milliseconds.append(1000 * seconds[0])
    return milliseconds, torch.stack(logits)


@contextmanager
def clock(seconds: list[float] | None = None) -> Iterator[list[float]]:
    """Append the seconds that the inside takes."""
    seconds = [] if seconds is None else seconds
    synchronize()
    start = time.perf_counter()
    yield seconds
    synchronize()
    seconds.append(time.perf_counter() - start)


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def in_turns(items: Sequence[Item], rounds: int) -> Iterator[tuple[int, Item]]:
    """Each round's number with each item, forth and back, so that what else the machine does meets all alike."""
    for number in tqdm(range(rounds), desc="rounds", delay=5, leave=False):
        turn()
        for item in items if number % 2 == 0 else items[::-1]:
            yield number, item


def percentiles(values: Iterable[float], which: Sequence[int] = (20, 50, 80)) -> dict[str, float]:
    """Percentiles by name: p20, p50 and p80."""
    found = np.percentile(list(values), which)
    return {f"p{percent}": float(value) for percent, value in zip(which, found, strict=True)}


# --- Memory ----------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Bytes of memory that the process has now."""
    return int(psutil.Process().memory_info().rss)


def forget_peak() -> None:
    """Let `peak_bytes` begin anew; Linux."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Bytes of memory that the process had at most since `forget_peak`; Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


# --- Runs that go on -------------------------------------------------------------------------------------------------


@torch.inference_mode()
def over_texts(
    setting: Setting,
    rows: Sequence[Row],
    places: Sequence[Mapping[str, Any]],
    read: Callable[[Any], Any],
    measure: Callable[[Any, Row], list[dict[str, Any]]],
    **about: Any,
) -> list[dict[str, Any]]:
    """What rows make of texts: lines of the CSV, which is written after each text. A stopped run goes on.

    Args:
        places: the texts, as columns of the results.
        read: makes of a place what all rows share, unless they have all been asked already.
        measure: makes of that and a row the row's lines.
        about: what else the lines depend on, for `json`.
    """
    about |= {"model": setting.model, "dtype": setting.dtype, "commit": environment()["commit"]}
    about["files"] = {row.name: row.files for row in rows if row.files}
    records, lines = Records(setting.beside(".jsonl"), ("row", "place"), about), []
    for place in tqdm(places, desc="texts"):
        shared, called = functools.cache(functools.partial(read, place)), ", ".join(map(str, place.values()))
        for row in tqdm(rows, desc=called, leave=False):
            if (row.name, called) not in records.found:
                records.add({"row": row.name, "place": called, "lines": measure(shared(), row)})
            lines += [{"row": row.name} | place | line for line in records.found[row.name, called]["lines"]]
        setting.write(lines)
    records.remove()
    return lines


# --- Calls in turns, small models -----------------------------------------------------------------------------------


def time_in_turns(makers: Mapping[str, Callable[[], Callable[[], Any]]], rounds: int) -> dict[str, list[float]]:
    """Seconds of calls on the CPU in turns, by name; each is made anew, untimed, and made and run once before."""
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    for make in makers.values():
        make()()  # compiles
    for _, name in in_turns(list(makers), rounds):
        call = makers[name]()
        with clock(seconds[name]):
            call()
    return seconds


def random_llama(**sizes: Any) -> PreTrainedModel:
    """A random Llama of four layers with 64 channels in all, or of other sizes, for what weights do not change."""
    usual = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}
    usual |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1 << 16}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**usual | sizes)).eval()
