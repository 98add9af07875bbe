"""Find a number hidden in a long text: full attention against a cache that attends a few blocks of it.

    python examples/quickstart.py
    python examples/quickstart.py --model Qwen/Qwen3-0.6B --file novel.txt --question "Who marries whom?"

The default prompt hides a 7-digit number in about 6,500 tokens of Python's manual and asks
SmolLM2-135M-Instruct for it. Without a GPU, "split" still keeps two memories apart, so that layer-ahead
attention, recall and merge are at work.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

import hf_offload
from hf_offload import assets

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
# A file or a pipe has no width of its own.
console = Console(width=None if sys.stdout.isatty() else 120)


class Clock(BaseStreamer):
    """Note when each new token arrives; `generate` puts the prompt first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def first(self) -> float:
        """Seconds from the prompt to the first token."""
        return self.times[1] - self.times[0]

    @property
    def each(self) -> float:
        """Seconds per later token (their median)."""
        gaps = [after - before for before, after in zip(self.times[1:], self.times[2:], strict=False)]
        return statistics.median(gaps) if gaps else float("nan")


@dataclass(frozen=True)
class Row:
    """One way to answer: a name, and the policy and options of its cache (no policy: Transformers' DynamicCache)."""

    name: str
    policy: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def make_cache(self, model: PreTrainedModel) -> Cache:
        model.set_attn_implementation("hybrid_sparse" if self.policy else "sdpa")
        if self.policy is None:
            return DynamicCache(config=model.config)
        return hf_offload.HybridCache(model, self.policy, **self.options)


def device_mib(cache: Cache) -> float:
    """MiB of keys and values (and digests) that a cache keeps on the model's device."""
    if isinstance(cache, hf_offload.HybridCache):
        return cache.stats().as_dict()["device_bytes"] / 2**20
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) / 2**20


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, row: Row, prompt: torch.Tensor, new_tokens: int
) -> tuple[str, Clock, Cache]:
    """Generate greedily with a row's cache; returns the answer, when its tokens came, and the cache."""
    cache, clock = row.make_cache(model), Clock()
    prompt = prompt.to(model.device)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        streamer=clock,
    )
    return tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True).strip(), clock, cache


def own_prompt(tokenizer: PreTrainedTokenizerBase, text: str, question: str) -> torch.Tensor:
    """Token ids `[1, N]` of a text and a question about it, in the model's chat template where it has one."""
    content = f"{text}\n\n{question}"
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": content}]
        content = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(content, add_special_tokens=not tokenizer.chat_template, return_tensors="pt")["input_ids"]


@app.command()
def main(
    model: Annotated[str | None, typer.Option(help="Hub name or folder (SmolLM2-135M-Instruct if none).")] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Your text.")] = None,
    question: Annotated[str | None, typer.Option(help="Your question (no number is hidden then).")] = None,
    policy: Annotated[str, typer.Option(help="The policy to compare with full attention.")] = "scout",
    budget: Annotated[int, typer.Option(help="Tokens that each step attends.")] = 1024,
    tokens: Annotated[int, typer.Option(help="Length of the prompt with the hidden number.")] = 6500,
    dtype: Annotated[str, typer.Option(help="Weights and activations.")] = "bfloat16",
) -> None:
    """Answer a question about a long text with full attention and with a sparse cache, side by side."""
    if question is not None and file is None:
        raise typer.BadParameter("a --question of your own needs the text it is about: add --file")
    with console.status("loading the model"):
        language_model, tokenizer = assets.load_demo_model(model, dtype=dtype)
    text = file.read_text(encoding="utf-8") if file else assets.demo_text("documentation")
    needle = None if question else assets.hide_number(text, tokenizer, tokens=tokens, depth=0.4)
    prompt = needle.prompt if needle else own_prompt(tokenizer, text, question or "")
    new_tokens = 24 if needle else 128

    split: dict[str, Any] = {"tier": "split", "resident": budget * 3 // 2}
    if policy == "scout":
        split["lookahead"] = "attend"
    knobs = {} if policy == "full" else {"budget": budget}
    rows = [Row("full"), Row(policy, policy, knobs), Row(f"{policy}, split", policy, knobs | split)]

    title = f"{prompt.shape[1]:,} tokens, budget {budget:,}"
    if needle:
        title += f", hidden number {needle.number}"
    table = Table(title=title)
    for column in ("cache", "answer", "found", "first token", "per token", "device KV", "CPU ratio"):
        table.add_column(column, justify="left" if column in ("cache", "answer", "found") else "right")
    found = {}
    for row in rows:
        with console.status(f"{row.name}: warming up"):
            # A short prompt first: kernels are compiled when they first run.
            answer(language_model, tokenizer, row, prompt[:, : budget + 512], 3)
        with console.status(row.name):
            said, clock, cache = answer(language_model, tokenizer, row, prompt, new_tokens)
        found[row.name] = needle is None or needle.found_in(said)
        ratio = cache.stats().as_dict()["cpu_ratio"] if row.policy else None
        table.add_row(
            row.name,
            said,
            "" if needle is None else "yes" if found[row.name] else "no",
            f"{clock.first:.2f} s",
            f"{clock.each * 1000:.0f} ms",
            f"{device_mib(cache):.0f} MiB",
            "–" if ratio is None else f"{ratio:.1%}",
        )
    console.print(table)
    if found["full"] and not all(found.values()):
        console.print("[red]Full attention finds the number, and not every other row does.[/red]")
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
