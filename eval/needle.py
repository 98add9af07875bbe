"""Numbers hidden in long texts: how many of those that full attention finds does a sparse cache lose?

    python eval/needle.py --count 20
    python eval/needle.py --rows scout-512,window-1024 --prose novel.txt

Each needle is a 7-digit number at a random depth of a random stretch of a text; the kinds of text take turns. Needles
that full attention does not find say nothing about a cache and are not counted (the CSV keeps them, row "full").
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from common import (
    FULL,
    RESULTS,
    DtypeOption,
    ModelOption,
    OutOption,
    ProseOption,
    Row,
    ThreadsOption,
    TierOption,
    choose,
    command,
    kinds_of,
    load,
    show,
    text_of,
    write_csv,
)
from hf_offload import assets


def make_rows(tier: str | None, lookahead: str) -> list[Row]:
    """The rows to choose from."""
    memory = {} if tier is None else {"tier": tier}
    scout = {"lookahead": lookahead} | memory
    return [
        *(Row(f"scout-{budget}", "scout", {"budget": budget} | scout) for budget in (2048, 1024, 512, 256)),
        *(Row(f"window-{budget}", "window", {"budget": budget} | memory) for budget in (2048, 1024, 512)),
    ]


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    prompt: torch.Tensor,
    cache: Cache | None = None,
) -> dict[str, Any]:
    """Answer a prompt `[1, N]` with a row's cache; returns the answer, the seconds it took, and the CPU ratio.

    Args:
        cache: holds the beginning of the prompt; None: a new one of the row.
    """
    cache = row.make_cache(model) if cache is None else cache
    start = time.perf_counter()
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=24, do_sample=False
    )
    return {
        "answer": tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True).strip(),
        "seconds": time.perf_counter() - start,
        "cpu_ratio": None if row is FULL else cache.stats().as_dict()["cpu_ratio"],
    }


def hunt(count: int, kinds: Iterable[str], ask_all: Callable[[int, str], bool]) -> tuple[int, int]:
    """Ask for needle after needle, until full attention has found so many of them.

    Args:
        count: needles to be found.
        kinds: of text, in turns.
        ask_all: asks for a needle by its seed in a text of a kind; returns whether it counts.

    Returns:
        How many were found of how many.

    Raises:
        typer.BadParameter: full attention finds less than a tenth of them.
    """
    found = asked = 0
    with tqdm(total=count, desc="numbers found by full attention") as progress:
        for kind in itertools.cycle(kinds):
            if found == count:
                break
            if asked >= 20 and found * 10 < asked:
                raise typer.BadParameter(f"full attention found {found} of {asked} numbers: give fewer --tokens")
            found += ask_all(asked, kind)
            asked += 1
            progress.update(found - progress.n)
    return found, asked


def main(
    count: Annotated[int, typer.Option(min=1, help="Needles found by full attention to count.")] = 20,
    tokens: Annotated[int, typer.Option(help="Length of each prompt.")] = 6500,
    kinds: Annotated[str, typer.Option(help="Kinds of text, in turns.")] = ",".join(assets.KINDS),
    rows: Annotated[str, typer.Option(help="scout-2048, -1024, -512, -256, window-2048, -1024, -512.")] = (
        "scout-1024,scout-512,window-1024"
    ),
    lookahead: Annotated[str, typer.Option(help="Scout's: auto, off, select or attend.")] = "auto",
    tier: TierOption = None,
    prose: ProseOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = "bfloat16",
    threads: ThreadsOption = 0,
    out: OutOption = RESULTS / "needle.csv",
) -> None:
    """Count the hidden numbers that a sparse cache loses."""
    chosen = choose(make_rows(tier, lookahead), rows)
    sources = {kind: text_of(kind, prose) for kind in kinds_of(kinds)}
    language_model, tokenizer = load(model, dtype, threads)
    records: list[dict[str, Any]] = []

    def ask_all(seed: int, kind: str) -> bool:
        """Ask for needle `seed`: full attention first, the other rows only if it finds the number."""
        needle = assets.random_needle(sources[kind], tokenizer, seed, tokens=tokens)
        prompt = needle.prompt.to(language_model.device)
        for row in [FULL, *chosen]:
            result = ask(language_model, tokenizer, row, prompt)
            hit = needle.found_in(result["answer"])
            key = {"row": row.name, "kind": kind, "seed": seed, "tokens": prompt.shape[1], "number": needle.number}
            records.append({**key, "found": int(hit), **result})
            if row is FULL and not hit:
                return False
        return True

    found, asked = hunt(count, sources, ask_all)
    write_csv(out, records)
    show(f"{found} of {asked} numbers found by full attention", [summary(records, row.name, sources) for row in chosen])


def summary(records: list[dict[str, Any]], row: str, kinds: Iterable[str]) -> dict[str, Any]:
    """One line of the table: lost of found, by kind and in all."""
    mine = [r for r in records if r["row"] == row]
    line: dict[str, Any] = {"row": row}
    for kind in kinds:
        of_kind = [r for r in mine if r["kind"] == kind]
        line[f"lost, {kind}"] = f"{sum(not r['found'] for r in of_kind)} of {len(of_kind)}"
    return line | {"lost": f"{sum(not r['found'] for r in mine)} of {len(mine)}"}


if __name__ == "__main__":
    command(main)()
