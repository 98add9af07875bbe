"""A step with one memory that attends a window and, before it, single tokens: all of it in one visit to the threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hf_offload.cache.context import Context
from hf_offload.cpu import average as averaging
from hf_offload.cpu import decode as cpu_decode
from hf_offload.cpu.join import join_parts
from hf_offload.cpu.standing import Kept, Standing
from hf_offload.cpu.together import run_together
from hf_offload.policies.base import Plan, Selection

if TYPE_CHECKING:
    from hf_offload.attention.host_step import HostStep


class WindowKernels:
    """What a step needs beside `HostKernels` where tokens are kept by their attention weights.

    Args:
        layer: its number in the model.
        shape: (B, Hq, D) of the query.
    """

    def __init__(self, layer: int, shape: tuple[int, ...]) -> None:
        self.weights = np.empty((*shape[:2], 0), np.float32)
        """`[B, Hq, W]`, scores of the window's tokens."""
        self.out, self.lse = np.empty(shape, np.float32), np.empty(shape[:2], np.float32)
        """Of the kept tokens."""
        self.nothing = np.empty(shape, np.float32), np.full(shape[:2], -np.inf, np.float32)
        self.keeping = Kept(f"attention to kept tokens of layer {layer}")
        self.averaging = Kept(f"averages of layer {layer}")
        self.joining = Kept(f"the join of window and kept tokens of layer {layer}")
        self._first, self._blocks = -1, Selection(np.empty((0, 0, 0), np.int32), np.empty((0, 0), np.int32))

    def blocks(self, shape: tuple[int, int], first: int, stop: int) -> Selection:
        """The blocks from one on for all rows and KV heads `shape`: the same arrays in most steps."""
        whole = (*shape, stop - first)
        if self._first != first or self._blocks.blocks.shape != whole:
            numbers = np.broadcast_to(np.arange(first, stop, dtype=np.int32), whole).copy()
            self._first, self._blocks = first, Selection(numbers, np.full(shape, stop - first, np.int32))
        return self._blocks


def attend_kept(step: HostStep, plan: Plan, *, learn: bool) -> None:
    """Attend the window and the kept tokens, into the layer's `out` and `lse`.

    Args:
        step: of a layer with a salience rule.
        plan: its host part is the window.
        learn: whether the averages of the window's tokens take in this step's weights.
    """
    kernels, mine, context, window = step.kernels, step.windowed, plan.kept, plan.host
    salience = step.layer.salience
    assert window is not None
    assert salience is not None
    scores = None
    if learn:
        width = window.blocks.shape[2] * step.block_size
        if mine.weights.shape[2] != width:
            mine.weights = np.empty((*step.query.shape[:2], width), np.float32)
        scores = mine.weights
    near = step.attention(kernels.attending, window, None, scores)
    far = _attention_to_kept(step, mine, context) if context.counts.any() else None
    moving = _moving(step, mine, window) if learn else None
    silent = salience.silent(step.length) if learn else None
    before = None if silent is None else salience.average[silent]
    run_together(near, far, moving, step.length)
    if silent is not None:
        salience.average[silent] = before
    if far is not None:
        joining = mine.joining.find((), ())
        if joining is None:
            launch = join_parts(kernels.out, kernels.lse, (mine.out, mine.lse), mine.nothing)
            joining = mine.joining.keep(launch, (), ())
        joining.run()


def _moving(step: HostStep, mine: WindowKernels, window: Selection) -> Standing:
    """The launch that moves the averages of the window's tokens, once its scores and their log-sum-exp are there."""
    salience, size = step.layer.salience, step.block_size
    assert salience is not None
    salience.reserve(step.length, step.query.shape[1])
    arrays, numbers = (salience.average, mine.weights, window.blocks), (salience.window_blocks,)
    standing = mine.averaging.find(arrays, numbers)
    if standing is None:
        first = int(window.blocks[0, 0, 0]) * size
        moving = salience.weighing.moving(salience.alpha, salience.window_size)
        launch = averaging.move_averages(salience.average, mine.weights, step.kernels.lse, first, step.length, **moving)
        standing = mine.averaging.keep(launch, arrays, numbers, length=first + window.blocks.shape[2] * size)
    return standing


def _attention_to_kept(step: HostStep, mine: WindowKernels, context: Context) -> Standing:
    lists = context.lists
    arrays = (
        context.blocks, context.block_counts, context.table, context.pool.block_ptr, context.valid, context.holes,
    )  # fmt: skip
    numbers = (step.scale, step.softcap)
    standing = mine.keeping.find(arrays, numbers)
    if standing is None:
        shape = (lists, step.query.shape[1] * step.query.shape[0] // lists, step.query.shape[2])
        launch = cpu_decode.sparse_decode(
            step.query.reshape(shape), context.pool.block_ptr, context.table, context.blocks, context.block_counts,
            context.holes, context.valid, context.capacity, mine.out.reshape(shape), mine.lse.reshape(shape[:2]),
            None, kv_dtype=context.dtype, block_size=context.block_size, scale=step.scale, softcap=step.softcap,
        )  # fmt: skip
        standing = mine.keeping.keep(launch, arrays, numbers)
    return standing
