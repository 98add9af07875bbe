"""Moving averages of attention weights (MAW) of a layer's tokens, and the retention that they decide (HGCA §3.2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_offload.blocks.device_mirror import to_host
from hf_offload.blocks.memory import host_empty
from hf_offload.cpu.launch import Launch
from hf_offload.cpu.thread_pool import Job
from hf_offload.fields import Field, LayerSizes
from hf_offload.knobs import MOST
from hf_offload.policies.base import LayerState
from hf_offload.policies.hgca.append import AppendProgress, RetentionRule, Span, mark_above
from hf_offload.policies.hgca.kernels.query_weights import Queries, query_lse, weigh_tokens
from hf_offload.policies.hgca.resident_mass import ResidentMass
from hf_offload.policies.hgca.retained_tokens import LIST_STEP, RetainedTokens
from hf_offload.policies.hgca.retention import Retention
from hf_offload.scores import Scores

if TYPE_CHECKING:
    from hf_offload.cache.layer import HybridLayer
    from hf_offload.cache.stats import LayerStats

TILE = 4096
"""Tokens that are marked and copied at a time."""
KEEP_ALL = -np.inf
"""A threshold that every valid token exceeds."""


@dataclass(slots=True)
class _Decision:
    """What `TokenMass.wait` adopts when the job that decides it has ended.

    Args:
        state: the new state.
        free: frees the slots of the blocks that leave.
        seconds: how long the job took.
    """

    state: Retention
    free: Callable[[], None] | None
    seconds: float = 0.0


class TokenMass(LayerState):
    """State of a layer: the moving average of each token's attention weights, and the tokens retained by them.

    `now` holds them. A job in a worker thread marks and copies tokens when blocks leave the window, and after a prompt
    or append; `wait` waits for it, and adopts the state that it has made.
    Source: HGCA, section 3.2, algorithm 1.

    Args:
        layer: its store is there, and empty. Its index staggers evictions, so that layers do not evict all at once.
        rule: which tokens are retained.
        window_tokens: tokens of the window, by the number of cached tokens; None: as many as are resident.
    """

    def __init__(
        self, layer: HybridLayer, rule: RetentionRule, window_tokens: Callable[[int], int | None]
    ) -> None:  # fmt: skip
        assert layer.store is not None
        self.store = store = layer.store
        self.rule, self.worker, self.stats, self.window_tokens = rule, layer.settings.worker, layer.stats, window_tokens
        self.stagger = layer.index % store.block_size
        batch, heads = store.batch, store.num_kv_heads
        self.now = Retention(
            self._window_of(layer), 0, np.zeros((batch, 0, 0), np.float32), np.zeros((batch, heads, 0), np.uint8),
            np.ones(batch, bool), RetainedTokens(batch * heads, store.block_size, store.head_dim, store.dtype),
            AppendProgress(rule, np.zeros(batch, np.int64)),
        )  # fmt: skip
        self._before: tuple[int, Retention] | None = None
        """Tokens before the last chunk, and the state then: until anything but a crop of that chunk happens."""
        self._prepared: tuple[int, Retention] | None = None
        """The length of a prepared crop that retains every token, and the state after it."""
        self.resident: ResidentMass | None = None
        """The averages of resident tokens, with two memories."""
        self._job: tuple[Job, _Decision] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.resident is None else self.resident.average.nbytes

    @property
    def slots(self) -> int:
        return self.now.window_blocks + 1  # one for the block whose tokens a job marks

    def _window_of(self, layer: HybridLayer) -> int:
        """Blocks of the window, by the number of tokens cached now."""
        tokens, size = self.window_tokens(layer.past), self.store.block_size
        if tokens is not None:
            return -(-tokens // size)
        return (layer.settings.resident // size if layer.resident is None else layer.resident.slots) - 1

    @property
    def step_update(self) -> dict[str, Any]:
        """The last arguments of `move_averages` and `update_weights`."""
        return self.now.progress.step_update(self.now.window)

    def _outside(self, state: Retention, length: int) -> int:
        """Blocks before a window that ends at `length`."""
        return max((length - self.stagger) // self.store.block_size + 1 - state.window_blocks, 0)

    def reserve(self, length: int, query_heads: int) -> None:
        """Allocate averages and marks for a number of tokens."""
        self.now = self.now.with_room(length, query_heads)

    # --- the job in flight --------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for the job, and adopt what it has decided.

        Raises:
            WorkerError: it failed, or does not end in time. Then nothing is decided: the blocks are still in the
                window, or the old lists stay, and every token that leaves the window until the next append is kept.
        """
        if self._job is None:
            return
        job, decision = self._job
        now, made, stats = self.now, decision.state, self.stats
        evicts = made.retained is now.retained
        try:
            job.result()
        except BaseException:
            if job.foreign:  # the thread that wrote into the lists stayed in the parent process, perhaps with a lock
                now = replace(now, retained=self._copy_marked(now.kept, now.evicted))
            if job.done():
                now.retained.truncate(now.outside)
                self.now = replace(now, weighed=now.weighed & evicts)
                self._job = None
            raise
        if evicts:
            stats.evictions += made.evicted - now.evicted
            stats.eviction_seconds += decision.seconds
        else:
            stats.reevaluations += 1
            stats.reevaluation_seconds += decision.seconds
        self.now = made
        if decision.free is not None:
            decision.free()
        self._job = None

    def _start(
        self, stages: Iterator[Launch], state: Retention, label: str, free: Callable[[], None] | None = None
    ) -> None:
        """Start the job whose launches make a state."""
        decision, began = _Decision(state, free), time.perf_counter()

        def work() -> None:
            for launch in stages:
                self.worker.divide(launch)
            decision.seconds = time.perf_counter() - began

        self._job = self.worker.submit(work, label, keep=(self.store.pool, state.retained.pool)), decision

    # --- a prompt or an append ---------------------------------------------------------------------------------------

    def before_append(self, layer: HybridLayer) -> None:
        """Remember the state, for a crop of the chunk."""
        self.wait()
        self._before, self._prepared = (self.store.length, self.now), None

    def append(self, layer: HybridLayer, query: torch.Tensor, scores: Scores) -> None:
        """Start to weigh the cached tokens by the new queries, and to retain tokens by that (§3.2.2, re-evaluation)."""
        self.wait()
        store, rule, count = self.store, self.rule, query.shape[2]
        length, past, size = store.length, store.length - count, store.block_size
        valid = store.padding.valid[:, past:length]
        now = self.now.with_room(length, query.shape[1])
        progress, average, weighed = now.progress.chunk(past, length, now.outside), now.average.copy(), now.weighed
        average[:, :, past:length] = 0.0
        anew = rule.reevaluate or progress.prompt or not weighed.any()
        now = replace(now, window_blocks=self._window_of(layer), average=average)
        spans, progress = progress.spans(valid, length, now.window, anew=anew)
        most = max(span.queries for span in spans)
        there, wait = to_host(query[:, :, count - most :].detach().float().contiguous(), "queries of an append")
        queries, all_padding, border = there.numpy(), valid.max(1) == 0, progress.border
        if anew:
            retained, first = RetainedTokens(now.retained.lists, size, store.head_dim, store.dtype), 0
            weighed = weighed | ~all_padding | progress.prompt
        else:
            retained, first = now.retained.fork(), border // size
            retained.truncate(border)
        self.now = now = replace(now, weighed=weighed, progress=progress)
        made = replace(now, evicted=max(self._outside(now, length), first), kept=now.kept.copy(), retained=retained)

        def stages() -> Iterator[Launch]:
            wait()
            store.wait()
            for span in spans:
                yield from self._weigh(span, average, queries, length, scores)
            yield from self._retain(made, first, border, length, all_padding)

        self._start(stages(), made, f"what {count} tokens leave to the CPU in layer {self.stats.layer}")

    def _weigh(
        self, span: Span, average: np.ndarray, queries: np.ndarray, length: int, scores: Scores
    ) -> Iterator[Launch]:
        """Update the averages of a span's tokens with the weights that the newest queries give them."""
        store = self.store
        span_queries = np.ascontiguousarray(queries[:, :, queries.shape[2] - span.queries :])
        lse = np.empty(span_queries.shape[:3], np.float32)
        pool = store.host_blocks
        asked = Queries(span_queries, store.num_kv_heads, length - span.queries, span.first, span.stop, *scores)
        yield query_lse(pool, asked, lse)
        span.leave_out(lse)
        weights = np.empty((*average.shape[:2], span.stop + 31 & ~15), np.float32)
        yield weigh_tokens(pool, asked, lse, span.coefficient, weights, skipped=span.skipped)
        span.update(average, weights)

    # --- blocks that leave the window --------------------------------------------------------------------------------

    def rows_at_padding(self, length: int) -> np.ndarray | None:
        """Rows whose newest token of `length` is padding: its weights do not count. None if there is none."""
        padding = self.store.padding
        if not padding.ragged:
            return None
        rows = np.flatnonzero(padding.valid[:, length - 1] == 0)
        return rows if len(rows) else None

    def token(self, layer: HybridLayer) -> None:
        """Start to select among the tokens of blocks that leave the window (algorithm 1, lines 10 to 24)."""
        self._before = self._prepared = None
        self._evict()

    def before_token(self, layer: HybridLayer) -> None:
        """Evict at once blocks that are still inside the window and belong outside, as after a job that failed."""
        self.wait()
        if self._outside(self.now, self.store.length) > self.now.evicted:
            self.token(layer)
            self.wait()

    def _evict(self) -> None:
        self.wait()
        length, first = self.store.length, self.now.evicted
        evicted = self._outside(self.now, length)
        if evicted <= first:  # a block that has left does not come back
            return
        self.reserve(length, self.now.average.shape[1])
        made, border = replace(self.now, evicted=evicted), self.now.outside
        arrive, free = (None, None) if self.resident is None else self.resident.leave(first, evicted)
        no_row = np.zeros(self.store.batch, bool)

        def stages() -> Iterator[Launch]:
            if arrive is not None:
                arrive(made.average)
            self.store.wait()
            yield from self._retain(made, first, border, length, no_row)

        self._start(stages(), made, f"what block {evicted - 1} of layer {self.stats.layer} leaves to the CPU", free)

    def _retain(
        self, state: Retention, first: int, border: int, length: int, frozen: np.ndarray
    ) -> Iterator[Launch]:  # fmt: skip
        """Mark tokens whose average exceeds the threshold, and append them to lists (algorithm 1, lines 19 to 24).

        Args:
            state: with the averages; its marks and lists are written.
            first: the first of its evicted blocks that is not in the lists.
            border: tokens before this one share their weights among one another (A_cpu), the others with all up to
                `length` (A_gpu).
            length: tokens.
            frozen: bool `[B]`, rows whose marks before `border` stay as they are.
        """
        store = self.store
        valid, size = store.padding.valid, store.block_size
        new = self._thresholds(state, valid[:, border:length])
        old = self._thresholds(state, valid[:, :border]) if first * size < border else new
        for start in range(first * size, state.outside, TILE):
            stop = min(start + TILE, state.outside)
            tile, early = slice(start, stop), np.arange(start, stop) < border
            bars = np.where(early, old[:, None], new[:, None])
            marks = mark_above(state.average[:, :, tile], valid[:, tile], bars, store.num_kv_heads, self.rule.group)
            np.copyto(state.kept[:, :, tile], marks, where=~(frozen[:, None] & early)[:, None])
            self._mark_sinks(state.kept, start, stop)
            yield from self._copy(state.retained, state.kept, start, stop)

    def _thresholds(self, state: Retention, valid: np.ndarray) -> np.ndarray:
        """β / A.size, float32 `[B]`, by the marks `[B, t]` of the tokens that share the weights."""
        if self.rule.beta == 0:
            return np.full(len(valid), KEEP_ALL, np.float32)
        shares = self.rule.beta / np.maximum(valid.sum(1), 1)
        return np.where(state.weighed, shares, KEEP_ALL).astype(np.float32)

    def _mark_sinks(self, kept: np.ndarray, start: int, stop: int) -> None:
        """Mark the rows' first tokens, which are retained whatever their weights."""
        padding, sinks = self.store.padding, self.rule.sinks
        for row, begin in enumerate(padding.first if sinks else ()):
            low, high = max(int(begin), start), min(int(begin) + sinks, stop)
            if low < high:
                kept[row, :, low:high] = padding.valid[row, low:high]

    def _copy(self, retained: RetainedTokens, kept: np.ndarray, start: int, stop: int) -> Iterator[Launch]:
        """Append the marked ones of the tokens `start` to `stop - 1` to lists."""
        store = self.store
        if not kept[:, :, start:stop].any():
            return
        shape = (store.batch, store.num_kv_heads, stop - start, store.head_dim)
        k, v = (host_empty(shape, store.format.gather_dtype, brief=True, what="kept tokens") for _ in range(2))
        yield store.gathering(k, v, start)
        k, v = store.narrowed(k), store.narrowed(v)
        yield retained.append(k, v, kept, start)

    def _copy_marked(self, kept: np.ndarray, evicted: int, blocks: int = 0) -> RetainedTokens:
        """Make new lists of all marked tokens, in this thread.

        Args:
            kept: uint8 `[B, Hkv, T]`, marks of the tokens of `evicted` blocks at least.
            blocks: as in `RetainedTokens`.
        """
        store, size = self.store, self.store.block_size
        retained = RetainedTokens(self.now.retained.lists, size, store.head_dim, store.dtype, blocks)
        for start in range(0, evicted * size, TILE):
            for launch in self._copy(retained, kept, start, min(start + TILE, evicted * size)):
                launch.run("kept tokens")
        return retained

    # --- changes -----------------------------------------------------------------------------------------------------

    def adopted(self, layer: HybridLayer) -> None:
        if not self.now.average.size:  # a cache that was taken over; otherwise the window is the last append's
            self.now = replace(self.now, window_blocks=self._window_of(layer))
        self._keep_all()

    def padding_changed(self, layer: HybridLayer, block: int) -> None:
        if block < self.store.sealed:
            self._keep_all()

    def _keep_all(self) -> None:
        """Retain every valid token until the next append: its attention weights are unknown."""
        self._before = self._prepared = None
        self.now = self.now.cut(self.store.length)
        self.now = self._whole(self.now, self.store.length)

    def _whole(self, state: Retention, length: int) -> Retention:
        """The state after another one in which all of the first `length` tokens are retained."""
        size, valid = self.store.block_size, self.store.padding.valid
        state = state.with_room(length, max(state.average.shape[1], self.store.num_kv_heads))
        evicted = max(self._outside(state, length), min(state.evicted, length // size))
        kept, weighed = np.zeros_like(state.kept), np.zeros_like(state.weighed)
        if stop := evicted * size:  # an empty cache may not know its rows yet
            kept[:, :, :stop] = valid[:, None, :stop]
        progress, retained = replace(state.progress, begin=0, end=-1), self._copy_marked(kept, evicted)
        return replace(state, evicted=evicted, kept=kept, weighed=weighed, retained=retained, progress=progress)

    def _state_at(self, length: int) -> Retention:
        """The state of which a crop keeps the first `length` tokens: that before the last chunk, or `now`."""
        return self._before[1] if self._before is not None and length <= self._before[0] else self.now

    def prepare_crop(self, layer: HybridLayer, length: int) -> None:
        self.reserve(self.store.num_blocks * self.store.block_size, self.now.average.shape[1])  # for `_write_back`
        state = self._state_at(length)
        self._prepared = (length, self._whole(state, length)) if 0 < length <= state.progress.begin else None

    def crop(self, layer: HybridLayer, length: int) -> None:
        """Keep the first `length` tokens; no job is in flight.

        A crop of the last chunk of a prompt or append alone, as when its forward fails, restores the state before it.
        A crop that takes an append back whole, whose averages have replaced those from before it, retains every token.
        """
        state, prepared = self._state_at(length), self._prepared
        back = state is not self.now
        if prepared is not None and prepared[0] == length:
            state = prepared[1]
        elif 0 < length <= state.progress.begin:
            state = self._whole(state, length)
        self.now = state.cut(length)
        self._prepared, self._before = None, None if back else self._before

    def check_rows(self, layer: HybridLayer) -> None:
        pass

    def select_rows(self, layer: HybridLayer, rows: torch.Tensor) -> None:
        index = rows.numpy()
        self.now = self.now.rows(index)
        self._before = self._prepared = None
        if self.resident is not None:
            self.resident.select_rows(index)

    # --- resident tokens ----------------------------------------------------------------------------------------------

    def placed(self, layer: HybridLayer, query_heads: int | None = None) -> None:
        assert layer.resident is not None
        self.reserve(self.store.length, query_heads or self.now.average.shape[1])
        self.resident = ResidentMass(layer.resident, self.now.average, self.now.evicted)

    def block_opened(self, layer: HybridLayer, block: int) -> None:
        if self.resident is not None:
            self.resident.open(block)

    def unplaced(self, layer: HybridLayer) -> None:
        self.wait()
        self._write_back()
        self.resident = None

    def _write_back(self) -> None:
        """Copy the averages of resident tokens to those of the others."""
        if self.resident is not None and self.now.evicted < self.store.num_blocks:
            self.reserve(self.store.num_blocks * self.store.block_size, self.resident.average.shape[1])
            self.resident.write_back(self.now.average, self.now.evicted)

    # --- forks, drafts, files -----------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[Retention, np.ndarray, torch.Tensor | None]:
        """The state, and what steps change of it in place: averages of the window and of slots."""
        self.wait()
        average = self.now.average[:, :, self.now.outside : self.store.length].copy()
        return self.now, average, None if self.resident is None else self.resident.average.clone()

    def restore(self, layer: HybridLayer, snapshot: Any) -> None:
        state, average, there = snapshot
        first = state.outside
        state.clear(first)
        state.average[:, :, first : first + average.shape[2]] = average
        self.now = state
        if there is None:  # nothing was resident yet
            self.resident = None
        elif self.resident is not None:
            self.resident.average.copy_(there)

    def share(self, layer: HybridLayer, source: TokenMass) -> None:
        source._write_back()
        self.now = source.now.fork()
        if source.resident is not None:
            self.placed(layer)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Averages, marks and numbers; no job is in flight."""
        self._write_back()
        now, progress, length = self.now, self.now.progress, self.store.length
        numbers = (now.window_blocks, now.evicted, progress.border, progress.prompt, progress.end, progress.begin)
        return {
            "average": torch.from_numpy(now.average[:, :, :length]),
            "kept": torch.from_numpy(now.kept[:, :, :length]),
            "known": torch.from_numpy(now.weighed),
            "queries": torch.from_numpy(progress.queries),
            "numbers": torch.tensor(numbers, dtype=torch.int64, device="cpu"),
            "room": torch.tensor(now.retained.table.shape[1], dtype=torch.int64, device="cpu"),
        }

    def load(self, layer: HybridLayer, tensors: dict[str, torch.Tensor]) -> None:
        if not tensors:
            self.adopted(layer)
            return
        average, kept = tensors["average"].numpy(), tensors["kept"].numpy()
        blocks, evicted, border, prompt, end, begin = tensors["numbers"].tolist()
        now = self.now.with_room(average.shape[2], average.shape[1])
        now.average[:, :, : average.shape[2]], now.kept[:, :, : kept.shape[2]] = average, kept
        if self.window_tokens(0) is None:  # the window is as large as what is resident here
            blocks = now.window_blocks
        self.now = replace(
            now, window_blocks=blocks, evicted=evicted, weighed=tensors["known"].numpy().copy(),
            retained=self._copy_marked(now.kept, evicted, int(tensors["room"])),
            progress=AppendProgress(self.rule, tensors["queries"].numpy().copy(), border, bool(prompt), begin, end),
        )  # fmt: skip

    def report(self, stats: LayerStats) -> None:
        now, tokens = self.now, self.now.outside
        outside = int(np.count_nonzero(self.store.padding.valid[:, :tokens]))
        counts = now.kept[:, :, :tokens].sum((0, 2), dtype=np.int64)
        stats.kept_share_by_head = (counts / outside).tolist() if outside else []
        stats.context_bytes, stats.salience_bytes = now.retained.nbytes, now.average.nbytes + now.kept.nbytes


def token_mass_fields(sizes: LayerSizes, windows: range) -> dict[str, Field]:
    """The fields of `TokenMass.tensors` for a layer by the number of blocks that its window may have."""
    rows, tokens, possible = sizes.rows, sizes.tokens, sizes.query_heads
    # A cache that was taken over has averages by KV head until something is resident.
    heads = possible if sizes.placed or sizes.kv_heads in possible else {sizes.kv_heads, *possible}
    least, most = (windows.start, 0, 0, 0, -1, 0), (windows.stop - 1, sizes.full_blocks, tokens, 1, tokens, tokens)
    return {
        "average": Field(torch.float32, (rows, heads, tokens)),
        "kept": Field(torch.uint8, (*sizes.lines, tokens), 0, 1),
        "known": Field(torch.bool, (rows,)),
        "queries": Field(torch.int64, (rows,), 0, MOST),
        "numbers": Field(torch.int64, (6,), least, most),
        "room": Field(torch.int64, (), 0, sizes.width * 5 // 4 + LIST_STEP),
    }
