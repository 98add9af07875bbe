"""How much each token of a layer was attended, and which of those that left the window the CPU goes on attending."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_offload.cache.context import Context
from hf_offload.cache.keeping import copy_marked, keep_tokens
from hf_offload.cache.mirror import brought
from hf_offload.cache.stats import LayerStats
from hf_offload.cache.store import BlockStore
from hf_offload.cache.weighing import Span, Weighing, averages_for
from hf_offload.cpu.launch import Launch
from hf_offload.cpu.query_lse import query_lse
from hf_offload.cpu.weigh import weigh_tokens
from hf_offload.cpu.worker import Job, Worker
from hf_offload.policies.salience import SalienceRule
from hf_offload.scores import Scores

if TYPE_CHECKING:
    from hf_offload.cache.near import NearAverages


@dataclass(slots=True)
class _Decision:
    """What is being decided, and what holds once it is.

    Args:
        evicted: blocks that have left the window then.
        counts: `[B · Hkv]`, tokens that the lists hold now.
        context, kept: in place of those that are there; None: they are added to.
        free: frees the slots of the blocks that leave.
        began, seconds: when it was asked for, and how long it took.
    """

    evicted: int
    counts: np.ndarray
    context: Context | None = None
    kept: np.ndarray | None = None
    free: Callable[[], None] | None = None
    began: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Before:
    """What was known before a chunk of a prompt or append, which wrote beside it: no array of it is written any more.

    Args:
        length: tokens that there were.
        since, window_blocks, evicted, average, kept, known, context, weighing: as in `Salience`.
    """

    length: int
    since: int
    window_blocks: int
    evicted: int
    average: np.ndarray
    kept: np.ndarray
    known: np.ndarray
    context: Context
    weighing: Weighing


class Salience:
    """The moving averages of attention weights of a layer's tokens, and the tokens that are kept by them.

    Blocks before `evicted` have left the window; of their tokens `context` holds those that are kept. What is decided
    when blocks leave, or after a prompt or append, is decided by a thread beside the model's; `settle` waits for it.
    Source: HGCA, section 3.2, algorithm 1.

    Args:
        store: the layer's blocks.
        rule: what is kept.
        worker: whose threads decide.
        stats: of the layer.
        stagger: tokens by which this layer's blocks leave later than at the next block: not all layers' at once.
    """

    def __init__(self, store: BlockStore, rule: SalienceRule, worker: Worker, stats: LayerStats, stagger: int) -> None:
        self.store, self.rule, self.worker, self.stats = store, rule, worker, stats
        self.stagger = stagger % store.block_size
        self.window_blocks = 1
        """Blocks of the window; there may be one more, until the oldest one's tokens have been looked at."""
        lists = store.batch * store.num_kv_heads
        self.context = Context(lists, store.block_size, store.head_dim, store.dtype)
        self.evicted = 0
        self.average = np.zeros((store.batch, 0, 0), np.float32)
        """`[B, Hq, T]`, by token; with two memories the resident tokens' own lie on the device meanwhile."""
        self.kept = np.zeros((store.batch, store.num_kv_heads, 0), np.uint8)
        """`[B, Hkv, T]`, 1 for tokens before the window that are kept."""
        self.known = np.ones(store.batch, bool)
        """`[B]`, whether averages come from attention: a cache that was taken over has none, and keeps every token."""
        self.weighing = Weighing(rule, np.zeros(store.batch, np.int64))
        self.since = 0
        """Tokens before the last prompt or append, all its chunks: what was known of these is gone."""
        self._before: _Before | None = None
        """Until something else happens than that the chunk is taken back."""
        self._whole: tuple[int, int, np.ndarray, Context] | None = None
        """Of a crop that is prepared: tokens, and what `_keep_whole` gave for them."""
        self.near: NearAverages | None = None
        """The averages of what is resident, with two memories."""
        self._job: Job | None = None
        self._decision: _Decision | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the averages and marks of all tokens."""
        return self.average.nbytes + self.kept.nbytes

    @property
    def window_size(self) -> int:
        """Tokens of the window."""
        return self.window_blocks * self.store.block_size

    @property
    def alpha(self) -> float:
        """How fast averages forget."""
        return self.rule.alpha or 1 / self.window_size

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
                window, or what was kept before still is, and every token that leaves the window until the next append.
        """
        job, decision = self._job, self._decision
        if job is None:
            return
        assert decision is not None
        try:
            job.result()
        except BaseException:
            if job.foreign:  # whoever was at work in the lists is not here, and may have left a lock closed
                self.context = copy_marked(self, self.kept, self.evicted)
            if job.done():
                self.context.cut(decision.counts)
                self.known &= decision.context is None
                self._job = self._decision = None
            raise
        self._adopt(decision)
        self._job = self._decision = None

    def _adopt(self, made: _Decision) -> None:
        stats = self.stats
        if made.context is None or made.kept is None:
            stats.evictions += made.evicted - self.evicted
            stats.eviction_seconds += made.seconds
        else:
            self.context, self.kept = made.context, made.kept
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
        keep = (self.store.pool, self.context.pool)
        self._job = self.worker.submit(work, label, keep=keep)

    # --- a prompt or an append ---------------------------------------------------------------------------------------

    def begin_chunk(self) -> None:
        """A chunk of a prompt or append is about to be stored: remember what is known, beside which `take_in` writes.

        Raises:
            WorkerError: as `settle`.
        """
        self.settle()
        self._before = _Before(
            self.store.length, self.since, self.window_blocks, self.evicted, self.average, self.kept, self.known,
            self.context, self.weighing,
        )  # fmt: skip

    def take_in(self, query: torch.Tensor, window: int, *, scores: Scores) -> None:
        """Let the queries `[B, Hq, Q, D]` of the newest Q tokens, which are stored, weigh what is cached.

        Args:
            query: of the newest tokens.
            window: blocks of the window from here on.
            scores: the model's.
        """
        self.settle()
        store, rule, count, weighing = self.store, self.rule, query.shape[2], replace(self.weighing)
        length, past, size = store.length, store.length - query.shape[2], store.block_size
        valid = store.padding.valid[:, past:length]
        self.reserve(length, query.shape[1])
        self.average, self.known, self.weighing = self.average.copy(), self.known.copy(), weighing
        self.window_blocks = window
        self.average[:, :, past:length] = 0.0
        if weighing.begin(past, length, self.evicted * size):
            self.since = past
        border = weighing.border
        anew = rule.reevaluate or weighing.prompt or not self.known.any()
        spans = weighing.spans(valid, length, self.alpha, self.window_size, anew=anew)
        most = max(span.queries for span in spans)
        there, wait = brought(query[:, :, count - most :].detach().float().contiguous(), "queries of an append")
        queries, silent = there.numpy(), valid.max(1) == 0
        if anew:
            context, first = Context(self.context.lists, size, store.head_dim, store.dtype), 0
            self.known |= ~silent | weighing.prompt
        else:
            context, first = self.context.fork(), border // size
            context.truncate(border)
        evicted, kept = max(self._outside(length), first), self.kept.copy()

        def stages() -> Iterator[Launch]:
            wait()
            store.settle()
            for span in spans:
                yield from self._weigh(span, queries, length, scores)
            yield from keep_tokens(self, context, kept, range(first, evicted), border, length, silent)

        decision = _Decision(evicted, self.context.counts.copy(), context, kept)
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

    def advance(self) -> None:
        """After a decode step: begin to look at the tokens of blocks that have left the window."""
        self._before = None
        length, evicted = self.store.length, self.due(self.store.length)
        if evicted == self.evicted:
            return
        self.settle()
        self.reserve(length, self.average.shape[1])
        first, context = self.evicted, self.context
        arrive, free = (None, None) if self.near is None else self.near.leave(first, evicted)
        border, silent = first * self.store.block_size, np.zeros(self.store.batch, bool)

        def stages() -> Iterator[Launch]:
            if arrive is not None:
                arrive()
            self.store.settle()
            yield from keep_tokens(self, context, self.kept, range(first, evicted), border, length, silent)

        decision = _Decision(evicted, context.counts.copy(), free=free)
        self._start(stages(), decision, f"what block {evicted - 1} of layer {self.stats.layer} leaves to the CPU")

    # --- changes -----------------------------------------------------------------------------------------------------

    def keep_all(self) -> None:
        """Keep every valid token until the next append: nobody knows how much they were attended."""
        self._before = None
        self._cut(self.store.length)
        self._adopt_whole(*self._keep_whole(self.store.length))

    def _keep_whole(self, length: int) -> tuple[int, np.ndarray, Context]:
        """Blocks out of the window, marks and lists, where the first `length` tokens are all kept."""
        size, valid = self.store.block_size, self.store.padding.valid
        self.reserve(length, max(self.average.shape[1], self.store.num_kv_heads))
        evicted, kept = max(self._outside(length), min(self.evicted, length // size)), np.zeros_like(self.kept)
        if stop := evicted * size:  # without any token nobody knows how many rows come
            kept[:, :, :stop] = valid[:, None, :stop]
        return evicted, kept, copy_marked(self, kept, evicted)

    def _adopt_whole(self, evicted: int, kept: np.ndarray, context: Context) -> None:
        self.evicted, self.kept, self.context, self.since = evicted, kept, context, 0
        self.known, self.weighing.end = np.zeros_like(self.known), -1

    def catch_up(self) -> None:
        """Have all that should have left the window out of it: what is decided now is waited for.

        Raises:
            WorkerError: as `settle`.
        """
        self.settle()
        if self.due(self.store.length) > self.evicted:
            self.advance()
            self.settle()

    def prepare_crop(self, length: int) -> None:
        """Do what may fail of a crop; nothing is in flight."""
        self._whole = (length, *self._keep_whole(length)) if self._loses_all(length) else None

    def _loses_all(self, length: int) -> bool:
        """Whether a crop takes the last append whole, and nobody can tell any more what was known before it."""
        before = self._before
        since = self.since if before is None or length > before.length else before.since
        return 0 < length <= since

    def crop(self, length: int) -> None:
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
            self.context, self.weighing = before.context, before.weighing
        if length < self.weighing.end:  # what comes next is no part of what has been cropped
            self.weighing.end = -1
        self._cut(length)
        if loses_all:
            self._adopt_whole(*(whole[1:] if whole is not None and whole[0] == length else self._keep_whole(length)))

    def _cut(self, length: int) -> None:
        """Know nothing of the tokens from `length` on."""
        size = self.store.block_size
        self.evicted = min(self.evicted, length // size)
        self.weighing.border = min(self.weighing.border, self.evicted * size)
        self.average[:, :, length:] = 0.0
        self.kept[:, :, self.evicted * size :] = 0
        self.context.truncate(self.evicted * size)

    def select_rows(self, rows: np.ndarray) -> None:
        """Keep the rows of an index, in its order."""
        heads = self.store.num_kv_heads
        self.context.select_lists((rows[:, None] * heads + np.arange(heads)).ravel())
        self.average, self.kept, self.known = self.average[rows], self.kept[rows], self.known[rows]
        self.weighing.select_rows(rows)
        self._before = self._whole = None
        if self.near is not None:
            self.near.select_rows(rows)

    def unplace(self) -> None:
        """Nothing is resident any more, from here on."""
        self.settle()
        if self.near is not None:
            self.near.write_back()
            self.near = None
