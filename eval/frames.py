"""How much Python does a decode step run in one layer: frames of the package, changes of file, files?

    python eval/frames.py
    python eval/frames.py --row hgca --row scout:budget=1024,lookahead=off --tiers one
    python eval/versus.py v0.1.0 --script frames

Counted is all that the calling thread does from the call of a decoder layer to its return: hooks, `update` and the
attention function. The model is a random one with four layers (nine query heads, three KV heads, 64 channels); with
two memories the work of a GPU is done by torch operators where there is none.

Steps differ: the `first` one after a prompt makes what later ones find, the `second` one may still plan; one `begins` a
block, one `fills` it; the `usual` one is neither. Numbers are medians over the steps of a kind.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from types import FrameType
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch import nn
from transformers import PreTrainedModel

import common
import hf_offload
from records import RESULTS, show, write_csv

PACKAGE = str(Path(hf_offload.__file__).parent)
BLOCK_SIZE, BLOCKS = 32, 2
LAYER = 2  # neither the first nor the last
KEYS = ("budget=1024", "samples=512")


@contextmanager
def watching(layer: nn.Module) -> Iterator[list[str]]:
    """The files of the frames of the package in the last call of a layer, in the order in which the frames began."""
    files: list[str] = []
    call = type(layer).__call__

    def see(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    def watched(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if this is not layer:
            return call(this, *args, **kwargs)
        files.clear()
        sys.setprofile(see)
        try:
            return call(this, *args, **kwargs)
        finally:
            sys.setprofile(None)

    with mock.patch.object(type(layer), "__call__", watched):
        yield files


def kind_of(number: int, length: int) -> str:
    """The kind of a step: its number, and how many tokens were there before it."""
    if number < 2:
        return ("first", "second")[number]
    return {0: "begins", BLOCK_SIZE - 1: "fills"}.get(length % BLOCK_SIZE, "usual")


def measure(model: PreTrainedModel, row: common.Row, ids: torch.Tensor, context: int) -> Iterator[dict[str, Any]]:
    """A record of each kind of step: frames, changes of file, and files."""
    cache, found = row.make_cache(model), defaultdict(list)
    common.prefill(model, cache, ids[:, :context], chunk=2048)
    with watching(model.model.layers[LAYER]) as files:
        for number, token in enumerate(ids[:, context:].split(1, 1)):
            model(token, past_key_values=cache)
            changes = sum(one != other for one, other in pairwise(files))
            found[kind_of(number, context + number)].append((len(files), changes, len(set(files))))
    for kind, counts in found.items():
        frames, changes, used = map(statistics.median_low, zip(*counts, strict=True))
        yield {"step": kind, "frames": frames, "changes": changes, "files": used}


def main(
    rows: common.RowsOption = [f"scout:{kind}{mode}" for mode in ("", ",lookahead=attend") for kind in KEYS],  # noqa: B006
    tiers: Annotated[str, typer.Option(help='"one", "split" or both, comma-separated.')] = "one,split",
    context: Annotated[str, typer.Option(help="Tokens of the prompt; k is 1,024.")] = "2k",
    out: common.OutOption = RESULTS / "frames.csv",
) -> None:
    """Count the Python frames of a decode step."""
    (length,) = common.numbers(context)
    model = common.random_llama(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64).bfloat16()
    ids = torch.randint(3, 150, (1, length + BLOCKS * BLOCK_SIZE))
    records = []
    for row, tier in product(common.rows_of(rows), tiers.split(",")):
        if tier == "one" and row.options.get("lookahead") in ("attend", "select"):  # which need two memories
            continue
        set_up = common.Row(row.name, row.policy, {**row.options, "tier": tier, "block_size": BLOCK_SIZE})
        with torch.inference_mode():
            found = list(measure(model, set_up, ids, length))
        records += [{"row": row.name, "tier": tier, "context": length, **record} for record in found]
    write_csv(out, records)
    show("Python frames of the package in one layer of a decode step", records)


if __name__ == "__main__":
    common.command(main)()
