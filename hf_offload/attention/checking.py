"""A check of a decode step against full attention (`check_every`): what the step missed, how far its output is off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hf_offload.attention.merge import merge_partials
from hf_offload.cpu.kernels.pair_decode import attend_pairs
from hf_offload.cpu.kernels.sparse_decode import sparse_decode
from hf_offload.policies.base import Drawn
from hf_offload.scores import Scores

if TYPE_CHECKING:
    from hf_offload.cache.layer import HybridLayer


class Early(NamedTuple):
    """The part of a step that the CPU attended with a predicted query.

    Args:
        blocks, counts: int32 `[B, Hkv, C]` and `[B, Hkv]`, what it attended.
        lse: float32 `[B, Hq]`, as the merge took it: of the predicted query, or corrected to the real one.
    """

    blocks: np.ndarray
    counts: np.ndarray
    lse: np.ndarray


class Outcome(NamedTuple):
    """What a step of a layer came to.

    Args:
        query: float32 `[B, Hq, D]`, the real query.
        out: float32 `[B, Hq, D]`, with the model's sinks.
        lse: float32 `[B, Hq]`, without them.
        drawn: the drawn part, if any.
        early: the part of a predicted query, if any that is not drawn.
    """

    query: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    drawn: Drawn | None
    early: Early | None = None


def check(
    layer: HybridLayer, outcome: Outcome, length: int, scores: Scores, sinks: torch.Tensor | None, label: str
) -> None:
    """Compare a step with full attention over the blocks in host memory, for the statistics.

    Args:
        layer: the layer; host memory holds all its tokens.
        outcome: what the step came to.
        length: tokens of a row, including the step's.
        scores: parameters of the model's scores.
        sinks: `[Hq]`, logits of the model's attention sinks, or None.
        label: the check's name in error messages.
    """
    store, checks = layer.store, layer.settings.checks
    assert store is not None
    assert checks is not None
    query, got, got_lse, drawn, early = outcome
    view, size = store.view(length), store.block_size
    arrays, padding = (query, view.block_ptr, view.table), (view.holes, view.valid)
    form: dict[str, Any] = {"kv_dtype": store.dtype, "block_size": size, **scores._asdict()}
    form["packed"] = store.format.packed
    shape = store.batch, store.num_kv_heads, -(-length // size)
    blocks = np.broadcast_to(np.arange(shape[2], dtype=np.int32), shape).copy()
    out, lse = np.empty(query.shape, np.float32), np.empty(query.shape[:2], np.float32)
    counts = np.full(shape[:2], shape[2], np.int32)
    sparse_decode(*arrays, blocks, counts, *padding, length, out, lse, None, **form).run(label)
    attended, estimated, once = got_lse, None, np.empty_like(lse)
    # In place of what a part stands for: the log mass of its keys themselves, by the real query.
    if drawn is not None:
        pairs, weights, number = drawn.pairs
        marked = length if drawn.skipped is None else min(length, drawn.skipped.shape[2])  # all pairs lie before that
        attend_pairs(
            *arrays, pairs, np.zeros_like(weights), number, *padding, marked, np.empty_like(out), once, None, **form,
            skipped=drawn.skipped,
        ).run(label)  # fmt: skip
        attended = _replaced(attended, drawn.lse, once)
    elif early is not None:
        sparse_decode(
            *arrays, early.blocks, early.counts, *padding, length, np.empty_like(out), once, None, **form
        ).run(label)  # fmt: skip
        attended = _replaced(attended, early.lse, once)
    if sinks is not None:
        both = torch.from_numpy(out), torch.from_numpy(lse)
        out = merge_partials([both], sinks.float().cpu().view(1, -1))[0].numpy()
    there = np.isfinite(lse)  # not a row of padding
    if not there.any():
        return
    true = np.abs(np.expm1(got_lse[there] - lse[there]))
    missed = -np.expm1(np.minimum(attended[there] - lse[there], 0))
    norm = np.maximum(np.linalg.norm(out[there], axis=-1), np.finfo(np.float32).tiny)
    error = np.linalg.norm(got[there] - out[there], axis=-1) / norm
    estimated = None if drawn is None else drawn.errors[there]
    layer.stats.checked.add(missed, error, estimated, true)
    if estimated is not None:
        checks.compare(estimated, true)


def _replaced(total: np.ndarray, part: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The log of exp(total) - exp(part) + exp(other), which is not less than `other`."""
    with np.errstate(all="ignore"):  # rows of padding; a part that is the whole
        rest = np.log1p(-np.minimum(np.exp(np.minimum(part - total, 0)), 1))
        found: np.ndarray = np.logaddexp(total + rest, other)
    return np.where(np.isnan(found), other, found)
