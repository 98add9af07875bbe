"""Search for a number hidden in a long text, with `DynamicCache` and with a cache that reads a few blocks in each step.

    python examples/quickstart.py
    python examples/quickstart.py --model Qwen/Qwen3-0.6B --file novel.txt --question "Who marries whom?"

The default prompt hides a 7-digit number in about 6,500 tokens of Python's manual. SmolLM2-135M-Instruct reads it once
into a `HybridCache`. `to_dynamic()` copies it into a `DynamicCache`, so all answer from the same keys and values. On a
CPU a third way decodes with `fast_linear`, too.
"""

from __future__ import annotations

import csv
import inspect
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numba.core.event
import torch
import transformers
import typer
from rich.bar import Bar
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm.auto import tqdm
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

import hf_offload

ROOT = Path(__file__).resolve().parent.parent
DYNAMIC = "DynamicCache"
TURN = 8
"""Tokens that one way decodes before the next has its turn: what disturbs the machine disturbs all."""
NEW_TOKENS = 64
"""Decoded by each way to find the number; the answer ends before."""
MIB = 2**20

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
# A file or a pipe has no width of its own.
console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)


@dataclass
class Way:
    """One way to answer: a cache that holds the prompt, and what was decoded with it."""

    name: str
    cache: Cache
    tokens: list[int]
    fast: bool = False
    """Whether `fast_linear` serves the model's layers."""
    seconds: list[float] = field(default_factory=list)
    held: dict[str, float] = field(default_factory=dict)
    """MiB of keys, values and digests: device, host, and what a step reads (NaN: not known)."""

    @torch.no_grad()
    def decode(self, model: PreTrainedModel, count: int) -> None:
        """Decode tokens greedily and note how long each took."""
        model.set_attn_implementation("sdpa" if self.name == DYNAMIC else "hybrid_sparse")
        with hf_offload.fast_linear(model) if self.fast else nullcontext():
            for _ in range(count):
                start = time.perf_counter()
                token = torch.tensor([[self.tokens[-1]]], device=model.device)
                self.tokens.append(int(model(token, **given(model, self.cache)).logits[0, -1].argmax()))
                self.seconds.append(time.perf_counter() - start)

    def milliseconds(self) -> tuple[float, float, float]:
        """The 20th, 50th and 80th percentile of a token's time."""
        cuts = statistics.quantiles([1000 * each for each in self.seconds], n=10, method="inclusive")
        return cuts[1], cuts[4], cuts[7]

    def answer(self, tokenizer: PreTrainedTokenizerBase, ends: set[int]) -> str:
        """What was said until the model ended its answer."""
        end = next((i for i, token in enumerate(self.tokens) if token in ends), len(self.tokens))
        return str(tokenizer.decode(self.tokens[:end], skip_special_tokens=True)).strip()


def given(model: PreTrainedModel, cache: Cache) -> dict[str, Cache]:
    """The argument that hands a cache to a model's forward: its name changed in Transformers 5.24."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def measure_memory(cache: Cache, policy: str) -> dict[str, float]:
    """MiB that a cache holds on the model's device and in host memory, and that a decode step reads."""
    if not isinstance(cache, hf_offload.HybridCache):
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / MIB
        return {"device": held, "host": 0.0, "read": held}
    stats = cache.stats().as_dict()
    keys = stats["host_bytes"]
    total = keys + stats["resident_bytes"] + stats["digest_bytes"]
    share = stats["attended_share"]  # of drawn keys
    if share is None:
        share = min(1.0, (getattr(cache.policy, "budget", None) or 0) / cache.get_seq_length())
    # These two score the digests of all blocks and then attend a part of the tokens; others read in other ways.
    chosen = keys * share + stats["digest_bytes"]
    read = {"full": keys, "scout": chosen, "quest": chosen}
    device = stats["device_bytes"]
    return {"device": device / MIB, "host": (total - device) / MIB, "read": read.get(policy, float("nan")) / MIB}


@torch.no_grad()
def read_prompt(model: PreTrainedModel, prompt: torch.Tensor, policy: str, **options: Any) -> tuple[Any, int]:
    """Read a prompt `[1, N]` into a new `HybridCache`; returns the cache and the first token of the answer."""
    model.set_attn_implementation("hybrid_sparse")
    cache = hf_offload.HybridCache(model, policy, **options)
    logits = model(prompt.to(model.device), **given(model, cache), logits_to_keep=1).logits
    return cache, int(logits[0, -1].argmax())


@torch.no_grad()
def make_ways(
    model: PreTrainedModel, prompt: torch.Tensor, policy: str, split: bool, **options: Any
) -> tuple[list[Way], float]:
    """The caches to compare, filled by one prefill; returns them and its seconds."""
    start = time.perf_counter()
    cache, first = read_prompt(model, prompt, policy, **options)
    seconds = time.perf_counter() - start
    dynamic = cache.to_dynamic()
    ways = [Way(DYNAMIC, dynamic, [first]), Way(policy, cache, [first])]
    if model.device.type == "cpu":
        ways.append(Way(f"{policy}, fast_linear", cache.fork(), [first], fast=True))
    if split:
        options |= {"tier": "split", "resident": options.get("budget", 1024) * 3 // 2}
        if policy == "scout":
            options["lookahead"] = "attend"
        two = hf_offload.HybridCache.from_cache(dynamic, model, policy, **options)
        ways.append(Way(f"{policy}, split", two, [first]))
    return ways, seconds


def decode_in_turns(model: PreTrainedModel, ways: list[Way], count: int) -> None:
    """Let each way decode so many tokens, a few at a time."""
    with tqdm(total=count * len(ways), desc="decoding", unit="token", delay=5, leave=False) as bar:
        for _ in range(0, count, TURN):
            for way in ways:
                way.decode(model, TURN)
                bar.update(TURN)


def warm_up(model: PreTrainedModel, prompt: torch.Tensor, policy: str, split: bool, **options: Any) -> str:
    """Run all ways on a short prompt, so that what compiles compiles now; returns a sentence about it."""
    start = time.perf_counter()
    with numba.core.event.install_recorder("numba:compile") as recorder:
        ways, _ = make_ways(model, prompt, policy, split, **options)
        for way in ways:
            way.decode(model, TURN)
    compiled = sum(event.is_start for _, event in recorder.buffer)
    seconds = time.perf_counter() - start
    if compiled:
        return f"compiled {compiled} functions of the kernels in {seconds:.1f} s (cached for later runs)"
    return f"loaded the kernels that an earlier run compiled in {seconds:.1f} s"


def own_prompt(tokenizer: PreTrainedTokenizerBase, text: str, question: str) -> torch.Tensor:
    """Token ids `[1, N]` of a text and a question about it, in the model's chat template where it has one."""
    content = f"{text}\n\n{question}"
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": content}]
        content = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(content, add_special_tokens=not tokenizer.chat_template, return_tensors="pt")["input_ids"]


def show(ways: list[Way], rows: list[tuple[str, list[str]]], title: str) -> None:
    """Print a table with a column a way, and a bar a way for its ms a token."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for way in ways:
        table.add_column(way.name, justify="right", overflow="fold")
    for name, cells in rows:
        table.add_row(name, *cells)
    console.print(table)
    slowest = max(way.milliseconds()[1] for way in ways)
    chart = Table.grid(padding=(0, 1))
    chart.add_column(justify="right")
    chart.add_column(width=min(48, console.width - 30))
    chart.add_column(justify="right")
    for way in ways:
        p50 = way.milliseconds()[1]
        chart.add_row(way.name, Bar(slowest, 0, p50, color="cyan"), f"{p50:.0f} ms a token")
    console.print(chart)


def write_csv(path: Path, ways: list[Way], found: dict[str, bool | None], prompt: int, prefill: float) -> None:
    """Write a row a way: its figures, and what they depend on."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty=+changes", "--abbrev=12", "--exclude=*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    about = {
        "commit": commit or "unknown",
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "default"),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": " ".join(["python examples/quickstart.py", *(Path(word).name for word in sys.argv[1:])]),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer: csv.DictWriter[str] | None = None
        for way in ways:
            p20, p50, p80 = way.milliseconds()
            row: dict[str, Any] = {"way": way.name, "context": prompt, "p20": p20, "p50": p50, "p80": p80}
            row |= {"prefill_s": prefill, "found": found[way.name]}
            row |= {f"{name}_mib": value for name, value in way.held.items()}
            row = {key: f"{value:.5g}" if isinstance(value, float) else value for key, value in row.items()}
            if writer is None:
                writer = csv.DictWriter(file, [*row, *about], lineterminator="\n")
                writer.writeheader()
            writer.writerow(row | about)
    console.print(f"wrote {path}")


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


@app.command()
def main(
    model: Annotated[str | None, typer.Option(help="Hub name, folder or GGUF file (SmolLM2 if none).")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Your text.")] = None,
    question: Annotated[str | None, typer.Option(help="Your question (no number is hidden then).")] = None,
    policy: Annotated[str, typer.Option(help="The policy to compare with full attention.")] = "scout",
    budget: Annotated[int | None, typer.Option(help="Tokens that each step attends [default: the policy's].")] = None,
    tokens: Annotated[int, typer.Option(help="Length of the prompt with the hidden number.")] = 6500,
    dtype: Annotated[str, typer.Option(help="Weights and activations.")] = "bfloat16",
    split: Annotated[bool, typer.Option("--split", help="Imitate a GPU's two memories on the CPU as well.")] = False,
    results: Annotated[Path | None, typer.Option("--csv", help="Write the figures there.")] = None,
) -> None:
    """Answer a question about a long text with DynamicCache and with a sparse cache, side by side."""
    if question is not None and file is None:
        raise typer.BadParameter("a --question of your own needs the text it is about: add --file")
    transformers.utils.logging.disable_progress_bar()  # the line below takes its place
    start = time.perf_counter()
    with console.status("loading the model"):
        language_model, tokenizer = hf_offload.load_demo_model(model, dtype=dtype)
    console.print(f"loaded {model or 'SmolLM2-135M-Instruct'} in {time.perf_counter() - start:.1f} s")
    text = file.read_text(encoding="utf-8") if file else hf_offload.demo_text("documentation")
    needle = None if question else hf_offload.hide_number(text, tokenizer, tokens=tokens, depth=0.4)
    prompt = needle.prompt if needle else own_prompt(tokenizer, text, question or "")
    length = prompt.shape[1]
    options: dict[str, Any] = {} if policy == "full" or budget is None else {"budget": budget}

    with console.status("warming up: kernels compile when they first run"):
        sentence = warm_up(language_model, prompt[:, : (budget or 1024) + 128], policy, split, **options)
    console.print(sentence)
    ways, prefill = make_ways(language_model, prompt, policy, split, **options, progress=True)
    console.print(f"read {length:,} tokens in {prefill:.1f} s: one prefill, by HybridCache, serves all columns\n")
    decode_in_turns(language_model, ways, NEW_TOKENS if needle else 128)
    for way in ways:
        way.held = measure_memory(way.cache, policy)

    eos = language_model.generation_config.eos_token_id
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    answers = {way.name: way.answer(tokenizer, ends) for way in ways}
    found = {name: None if needle is None else needle.found_in(answer) for name, answer in answers.items()}
    rows = [("answer", [escape(answers[way.name]) for way in ways])]
    if needle:
        rows.append(("finds the number", ["yes" if found[way.name] else "[red]no[/red]" for way in ways]))
    spread = [way.milliseconds() for way in ways]
    rows.append(("ms a token", [f"[bold]{p50:.0f}[/bold]" for _, p50, _ in spread]))
    rows.append(("p20 to p80", [f"{p20:.0f} to {p80:.0f}" for p20, _, p80 in spread]))
    rows.append(("KV memory", [_memory(way.held) for way in ways]))
    rows.append(("read by a step", [_mib(way.held["read"]) for way in ways]))
    title = f"{length:,} tokens" + (f", hidden number {needle.number}" if needle else "")
    show(ways, rows, f"{title}, budget {budget:,}" if "budget" in options else title)
    if split:
        console.print(
            "[dim]split uses two memories as a GPU would, to try a policy without one. On a CPU it saves no time.[/dim]"
        )
    if results:
        write_csv(results, ways, found, length, prefill)
    if found[DYNAMIC] and not all(found.values()):
        console.print(f"[red]Full attention finds the number, {policy} does not.[/red]")
        raise typer.Exit(1)


def _mib(value: float) -> str:
    return "–" if value != value else f"{value:.0f} MiB"


def _memory(held: dict[str, float]) -> str:
    return _mib(held["device"]) + (f" + {held['host']:.0f} on the host" if held["host"] >= 1 else "")


if __name__ == "__main__":
    app()
