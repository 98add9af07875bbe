"""What the evaluation scripts share: options, models, texts, the rows they compare, tables and results."""

from __future__ import annotations

import csv
import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, StaticCache

import hf_offload
from hf_offload import assets
from hf_offload.plan import parse_setting

RESULTS = Path(__file__).parent / "results"
_FOLDERS = re.compile(r"(?<![^=,:])(?:\.{0,2}/)(?:[^/=,:]+/)*")
"""Of a file's path in an argument (`/a/b.txt`, `../b.txt`, `row:knob=/a/b`), what stands before the file's name."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ModelOption = Annotated[
    str | None, typer.Option("--model", help="Hub name or folder [default: SmolLM2-135M-Instruct].")
]
DtypeOption = Annotated[str, typer.Option(help=f"Weights and activations: {', '.join(DTYPES)}.")]
ThreadsOption = Annotated[int, typer.Option(min=0, help="CPU threads of torch; 0 leaves torch's own choice.")]
ProseOption = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A book to use as the prose.")]
TierOption = Annotated[str | None, typer.Option(help='"one" or "split" memory; the default follows the device.')]
OutOption = Annotated[Path, typer.Option(help="Where the CSV goes; a plot goes beside it.")]

# Where the windows of a text begin, in tokens.
OFFSETS = {"prose": (2_000, 20_000, 40_000), "code": (5_000, 30_000, 60_000), "documentation": (5_000, 30_000, 60_000)}


@dataclass(frozen=True)
class Row:
    """One row of a comparison: how to make its cache.

    Attributes:
        name: its name in tables and results.
        policy: "dynamic" or "static" (Transformers' own caches under sdpa), or one of the policies of hf_offload, by
            name or as an instance.
        options: what else the cache is given.
    """

    name: str
    policy: Any
    options: Mapping[str, Any] = field(default_factory=dict)

    def make_cache(self, model: PreTrainedModel) -> Cache:
        """Make an empty cache and set the attention implementation that goes with it."""
        self.activate(model)
        if self.policy == "dynamic":
            return DynamicCache(config=model.config)
        if self.policy == "static":
            return StaticCache(config=model.config, **self.options)
        return hf_offload.HybridCache(model, self.policy, **self.options)

    def activate(self, model: PreTrainedModel) -> None:
        """Set the attention implementation that goes with this row's caches."""
        wanted = "sdpa" if self.policy in ("dynamic", "static") else "hybrid_sparse"
        if model.config._attn_implementation != wanted:
            model.set_attn_implementation(wanted)

    @cached_property
    def files(self) -> dict[str, str]:
        """Checksums of the files that its knobs name: the row's name does not tell what is in them."""
        named = {knob: Path(x) for knob, x in self.options.items() if isinstance(x, str)}
        return {
            knob: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for knob, path in named.items() if path.is_file()
        }


FULL = Row("full", "dynamic")


def command(main: Callable[..., None]) -> typer.Typer:
    """Make a command line of a script's function (with plain tracebacks: those of a model's forward are long)."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    return app


def choose(rows: Sequence[Row], names: str | None) -> list[Row]:
    """Return the rows named in a comma-separated list (all of them for None), in the list's order.

    Raises:
        typer.BadParameter: a name that is not among the rows.
    """
    if names is None:
        return list(rows)
    by_name = {row.name: row for row in rows}
    chosen = [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in by_name]:
        raise typer.BadParameter(f"unknown rows {', '.join(unknown)}: choose among {', '.join(by_name)}")
    return [by_name[name] for name in chosen]


def row_of(text: str) -> Row:
    """The row of a policy and its knobs, `scout:budget=1024`; of a file that a knob names its name has no folder.

    Raises:
        typer.BadParameter: it is written otherwise.
    """
    try:
        policy, options = parse_setting(text)
    except ValueError as error:
        raise typer.BadParameter(f"--row: {error}") from None
    knobs = ",".join(f"{knob}={Path(x).name if isinstance(x, str) else x}" for knob, x in options.items())
    return Row(f"{policy}:{knobs}" if knobs else policy, policy, options)


def check_rows(rows: Iterable[Row], model: PreTrainedModel) -> None:
    """Make a cache of each row once: what cannot be run is told before hours of work on the others.

    Raises:
        typer.BadParameter: a row that the model or the policy refuses.
    """
    for row in rows:
        try:
            row.make_cache(model)
        except (ValueError, TypeError, FileNotFoundError) as error:
            raise typer.BadParameter(f"--row {row.name}: {error}") from None


def kinds_of(names: str) -> list[str]:
    """Parse a comma-separated list of kinds of text; each once.

    Raises:
        typer.BadParameter: a name that is not a kind.
    """
    kinds = list(dict.fromkeys(names.replace(" ", "").split(",")))
    if unknown := [kind for kind in kinds if kind not in assets.KINDS]:
        raise typer.BadParameter(f"unknown kinds {', '.join(unknown)}: choose among {', '.join(assets.KINDS)}")
    return kinds


def numbers(text: str) -> list[int]:
    """Parse a comma-separated list of whole numbers; `k` is 1,024 ("128,2k" → [128, 2048])."""
    try:
        return [int(part[:-1]) * 1024 if part.endswith("k") else int(part) for part in text.replace(" ", "").split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers like 128,2k") from None


def decimals(text: str) -> list[float]:
    """Parse a comma-separated list of positive numbers ("0.25, 1" → [0.25, 1.0]).

    Raises:
        typer.BadParameter: not a list of positive numbers.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < value < float("inf") for value in found):
        raise typer.BadParameter(f"{text!r} is not a list of positive numbers like 0.25,1")
    return found


def load(
    name: str | None, dtype: str, threads: int, device: torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Set the number of threads and load a model (and its tokenizer) for evaluation.

    Args:
        name, device: as for `hf_offload.assets.load_demo_model`.
        dtype: of `DTYPES`; threads: of torch, 0 leaves its own choice.

    Raises:
        typer.BadParameter: an unknown dtype.
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    if threads:
        torch.set_num_threads(threads)
    return assets.load_demo_model(name, dtype=DTYPES[dtype], device=device)


def text_of(kind: str, prose: Path | None = None) -> str:
    """Return `hf_offload.demo_text(kind)`, with a file in place of the prose if one is given."""
    return prose.read_text(encoding="utf-8") if kind == "prose" and prose is not None else assets.demo_text(kind)


def window(text: str, tokenizer: PreTrainedTokenizerBase, start: int, tokens: int) -> torch.Tensor:
    """Return token ids `[1, tokens]` of a text from token `start` on.

    Raises:
        typer.BadParameter: the text ends before the window does.
    """
    # Seven characters a token is more than any ordinary text needs; it spares tokenizing a whole book.
    ids = tokenizer(text[: 7 * (start + tokens)], add_special_tokens=False)["input_ids"][start : start + tokens]
    if len(ids) < tokens:
        raise typer.BadParameter(f"the text has {start + len(ids)} tokens; a window at {start} needs {tokens} more")
    return torch.tensor([ids])


def prefill(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, chunk: int | None = None) -> torch.Tensor:
    """Run a prompt `[1, N]` through a model into a cache, in chunks if asked; returns the last logits `[1, V]`."""
    for part in tqdm(ids.split(chunk or ids.shape[1], dim=1), desc="prompt", unit="chunk", delay=5, leave=False):
        logits = model(part, past_key_values=cache, logits_to_keep=1).logits
    return logits[:, -1]


def kv_bytes(cache: Cache) -> int:
    """Bytes of keys and values that a cache of Transformers' own keeps on the device."""
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.nbytes for t in tensors if t is not None)


def token_bytes(model: PreTrainedModel, layers: int) -> int:
    """Bytes of one token's keys and values in so many layers, by the model's config and dtype."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * layers * heads * size * model.dtype.itemsize)


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """The 20th, 50th and 80th percentile, as p20, p50 and p80."""
    p20, p50, p80 = np.percentile(list(values), [20, 50, 80])
    return {"p20": float(p20), "p50": float(p50), "p80": float(p80)}


def environment() -> dict[str, str]:
    """What a result depends on: commit, machine, threads, versions, and the command that makes it again."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    def installed(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "none"

    commit = git("rev-parse", "--short=12", "HEAD") or "unknown"
    # The results themselves are rewritten by the very runs that record the commit.
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude)results")
    script = Path(sys.argv[0])
    return {
        "commit": f"{commit}+changes" if changed else commit,
        "cpu": _cpu_model(),
        "threads": str(torch.get_num_threads()),
        "cores": str(len(os.sched_getaffinity(0))),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        **{name: installed(name) for name in ("torch", "transformers", "numba", "triton")},
        # Of a file's path only the name: where it lay is of no use to anyone else. Names of models stay.
        "command": shlex.join(
            ["python", f"{script.parent.name}/{script.name}", *(_FOLDERS.sub("", a) for a in sys.argv[1:])]
        ),
    }


def _cpu_model() -> str:
    """The CPU's name and, since virtual machines often hide it, its family and model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


def origin() -> str:
    """What of the `environment` goes above a table, in Markdown."""
    meta = environment()
    return (
        f"`{meta['command']}`, commit {meta['commit']}, {meta['cpu']}, GPU {meta['gpu']}, torch {meta['torch']}, "
        f"transformers {meta['transformers']}."
    )


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write results, each row with what it depends on; floats with six significant digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = environment()
    columns = [*dict.fromkeys(key for row in rows for key in row), *meta]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            short = {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow({**short, **meta})
    print(f"wrote {path}")


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table; the first row names the columns, floats get four significant digits."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else "" if v is None else str(v) for v in row.values()))
    # A file or a pipe has no width of its own; rows that differ behind their first words are to be told apart.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def markdown(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows as a table in Markdown; the first row names the columns."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
