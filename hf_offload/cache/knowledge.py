"""What a layer knows of its tokens' attention, remembered, copied and written down."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from hf_offload.cache.context import LIST_STEP
from hf_offload.cache.keeping import copy_marked
from hf_offload.cache.salience import Salience
from hf_offload.cache.weighing import Weighing
from hf_offload.fields import Field, LayerSizes
from hf_offload.knobs import MOST


@dataclass(slots=True)
class Remembered:
    """What `restore` goes back to.

    Args:
        evicted: blocks that had left the window.
        counts: `[B · Hkv]`, tokens that were kept.
        average: `[B, Hq, W]`, of the tokens of the window; near: `[B, Hq, R, block_size]`, of the resident ones.
        weighing: how far the last append was.
    """

    evicted: int
    counts: np.ndarray
    average: np.ndarray
    near: torch.Tensor | None
    weighing: Weighing


def remember(salience: Salience) -> Remembered:
    """What is known now, between two tokens."""
    salience.settle()
    first, near = salience.evicted * salience.store.block_size, salience.near
    average = salience.average[:, :, first : salience.store.length].copy()
    there = None if near is None else near.average.clone()
    return Remembered(salience.evicted, salience.context.counts.copy(), average, there, replace(salience.weighing))


def restore(salience: Salience, then: Remembered) -> None:
    """Go back to what was known then, after decode steps alone; nothing is in flight."""
    first = then.evicted * salience.store.block_size
    salience.context.cut(then.counts)
    salience.evicted, salience.weighing = then.evicted, replace(then.weighing)
    salience.average[:, :, first:] = 0.0
    salience.average[:, :, first : first + then.average.shape[2]] = then.average
    salience.kept[:, :, first:] = 0
    if then.near is None:  # nothing was resident yet
        salience.near = None
    elif salience.near is not None:
        salience.near.average.copy_(then.near)


def copy(source: Salience, target: Salience) -> None:
    """Let that of another cache over the same blocks know the same; nothing is in flight."""
    if source.near is not None:
        source.near.write_back()
    target.context = source.context.fork()
    target.average, target.kept = source.average.copy(), source.kept.copy()
    target.window_blocks, target.evicted, target.known = source.window_blocks, source.evicted, source.known.copy()
    target.weighing = replace(source.weighing)
    target.since = source.since


def pack(salience: Salience) -> dict[str, torch.Tensor]:
    """All of it as tensors, for a saved cache; nothing is in flight."""
    if salience.near is not None:
        salience.near.write_back()
    weighing, length = salience.weighing, salience.store.length
    numbers = (
        salience.window_blocks, salience.evicted, weighing.border, weighing.prompt, weighing.end, salience.since,
    )  # fmt: skip
    return {
        "average": torch.from_numpy(salience.average[:, :, :length]),
        "kept": torch.from_numpy(salience.kept[:, :, :length]),
        "known": torch.from_numpy(salience.known),
        "queries": torch.from_numpy(weighing.queries),
        "numbers": torch.tensor(numbers, dtype=torch.int64),
        "room": torch.tensor(salience.context.table.shape[1]),
    }


def fields(sizes: LayerSizes, windows: range) -> dict[str, Field]:
    """What `pack` gives for a layer, whose window may have so many blocks."""
    rows, tokens, known = sizes.rows, sizes.tokens, sizes.query_heads
    # A cache that was taken over does not know the query heads before something is resident.
    heads = known if sizes.placed or sizes.kv_heads in known else {sizes.kv_heads, *known}
    least, most = (windows.start, 0, 0, 0, -1, 0), (windows.stop - 1, sizes.full_blocks, tokens, 1, tokens, tokens)
    return {
        "average": Field(torch.float32, (rows, heads, tokens)),
        "kept": Field(torch.uint8, (*sizes.lines, tokens), 0, 1),
        "known": Field(torch.bool, (rows,)),
        "queries": Field(torch.int64, (rows,), 0, MOST),
        "numbers": Field(torch.int64, (6,), least, most),
        "room": Field(torch.int64, (), 0, sizes.width * 5 // 4 + LIST_STEP),
    }


def unpack(salience: Salience, packed: dict[str, torch.Tensor], *, window: bool) -> None:
    """What `pack` gave, with the same tokens; `window`: whether the size of the window too."""
    average, kept = packed["average"].numpy(), packed["kept"].numpy()
    salience.reserve(average.shape[2], average.shape[1])
    salience.average[:, :, : average.shape[2]], salience.kept[:, :, : kept.shape[2]] = average, kept
    blocks, salience.evicted, border, prompt, end, salience.since = packed["numbers"].tolist()
    salience.window_blocks = blocks if window else salience.window_blocks
    salience.known = packed["known"].numpy().copy()
    queries = packed["queries"].numpy().copy()
    salience.weighing = Weighing(salience.rule, queries, border, bool(prompt), end)
    salience.context = copy_marked(salience, salience.kept, salience.evicted, int(packed["room"]))
