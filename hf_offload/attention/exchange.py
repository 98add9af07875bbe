"""Which resident blocks give way to which others, and the copies that follow (ScoutAttention §3.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hf_offload.policies.base import Selection

if TYPE_CHECKING:
    from hf_offload.attention.step import Step


def recall(step: Step, wanted: Selection, score: np.ndarray) -> None:
    """Exchange the least wanted resident blocks for wanted ones; to be used from the next step on.

    Args:
        wanted: blocks that should be resident; those that fit in place of unwanted ones will be.
        score: `[B, Hkv, N]` how much each sealed block is wanted.
    """
    resident = step.layer.resident
    assert resident is not None
    rows, heads, slots, blocks = [], [], [], []
    for b, h in np.argwhere(step.split(wanted)[1].counts > 0):  # type: ignore[union-attr]
        may = exchangeable(step, b, h)
        want = wanted.blocks[b, h, : wanted.counts[b, h]]
        want = want[_may_move(step, b, want)]
        want = want[np.argsort(-score[b, h, want], kind="stable")][: len(may)]
        missing = want[resident.slot_of[b, h, want] < 0]
        held = resident.block_of[b, h, may]
        victims = may[~np.isin(held, want)]
        count = min(len(missing), len(victims))
        rows += [b] * count
        heads += [h] * count
        slots += least_wanted(step, b, h, victims, score[b, h])[:count].tolist()
        blocks += missing[:count].tolist()
    if rows:
        stats = step.layer.stats
        stats.recall_bytes += transfer(step, rows, heads, slots, blocks, "recall")
        stats.recall_blocks += len(rows)
        stats.recalls += 1


def _may_move(step: Step, b: int, blocks: np.ndarray) -> np.ndarray:
    """Which blocks of a row are neither sinks nor recent nor unsealed: those stay resident."""
    newest = step.store.sealed - -(-step.layer.policy.recent_tokens // step.block_size)
    free: np.ndarray = (blocks >= step.sinks()[1][b]) & (blocks < newest)
    return free


def exchangeable(step: Step, b: int, h: int) -> np.ndarray:
    """Slots of a row and KV head that may be given to another block: free ones, and those of blocks that may move."""
    assert step.layer.resident is not None
    held = step.layer.resident.block_of[b, h]
    return np.flatnonzero((held < 0) | _may_move(step, b, held))


def least_wanted(step: Step, b: int, h: int, slots: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Slots by rising score `[N]` of the block that each holds: free ones first, blocks newer than the scores last."""
    assert step.layer.resident is not None
    held = step.layer.resident.block_of[b, h, slots]
    worth = np.full(len(held), np.inf)
    worth[held < 0] = -np.inf
    known = (held >= 0) & (held < len(score))
    worth[known] = score[held[known]]
    ranked: np.ndarray = slots[np.argsort(worth, kind="stable")]
    return ranked


def transfer(step: Step, rows: Any, heads: Any, slots: Any, blocks: Any, label: str) -> int:
    """Start a copy of host blocks into slots (four equal lists); returns its bytes."""
    resident = step.layer.resident
    assert resident is not None
    rows, heads, slots, blocks = (np.asarray(x, np.int32) for x in (rows, heads, slots, blocks))
    return resident.fetch(rows, heads, slots, blocks, step.label(label))
