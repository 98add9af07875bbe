"""Records copied out of a long list: how much of what full attention writes does a sparse cache keep?

    python eval/extraction.py
    python eval/extraction.py --row scout:budget=1024 --row scout:samples=512 --records 200 --lists 8

A prompt lists some hundred records of a key and a value in random order, and asks for some of them as JSON. Every token
of the answer hangs on another place of the context, which no summary of it can hold: other tasks lose little where this
one loses much. Full attention reads the prompt, every row takes that over (`hgca` and others that learn from a prompt
read it themselves) and is fed the right answer, token by token.

kept       share of the answer's tokens for which a row's most likely token is full attention's
right      share for which it is the answer's own; of full attention: `right_full`
kl         KL(full‖row), mean over the answer
attended   mean number of tokens that a row and KV head attends, where keys are drawn

The interval of `kept` is that of the mean over lists, at 95 %.
"""

from __future__ import annotations

import json
import random
import statistics
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import common
from hf_offload.tools import measuring

ROWS = (
    "full,scout:budget=1024,scout:budget=2048,scout:samples=128,scout:samples=256,scout:samples=512,quest:budget=1024,"
    "hgca:gpu_ratio=0.25,rescue=0,hgca:gpu_ratio=0.25,rescue=128,fixed_hybrid:budget=0.1,window:budget=1024"
)
FIRST = """amber bitter calm dusty early fallen gentle hollow iron jade keen lunar misty narrow olive pale"""
SECOND = """anchor bridge canyon drum engine ferry garden harbor island jungle kettle lantern meadow needle orchard"""


def prompt_and_answer(seed: int, records: int, asked: int) -> tuple[str, str]:
    """A question over a list of records, and its answer: JSON with the asked keys in the order of the question."""
    chance = random.Random(seed)
    keys = chance.sample([f"{one} {two}" for one in FIRST.split() for two in SECOND.split()], records)
    held = {key: f"{chance.choice('ABCDEFGH')}{chance.randrange(10**5):05d}" for key in keys}
    wanted = chance.sample(keys, asked)
    listed = "\n".join(f"- {key}: {value}" for key, value in held.items())
    question = (
        f"Here is a list of {records} records, each with a key and a value.\n\n{listed}\n\n"
        f"Write a JSON object with the values of these keys, in this order: {', '.join(wanted)}."
    )
    return question, json.dumps({key: held[key] for key in wanted}, indent=0)


def tokens_of(tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> tuple[torch.Tensor, int]:
    """The prompt's and the answer's tokens `[1, N]`, and how many of them are the answer's."""
    said = [{"role": "user", "content": question}]
    asked = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = asked["input_ids"]
    told = tokenizer(answer, return_tensors="pt", add_special_tokens=False)["input_ids"]
    return torch.cat([prompt, told], 1), told.shape[1]


def measure(
    model: PreTrainedModel, row: common.Row, reading: measuring.Reading, answer: torch.Tensor
) -> dict[str, Any]:
    """One row, one list. The last token of the prompt is the first that a row is fed."""
    cache = measuring.hold(model, row.policy, dict(row.options), reading)
    logprobs, _ = measuring.follow(model, cache, reading.following)
    kl, kept = measuring.divergence(logprobs, reading.full)
    right, of_full = ((found.argmax(-1) == answer).float().mean().item() for found in (logprobs, reading.full))
    attended = cache.stats().as_dict()["attended_tokens"]
    return {"kept": kept, "right": right, "right_full": of_full, "kl": float(kl.mean()), "attended": attended}


def main(
    rows: common.RowsOption = [ROWS],  # noqa: B006
    records: Annotated[int, typer.Option(min=20, max=240, help="Records of a list.")] = 200,
    asked: Annotated[int, typer.Option(min=1, max=20, help="Records that the answer has.")] = 20,
    lists: Annotated[int, typer.Option(min=2, help="Lists, each with its own prompt.")] = 8,
    tier: common.TierOption = None,
    *,
    setting: common.Setting = common.EXACT,
) -> None:
    """Compare policies with full attention where every token of the answer is somewhere else in the context."""
    chosen, size = common.rows_of(rows, tier), {"records": records, "asked": asked, "tier": tier}
    runs = setting.records(("row", "list"), chosen, **size)
    model, tokenizer = setting.load()
    model.set_attn_implementation("hybrid_sparse")
    common.check_rows(chosen, model)
    with tqdm(total=lists * len(chosen)) as bar, torch.inference_mode():
        for seed in range(lists):
            ids, steps = tokens_of(tokenizer, *prompt_and_answer(seed, records, asked))
            reading: measuring.Reading | None = None
            for row in chosen:
                bar.set_description(f"list {seed}, {row.name}")
                key = {"row": row.name, "list": seed}
                if reading is None and runs.key(key) not in runs.found:
                    # Fed are the prompt's last token and all of the answer but its own.
                    reading = measuring.read(model, ids[:, :-1].to(model.device), steps)
                runs.once(
                    key, lambda row=row, reading=reading, answer=ids[0, -steps:]: measure(model, row, reading, answer)
                )
                bar.update()
            setting.write([record | size for record in runs.found.values()])
    found = []
    for row in chosen:
        mine = [record for record in runs.found.values() if record["row"] == row.name]
        line: dict[str, Any] = {"row": row.name}
        for column in ("kept", "right", "right_full", "kl", "attended"):
            values = [record[column] for record in mine if record[column] is not None]
            line[column] = statistics.mean(values) if values else None
        line["interval"] = 1.96 * statistics.stdev(record["kept"] for record in mine) / len(mine) ** 0.5
        found.append(line)
    common.show(f"{asked} of {records} records, {lists} lists", found)
    runs.remove()


if __name__ == "__main__":
    common.command(main)()
