"""How much each token of a layer was attended, and which of those that left the window are retained (HGCA §3.2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_offload.cache.device_mirror import brought
from hf_offload.cache.memory import host_empty
from hf_offload.cpu.launch import Launch
from hf_offload.cpu.thread_pool import Job
from hf_offload.fields import Field, LayerSizes
from hf_offload.knobs import MOST
from hf_offload.policies.base import LayerState
from hf_offload.policies.hgca.append import AppendProgress, Span, averages_for
from hf_offload.policies.hgca.kernels.query_lse import query_lse
from hf_offload.policies.hgca.kernels.query_mass import weigh_tokens
from hf_offload.policies.hgca.kernels.retain import count_kept
from hf_offload.policies.hgca.resident_mass import ResidentMass
from hf_offload.policies.hgca.retained_tokens import LIST_STEP, RetainedTokens
from hf_offload.policies.hgca.rule import RetentionRule
from hf_offload.scores import Scores

if TYPE_CHECKING:
    from hf_offload.cache.layer import HybridLayer
    from hf_offload.cache.stats import LayerStats

TILE = 4096
"""Tokens that are looked at and copied at a time."""
KEEP_ALL = -np.inf
"""A threshold that every valid token exceeds."""


@dataclass(slots=True)
class _Decision:
    """What is being decided, and what holds once it is.

    Args:
        evicted: blocks that have left the window then.
        counts: `[B · Hkv]`, tokens that the lists hold now.
        retained, kept: in place of those that are there; None: they are added to.
        free: frees the slots of the blocks that leave.
        began, seconds: when it was asked for, and how long it took.
    """

    evicted: int
    counts: np.ndarray
    retained: RetainedTokens | None = None
    kept: np.ndarray | None = None
    free: Callable[[], None] | None = None
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Before:
    """What was known before a chunk of a prompt or append, which wrote beside it: no array of it is written any more.

    Args:
        length: tokens that there were.
        since, window_blocks, evicted, average, kept, known, retained, progress: as in `TokenMass`.
    """

    length: int
    since: int
    window_blocks: int
    evicted: int
    average: np.ndarray
    kept: np.ndarray
    known: np.ndarray
    retained: RetainedTokens
    progress: AppendProgress


@dataclass(slots=True)
class _Snapshot:
    """What was known between two decode steps.

    Args:
        evicted: blocks that had left the window.
        counts: `[B · Hkv]`, tokens that were retained.
        average: `[B, Hq, W]`, of the tokens of the window; resident: `[B, Hq, R, block_size]`, of the resident ones.
        progress: how far the last append was.
    """

    evicted: int
    counts: np.ndarray
    average: np.ndarray
    resident: torch.Tensor | None
    progress: AppendProgress


class TokenMass(LayerState):
    """The moving averages of attention weights of a layer's tokens, and the tokens that are retained by them.

    Blocks before `evicted` have left the window; of their tokens `retained` holds those that are kept. What is decided
    when blocks leave, or after a prompt or append, is decided by a thread beside the model's; `settle` waits for it.
    Source: HGCA, section 3.2, algorithm 1.

    Args:
        layer: whose blocks are there, and empty; blocks leave later by its number, not all layers' at once.
        rule: what is kept.
        window_tokens: how large the window is, by the number of cached tokens; None: as large as what is resident.
    """

    def __init__(
        self, layer: HybridLayer, rule: RetentionRule, window_tokens: Callable[[int], int | None]
    ) -> None:  # fmt: skip
        assert layer.store is not None
        self.store = store = layer.store
        self.rule, self.worker, self.stats, self.window_tokens = rule, layer.settings.worker, layer.stats, window_tokens
        self.stagger = layer.index % store.block_size
        self.window_blocks = self._window_of(layer)
        """Blocks of the window; there may be one more, until the oldest one's tokens have been looked at."""
        lists = store.batch * store.num_kv_heads
        self.retained = RetainedTokens(lists, store.block_size, store.head_dim, store.dtype)
        self.evicted = 0
        self.average = np.zeros((store.batch, 0, 0), np.float32)
        """`[B, Hq, T]`, by token; with two memories the resident tokens' own lie on the device meanwhile."""
        self.kept = np.zeros((store.batch, store.num_kv_heads, 0), np.uint8)
        """`[B, Hkv, T]`, 1 for tokens before the window that are kept."""
        self.known = np.ones(store.batch, bool)
        """`[B]`, whether averages come from attention: a cache that was taken over has none, and keeps every token."""
        self.progress = AppendProgress(rule, np.zeros(store.batch, np.int64))
        self.since = 0
        """Tokens before the last prompt or append, all its chunks: what was known of these is gone."""
        self._before: _Before | None = None
        """Until something else happens than that the chunk is taken back."""
        self._whole: tuple[int, int, np.ndarray, RetainedTokens] | None = None
        """Of a crop that is prepared: tokens, and what `_keep_whole` gave for them."""
        self.resident: ResidentMass | None = None
        """The averages of what is resident, with two memories."""
        self._job: Job | None = None
        self._decision: _Decision | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.resident is None else self.resident.average.nbytes

    @property
    def slots(self) -> int:
        return self.window_blocks + 1  # one for the block whose tokens are being looked at

    def _window_of(self, layer: HybridLayer) -> int:
        """Blocks of the window with the tokens that are there now."""
        tokens, size = self.window_tokens(layer.past), self.store.block_size
        if tokens is not None:
            return -(-tokens // size)
        return (layer.settings.resident // size if layer.resident is None else layer.resident.slots) - 1

    @property
    def window_size(self) -> int:
        """Tokens of the window."""
        return self.window_blocks * self.store.block_size

    @property
    def alpha(self) -> float:
        """How fast averages forget."""
        return self.rule.alpha or 1 / self.window_size

    @property
    def moving(self) -> dict[str, Any]:
        """The last arguments of `move_averages` and `update_weights`."""
        return self.progress.moving(self.alpha, self.window_size)

    def due(self, length: int) -> int:
        """Blocks that have left the window once the rows have `length` tokens; what has left it does not come back."""
        return max(self._outside(length), self.evicted)

    def _outside(self, length: int) -> int:
        return max((length - self.stagger) // self.store.block_size + 1 - self.window_blocks, 0)

    def reserve(self, length: int, query_heads: int) -> None:
        """Have averages for so many tokens; those of tokens that are new begin with 0."""
        have = self.average.shape[2]
        if have < length or self.average.shape[1] != query_heads:
            tokens = averages_for(length, have, self.store.block_size)
            average = np.zeros((self.store.batch, query_heads, tokens), np.float32)
            kept = np.zeros((*self.kept.shape[:2], tokens), np.uint8)
            if self.average.shape[1] == query_heads:
                average[:, :, :have] = self.average
            kept[:, :, : self.kept.shape[2]] = self.kept
            self.average, self.kept = average, kept

    # --- in flight ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for what is being decided; it holds from here on.

        Raises:
            WorkerError: it failed, or does not end in time. Then nothing was decided: the blocks are still in the
                window, or the old lists stay, and every token that leaves the window until the next append is kept.
        """
        job, decision = self._job, self._decision
        if job is None:
            return
        assert decision is not None
        try:
            job.result()
        except BaseException:
            if job.foreign:  # whoever was at work in the lists is not here, and may have left a lock closed
                self.retained = self._copy_marked(self.kept, self.evicted)
            if job.done():
                self.retained.cut(decision.counts)
                self.known &= decision.retained is None
                self._job = self._decision = None
            raise
        self._adopt(decision)
        self._job = self._decision = None

    def _adopt(self, made: _Decision) -> None:
        stats = self.stats
        if made.retained is None or made.kept is None:
            stats.evictions += made.evicted - self.evicted
            stats.eviction_seconds += made.seconds
        else:
            self.retained, self.kept = made.retained, made.kept
            stats.reevaluations += 1
            stats.reevaluation_seconds += made.seconds
        self.evicted = made.evicted
        if made.free is not None:
            made.free()

    def _start(self, stages: Iterator[Launch], decision: _Decision, label: str) -> None:
        def work() -> None:
            for launch in stages:
                self.worker.divide(launch)
            decision.seconds = time.perf_counter() - decision.began

        self._decision = decision
        keep = (self.store.pool, self.retained.pool)
        self._job = self.worker.submit(work, label, keep=keep)

    # --- a prompt or an append ---------------------------------------------------------------------------------------

    def before_append(self, layer: HybridLayer) -> None:
        """Remember what is known, beside which `append` writes."""
        self.settle()
        self._before = _Before(
            self.store.length, self.since, self.window_blocks, self.evicted, self.average, self.kept, self.known,
            self.retained, self.progress,
        )  # fmt: skip

    def append(self, layer: HybridLayer, query: torch.Tensor, scores: Scores) -> None:
        """Let the queries of the newest tokens weigh what is cached (§3.2.2, re-evaluation)."""
        self.settle()
        store, rule, count, progress = self.store, self.rule, query.shape[2], replace(self.progress)
        length, past, size = store.length, store.length - query.shape[2], store.block_size
        valid = store.padding.valid[:, past:length]
        self.reserve(length, query.shape[1])
        self.average, self.known, self.progress = self.average.copy(), self.known.copy(), progress
        self.window_blocks = self._window_of(layer)
        self.average[:, :, past:length] = 0.0
        if progress.begin(past, length, self.evicted * size):
            self.since = past
        border = progress.border
        anew = rule.reevaluate or progress.prompt or not self.known.any()
        spans = progress.spans(valid, length, self.alpha, self.window_size, anew=anew)
        most = max(span.queries for span in spans)
        there, wait = brought(query[:, :, count - most :].detach().float().contiguous(), "queries of an append")
        queries, silent = there.numpy(), valid.max(1) == 0
        if anew:
            retained, first = RetainedTokens(self.retained.lists, size, store.head_dim, store.dtype), 0
            self.known |= ~silent | progress.prompt
        else:
            retained, first = self.retained.fork(), border // size
            retained.truncate(border)
        evicted, kept = max(self._outside(length), first), self.kept.copy()

        def stages() -> Iterator[Launch]:
            wait()
            store.settle()
            for span in spans:
                yield from self._weigh(span, queries, length, scores)
            yield from self._retain(retained, kept, range(first, evicted), border, length, silent)

        decision = _Decision(evicted, self.retained.counts.copy(), retained, kept)
        self._start(stages(), decision, f"what {count} tokens leave to the CPU in layer {self.stats.layer}")

    def _weigh(self, span: Span, queries: np.ndarray, length: int, scores: Scores) -> Iterator[Launch]:
        store, padding = self.store, self.store.padding
        mine = np.ascontiguousarray(queries[:, :, queries.shape[2] - span.queries :])
        lse = np.empty(mine.shape[:3], np.float32)
        where = (
            mine, store.pool.block_ptr, store.table, padding.holes, padding.valid, span.first, span.stop,
            length - span.queries, lse,
        )  # fmt: skip
        form: dict[str, Any] = {
            "kv_dtype": store.dtype, "block_size": store.block_size, **scores._asdict(),
            "packed": store.format.packs, "kv_heads": store.num_kv_heads,
        }  # fmt: skip
        yield query_lse(*where, **form)
        span.pick(lse)
        weights = np.empty_like(self.average)
        yield weigh_tokens(*where, span.coefficient, weights, near=span.near, **form)
        span.take_in(self.average, weights)

    # --- blocks that leave the window --------------------------------------------------------------------------------

    def silent(self, length: int) -> np.ndarray | None:
        """Rows whose newest token of `length` is padding, so that its weights say nothing; None if there is none."""
        padding = self.store.padding
        if not padding.ragged:
            return None
        rows = np.flatnonzero(padding.valid[:, length - 1] == 0)
        return rows if len(rows) else None

    def token(self, layer: HybridLayer) -> None:
        """Begin to look at the tokens of blocks that have left the window (algorithm 1)."""
        self._before = None
        self._evict()

    def before_token(self, layer: HybridLayer) -> None:
        """Have all that should have left the window out of it: what is decided now is waited for."""
        self.settle()
        if self.due(self.store.length) > self.evicted:
            self._before = None
            self._evict()
            self.settle()

    def _evict(self) -> None:
        length, evicted = self.store.length, self.due(self.store.length)
        if evicted == self.evicted:
            return
        self.settle()
        self.reserve(length, self.average.shape[1])
        first, retained, average = self.evicted, self.retained, self.average
        arrive, free = (None, None) if self.resident is None else self.resident.leave(first, evicted)
        border, silent = first * self.store.block_size, np.zeros(self.store.batch, bool)

        def stages() -> Iterator[Launch]:
            if arrive is not None:
                arrive(average)
            self.store.settle()
            yield from self._retain(retained, self.kept, range(first, evicted), border, length, silent)

        decision = _Decision(evicted, retained.counts.copy(), free=free)
        self._start(stages(), decision, f"what block {evicted - 1} of layer {self.stats.layer} leaves to the CPU")

    def _retain(
        self, retained: RetainedTokens, kept: np.ndarray, blocks: range, border: int, length: int, silent: np.ndarray
    ) -> Iterator[Launch]:
        """Mark the tokens of blocks that are kept, and append them to lists. Source: HGCA, algorithm 1, lines 19-24.

        Args:
            retained: the lists.
            kept: uint8 `[B, Hkv, T]`, marks, written.
            blocks: those that have left the window, or of them those that are not in the lists.
            border: tokens before this one shared their weights among one another, the others with all up to `length`.
            length: tokens.
            silent: bool `[B]`, rows in which nothing changes about the tokens before `border`.
        """
        store = self.store
        valid, size = store.padding.valid, store.block_size
        old, new = (self._thresholds(valid[:, part]) for part in (slice(border), slice(border, length)))
        counts = np.zeros((store.batch, store.num_kv_heads), np.int64)
        for start in range(blocks.start * size, blocks.stop * size, TILE):
            stop = min(start + TILE, blocks.stop * size)
            shared = slice(start, max(min(stop, border), start))
            before = kept[silent, :, shared]
            yield count_kept(
                self.average, valid, old, new, border, start, stop, kept, counts, kv_heads=store.num_kv_heads,
                rule=self.rule.group,
            )  # fmt: skip
            kept[silent, :, shared] = before
            self._keep_sinks(kept, start, stop)
            if before.size or self.rule.sinks:  # others than the kernel has counted
                counts[:] = kept[:, :, start:stop].sum(2, dtype=np.int64)
            yield from self._copy(retained, kept, start, stop, counts)

    def _thresholds(self, valid: np.ndarray) -> np.ndarray:
        """What averages must exceed in each row, float32 `[B]`, where tokens with these marks shared the weights."""
        if self.rule.beta == 0:
            return np.full(len(valid), KEEP_ALL, np.float32)
        shares = self.rule.beta / np.maximum(valid.sum(1), 1)
        return np.where(self.known, shares, KEEP_ALL).astype(np.float32)

    def _keep_sinks(self, kept: np.ndarray, start: int, stop: int) -> None:
        """Mark the rows' first tokens, which are kept whatever their weights."""
        padding, sinks = self.store.padding, self.rule.sinks
        for row, begin in enumerate(padding.first if sinks else ()):
            low, high = max(int(begin), start), min(int(begin) + sinks, stop)
            if low < high:
                kept[row, :, low:high] = padding.valid[row, low:high]

    def _copy(
        self, retained: RetainedTokens, kept: np.ndarray, start: int, stop: int, counts: np.ndarray
    ) -> Iterator[Launch]:
        """Append those of the tokens `start` to `stop - 1` that are marked, `[B, Hkv]` of them, to lists."""
        store = self.store
        if not counts.any():
            return
        shape = (store.batch, store.num_kv_heads, stop - start, store.head_dim)
        k, v = (host_empty(shape, store.format.gather_dtype, brief=True, what="kept tokens") for _ in range(2))
        yield store.gathering(k, v, start)
        k, v = store.narrowed(k), store.narrowed(v)
        yield retained.append(k, v, kept, counts, start, self.average, self.rule.group)

    def _copy_marked(self, kept: np.ndarray, evicted: int, room: int = 0) -> RetainedTokens:
        """New lists of all tokens that are marked, at once.

        Args:
            kept: uint8 `[B, Hkv, T]`, marks of the tokens of `evicted` blocks at least.
            room: as in `RetainedTokens`.
        """
        store, size = self.store, self.store.block_size
        retained = RetainedTokens(self.retained.lists, size, store.head_dim, store.dtype, room)
        for start in range(0, evicted * size, TILE):
            stop = min(start + TILE, evicted * size)
            counts = kept[:, :, start:stop].sum(2, dtype=np.int64)
            for launch in self._copy(retained, kept, start, stop, counts):
                launch.run("kept tokens")
        return retained

    # --- changes -----------------------------------------------------------------------------------------------------

    def adopted(self, layer: HybridLayer) -> None:
        if not self.average.size:  # of a cache that was taken over; otherwise the window is the last append's
            self.window_blocks = self._window_of(layer)
        self._keep_all()

    def padding_changed(self, layer: HybridLayer, block: int) -> None:
        if block < self.store.sealed:
            self._keep_all()

    def _keep_all(self) -> None:
        """Keep every valid token until the next append: nobody knows how much they were attended."""
        self._before = None
        self._cut(self.store.length)
        self._adopt_whole(*self._keep_whole(self.store.length))

    def _keep_whole(self, length: int) -> tuple[int, np.ndarray, RetainedTokens]:
        """Blocks out of the window, marks and lists, where the first `length` tokens are all kept."""
        size, valid = self.store.block_size, self.store.padding.valid
        self.reserve(length, max(self.average.shape[1], self.store.num_kv_heads))
        evicted, kept = max(self._outside(length), min(self.evicted, length // size)), np.zeros_like(self.kept)
        if stop := evicted * size:  # without any token nobody knows how many rows come
            kept[:, :, :stop] = valid[:, None, :stop]
        return evicted, kept, self._copy_marked(kept, evicted)

    def _adopt_whole(self, evicted: int, kept: np.ndarray, retained: RetainedTokens) -> None:
        self.evicted, self.kept, self.retained, self.since = evicted, kept, retained, 0
        self.known, self.progress.end = np.zeros_like(self.known), -1

    def prepare_crop(self, layer: HybridLayer, length: int) -> None:
        self._whole = (length, *self._keep_whole(length)) if self._loses_all(length) else None

    def _loses_all(self, length: int) -> bool:
        """Whether a crop takes the last append whole, and nobody can tell any more what was known before it."""
        before = self._before
        since = self.since if before is None or length > before.length else before.since
        return 0 < length <= since

    def crop(self, layer: HybridLayer, length: int) -> None:
        """Keep the first `length` tokens; nothing is in flight.

        What was known before the last chunk of a prompt or append comes back where that alone is taken back, as when
        its forward fails. A crop that reaches further back keeps every token.
        """
        loses_all, before, whole = self._loses_all(length), self._before, self._whole
        self._whole = None
        if before is not None and length <= before.length:
            self._before = None
            self.since, self.window_blocks, self.evicted = before.since, before.window_blocks, before.evicted
            self.average, self.kept, self.known = before.average, before.kept, before.known
            self.retained, self.progress = before.retained, before.progress
        if length < self.progress.end:  # what comes next is no part of what has been cropped
            self.progress.end = -1
        self._cut(length)
        if loses_all:
            self._adopt_whole(*(whole[1:] if whole is not None and whole[0] == length else self._keep_whole(length)))

    def _cut(self, length: int) -> None:
        """Know nothing of the tokens from `length` on."""
        size = self.store.block_size
        self.evicted = min(self.evicted, length // size)
        self.progress.border = min(self.progress.border, self.evicted * size)
        self.average[:, :, length:] = 0.0
        self.kept[:, :, self.evicted * size :] = 0
        self.retained.truncate(self.evicted * size)

    def select_rows(self, layer: HybridLayer, rows: torch.Tensor) -> None:
        index, heads = rows.numpy(), self.store.num_kv_heads
        self.retained.select_lists((index[:, None] * heads + np.arange(heads)).ravel())
        self.average, self.kept, self.known = self.average[index], self.kept[index], self.known[index]
        self.progress.select_rows(index)
        self._before = self._whole = None
        if self.resident is not None:
            self.resident.select_rows(index)

    # --- what is resident --------------------------------------------------------------------------------------------

    def placed(self, layer: HybridLayer, query_heads: int | None = None) -> None:
        assert layer.resident is not None
        self.reserve(self.store.length, query_heads or self.average.shape[1])
        self.resident = ResidentMass(layer.resident, self.average, self.evicted)

    def block_opened(self, layer: HybridLayer, block: int) -> None:
        if self.resident is not None:
            self.resident.open(block)

    def unplaced(self, layer: HybridLayer) -> None:
        self.settle()
        self._write_back()
        self.resident = None

    def _write_back(self) -> None:
        """Know the averages of all resident tokens here, too."""
        if self.resident is not None and self.evicted < self.store.num_blocks:
            self.reserve(self.store.num_blocks * self.store.block_size, self.resident.average.shape[1])
            self.resident.write_back(self.average, self.evicted)

    # --- what lasts --------------------------------------------------------------------------------------------------

    def snapshot(self) -> _Snapshot:
        self.settle()
        average = self.average[:, :, self.evicted * self.store.block_size : self.store.length].copy()
        there = None if self.resident is None else self.resident.average.clone()
        return _Snapshot(self.evicted, self.retained.counts.copy(), average, there, replace(self.progress))

    def restore(self, layer: HybridLayer, snapshot: _Snapshot) -> None:
        first = snapshot.evicted * self.store.block_size
        self.retained.cut(snapshot.counts)
        self.evicted, self.progress = snapshot.evicted, replace(snapshot.progress)
        self.average[:, :, first:] = 0.0
        self.average[:, :, first : first + snapshot.average.shape[2]] = snapshot.average
        self.kept[:, :, first:] = 0
        if snapshot.resident is None:  # nothing was resident yet
            self.resident = None
        elif self.resident is not None:
            self.resident.average.copy_(snapshot.resident)

    def share(self, layer: HybridLayer, source: TokenMass) -> None:
        source._write_back()
        self.retained = source.retained.fork()
        self.average, self.kept = source.average.copy(), source.kept.copy()
        self.window_blocks, self.evicted, self.known = source.window_blocks, source.evicted, source.known.copy()
        self.progress, self.since = replace(source.progress), source.since
        if source.resident is not None:
            self.placed(layer)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it; nothing is in flight."""
        self._write_back()
        progress, length = self.progress, self.store.length
        numbers = (self.window_blocks, self.evicted, progress.border, progress.prompt, progress.end, self.since)
        return {
            "average": torch.from_numpy(self.average[:, :, :length]),
            "kept": torch.from_numpy(self.kept[:, :, :length]),
            "known": torch.from_numpy(self.known),
            "queries": torch.from_numpy(progress.queries),
            "numbers": torch.tensor(numbers, dtype=torch.int64),
            "room": torch.tensor(self.retained.table.shape[1]),
        }

    def load(self, layer: HybridLayer, tensors: dict[str, torch.Tensor]) -> None:
        if not tensors:
            self.adopted(layer)
            return
        average, kept = tensors["average"].numpy(), tensors["kept"].numpy()
        self.reserve(average.shape[2], average.shape[1])
        self.average[:, :, : average.shape[2]], self.kept[:, :, : kept.shape[2]] = average, kept
        blocks, self.evicted, border, prompt, end, self.since = tensors["numbers"].tolist()
        if self.window_tokens(0) is not None:  # otherwise it is as large as what is resident here
            self.window_blocks = blocks
        self.known = tensors["known"].numpy().copy()
        self.progress = AppendProgress(self.rule, tensors["queries"].numpy().copy(), border, bool(prompt), end)
        self.retained = self._copy_marked(self.kept, self.evicted, int(tensors["room"]))

    def report(self, stats: LayerStats) -> None:
        tokens = self.evicted * self.store.block_size
        outside = int(np.count_nonzero(self.store.padding.valid[:, :tokens]))
        counts = self.kept[:, :, :tokens].sum((0, 2), dtype=np.int64)
        stats.kept_share_by_head = (counts / outside).tolist() if outside else []
        stats.context_bytes, stats.salience_bytes = self.retained.nbytes, self.average.nbytes + self.kept.nbytes


def token_mass_fields(sizes: LayerSizes, windows: range) -> dict[str, Field]:
    """What `TokenMass.tensors` gives for a layer, whose window may have so many blocks."""
    rows, tokens, known = sizes.rows, sizes.tokens, sizes.query_heads
    # A cache that was taken over does not know the query heads before something is resident.
    heads = known if sizes.placed or sizes.kv_heads in known else {sizes.kv_heads, *known}
    least, most = (windows.start, 0, 0, 0, -1, 0), (windows.stop - 1, sizes.full_blocks, tokens, 1, tokens, tokens)
    return {
        "average": Field(torch.float32, (rows, heads, tokens)),
        "kept": Field(torch.uint8, (*sizes.lines, tokens), 0, 1),
        "known": Field(torch.bool, (rows,)),
        "queries": Field(torch.int64, (rows,), 0, MOST),
        "numbers": Field(torch.int64, (6,), least, most),
        "room": Field(torch.int64, (), 0, sizes.width * 5 // 4 + LIST_STEP),
    }
