"""Which resident blocks give way to which others, and the copies that follow (ScoutAttention §3.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hf_offload.attention.step import Step


def recall(step: Step) -> None:
    """Make the most wanted blocks resident, in place of the least wanted; to be used from the next step on."""
    resident, stats = step.layer.resident, step.layer.stats
    assert resident is not None
    moves: list[np.ndarray] = []
    for b, h in np.ndindex(resident.block_of.shape[:2]):
        may = exchangeable(step, b, h)
        worth = resident.worth[b, h, : resident.known]
        ranked = np.argsort(-worth, kind="stable")
        ranked = ranked[(worth[ranked] > -np.inf) & _may_move(step, b, ranked)][: len(may)]
        missing = ranked[resident.slot_of[b, h, ranked] < 0]
        victims = least_wanted(step, b, h, may[~np.isin(resident.block_of[b, h, may], ranked)])
        count = min(len(missing), len(victims))
        row, head = np.full(count, b), np.full(count, h)
        moves.append(np.stack([row, head, victims[:count], missing[:count]]))
    rows, heads, slots, blocks = np.concatenate(moves, axis=1)
    if len(rows):
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


def least_wanted(step: Step, b: int, h: int, slots: np.ndarray) -> np.ndarray:
    """Slots in the order in which they are given up: free ones, then by rising worth, then blocks newer than any score.

    For policies that do not score, that is the order of age.
    """
    resident = step.layer.resident
    assert resident is not None
    held = resident.block_of[b, h, slots]
    known = (held >= 0) & (held < resident.known)
    worth = np.where(held < 0, -np.inf, np.inf)
    worth[known] = resident.worth[b, h, held[known]]
    return slots[np.lexsort((held, worth))]


def transfer(step: Step, rows: Any, heads: Any, slots: Any, blocks: Any, label: str) -> int:
    """Start a copy of host blocks into slots (four equal lists); returns its bytes."""
    resident = step.layer.resident
    assert resident is not None
    rows, heads, slots, blocks = (np.asarray(x, np.int32) for x in (rows, heads, slots, blocks))
    return resident.fetch(rows, heads, slots, blocks, step.label(label))
