"""Moving averages of attention weights (MAW) of a layer's tokens, and the retention that they decide (HGCA §3.2)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
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
from hf_offload.policies.hgca.append import AppendProgress, RetentionRule, Span, average_capacity, mark_above
from hf_offload.policies.hgca.kernels.query_weights import Queries, query_lse, weigh_tokens
from hf_offload.policies.hgca.resident_mass import ResidentMass
from hf_offload.policies.hgca.retained_tokens import LIST_STEP, RetainedTokens
from hf_offload.scores import Scores

if TYPE_CHECKING:
    from hf_offload.cache.layer import HybridLayer
    from hf_offload.cache.stats import LayerStats

TILE = 4096
"""Tokens that are marked and copied at a time."""
KEEP_ALL = -np.inf
"""A threshold that every valid token exceeds."""
_REPLACED = ("since", "window_blocks", "evicted", "average", "kept", "weighed", "retained", "progress")
"""What `append` replaces by new objects, without a change in the old ones: a crop of the chunk brings them back."""


@dataclass(slots=True)
class _Decision:
    """What a running job decides, for `TokenMass` to adopt when it has ended.

    Args:
        evicted: blocks that have left the window by then.
        counts: `[B · Hkv]`, tokens in the lists when the job began.
        retained, kept: lists and marks that replace the present ones (re-evaluation); None: the job adds to these.
        free: frees the slots of the blocks that leave.
        began, seconds: when the job was made, and how long it took.
    """

    evicted: int
    counts: np.ndarray
    retained: RetainedTokens | None = None
    kept: np.ndarray | None = None
    free: Callable[[], None] | None = None
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0


class TokenMass(LayerState):
    """State of a layer: the moving average of each token's attention weights, and the tokens retained by them.

    Blocks before `evicted` have left the window; `retained` holds K and V of their marked tokens. A job in a worker
    thread marks and copies tokens when blocks leave the window, and after a prompt or append; `wait` waits for it.
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
        self.window_blocks = self._window_of(layer)
        """Blocks of the window; there may be one more, while a job marks the oldest one's tokens."""
        lists = store.batch * store.num_kv_heads
        self.retained = RetainedTokens(lists, store.block_size, store.head_dim, store.dtype)
        self.evicted = 0
        self.average = np.zeros((store.batch, 0, 0), np.float32)
        """`[B, Hq, T]`, by token; with two memories `resident` has those of resident tokens."""
        self.kept = np.zeros((store.batch, store.num_kv_heads, 0), np.uint8)
        """`[B, Hkv, T]`, 1 for retained tokens."""
        self.weighed = np.ones(store.batch, bool)
        """`[B]`, whether averages come from attention. Where they do not, every token that leaves is retained."""
        self.progress = AppendProgress(rule, np.zeros(store.batch, np.int64))
        self.since = 0
        """Tokens before the last prompt or append, all its chunks: their earlier averages are gone."""
        self._before: tuple[int, dict[str, Any]] | None = None
        """Tokens before the last chunk, and `_REPLACED`: until anything but a crop of that chunk happens."""
        self._whole: tuple[int, int, np.ndarray, RetainedTokens] | None = None
        """Of a prepared crop: its length, and what `_keep_whole` returned for it."""
        self.resident: ResidentMass | None = None
        """The averages of resident tokens, with two memories."""
        self._job: tuple[Job, _Decision] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self.resident is None else self.resident.average.nbytes

    @property
    def slots(self) -> int:
        return self.window_blocks + 1  # one for the block whose tokens a job marks

    def _window_of(self, layer: HybridLayer) -> int:
        """Blocks of the window, by the number of tokens cached now."""
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
        """Share of a step in the averages (algorithm 1, line 6)."""
        return self.rule.alpha or 1 / self.window_size

    @property
    def step_update(self) -> dict[str, Any]:
        """The last arguments of `move_averages` and `update_weights`."""
        return self.progress.step_update(self.alpha, self.window_size)

    def _due(self, length: int) -> int:
        """Blocks outside the window once the rows have `length` tokens; a block that has left does not come back."""
        return max(self._outside(length), self.evicted)

    def _outside(self, length: int) -> int:
        """Blocks before a window that ends at `length`."""
        return max((length - self.stagger) // self.store.block_size + 1 - self.window_blocks, 0)

    def reserve(self, length: int, query_heads: int) -> None:
        """Allocate averages and marks for a number of tokens; new ones are 0."""
        have = self.average.shape[2]
        if have < length or self.average.shape[1] != query_heads:
            tokens = average_capacity(length, have, self.store.block_size)
            average = np.zeros((self.store.batch, query_heads, tokens), np.float32)
            kept = np.zeros((*self.kept.shape[:2], tokens), np.uint8)
            if self.average.shape[1] == query_heads:
                average[:, :, :have] = self.average
            kept[:, :, : self.kept.shape[2]] = self.kept
            self.average, self.kept = average, kept

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
        try:
            job.result()
        except BaseException:
            if job.foreign:  # the thread that wrote into the lists stayed in the parent process, perhaps with a lock
                self.retained = self._copy_marked(self.kept, self.evicted)
            if job.done():
                self.retained.cut(decision.counts)
                self.weighed &= decision.retained is None
                self._job = None
            raise
        self._adopt(decision)
        self._job = None

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

        keep = (self.store.pool, self.retained.pool)
        self._job = self.worker.submit(work, label, keep=keep), decision

    # --- a prompt or an append ---------------------------------------------------------------------------------------

    def before_append(self, layer: HybridLayer) -> None:
        """Remember the state, for a crop of the chunk; `append` makes new arrays beside it."""
        self.wait()
        self._before = self.store.length, {name: getattr(self, name) for name in _REPLACED}

    def append(self, layer: HybridLayer, query: torch.Tensor, scores: Scores) -> None:
        """Start to weigh the cached tokens by the new queries, and to retain tokens by that (§3.2.2, re-evaluation)."""
        self.wait()
        store, rule, count, progress = self.store, self.rule, query.shape[2], replace(self.progress)
        length, past, size = store.length, store.length - query.shape[2], store.block_size
        valid = store.padding.valid[:, past:length]
        self.reserve(length, query.shape[1])
        self.average, self.weighed, self.progress = self.average.copy(), self.weighed.copy(), progress
        self.window_blocks = self._window_of(layer)
        self.average[:, :, past:length] = 0.0
        if progress.begin(past, length, self.evicted * size):
            self.since = past
        border = progress.border
        anew = rule.reevaluate or progress.prompt or not self.weighed.any()
        spans = progress.spans(valid, length, self.alpha, self.window_size, anew=anew)
        most = max(span.queries for span in spans)
        there, wait = to_host(query[:, :, count - most :].detach().float().contiguous(), "queries of an append")
        queries, all_padding = there.numpy(), valid.max(1) == 0
        if anew:
            retained, first = RetainedTokens(self.retained.lists, size, store.head_dim, store.dtype), 0
            self.weighed |= ~all_padding | progress.prompt
        else:
            retained, first = self.retained.fork(), border // size
            retained.truncate(border)
        evicted, kept = max(self._outside(length), first), self.kept.copy()

        def stages() -> Iterator[Launch]:
            wait()
            store.wait()
            for span in spans:
                yield from self._weigh(span, queries, length, scores)
            yield from self._retain(retained, kept, range(first, evicted), border, length, all_padding)

        decision = _Decision(evicted, self.retained.counts.copy(), retained, kept)
        self._start(stages(), decision, f"what {count} tokens leave to the CPU in layer {self.stats.layer}")

    def _weigh(self, span: Span, queries: np.ndarray, length: int, scores: Scores) -> Iterator[Launch]:
        """Update the averages of a span's tokens with the weights that the newest queries give them."""
        store = self.store
        span_queries = np.ascontiguousarray(queries[:, :, queries.shape[2] - span.queries :])
        lse = np.empty(span_queries.shape[:3], np.float32)
        pool = store.host_blocks
        asked = Queries(span_queries, store.num_kv_heads, length - span.queries, span.first, span.stop, *scores)
        yield query_lse(pool, asked, lse)
        span.leave_out(lse)
        weights = np.empty_like(self.average)
        yield weigh_tokens(pool, asked, lse, span.coefficient, weights, skipped=span.skipped)
        span.update(self.average, weights)

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
        self._before = None
        self._evict()

    def before_token(self, layer: HybridLayer) -> None:
        """Evict at once blocks that are still inside the window and belong outside, as after a job that failed."""
        self.wait()
        if self._due(self.store.length) > self.evicted:
            self._before = None
            self._evict()
            self.wait()

    def _evict(self) -> None:
        length, evicted = self.store.length, self._due(self.store.length)
        if evicted == self.evicted:
            return
        self.wait()
        self.reserve(length, self.average.shape[1])
        first, retained, average = self.evicted, self.retained, self.average
        arrive, free = (None, None) if self.resident is None else self.resident.leave(first, evicted)
        border, no_row = first * self.store.block_size, np.zeros(self.store.batch, bool)

        def stages() -> Iterator[Launch]:
            if arrive is not None:
                arrive(average)
            self.store.wait()
            yield from self._retain(retained, self.kept, range(first, evicted), border, length, no_row)

        decision = _Decision(evicted, retained.counts.copy(), free=free)
        self._start(stages(), decision, f"what block {evicted - 1} of layer {self.stats.layer} leaves to the CPU")

    def _retain(
        self, retained: RetainedTokens, kept: np.ndarray, blocks: range, border: int, length: int, frozen: np.ndarray
    ) -> Iterator[Launch]:
        """Mark tokens whose average exceeds the threshold, and append them to lists (algorithm 1, lines 19 to 24).

        Args:
            retained: the lists.
            kept: uint8 `[B, Hkv, T]`, marks, written.
            blocks: blocks outside the window that are not in the lists.
            border: tokens before this one share their weights among one another (A_cpu), the others with all up to
                `length` (A_gpu).
            length: tokens.
            frozen: bool `[B]`, rows whose marks before `border` stay as they are.
        """
        store = self.store
        valid, size = store.padding.valid, store.block_size
        new = self._thresholds(valid[:, border:length])
        old = self._thresholds(valid[:, :border]) if blocks.start * size < border else new
        for start in range(blocks.start * size, blocks.stop * size, TILE):
            stop = min(start + TILE, blocks.stop * size)
            tile, early = slice(start, stop), np.arange(start, stop) < border
            bars = np.where(early, old[:, None], new[:, None])
            marks = mark_above(self.average[:, :, tile], valid[:, tile], bars, store.num_kv_heads, self.rule.group)
            np.copyto(kept[:, :, tile], marks, where=~(frozen[:, None] & early)[:, None])
            self._mark_sinks(kept, start, stop)
            yield from self._copy(retained, kept, start, stop)

    def _thresholds(self, valid: np.ndarray) -> np.ndarray:
        """β / A.size, float32 `[B]`, by the marks `[B, t]` of the tokens that share the weights."""
        if self.rule.beta == 0:
            return np.full(len(valid), KEEP_ALL, np.float32)
        shares = self.rule.beta / np.maximum(valid.sum(1), 1)
        return np.where(self.weighed, shares, KEEP_ALL).astype(np.float32)

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
        retained = RetainedTokens(self.retained.lists, size, store.head_dim, store.dtype, blocks)
        for start in range(0, evicted * size, TILE):
            for launch in self._copy(retained, kept, start, min(start + TILE, evicted * size)):
                launch.run("kept tokens")
        return retained

    # --- changes -----------------------------------------------------------------------------------------------------

    def adopted(self, layer: HybridLayer) -> None:
        if not self.average.size:  # a cache that was taken over; otherwise the window is the last append's
            self.window_blocks = self._window_of(layer)
        self._keep_all()

    def padding_changed(self, layer: HybridLayer, block: int) -> None:
        if block < self.store.sealed:
            self._keep_all()

    def _keep_all(self) -> None:
        """Retain every valid token until the next append: its attention weights are unknown."""
        self._before = None
        self._cut(self.store.length)
        self._adopt_whole(*self._keep_whole(self.store.length))

    def _keep_whole(self, length: int) -> tuple[int, np.ndarray, RetainedTokens]:
        """Evicted blocks, marks and lists with which all of the first `length` tokens are retained."""
        size, valid = self.store.block_size, self.store.padding.valid
        self.reserve(length, max(self.average.shape[1], self.store.num_kv_heads))
        evicted, kept = max(self._outside(length), min(self.evicted, length // size)), np.zeros_like(self.kept)
        if stop := evicted * size:  # an empty cache may not know its rows yet
            kept[:, :, :stop] = valid[:, None, :stop]
        return evicted, kept, self._copy_marked(kept, evicted)

    def _adopt_whole(self, evicted: int, kept: np.ndarray, retained: RetainedTokens) -> None:
        self.evicted, self.kept, self.retained, self.since = evicted, kept, retained, 0
        self.weighed, self.progress.end = np.zeros_like(self.weighed), -1

    def prepare_crop(self, layer: HybridLayer, length: int) -> None:
        self._whole = (length, *self._keep_whole(length)) if self._loses_all(length) else None

    def _loses_all(self, length: int) -> bool:
        """Whether a crop removes the last append whole, and the averages from before it are gone."""
        before = self._before
        since: int = self.since if before is None or length > before[0] else before[1]["since"]
        return 0 < length <= since

    def crop(self, layer: HybridLayer, length: int) -> None:
        """Keep the first `length` tokens; no job is in flight.

        A crop of the last chunk of a prompt or append alone, as when its forward fails, restores the state before it.
        A crop that reaches further back retains every token.
        """
        loses_all, before, whole = self._loses_all(length), self._before, self._whole
        self._whole = None
        if before is not None and length <= before[0]:
            self._before = None
            vars(self).update(before[1])
        if length < self.progress.end:  # a later chunk does not continue the cropped one
            self.progress.end = -1
        self._cut(length)
        if loses_all:
            self._adopt_whole(*(whole[1:] if whole is not None and whole[0] == length else self._keep_whole(length)))

    def _cut(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        size = self.store.block_size
        self.evicted = min(self.evicted, length // size)
        self.progress.border = min(self.progress.border, self.evicted * size)
        self.average[:, :, length:] = 0.0
        self.kept[:, :, self.evicted * size :] = 0
        self.retained.truncate(self.evicted * size)

    def check_rows(self, layer: HybridLayer) -> None:
        pass

    def select_rows(self, layer: HybridLayer, rows: torch.Tensor) -> None:
        index, heads = rows.numpy(), self.store.num_kv_heads
        self.retained.select_lists((index[:, None] * heads + np.arange(heads)).ravel())
        self.average, self.kept, self.weighed = self.average[index], self.kept[index], self.weighed[index]
        self.progress.queries = self.progress.queries[index]
        self._before = self._whole = None
        if self.resident is not None:
            self.resident.select_rows(index)

    # --- resident tokens ----------------------------------------------------------------------------------------------

    def placed(self, layer: HybridLayer, query_heads: int | None = None) -> None:
        assert layer.resident is not None
        self.reserve(self.store.length, query_heads or self.average.shape[1])
        self.resident = ResidentMass(layer.resident, self.average, self.evicted)

    def block_opened(self, layer: HybridLayer, block: int) -> None:
        if self.resident is not None:
            self.resident.open(block)

    def unplaced(self, layer: HybridLayer) -> None:
        self.wait()
        self._write_back()
        self.resident = None

    def _write_back(self) -> None:
        """Copy the averages of resident tokens to `average`."""
        if self.resident is not None and self.evicted < self.store.num_blocks:
            self.reserve(self.store.num_blocks * self.store.block_size, self.resident.average.shape[1])
            self.resident.write_back(self.average, self.evicted)

    # --- forks, drafts, files -----------------------------------------------------------------------------------------

    def snapshot(self) -> tuple[int, np.ndarray, np.ndarray, torch.Tensor | None, AppendProgress]:
        """Blocks outside the window, tokens in the lists, averages of the window and of slots, and the progress."""
        self.wait()
        average = self.average[:, :, self.evicted * self.store.block_size : self.store.length].copy()
        there = None if self.resident is None else self.resident.average.clone()
        return self.evicted, self.retained.counts.copy(), average, there, replace(self.progress)

    def restore(self, layer: HybridLayer, snapshot: Any) -> None:
        self.evicted, counts, average, there, progress = snapshot
        first, self.progress = self.evicted * self.store.block_size, replace(progress)
        self.retained.cut(counts)
        self.average[:, :, first:] = 0.0
        self.average[:, :, first : first + average.shape[2]] = average
        self.kept[:, :, first:] = 0
        if there is None:  # nothing was resident yet
            self.resident = None
        elif self.resident is not None:
            self.resident.average.copy_(there)

    def share(self, layer: HybridLayer, source: TokenMass) -> None:
        source._write_back()
        self.retained = source.retained.fork()
        self.average, self.kept = source.average.copy(), source.kept.copy()
        self.window_blocks, self.evicted, self.weighed = source.window_blocks, source.evicted, source.weighed.copy()
        self.progress, self.since = replace(source.progress), source.since
        if source.resident is not None:
            self.placed(layer)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Averages, marks and numbers; no job is in flight."""
        self._write_back()
        progress, length = self.progress, self.store.length
        numbers = (self.window_blocks, self.evicted, progress.border, progress.prompt, progress.end, self.since)
        return {
            "average": torch.from_numpy(self.average[:, :, :length]),
            "kept": torch.from_numpy(self.kept[:, :, :length]),
            "known": torch.from_numpy(self.weighed),
            "queries": torch.from_numpy(progress.queries),
            "numbers": torch.tensor(numbers, dtype=torch.int64, device="cpu"),
            "room": torch.tensor(self.retained.table.shape[1], dtype=torch.int64, device="cpu"),
        }

    def load(self, layer: HybridLayer, tensors: dict[str, torch.Tensor]) -> None:
        if not tensors:
            self.adopted(layer)
            return
        average, kept = tensors["average"].numpy(), tensors["kept"].numpy()
        self.reserve(average.shape[2], average.shape[1])
        self.average[:, :, : average.shape[2]], self.kept[:, :, : kept.shape[2]] = average, kept
        blocks, self.evicted, border, prompt, end, self.since = tensors["numbers"].tolist()
        if self.window_tokens(0) is not None:  # otherwise the window is as large as what is resident here
            self.window_blocks = blocks
        self.weighed = tensors["known"].numpy().copy()
        self.progress = AppendProgress(self.rule, tensors["queries"].numpy().copy(), border, bool(prompt), end)
        self.retained = self._copy_marked(self.kept, self.evicted, int(tensors["room"]))

    def report(self, stats: LayerStats) -> None:
        tokens = self.evicted * self.store.block_size
        outside = int(np.count_nonzero(self.store.padding.valid[:, :tokens]))
        counts = self.kept[:, :, :tokens].sum((0, 2), dtype=np.int64)
        stats.kept_share_by_head = (counts / outside).tolist() if outside else []
        stats.context_bytes, stats.salience_bytes = self.retained.nbytes, self.average.nbytes + self.kept.nbytes


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
