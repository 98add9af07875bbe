"""Numbers asked for in a second turn: how many does a cache lose whose first turn gave no reason to keep them?

    python eval/second_turn.py --found 20
    python eval/second_turn.py --rows hgca-0.1,hgca-0.1-once --kinds prose --prose novel.txt

The first turn is a long text with a hidden 7-digit number and a question of something else, which the model answers
for some steps. The second turn asks for the number, on the same cache. A policy that has chosen what to keep by the
first turn's attention must now choose anew (HGCA, §3.2.2, Re-evaluation); `hgca-…-once` is the control that does not.

All rows are fed the same tokens: the first answer is that of full attention. Needles that full attention does not
find, or gives away in its first answer, are not counted (the CSV keeps them, row "full"). A needle takes one long
prompt a row: at 90 s each (SmolLM2, bf16, two cores) 20 needles and four rows take two hours.
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
    prefill,
    show,
    text_of,
    write_csv,
)
from hf_offload import assets

FIRST_QUESTION = "What is this text about? Answer in one sentence."


def make_rows(tier: str | None) -> list[Row]:
    """The rows to choose from."""
    memory = {} if tier is None else {"tier": tier}
    rows = []
    for ratio in (0.05, 0.1, 0.25):
        knobs = {"gpu_ratio": ratio, "beta": 1.0} | memory
        rows += [
            Row(f"hgca-{ratio:g}", "hgca", knobs),
            Row(f"hgca-{ratio:g}-once", "hgca", knobs | {"reevaluate": False}),
        ]
    rows += [Row(f"scout-{budget}", "scout", {"budget": budget} | memory) for budget in (1024, 512)]
    return [*rows, Row("window-1024", "window", {"budget": 1024} | memory)]


def next_turn(tokenizer: PreTrainedTokenizerBase, question: str) -> torch.Tensor:
    """Token ids `[1, N]` of what follows an answer: its end, the next question, and the beginning of its answer."""
    if not tokenizer.chat_template:
        return tokenizer(f"\n\n{question}\n", add_special_tokens=False, return_tensors="pt")["input_ids"]
    roles, answer = ("user", "assistant", "user"), "An answer of 1234567 words."
    turns = [{"role": r, "content": c} for r, c in zip(roles, ("Hello.", answer, question), strict=True)]
    text = str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    following = text.partition(answer)[2]
    return tokenizer(following, add_special_tokens=False, return_tensors="pt")["input_ids"]


def generate(model: PreTrainedModel, cache: Cache, ids: torch.Tensor, most: int, least: int = 0) -> torch.Tensor:
    """New tokens `[1, ≤ most]` after ids `[1, N]`, of which the cache holds a beginning."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
        max_new_tokens=most, min_new_tokens=least,
    )  # fmt: skip
    return out[:, ids.shape[1] :]


def first_turn(model: PreTrainedModel, row: Row, prompt: torch.Tensor, answer: torch.Tensor) -> Cache:
    """A row's cache after a prompt `[1, N]` and an answer `[1, A]`, all of which but the last token was decoded."""
    cache = row.make_cache(model)
    prefill(model, cache, prompt)
    for token in answer[:, :-1].split(1, 1):
        model(token, past_key_values=cache)
    return cache


@torch.inference_mode()
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


def summary(records: list[dict[str, Any]], row: str, kinds: Iterable[str]) -> dict[str, Any]:
    """One line of the table: lost of found, by kind and in all."""
    mine = [r for r in records if r["row"] == row]
    line: dict[str, Any] = {"row": row}
    for kind in kinds:
        of_kind = [r for r in mine if r["kind"] == kind]
        line[f"lost, {kind}"] = f"{sum(not r['found'] for r in of_kind)} of {len(of_kind)}"
    return line | {"lost": f"{sum(not r['found'] for r in mine)} of {len(mine)}"}


def main(
    found: Annotated[int, typer.Option(min=1, help="Needles found by full attention to count.")] = 20,
    tokens: Annotated[int, typer.Option(help="Length of the first turn's prompt.")] = 6500,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of the first turn's answer.")] = 48,
    kinds: Annotated[str, typer.Option(help="Kinds of text, in turns.")] = ",".join(assets.KINDS),
    rows: Annotated[str, typer.Option(help="By name, comma-separated; a wrong one lists them.")] = (
        "hgca-0.1,hgca-0.1-once,scout-1024"
    ),
    tier: TierOption = None,
    prose: ProseOption = None,
    model: ModelOption = None,
    dtype: DtypeOption = "bfloat16",
    threads: ThreadsOption = 0,
    out: OutOption = RESULTS / "second_turn.csv",
) -> None:
    """Count the numbers that a cache loses when they are asked for in a second turn."""
    chosen, names = choose(make_rows(tier), rows), kinds_of(kinds)
    language_model, tokenizer = load(model, dtype, threads)
    sources = {kind: text_of(kind, prose) for kind in names}
    question = next_turn(tokenizer, assets.QUESTION).to(language_model.device)
    records: list[dict[str, Any]] = []

    def ask_all(seed: int, kind: str) -> bool:
        """Ask for needle `seed`: full attention first, the other rows only if it finds the number."""
        needle = assets.random_needle(sources[kind], tokenizer, seed, tokens=tokens, question=FIRST_QUESTION)
        prompt = needle.prompt.to(language_model.device)
        for row in [FULL, *chosen]:
            start = time.perf_counter()
            if row is FULL:
                cache = row.make_cache(language_model)
                first = generate(language_model, cache, prompt, answer, answer)
                spoken = tokenizer.decode(first[0], skip_special_tokens=True).strip()
            else:
                cache = first_turn(language_model, row, prompt, first)
            second = generate(language_model, cache, torch.cat([prompt, first, question], 1), 24)
            text = tokenizer.decode(second[0], skip_special_tokens=True).strip()
            hit = needle.found_in(text)
            records.append(
                {
                    "row": row.name, "kind": kind, "seed": seed, "tokens": prompt.shape[1], "number": needle.number,
                    "found": int(hit), "answer": text, "seconds": time.perf_counter() - start,
                    "kept_share": None if row is FULL else cache.stats().as_dict().get("kept_share"),
                    "first_answer": spoken if row is FULL else None,
                }
            )  # fmt: skip
            if row is FULL and (not hit or needle.found_in(spoken)):
                return False
        write_csv(out, records)  # after each needle: a long run that is stopped has not been for nothing
        return True

    counted, asked = hunt(found, sources, ask_all)
    write_csv(out, records)
    title = f"{counted} of {asked} numbers found by full attention in a second turn"
    show(title, [summary(records, row.name, sources) for row in chosen])


if __name__ == "__main__":
    command(main)()
