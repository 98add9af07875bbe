"""Numbers hidden in long texts: how many of those that full attention finds does a sparse cache lose?

    python eval/needle.py --limit 8
    python eval/needle.py --row full --row scout:budget=512 --row window:budget=1024 --prose novel.txt

Each needle is a 7-digit number at a random depth of a random stretch of a text; a kind of text is a task. Rows, setups,
resuming and processes are those of longbench.py, and so are the results: a found number scores 100, differences to
`full` are paired. Beside these stands how many of the numbers that full attention finds each row has lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer
from transformers import PreTrainedTokenizerBase

import common
from hf_offload.tools import assets
from tasks.run import Asking, run
from tasks.samples import Sample
from tasks.scores import REFERENCE

USUAL = Asking(rows=["full,scout:budget=1024,scout:budget=512,window:budget=1024"], limit=8)
NEW_TOKENS = 24


def samples_of(
    text: str, kind: str, seeds: Iterable[int], tokenizer: PreTrainedTokenizerBase, tokens: int
) -> list[Sample]:
    """A needle for each seed, in prompts of about so many tokens.

    Raises:
        typer.BadParameter: the text is too short for that.
    """
    found = []
    for seed in seeds:
        try:
            needle = assets.random_needle(text, tokenizer, seed, tokens=tokens)
        except ValueError as error:
            raise typer.BadParameter(f"{kind}: {error}") from None

        def score(answer: str, needle: assets.Needle = needle) -> float:
            return 100.0 * needle.found_in(answer)

        found.append(Sample(kind, str(seed), needle.content, assets.QUESTION, NEW_TOKENS, score))
    return found


def lost(records: list[dict[str, Any]], kinds: Iterable[str]) -> list[dict[str, Any]]:
    """A line a row and setup: how many of the numbers that full attention finds it has not, by kind and in all."""
    hits = {(r["setup"], r["row"], r["task"], r["sample"]): r["score"] > 0 for r in records}
    rows = dict.fromkeys((r["setup"], r["row"]) for r in records if r["row"] != REFERENCE)
    lines = []
    for setup, row in rows:
        line: dict[str, Any] = {"setup": setup, "row": row}
        total = [0, 0]
        for kind in kinds:
            asked = [
                hits[setup, row, task, sample]
                for (at, one, task, sample), hit in hits.items()
                if (at, one, task) == (setup, REFERENCE, kind) and hit
            ]
            line[f"lost, {kind}"] = f"{asked.count(False)} of {len(asked)}"
            total = [total[0] + asked.count(False), total[1] + len(asked)]
        lines.append(line | {"lost": f"{total[0]} of {total[1]}"})
    return lines


def main(
    tokens: Annotated[int, typer.Option(help="Length of each prompt.")] = 6500,
    kinds: common.KindsOption = common.KINDS,
    *,
    asking: Asking = USUAL,
    setting: common.TextSetting,
) -> None:
    """Count the hidden numbers that a sparse cache loses."""
    names = common.kinds_of(kinds)

    def read(kind: str, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        seeds = range(names.index(kind), (asking.limit or 8) * len(names), len(names))  # each number in one kind alone
        return samples_of(setting.text(kind), kind, seeds, tokenizer, tokens)

    records = run("Needles", names, read, asking, setting, kinds=names, tokens=tokens, prose=setting.source)
    if any(record["row"] == REFERENCE for record in records):
        common.show("of the numbers that full attention finds", lost(records, names))


if __name__ == "__main__":
    common.command(main)()
