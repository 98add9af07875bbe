"""A decode step of HGCA: attention to the window and to the retained tokens, and the averages (algorithm 2, §3.3)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_offload.attention.draw import Buffer, Draw, own_buffer
from hf_offload.attention.host_partial import BlockHostPartial
from hf_offload.cpu.kernels.decode_attention import Pairs, decode_attention
from hf_offload.cpu.kernels.draw_pairs import Kept, PairLists, Resident
from hf_offload.cpu.kernels.merge import join_parts
from hf_offload.cpu.launch import Launch
from hf_offload.policies.base import Estimate, HostPartial, Partial, Selection
from hf_offload.policies.hgca.kernels.moving_average import move_averages
from hf_offload.policies.hgca.kernels.resident_weights import update_weights
from hf_offload.policies.hgca.retained_tokens import RetainedTokens
from hf_offload.policies.hgca.token_mass import TokenMass
from hf_offload.scores import Scores

if TYPE_CHECKING:
    from hf_offload.attention.step import Step
    from hf_offload.attention.step_cpu import CpuStep
    from hf_offload.attention.step_split import SplitStep
    from hf_offload.cache.layer import HybridLayer


def _attention(retained: RetainedTokens, query: np.ndarray, out: np.ndarray, lse: np.ndarray, scores: Scores) -> Launch:
    """Prepare attention to retained tokens: to the kernel, each list is a row with one KV head.

    Args:
        retained: the lists.
        query, out: float32 `[B, Hq, D]`; lse: `[B, Hq]`.
        scores: the model's.
    """
    rows, dim = (retained.lists, query.shape[0] * query.shape[1] // retained.lists), query.shape[2]
    return decode_attention(
        query.reshape(*rows, dim), retained.host_blocks, retained.blocks, retained.block_counts, retained.capacity,
        out.reshape(*rows, dim), lse.reshape(rows), **scores._asdict(),
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
        mass.reserve(step.num_blocks * step.block_size, query.shape[1])
        shape = (*query.shape[:2], window.items.shape[2] * window.unit)
        key = "hgca", query.shape
        scores = step.layer.step_buffers.get(key)  # of the window's tokens
        if scores is None or scores.shape != shape:
            scores = step.layer.step_buffers[key] = np.empty(shape, np.float32)
    partials = [step.attention(window, "CPU attention", scores)]
    if scores is not None:
        _queue_averages(step, mass, scores, partials[0].lse)
    now, arrays = mass.now, mass.now.retained.arrays
    step.as_long_as(lambda: mass.now is now and all(map(operator.is_, now.retained.arrays, arrays)))
    if now.retained.counts.any():
        target = step.output_buffers()
        step.add(_attention(now.retained, query, *target, step.scores), "attention to retained tokens")
        partials.append(target)
    if samples and now.evicted:
        partials.append(_queue_rescue(step, mass, window, samples))
    return tuple(partials)


def _queue_rescue(step: CpuStep, mass: TokenMass, window: Selection, samples: int) -> Partial:
    """Queue the draw of pairs among the tokens that are neither in the window nor retained, and their attention."""
    launches, selection = _draw(
        mass, step.buffers.query, window, samples, step.scores, step.layer.settings.buffer,
        unsealed=step.view.blocks, length=step.length,
    )  # fmt: skip
    for launch in launches:
        step.add(launch, "the draw of pairs", length=True)
    return step.attention(selection, "attention to drawn pairs", end=mass.now.outside)


def _draw(
    mass: TokenMass, query: np.ndarray, window: Selection, samples: int, scores: Scores, buffer: Buffer, **given: Any
) -> tuple[tuple[Launch, ...], Selection]:
    """Prepare the draw of pairs among the tokens that are neither in the window nor retained.

    Without digests all such pairs are selected.

    Args:
        mass: the layer's state.
        query: float32 `[B, Hq, D]`.
        window: blocks of the window.
        samples: as for `Draw`.
        scores: the model's.
        buffer: gives scratch.
        given: tail, unsealed, length and limits, as for `Draw.launch`.
    """
    store, now = mass.store, mass.now
    rows, heads, width = (store.batch, store.num_kv_heads), query.shape[1], store.table.shape[1]
    if store.awaits_digests:
        lists = PairLists.all_of(*rows, now.outside // 2)
        weights = Pairs.of(lists.weights, heads, skipped=now.kept, errors=np.zeros((rows[0], heads), np.float32))
        return (), Selection(lists.pairs, lists.counts, 2, weights)
    assert store.digests is not None
    draw = Draw(store, mass.stats, heads, samples, "max", width, skipped=now.kept, buffer=buffer)
    score = buffer("scores of blocks", (*rows, width), np.dtype(np.float32))
    resident, kept = Resident(window.items, window.counts, score, draw.portion), Kept(now.kept, now.retained.counts)
    launch = draw.launch(query, store.digests.arrays(query, scores.scale), resident, scores, kept=kept, **given)
    return (launch,), draw.selection


def _queue_averages(step: CpuStep, mass: TokenMass, scores: np.ndarray, lse: np.ndarray) -> None:
    """Queue the update of the window's averages, behind the launch that writes the scores and their log-sum-exp."""
    average = mass.now.average
    launch = move_averages(average, scores, lse, mass.now.outside, step.length, **mass.step_update)
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
        self._estimate: Estimate | None = None
        nothing = np.full(query.shape[:2], -np.inf, np.float32)
        self._nothing = Partial(np.zeros(query.shape, np.float32), nothing)
        self._mass: TokenMass | None = None
        self._window, self._samples = range(0), 0
        self._limits = np.zeros(2, np.int32)
        self._made: tuple[tuple[Any, ...], tuple[Any, ...], tuple[Launch, ...]] | None = None
        """Launches, behind the values that they were made for and the objects that they read."""

    def attend(self, step: SplitStep, mass: TokenMass, samples: int) -> RetainedHostPartial:
        """Start attention with the step's query.

        Args:
            step: of the layer.
            mass: its state.
            samples: as `HGCA.rescue`; 0: no pairs are drawn.
        """
        self.cancel()
        self._mass, self._samples = mass, samples
        self._window = range(mass.now.evicted, step.num_blocks) if samples else range(0)
        self._limits[0] = step.length
        if samples:
            self.tail.copy_(step.tail(), non_blocking=True)
        self.start(step, None, correct=False, label="attention to retained tokens")
        return self

    def share(self, step: Step) -> float:
        assert self._mass is not None
        retained = self._mass.now.retained
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
        key, now, made = (scores, self._window, self._samples), self._mass.now, self._made
        read = self.store.view(self.store.length), now, *now.retained.arrays
        if made is None or made[0] != key or not all(map(operator.is_, made[1], read)):
            made = self._made = key, read, make(scores)
        return made[2]

    def make_launches(self, scores: Scores) -> tuple[Launch, ...]:
        assert self._mass is not None
        query, result, now = self.query.numpy(), Partial(self.out.numpy(), self.lse.numpy()), self._mass.now
        retained: tuple[Launch, ...] = ()
        if now.retained.counts.any():
            retained = (_attention(now.retained, query, *result, scores),)
        self._estimate = None
        if not self._samples:
            return retained
        rows = (query.shape[0], self.counts.shape[1])
        numbers = np.arange(self._window.start, self._window.stop, dtype=np.int32)
        counts = np.full(rows, len(numbers), np.int32)
        window = Selection(np.broadcast_to(numbers, (*rows, len(numbers))).copy(), counts, self.store.block_size)
        draw, selection = _draw(
            self._mass, query, window, self._samples, scores, own_buffer, tail=self.tail.numpy(), limits=self._limits,
        )  # fmt: skip
        target = self._pairs if retained else result
        attention = decode_attention(
            query, self.store.view(self.store.length).blocks, selection.items, selection.counts, now.outside, *target,
            **scores._asdict(), pairs=selection.weights,
        )  # fmt: skip
        self._estimate = Estimate(selection, target.lse)
        return (*retained, *draw, attention, *((join_parts(*result, self._pairs, self._nothing),) if retained else ()))

    def estimate(self, step: Step) -> Estimate | None:
        return self._estimate


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
    samples = samples if mass.now.evicted else 0
    if samples or mass.now.retained.counts.any():
        layer, query = step.layer, step.query
        partial = layer.host_partial_of(
            lambda kept: kept.form == (query.shape, 0), lambda: RetainedHostPartial(layer, query)
        )
        partial.attend(step, mass, samples)
    device = step.attend_device(window)
    if step.fresh:
        assert mass.resident is not None
        average, rows = mass.resident.average, mass.rows_at_padding(step.length)
        before = None if rows is None else average[rows]
        update_weights(
            average, step.query, step.resident.pool, window.slots, window.items, window.counts, step.limits,
            step.valid, device.lse.logsumexp(-1), **step.scores._asdict(), **mass.step_update,
        )  # fmt: skip
        if before is not None:
            average[rows] = before
    return (device,) if partial is None else (device, partial)
