"""Steps with one memory like those before: the same launches, made again for another token.

From one token of a block to the next nothing changes but the token. The way through a policy's plan, and through all
that a plan depends on, takes Python longer than the rest of such a step.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from hf_offload.attention.ahead import Ahead, Early
from hf_offload.attention.host_kernels import HostKernels
from hf_offload.attention.plain_query import Foreseen
from hf_offload.cache.layer import HybridLayer
from hf_offload.cpu.standing import Standing
from hf_offload.cpu.together import Row
from hf_offload.policies.base import Policy, Selection

AGAIN, EARLY = "again", "early again"
"""Where a layer has them, among its kernels."""


class _Same:
    """Whether all that steps of a layer depend on, beside the token, is what it was.

    Args:
        layer: the layer.
        blocks: of the rows, the one that is filling up included.
    """

    __slots__ = ("_arrays", "_first", "_last", "_revision", "_scale", "_sealed", "_softcap")

    def __init__(self, layer: HybridLayer, blocks: int) -> None:
        store = layer.store
        assert store is not None
        self._first, self._last = (blocks - 1) * store.block_size + 1, blocks * store.block_size - 1
        self._sealed, self._revision = store.sealed, layer.revision
        self._scale, self._softcap = layer.scale, layer.softcap
        pool, padding = store.pool, store.padding
        bundle = None if store.digests is None else store.digests.bundle
        self._arrays = pool, store.table, pool.block_ptr, padding.valid, padding.holes, padding.first, bundle

    def holds(self, layer: HybridLayer) -> bool:
        """Whether a token that comes now neither begins a block nor fills one, and nothing else has changed."""
        store = layer.store
        assert store is not None
        padding, digests = store.padding, store.digests
        pool, table, block_ptr, valid, holes, first, bundle = self._arrays
        return bool(
            self._first <= store.length < self._last
            and store.sealed == self._sealed
            and layer.revision == self._revision
            and store.pool is pool
            and not pool.shared
            and store.table is table
            and pool.block_ptr is block_ptr
            and padding.valid is valid
            and padding.holes is holes
            and padding.first is first
            and (digests is None or digests.bundle is bundle)
            and layer.scale == self._scale
            and layer.softcap == self._softcap
        )


class Again:
    """The launches of a whole step that a policy would plan like the one before (`Policy.repeats`).

    Args:
        layer: its layer, behind the step.
        kernels: those of the step.
        launches: of the token, the query, the choice of blocks where there is one, attention, and the answer.
        giving: the answer, where it follows what was attended early.
        host: the blocks that were attended with the real query.
        reads_tail: whether the choice looks at tokens that have no digest yet.
        query, key, value: `[B, H, 1, D]`, as the step got them.
    """

    __slots__ = (
        "_chooses", "_dtype", "_giving", "_host", "_kernels", "_launches", "_reads_tail", "_same", "_shape", "_strides",
    )  # fmt: skip

    def __init__(
        self, layer: HybridLayer, kernels: HostKernels, launches: tuple[Standing, ...], giving: Standing | None,
        host: Selection, reads_tail: bool, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    ) -> None:  # fmt: skip
        assert layer.store is not None
        self._kernels, self._launches, self._giving, self._host = kernels, launches, giving, host
        self._chooses, self._reads_tail = kernels.choosing.standing in launches, reads_tail
        self._same = _Same(layer, layer.store.num_blocks)
        self._strides = query.stride(), key.stride(), value.stride()
        self._shape, self._dtype = query.shape, query.dtype

    def step(
        self, layer: HybridLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor | None:
        """Append a token and attend with it: `[B, 1, Hq, D]`, or None, with nothing done, if it is no such step."""
        ahead = layer.ahead if isinstance(layer.ahead, Ahead) else None
        same = (
            self._same.holds(layer)
            and query.dtype is self._dtype
            and query.shape == self._shape
            and (query.stride(), key.stride(), value.stride()) == self._strides
            and (ahead is None) == (self._giving is None)
            and layer.policy.repeats(layer, self._host)
        )
        if not same:
            return None
        store, kernels = layer.store, self._kernels
        assert store is not None
        batch, heads, _, dim = self._shape
        given = query.new_empty((batch, 1, heads, dim))
        length = store.length
        store.length = now = length + 1
        choice = (now if self._reads_tail else 0,) if self._chooses else ()
        places = key.data_ptr(), value.data_ptr(), length, query.data_ptr(), *choice, now
        if ahead is None or self._giving is None:
            kernels.first.run(self._launches, (*places, given.data_ptr()))
        else:
            kernels.first.run(self._launches, places)
            ahead.take_part(kernels, layer.stats)
            kernels.others.run((self._giving,), (given.data_ptr(),))
        layer.ahead = None
        layer.stats.steps += 1
        return given


class EarlyAgain:
    """What was posted one layer early, as a policy would begin with the next token, too (`Policy.begin_again`).

    Args:
        layer: its layer, in the step before.
        kernels: those of the predicted query.
        launches: of that query, the choice of blocks, and what is done with them.
        reads_tail: whether the choice looks at tokens that have no digest yet.
        query: of the step.
        attended: the blocks that are attended early, and whether that is corrected; None: they are read ahead.
    """

    __slots__ = ("_attended", "_kernels", "_launches", "_memo", "_plain", "_reads_tail", "_same", "_shape")

    def __init__(
        self, layer: HybridLayer, kernels: HostKernels, launches: tuple[Standing, ...], reads_tail: bool,
        query: Foreseen, attended: tuple[Selection, bool] | None,
    ) -> None:  # fmt: skip
        assert layer.store is not None
        self._kernels, self._launches, self._reads_tail, self._attended = kernels, launches, reads_tail, attended
        self._plain, self._shape = (query.plain, query.weights), query.shape
        self._same = _Same(layer, layer.store.length // layer.store.block_size + 1)
        self._memo: Any = None

    def remember(self, layer: HybridLayer) -> None:
        """Behind the policy's own beginning: know what it made of it."""
        if _may_begin_again(type(layer.policy)):
            self._memo = layer.policy.begun(layer.state)

    def begin(self, layer: HybridLayer, query: Foreseen) -> bool:
        """Begin with the token that comes next; false, with nothing done, if it is not like the one before."""
        kernels, store = self._kernels, layer.store
        assert store is not None
        same = (
            self._memo is not None
            and self._same.holds(layer)
            and (query.plain, query.weights) == self._plain
            and query.shape == self._shape
            and kernels.free
        )
        if not same:
            return False
        length = store.length
        numbers = (*query.places, length if self._reads_tail else 0)
        if self._attended is None:
            early: Early = begin_reading(layer, kernels, kernels.first, self._launches, numbers, query)
        else:
            early = begin_attending(
                layer, kernels, kernels.first, self._launches, (*numbers, length + 1), query, *self._attended
            )
        layer.policy.begin_again(layer.state, self._memo, early)
        return True


def begin_attending(
    layer: HybridLayer, kernels: HostKernels, row: Row, launches: tuple[Standing, ...], numbers: tuple[int, ...],
    keep: Any, host: Selection, correct: bool,
) -> Ahead:  # fmt: skip
    """Let the worker attend blocks one layer early: the last of some launches."""
    assert layer.store is not None
    assert layer.scale is not None
    kernels.lent = True  # an interruption from here on leaves a job that nobody knows
    job = kernels.job = layer.settings.worker.post(
        row, launches, numbers, launches[-1].label, keep=(layer.store.pool, kernels, keep)
    )
    chosen = job.first(len(launches) - 1) if len(launches) > 1 else None
    layer.ahead = ahead = Ahead(kernels, host, layer.scale, correct, chosen, job)
    kernels.lent = False
    return ahead


def begin_reading(
    layer: HybridLayer, kernels: HostKernels, row: Row, launches: tuple[Standing, ...], numbers: tuple[int, ...],
    keep: Any,
) -> Early:  # fmt: skip
    """Let the worker choose blocks and read them ahead: the last of some launches, left out where it lags behind."""
    store, worker = layer.store, layer.settings.worker
    assert store is not None
    choosing = launches[:-1]
    assert choosing, "what is read ahead is chosen with it"
    if worker.idle:  # otherwise the next choice would wait for what is to be read
        numbers = (*numbers, store.sealed)
    else:
        launches, row = choosing, kernels.fewer
    kernels.lent = True
    job = worker.post(row, launches, numbers, launches[-1].label, keep=(store.pool, kernels, keep))
    # Reading writes nothing, and what it reads may be written meanwhile.
    kernels.job = chosen = job.first(len(choosing))
    layer.ahead = early = Early(chosen)
    kernels.lent = False
    return early


@functools.cache
def may_repeat(kind: type[Policy]) -> bool:
    """Whether what a policy says of its repetition was said of the plans that it has, not of those of a base class."""
    return _knows(kind, "repeats", "plan", "after_layer")


@functools.cache
def _may_begin_again(kind: type[Policy]) -> bool:
    return _knows(kind, "begun", "before_layer") and _knows(kind, "begin_again", "before_layer")


def _knows(kind: type[Policy], name: str, *others: str) -> bool:
    """Whether the class that has one method is also the one that has the others, or made from it."""
    where = {wanted: next(i for i, c in enumerate(kind.__mro__) if wanted in vars(c)) for wanted in (name, *others)}
    return where[name] == min(where.values())
