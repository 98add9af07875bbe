"""A decode step of HGCA: attention to the window and to the retained tokens, and the averages (algorithm 2, §3.3)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hf_offload.attention.host_partial import BlockHostPartial
from hf_offload.cpu.kernels import draw_pairs
from hf_offload.cpu.kernels.merge import join_parts
from hf_offload.cpu.kernels.pair_decode import attend_pairs
from hf_offload.cpu.kernels.sparse_decode import sparse_decode
from hf_offload.cpu.launch import Launch
from hf_offload.policies.base import Drawn, HostPartial, Partial, Selection
from hf_offload.policies.hgca.kernels.moving_average import move_averages
from hf_offload.policies.hgca.kernels.resident_weights import update_weights
from hf_offload.policies.hgca.retained_tokens import RetainedTokens
from hf_offload.policies.hgca.token_mass import TokenMass
from hf_offload.scores import Scores

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.attention.step_cpu import CpuStep
    from hf_offload.attention.step_split import SplitStep
    from hf_offload.cache.block_store import BlockStore
    from hf_offload.cache.layer import HybridLayer
    from hf_offload.cache.stats import LayerStats


def _attention(retained: RetainedTokens, query: np.ndarray, out: np.ndarray, lse: np.ndarray, scores: Scores) -> Launch:
    """Prepare attention to retained tokens: to the kernel, each list is a row with one KV head.

    Args:
        retained: the lists.
        query, out: float32 `[B, Hq, D]`; lse: `[B, Hq]`.
        scores: the model's.
    """
    lists, dim = retained.lists, query.shape[2]
    rows = (lists, query.shape[0] * query.shape[1] // lists)
    return sparse_decode(
        query.reshape(*rows, dim), retained.pool.block_ptr, retained.table, retained.blocks, retained.block_counts,
        retained.holes, retained.valid, retained.capacity, out.reshape(*rows, dim), lse.reshape(rows), None,
        kv_dtype=retained.dtype, block_size=retained.block_size, **scores._asdict(),
    )  # fmt: skip


# --- one memory ------------------------------------------------------------------------------------------------------


def queue_attention(step: CpuStep, window: Selection, samples: int) -> tuple[Partial, ...]:
    """Queue attention to the window, to the retained tokens, and to pairs drawn from the others.

    Where the step has a token of its own, the averages of the window's tokens take in its weights.

    Args:
        step: of the layer.
        window: blocks of the window.
        samples: as `HGCA.rescue`; 0: no pairs are drawn.
    """
    mass: TokenMass = step.state
    query, scores = step.buffers.query, None
    if step.form.fresh:
        shape = (*query.shape[:2], window.blocks.shape[2] * step.block_size)
        key = "hgca", query.shape
        scores = step.layer.kernels.get(key)  # of the window's tokens
        if scores is None or scores.shape != shape:
            scores = step.layer.kernels[key] = np.empty(shape, np.float32)
    found = [step.attention(window, "CPU attention", scores)]
    if scores is not None:
        _queue_averages(step, mass, scores, found[0].lse)
    retained = mass.retained
    some = bool(retained.counts.any())
    step.as_long_as(lambda: retained.counts.any() == some)
    if some:
        arrays, target = retained.arrays, step.room()
        step.add(_attention(retained, query, *target, step.scores), "attention to retained tokens")
        step.as_long_as(lambda: mass.retained is retained and all(map(operator.is_, retained.arrays, arrays)))
        found.append(target)
    if samples and mass.evicted:
        found.append(_queue_rescue(step, mass, window, samples))
    return tuple(found)


def _queue_rescue(step: CpuStep, mass: TokenMass, window: Selection, samples: int) -> Partial:
    """Queue the draw of pairs among the tokens that are neither in the window nor retained, and their attention."""
    kept, counts = mass.kept, mass.retained.counts
    step.as_long_as(lambda: mass.kept is kept and mass.retained.counts is counts)
    target, errors = step.room(), np.zeros(step.query_shape, np.float32)
    *draw, attention, lists = _rescue(
        step.store, step.layer.stats, mass, step.buffers.query, (window.blocks, window.counts), samples, target,
        step.scores, step.layer.settings.buffer, errors=errors, unsealed=step.unsealed(), length=step.length,
    )  # fmt: skip
    for launch in draw:
        step.add(launch, "the draw of pairs", length=True)
    step.add(attention, "attention to drawn pairs")
    step.note_drawn(lists, target.lse, errors, kept)
    return target


def _rescue(
    store: BlockStore,
    stats: LayerStats,
    mass: TokenMass,
    query: np.ndarray,
    window: tuple[np.ndarray, np.ndarray],
    samples: int,
    target: Partial,
    scores: Scores,
    buffer: Callable[[str, tuple[int, ...], np.dtype], np.ndarray],
    *,
    errors: np.ndarray | None = None,
    tail: np.ndarray | None = None,
    unsealed: draw_pairs.Unsealed | None = None,
    length: int = 0,
    limits: np.ndarray | None = None,
) -> tuple[Any, ...]:
    """Prepare the draw of pairs among the tokens that are neither in the window nor retained, and their attention.

    Without digests all such pairs are attended.

    Args:
        store: the layer's blocks.
        stats: the layer's statistics.
        mass: the layer's state.
        query: float32 `[B, Hq, D]`.
        window: blocks of the window and their numbers, as in `draw_pairs.Resident`.
        samples: as in `draw_pairs.draw_missing`.
        target: the result's arrays.
        scores: the model's.
        buffer: gives scratch by name, shape and dtype.
        errors: as in `attend_pairs`.
        tail, unsealed, length: as in `draw_pairs.draw_missing`; limits: those of its thresholds.

    Returns:
        The two launches, or without digests that of the attention, and what they list.
    """
    view, (batch, heads, _), width = store.view(store.length), query.shape, store.table.shape[1]
    lines, pairs = (batch, store.num_kv_heads), store.block_size // 2
    most = width * pairs
    attend = functools.partial(
        attend_pairs, query, view.block_ptr, view.table, holes=view.holes, valid=view.valid,
        length=mass.evicted * store.block_size, out=target.out, lse=target.lse, kbar=None, kv_dtype=store.dtype,
        block_size=store.block_size, **scores._asdict(), packed=store.format.packed, skipped=mass.kept, errors=errors,
    )  # fmt: skip
    if store.awaits_digests:
        lists = draw_pairs.PairLists.all_of(*lines, mass.evicted * pairs)
        return attend(**lists._asdict()), lists
    assert store.digests is not None
    lists = draw_pairs.PairLists.of(*lines, draw_pairs.most_pairs(samples, heads // lines[1], most))
    score = buffer("scores of blocks", (*lines, width), np.dtype(np.float32))
    masses = buffer("masses of pairs", (batch, heads, draw_pairs.kept_masses(width, pairs)), draw_pairs.MASSES)
    portion = np.empty((batch, heads), np.float32)
    tail = np.empty((batch, heads), np.float32) if tail is None else tail
    thresholds = draw_pairs.Thresholds.of(stats.layer, store.padding.first, most, limits)
    draw = draw_pairs.draw_missing(
        query, store.digests.arrays(query, scores.scale), store.table, draw_pairs.Resident(*window, score),
        thresholds, tail, masses, *lists, portion, samples=samples, join="max", **scores._asdict(), unsealed=unsealed,
        length=length, kept=draw_pairs.Kept(mass.kept, mass.retained.counts), tally=stats.drawn,
    )  # fmt: skip
    return draw, attend(**lists._asdict(), portion=portion, tally=stats.errors), lists


def _queue_averages(step: CpuStep, mass: TokenMass, scores: np.ndarray, lse: np.ndarray) -> None:
    """Queue the update of the window's averages, behind the launch that writes the scores and their log-sum-exp."""
    mass.reserve(step.num_blocks * step.block_size, scores.shape[1])
    average, blocks = mass.average, mass.window_blocks
    first = mass.evicted * step.block_size
    launch = move_averages(average, scores, lse, first, step.length, **mass.step_update)
    step.as_long_as(lambda: mass.average is average and mass.window_blocks == blocks)
    if not step.store.padding.ragged:
        step.add(launch, "averages", length=True)
        return
    before: list[np.ndarray] = []

    def remember(step: CpuStep) -> None:
        rows = mass.rows_at_padding(step.length)
        before[:] = [] if rows is None else [rows, average[rows]]

    def put_back(step: CpuStep) -> None:
        if before:
            average[before[0]] = before[1]

    step.then(remember)
    step.add(launch, "averages", length=True)
    step.then(put_back)


# --- two memories ----------------------------------------------------------------------------------------------------


class _Made(NamedTuple):
    """Launches, and what they were made for.

    Args:
        key: values that they were made for.
        arrays: objects that they read, whose contents may change.
        launches: the launches.
    """

    key: tuple[Any, ...]
    arrays: tuple[Any, ...]
    launches: tuple[Launch, ...]

    def serves(self, key: tuple[Any, ...], arrays: tuple[Any, ...]) -> bool:
        """Whether the launches serve a step with these values and the same objects."""
        return self.key == key and all(map(operator.is_, self.arrays, arrays))


class RetainedHostPartial(BlockHostPartial):
    """Attention to the retained tokens, and to pairs drawn from the others outside the window.

    Only the query and the tail's log mass come from the device.

    Args:
        layer: the layer.
        query: `[B, Hq, D]` fp32, tells the sizes.
    """

    def __init__(self, layer: HybridLayer, query: torch.Tensor) -> None:
        super().__init__(layer, query, 0)
        self.tail = self._buffer(*query.shape[:2])
        self._pairs = Partial(np.empty(query.shape, np.float32), np.empty(query.shape[:2], np.float32))
        self._drawn: Drawn | None = None
        nothing = np.full(query.shape[:2], -np.inf, np.float32)
        self._nothing = Partial(np.zeros(query.shape, np.float32), nothing)
        self._scratch: dict[str, np.ndarray] = {}
        self._mass: TokenMass | None = None
        self._window, self._samples = range(0), 0
        self._limits = np.zeros(2, np.int32)
        self._made: _Made | None = None

    def attend(self, step: SplitStep, mass: TokenMass, samples: int) -> RetainedHostPartial:
        """Start attention with the step's query.

        Args:
            step: of the layer.
            mass: its state.
            samples: as `HGCA.rescue`; 0: no pairs are drawn.
        """
        self.cancel()
        self._mass, self._samples = mass, samples
        self._window = range(mass.evicted, step.num_blocks) if samples else range(0)
        self._limits[0] = step.length
        if samples:
            self.tail.copy_(step.tail(), non_blocking=True)
        self.start(step, None, correct=False, label="attention to retained tokens")
        return self

    def share(self, step: Step) -> float:
        assert self._mass is not None
        retained = self._mass.retained
        return float(retained.counts.sum() / (retained.lists * step.length))

    def cancel(self) -> None:
        super().cancel()
        self._mass = None

    def _send(
        self,
        query: torch.Tensor,
        host: Selection | None,
        flag: torch.Tensor | None = None,
        epoch: torch.Tensor | None = None,
    ) -> None:
        assert flag is None, "HGCA's steps are not captured: the host selects tokens in them"
        self.mirror.pause()
        self.query.copy_(query, non_blocking=True)

    def _launches(self, scores: Scores, make: Callable[[Scores], tuple[Launch, ...]]) -> tuple[Launch, ...]:
        """Return the launches of the last step, unless a block came or left, or arrays were replaced since then."""
        assert self._mass is not None
        mass, retained = self._mass, self._mass.retained
        key = scores, self._window, self._samples, bool(retained.counts.any())
        arrays = self.store.view(self.store.length), mass.kept, retained.counts, *retained.arrays
        if self._made is None or not self._made.serves(key, arrays):
            self._made = _Made(key, arrays, make(scores))
        return self._made.launches

    def make_launches(self, scores: Scores) -> tuple[Launch, ...]:
        assert self._mass is not None
        query, result = self.query.numpy(), Partial(self.out.numpy(), self.lse.numpy())
        retained: tuple[Launch, ...] = ()
        if self._mass.retained.counts.any():
            retained = (_attention(self._mass.retained, query, *result, scores),)
        self._drawn = None
        if not self._samples:
            return retained
        lines = (query.shape[0], self.counts.shape[1])
        numbers = np.arange(self._window.start, self._window.stop, dtype=np.int32)
        window = np.broadcast_to(numbers, (*lines, len(numbers))).copy(), np.full(lines, len(numbers), np.int32)
        target, errors = self._pairs if retained else result, np.zeros(query.shape[:2], np.float32)
        *rescue, lists = _rescue(
            self.store, self.stats, self._mass, query, window, self._samples, target, scores, self._keep,
            errors=errors, tail=self.tail.numpy(), limits=self._limits,
        )  # fmt: skip
        self._drawn = Drawn(lists, target.lse, errors, self._mass.kept)
        return (*retained, *rescue, *((join_parts(*result, self._pairs, self._nothing),) if retained else ()))

    def drawn_part(self, step: Step) -> Drawn | None:
        return self._drawn

    def _keep(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return scratch of this partial alone: partials of two layers may run at once."""
        held = self._scratch.get(name)
        if held is None or held.shape != shape or held.dtype != dtype:
            held = self._scratch[name] = np.empty(shape, dtype)
        return held


def attend_on_both_sides(step: SplitStep, window: Selection | None, samples: int) -> tuple[Partial | HostPartial, ...]:
    """Start the host partial, and attend the window on the device.

    Where the step has a token of its own, the averages of the window's tokens take in its weights.

    Args:
        step: of the layer.
        window: resident blocks.
        samples: as `HGCA.rescue`; 0: no pairs are drawn.

    Returns:
        The partial of the window, in splits, and the host partial, if any token is retained or drawn from.
    """
    mass: TokenMass = step.state
    assert window is not None, "with two memories the window is resident"
    partial: RetainedHostPartial | None = None
    samples = samples if mass.evicted else 0
    if samples or mass.retained.counts.any():
        partial = step.layer.host_partial
        if partial is None or partial.form != (step.query.shape, 0):
            partial = step.layer.host_partial = RetainedHostPartial(step.layer, step.query)
        partial.attend(step, mass, samples)
    found = step.attend_device(window)
    if step.fresh:
        assert mass.resident is not None
        average, rows = mass.resident.average, mass.rows_at_padding(step.length)
        before = None if rows is None else average[rows]
        update_weights(
            average, step.query, step.resident.pool, window.slots, window.blocks, window.counts, step.limits,
            step.valid, found.lse.logsumexp(-1), **step.scores._asdict(), **mass.step_update,
        )  # fmt: skip
        if before is not None:
            average[rows] = before
    return (found,) if partial is None else (found, partial)
