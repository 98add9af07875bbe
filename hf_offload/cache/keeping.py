"""Which tokens before the window are kept by their averages, and the copies of those that are: a job's launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hf_offload.cache.context import Context
from hf_offload.cache.memory import host_empty
from hf_offload.cpu import keep
from hf_offload.cpu.launch import Launch

if TYPE_CHECKING:
    from hf_offload.cache.salience import Salience

TILE = 4096
"""Tokens that are looked at and copied at a time."""
KEEP_ALL = -np.inf
"""A threshold that every valid token exceeds."""


def keep_tokens(
    salience: Salience, context: Context, kept: np.ndarray, blocks: range, border: int, length: int, silent: np.ndarray
) -> Iterator[Launch]:
    """Mark the tokens of blocks that are kept, and append them to lists. Source: HGCA, algorithm 1, lines 19-24.

    Args:
        salience: what is known of the tokens.
        context: the lists.
        kept: uint8 `[B, Hkv, T]`, marks, written.
        blocks: those that have left the window, or of them those that are not in the lists.
        border: tokens before this one shared their weights among one another, the others with all up to `length`.
        length: tokens.
        silent: bool `[B]`, rows in which nothing changes about the tokens before `border`.
    """
    store = salience.store
    valid, size = store.padding.valid, store.block_size
    old, new = (_thresholds(salience, valid[:, part]) for part in (slice(border), slice(border, length)))
    counts = np.zeros((store.batch, store.num_kv_heads), np.int64)
    for start in range(blocks.start * size, blocks.stop * size, TILE):
        stop = min(start + TILE, blocks.stop * size)
        shared = slice(start, max(min(stop, border), start))
        before = kept[silent, :, shared]
        yield keep.count_kept(
            salience.average, valid, old, new, border, start, stop, kept, counts, kv_heads=store.num_kv_heads,
            rule=salience.rule.group,
        )  # fmt: skip
        kept[silent, :, shared] = before
        _keep_sinks(salience, kept, start, stop)
        if before.size or salience.rule.sinks:  # others than the kernel has counted
            counts[:] = kept[:, :, start:stop].sum(2, dtype=np.int64)
        yield from _copy(salience, context, kept, start, stop, counts)


def _copy(
    salience: Salience, context: Context, kept: np.ndarray, start: int, stop: int, counts: np.ndarray
) -> Iterator[Launch]:
    """Append those of the tokens `start` to `stop - 1` that are marked, `[B, Hkv]` of them, to lists."""
    store = salience.store
    if not counts.any():
        return
    shape = (store.batch, store.num_kv_heads, stop - start, store.head_dim)
    k, v = (host_empty(shape, store.format.gather_dtype, brief=True, what="kept tokens") for _ in range(2))
    yield store.gathering(k, v, start)
    k, v = store.narrowed(k), store.narrowed(v)
    yield context.append(k, v, kept, counts, start, salience.average, salience.rule.group)


def copy_marked(salience: Salience, kept: np.ndarray, evicted: int, room: int = 0) -> Context:
    """New lists of all tokens that are marked, at once.

    Args:
        kept: uint8 `[B, Hkv, T]`, marks of the tokens of `evicted` blocks at least.
        room: as in `Context`.
    """
    store, size = salience.store, salience.store.block_size
    context = Context(salience.context.lists, size, store.head_dim, store.dtype, room)
    for start in range(0, evicted * size, TILE):
        stop = min(start + TILE, evicted * size)
        counts = kept[:, :, start:stop].sum(2, dtype=np.int64)
        for launch in _copy(salience, context, kept, start, stop, counts):
            launch.run("kept tokens")
    return context


def _thresholds(salience: Salience, valid: np.ndarray) -> np.ndarray:
    """What averages must exceed in each row, float32 `[B]`, where the tokens with these marks shared the weights."""
    if salience.rule.beta == 0:
        return np.full(len(valid), KEEP_ALL, np.float32)
    shares = salience.rule.beta / np.maximum(valid.sum(1), 1)
    return np.where(salience.known, shares, KEEP_ALL).astype(np.float32)


def _keep_sinks(salience: Salience, kept: np.ndarray, start: int, stop: int) -> None:
    """Mark the rows' first tokens, which are kept whatever their weights."""
    padding, sinks = salience.store.padding, salience.rule.sinks
    for row, begin in enumerate(padding.first if sinks else ()):
        low, high = max(int(begin), start), min(int(begin) + sinks, stop)
        if low < high:
            kept[row, :, low:high] = padding.valid[row, low:high]
