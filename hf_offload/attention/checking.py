"""A check of a decode step against full attention (`check_every`): what the step missed, how far its output is off."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from hf_offload.attention.merge import merge_partials
from hf_offload.cpu.kernels.decode_attention import Pairs, decode_attention
from hf_offload.policies.base import Estimate, Selection
from hf_offload.scores import Scores

if TYPE_CHECKING:
    from hf_offload.cache.layer import HybridLayer


class Outcome(NamedTuple):
    """What a step of a layer came to.

    Args:
        query: float32 `[B, Hq, D]`, the real query.
        out: float32 `[B, Hq, D]`, with the model's sinks.
        lse: float32 `[B, Hq]`, without them.
        estimate: the part whose log mass is estimated, if any.
    """

    query: np.ndarray
    out: np.ndarray
    lse: np.ndarray
    estimate: Estimate | None


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
    query, got, got_lse, estimate = outcome
    blocks, count = store.view(length).blocks, -(-length // store.block_size)

    def attend(selection: Selection, pairs: Pairs | None = None, end: int = length) -> tuple[np.ndarray, np.ndarray]:
        out, lse = np.empty(query.shape, np.float32), np.empty(query.shape[:2], np.float32)
        decode_attention(
            query, blocks, selection.items, selection.counts, end, out, lse, **scores._asdict(), pairs=pairs
        ).run(label)
        return out, lse

    shape = store.batch, store.num_kv_heads, count
    numbers = np.broadcast_to(np.arange(count, dtype=np.int32), shape).copy()
    out, lse = attend(Selection(numbers, np.full(shape[:2], count, np.int32), store.block_size))
    attended, errors = got_lse, None
    # In place of what a part stands for: the log mass of its keys themselves, by the real query.
    if estimate is not None:
        pairs, end, plain = estimate.selection.weights, length, None
        if pairs is not None:
            errors = pairs.errors
            plain = Pairs.of(np.zeros_like(pairs.weights), query.shape[1], skipped=pairs.skipped)
            if len(pairs.skipped):  # all pairs lie before its end
                end = min(length, pairs.skipped.shape[2])
        attended = _replaced(attended, estimate.lse, attend(estimate.selection, plain, end)[1])
    if sinks is not None:
        both = torch.from_numpy(out), torch.from_numpy(lse)
        out = merge_partials([both], sinks.float().cpu().view(1, -1))[0].numpy()
    valid = np.isfinite(lse)  # not a row of padding
    if not valid.any():
        return
    true = np.abs(np.expm1(got_lse[valid] - lse[valid]))
    missed = -np.expm1(np.minimum(attended[valid] - lse[valid], 0))
    norm = np.maximum(np.linalg.norm(out[valid], axis=-1), np.finfo(np.float32).tiny)
    error = np.linalg.norm(got[valid] - out[valid], axis=-1) / norm
    estimated = None if errors is None else errors[valid]
    layer.stats.checked.add(missed, error, estimated, true)
    if estimated is not None:
        checks.compare(estimated, true)


def _replaced(total: np.ndarray, part: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The log of exp(total) - exp(part) + exp(other), which is not less than `other`."""
    with np.errstate(all="ignore"):  # rows of padding; a part that is the whole
        rest = np.log1p(-np.minimum(np.exp(np.minimum(part - total, 0)), 1))
        joined: np.ndarray = np.logaddexp(total + rest, other)
    return np.where(np.isnan(joined), other, joined)
