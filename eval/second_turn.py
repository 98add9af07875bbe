"""Does a policy find a number that only the second turn asks for?

    python eval/second_turn.py --found 20
    python eval/second_turn.py --rows hgca-0.1,hgca-0.1-once --kinds prose --prose novel.txt

The first turn is a long text with a hidden 7-digit number and a question of something else, which the model answers
for some steps. The second turn asks for the number, on the same cache. A policy that has chosen what to keep by the
first turn's attention must now choose anew (HGCA, §3.2.2, Re-evaluation); `hgca-…-once` is the control that does not.

All rows are fed the same tokens: the first answer is that of full attention. Needles that full attention does not
find, or gives away in its first answer, are not counted (the CSV keeps them, row "dynamic"). A needle takes one long
prompt a row: at 90 s each (SmolLM2, bf16, two cores) 20 needles and four rows take two hours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

import common
from hf_offload.tools import assets

FIRST_QUESTION = "What is this text about? Answer in one sentence."


def next_turn(tokenizer: PreTrainedTokenizerBase, question: str) -> torch.Tensor:
    """Token ids `[1, N]` of what follows an answer: its end, the next question, and the beginning of its answer."""
    following, answer = f"\n\n{question}\n", "An answer of 1234567 words."
    if tokenizer.chat_template:
        roles = zip(("user", "assistant", "user"), ("Hello.", answer, question), strict=True)
        turns = [{"role": role, "content": content} for role, content in roles]
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


def first_turn(model: PreTrainedModel, row: common.Row, prompt: torch.Tensor, answer: torch.Tensor) -> Cache:
    """A row's cache after a prompt `[1, N]` and an answer `[1, A]`, all of which but the last token was decoded."""
    cache = row.make_cache(model)
    common.prefill(model, cache, prompt)
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


def main(
    found: Annotated[int, typer.Option(min=1, help="Needles found by full attention to count.")] = 20,
    tokens: Annotated[int, typer.Option(help="Length of the first turn's prompt.")] = 6500,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of the first turn's answer.")] = 48,
    kinds: common.KindsOption = common.KINDS,
    rows: common.RowsOption = ["hgca-0.1,hgca-0.1-once,scout-1024"],  # noqa: B006
    tier: common.TierOption = None,
    *,
    setting: common.TextSetting,
) -> None:
    """Count the numbers that a cache loses when they are asked for in a second turn."""
    chosen, names = common.rows_of(rows, tier), common.kinds_of(kinds)
    model, tokenizer = setting.load()
    sources = {kind: setting.text(kind) for kind in names}
    question = next_turn(tokenizer, assets.QUESTION).to(model.device)
    records: list[dict[str, Any]] = []

    def ask_all(seed: int, kind: str) -> bool:
        """Ask for needle `seed`: full attention first, the other rows only if it finds the number."""
        needle = assets.random_needle(sources[kind], tokenizer, seed, tokens=tokens, question=FIRST_QUESTION)
        prompt = needle.prompt.to(model.device)
        spoken = None
        for row in [common.FULL, *chosen]:
            if row is common.FULL:
                cache: Any = row.make_cache(model)
                first = generate(model, cache, prompt, answer, answer)
                spoken = tokenizer.decode(first[0], skip_special_tokens=True).strip()
            else:
                cache = first_turn(model, row, prompt, first)
            second = generate(model, cache, torch.cat([prompt, first, question], 1), 24)
            text = tokenizer.decode(second[0], skip_special_tokens=True).strip()
            hit = needle.found_in(text)
            records.append(
                {
                    "row": row.name, "kind": kind, "seed": seed, "tokens": prompt.shape[1], "number": needle.number,
                    "found": int(hit), "answer": text, "first_answer": spoken if row is common.FULL else None,
                    "kept_share": None if row is common.FULL else cache.stats().as_dict().get("kept_share"),
                }
            )  # fmt: skip
            if row is common.FULL and (not hit or needle.found_in(str(spoken))):
                return False
        setting.write(records)  # after each needle: a long run that is stopped has not been for nothing
        return True

    counted, asked = hunt(found, sources, ask_all)
    setting.write(records)
    table = []
    for row in chosen:
        hits = {kind: [r["found"] for r in records if (r["row"], r["kind"]) == (row.name, kind)] for kind in names}
        hits["all"] = [hit for of_kind in hits.values() for hit in of_kind]
        table.append({"row": row.name} | {f"lost, {kind}": f"{h.count(0)} of {len(h)}" for kind, h in hits.items()})
    common.show(f"{counted} of {asked} numbers found by full attention in a second turn", table)


if __name__ == "__main__":
    common.command(main)()
