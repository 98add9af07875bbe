"""A step with one memory that attends a window and, before it, single tokens (HGCA, algorithm 2)."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import numpy as np

from hf_offload.cache.context import Context
from hf_offload.cpu import average as averaging
from hf_offload.cpu import decode as cpu_decode
from hf_offload.cpu.join import join_parts
from hf_offload.policies.base import Plan, Selection

if TYPE_CHECKING:
    from hf_offload.attention.host_step import HostStep


class WindowBuffers:
    """What a step needs beside `StepBuffers` where tokens are kept by their attention weights.

    Args:
        shape: (B, Hq, D) of the query.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.weights = np.empty((*shape[:2], 0), np.float32)
        """`[B, Hq, W]`, scores of the window's tokens."""
        self.out, self.lse = np.empty(shape, np.float32), np.empty(shape[:2], np.float32)
        """Of the kept tokens."""
        self.nothing = np.empty(shape, np.float32), np.full(shape[:2], -np.inf, np.float32)


def attend_kept(step: HostStep, plan: Plan, *, learn: bool) -> None:
    """Queue attention to the window and the kept tokens, into the layer's `out` and `lse`.

    Args:
        step: of a layer with a salience rule.
        plan: its host part is the window.
        learn: whether the averages of the window's tokens take in this step's weights.
    """
    mine, context, window = step.window_buffers, plan.kept, plan.host
    assert window is not None
    scores = None
    if learn:
        width = window.blocks.shape[2] * step.block_size
        if mine.weights.shape[2] != width:
            mine.weights = np.empty((*mine.lse.shape, width), np.float32)
        scores = mine.weights
    step.attention(window, "CPU attention", scores)
    if learn:
        _move_averages(step, window)
    some = bool(context.counts.any())
    step.as_long_as(lambda: context.counts.any() == some)
    if some:
        _attend_context(step, context)
        out, lse = step.buffers.out, step.buffers.lse
        step.add(join_parts(out, lse, (mine.out, mine.lse), mine.nothing), "the join of window and kept tokens")


def _move_averages(step: HostStep, window: Selection) -> None:
    """Queue what moves the averages of the window's tokens, behind their scores and the log-sum-exp of these."""
    salience, scores = step.layer.salience, step.window_buffers.weights
    assert salience is not None
    salience.reserve(step.num_blocks * step.block_size, scores.shape[1])
    average, blocks = salience.average, salience.window_blocks
    moving = salience.weighing.moving(salience.alpha, salience.window_size)
    first, length = salience.evicted * step.block_size, step.length
    launch = averaging.move_averages(average, scores, step.buffers.lse, first, length, **moving)
    step.as_long_as(lambda: salience.average is average and salience.window_blocks == blocks)
    if not step.store.padding.ragged:
        step.add(launch, "averages", length=True)
        return
    before: list[np.ndarray] = []

    def remember(step: HostStep) -> None:  # of rows whose newest token is padding: its weights say nothing
        silent = salience.silent(step.length)
        before[:] = [] if silent is None else [silent, average[silent]]

    def put_back(step: HostStep) -> None:
        if before:
            average[before[0]] = before[1]

    step.then(remember)
    step.add(launch, "averages", length=True)
    step.then(put_back)


def _attend_context(step: HostStep, context: Context) -> None:
    mine, query, lists = step.window_buffers, step.buffers.query, context.lists
    shape = (lists, query.shape[1] * query.shape[0] // lists, query.shape[2])
    launch = cpu_decode.sparse_decode(
        query.reshape(shape), context.pool.block_ptr, context.table, context.blocks, context.block_counts,
        context.holes, context.valid, context.capacity, mine.out.reshape(shape), mine.lse.reshape(shape[:2]),
        None, kv_dtype=context.dtype, block_size=context.block_size, **step.scores._asdict(),
    )  # fmt: skip
    salience = step.layer.salience
    assert salience is not None

    arrays = context.arrays

    def same() -> bool:
        return salience.context is context and all(map(operator.is_, context.arrays, arrays))

    step.add(launch, "attention to kept tokens")
    step.as_long_as(same)
