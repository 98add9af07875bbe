"""A decode step with one memory: Numba kernels over the pool itself, nothing copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hf_offload.attention.again import AGAIN, EARLY, Again, EarlyAgain, begin_attending, begin_reading, may_repeat
from hf_offload.attention.ahead import Ahead
from hf_offload.attention.host_kernels import kernels_of
from hf_offload.attention.host_near import HostNear
from hf_offload.attention.plain_query import Foreseen
from hf_offload.attention.retrieval import Foresight, Properties, Retrieval
from hf_offload.attention.step import Near, Step
from hf_offload.attention.windowed import WindowKernels, attend_kept
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.token_writer import Writing
from hf_offload.cpu import choose as choosing
from hf_offload.cpu import decode as cpu_decode
from hf_offload.cpu import pool as movers
from hf_offload.cpu import select as selecting
from hf_offload.cpu.launch import Launch
from hf_offload.cpu.scoring import Digest
from hf_offload.cpu.selections import common_blocks, part_always
from hf_offload.cpu.standing import Kept, Standing
from hf_offload.cpu.together import Row
from hf_offload.policies.base import Plan, Selection


class HostStep(Step):
    """A step of a layer whose blocks all lie in the memory that the model computes in.

    Args:
        layer: the layer.
        query: `[B, Hq, D]` or `[B, Hq, 1, D]`, the real or the predicted query, or what computes it.
        length, scale, softcap: as in `Step`.
        token: this step's token, if it is still to be written.
    """

    def __init__(
        self, layer: HybridLayer, query: torch.Tensor | Foreseen, length: int, scale: float,
        softcap: float | None = None, token: Writing | None = None,
    ) -> None:  # fmt: skip
        super().__init__(layer, length, scale, softcap)
        self.kernels = kernels = kernels_of(layer, query.shape, ahead=length > self.store.length)
        taking, places, read = query.bring(kernels) if isinstance(query, Foreseen) else kernels.take(query)
        self._launches: tuple[Standing, ...] = (taking,)
        """What is still to be made, beginning with what brings this step's token and query."""
        self._numbers: tuple[int, ...] = places
        if token is not None:
            self._launches, self._numbers = (token.launch, taking), token.numbers + places
        self._row = kernels.first
        self._keep = token, read

    @property
    def query(self) -> np.ndarray:
        self.begin()
        return self.kernels.query

    def begin(self) -> None:
        if self._launches:
            row, launches, numbers = self._row, self._launches, self._numbers
            self._row, self._launches, self._numbers = self.kernels.others, (), ()
            row.run(launches, numbers)

    def _add(self, launch: Standing, number: int | None = None) -> None:
        """Have something launched, with its number if it takes one, as soon as a result is wanted (`begin`)."""
        self._launches += (launch,)
        if number is not None:
            self._numbers += (number,)

    # --- choosing blocks ---------------------------------------------------------------------------------------------

    @property
    def sinks(self) -> tuple[np.ndarray, np.ndarray]:
        """First block and end of each row's sinks, `[B]` each."""
        return self.store.padding.sinks(self.layer.policy.sink_tokens)

    def score(self, join: str) -> np.ndarray:
        self._choose(join, None)
        self.begin()
        return self.kernels.score

    def choose(self, join: str, blocks: int) -> tuple[np.ndarray, Selection]:
        self._choose(join, blocks)
        assert self.kernels.chosen is not None
        return self.kernels.score, self.kernels.chosen

    def _choose(self, join: str, blocks: int | None) -> None:
        """Score the sealed blocks, and choose so many by it unless that is None."""
        store, kernels = self.store, self.kernels
        digests, padding, sealed = store.digests, store.padding, store.sealed
        assert digests is not None, "a policy without a digest cannot score"
        kernels.make_room(store.num_kv_heads, sealed)
        if not digests.frozen or sealed == 0:  # no block has a digest, or all are padding
            kernels.score[:, :, :sealed] = -np.inf
            kernels.chosen = None if blocks is None else self.select(kernels.score, blocks)
            kernels.choosing.forget()
            return
        # What is there: a layer ahead, this step's own token is not.
        reads_tail = join != "raw" and sealed * self.block_size < store.length
        bundle = digests.bundle
        if bundle is None:
            bundle = digests.arrays(self.query, self.scale)
        low, high = self.sinks
        arrays = (bundle, store.table, store.pool.block_ptr, padding.valid, padding.holes, low, high, kernels.score)
        numbers = (join, blocks, sealed, self.num_blocks, self.recent_blocks, self.scale, reads_tail)
        standing = kernels.choosing.find(arrays, numbers)
        if standing is None:
            launch = self._choice(bundle, join, blocks, reads_tail)
            covered = min(padding.valid.shape[1], min(padding.holes.shape[1], store.table.shape[1]) * self.block_size)
            standing = kernels.choosing.keep(launch, arrays, numbers, length=covered)
        self._add(standing, store.length if reads_tail else 0)

    def _choice(self, bundle: Digest, join: str, blocks: int | None, reads_tail: bool) -> Launch:
        store, kernels = self.store, self.kernels
        unsealed, select = None, None
        if reads_tail:
            padding = store.padding
            unsealed = (store.pool.block_ptr, padding.holes, padding.valid, store.length, self.block_size)
        if blocks is not None:
            kernels.chosen, bounds = self._room(blocks, self.recent_blocks)
            chosen = (kernels.chosen.blocks, kernels.chosen.counts)
            select = (*bounds, self.recent_blocks, self.num_blocks, blocks, *chosen)
        tail = np.full(kernels.query.shape[:2], -np.inf, np.float32)
        return choosing.choose_blocks(
            kernels.query, bundle, store.table, store.sealed, kernels.masses, tail, kernels.score, join=join,
            scale=self.scale, kv_dtype=store.dtype, unsealed=unsealed, select=select,
        )  # fmt: skip

    def select(self, score: np.ndarray, blocks: int) -> Selection:
        return self._select(score, blocks, self.recent_blocks)

    def recent(self, blocks: int) -> Selection:
        unsealed, sinks = self.num_blocks - self.store.sealed, -(-self.layer.policy.sink_tokens // self.block_size)
        self.kernels.make_room(self.store.num_kv_heads, self.store.sealed)
        return self._select(self.kernels.score, 0, max(blocks - unsealed - sinks, 0))

    def _room(self, blocks: int, recent: int) -> tuple[Selection, tuple[np.ndarray, np.ndarray]]:
        """An empty selection for `blocks` blocks or those that are always kept, and the bounds of the sinks."""
        low, high = self.sinks
        always = max((high - low).tolist(), default=0) + recent + self.num_blocks - self.store.sealed
        shape = (self.store.batch, self.store.num_kv_heads)
        width = min(max(blocks, always), self.num_blocks)
        return Selection(np.empty((*shape, width), np.int32), np.empty(shape, np.int32)), (low, high)

    def _select(self, score: np.ndarray, blocks: int, recent: int) -> Selection:
        selection, bounds = self._room(blocks, recent)
        launch = selecting.select_blocks(
            score, self.store.sealed, self.num_blocks, *bounds, recent, blocks, selection.blocks, selection.counts
        )
        launch.run(self.label("selection"))
        return selection

    def all_blocks(self) -> Selection:
        shape = (self.store.batch, self.store.num_kv_heads)
        known = self.layer.everything
        if known is None or known.blocks.shape != (*shape, self.num_blocks):
            blocks = np.broadcast_to(np.arange(self.num_blocks, dtype=np.int32), (*shape, self.num_blocks))
            known = Selection(blocks.copy(), np.full(shape, self.num_blocks, np.int32))
            self.layer.everything = known
        return known

    def window(self) -> Selection:
        salience, shape = self.layer.salience, (self.store.batch, self.store.num_kv_heads)
        assert salience is not None
        return self.windowed.blocks(shape, salience.evicted, self.num_blocks)

    def resident_blocks(self) -> None:
        return None

    def split(self, selection: Selection) -> tuple[None, Selection]:
        return None, selection

    def split_early(self, selection: Selection) -> tuple[Selection, Selection]:
        here, there = self.kernels.parts(selection)
        arrays, numbers = (selection.blocks, selection.counts, *self.sinks), (self.store.sealed - self.recent_blocks,)
        standing = self.kernels.parting.find(arrays, numbers)
        if standing is None:
            launch = part_always(*arrays, *numbers, (here.blocks, here.counts), (there.blocks, there.counts))
            standing = self.kernels.parting.keep(launch, arrays, numbers)
        self._add(standing)
        return here, there

    # --- computing ---------------------------------------------------------------------------------------------------

    def attention(
        self, kept: Kept, host: Selection, kbar: np.ndarray | None, scores: np.ndarray | None = None,
        to: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> Standing:  # fmt: skip
        """The launch that attends blocks with this step's query, into the layer's `out` and `lse` or those given."""
        store, padding, kernels = self.store, self.store.padding, self.kernels
        arrays = (host.blocks, host.counts, store.table, store.pool.block_ptr, padding.valid, padding.holes, kbar,
                  scores)  # fmt: skip
        numbers = (self.scale, self.softcap)
        standing = kept.find(arrays, numbers)
        if standing is None:
            launch = cpu_decode.sparse_decode(
                kernels.query, store.pool.block_ptr, store.table, host.blocks, host.counts, padding.holes,
                padding.valid, self.length, *(to or (kernels.out, kernels.lse)), kbar, kv_dtype=store.dtype,
                block_size=self.block_size, scale=self.scale, softcap=self.softcap, packed=store.packs, scores=scores,
            )  # fmt: skip
            covered = min(padding.valid.shape[1], padding.holes.shape[1] * self.block_size)
            standing = kept.keep(launch, arrays, numbers, length=covered)
        return standing

    def attend_host(self, host: Selection) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend blocks now with this step's query: (out `[B, Hq, D]`, lse `[B, Hq]`) fp32, until the next step."""
        kernels = self.kernels
        self._add(self.attention(kernels.attending, host, None), self.length)
        self.begin()
        return kernels.out_tensor, kernels.lse_tensor

    def answer(self, host: Selection, ahead: Ahead | None, query: torch.Tensor) -> torch.Tensor:
        """`attend_host` and `give` in one, with what was attended early between them."""
        kernels, layer = self.kernels, self.layer
        given = kernels.give(query)
        self._add(self.attention(kernels.attending, host, None), self.length)
        if given is not None and ahead is None:
            self._add(*given[:2])
        launches, numbers, whole = self._launches, self._numbers, self._row is kernels.first
        self.begin()
        if ahead is not None:
            ahead.take_part(kernels, layer.stats)
        if given is None:
            return self.give(query)
        if ahead is not None:
            self._add(*given[:2])
            self.begin()
        token, read = self._keep
        if whole and token is not None and may_repeat(type(layer.policy)):
            giving = None if ahead is None else given[0]
            layer.kernels[AGAIN] = Again(layer, kernels, launches, giving, host, numbers[4] != 0, read, *token.keep)
        return given[2]

    def give(self, query: torch.Tensor) -> torch.Tensor:
        """What was attended, `[B, 1, Hq, D]`: a copy in the dtype of the query `[B, Hq, 1, D]`."""
        given = self.kernels.give(query)
        if given is None:
            self.begin()  # the token must be there after a step, whatever it launched
            return self.kernels.out_tensor.to(query.dtype, copy=True).unsqueeze(1)
        self._add(*given[:2])
        self.begin()
        return given[2]

    def attend_kept(self, plan: Plan, *, learn: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend the window and the kept tokens: as `attend_host`.

        Args:
            plan: its host part is the window.
            learn: whether the averages of the window's tokens take in this step's weights.
        """
        self.begin()
        attend_kept(self, plan, learn=learn)
        return self.kernels.out_tensor, self.kernels.lse_tensor

    @property
    def windowed(self) -> WindowKernels:
        """What this layer has prepared for a window and kept tokens."""
        found = self.kernels.windowed
        if found is None:
            found = self.kernels.windowed = WindowKernels(self.layer.index, self.kernels.query.shape)
        return found

    @property
    def _near(self) -> HostNear:
        found: HostNear | None = self.kernels.near
        if found is None:
            found = self.kernels.near = HostNear(self.layer, self.kernels.query)
        return found

    def attend_near(self) -> Near:
        self.begin()
        return self._near.attend(self)

    def retrieve(
        self, needs: Properties | Foresight, granularities: tuple[int, ...], near: Near | None = None
    ) -> Retrieval:
        self.begin()
        choice = self._near.choice
        if self._reserve(choice, granularities):
            self._near.retrieve(self, needs)
        else:
            choice.nothing()
        return choice

    def join_near(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """What `plan.near` and `plan.retrieved` attended: as `attend_host`."""
        return self._near.join(self, plan)

    def nothing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What `attend_host` gives for no block."""
        self.begin()
        return self.kernels.out_tensor.fill_(0.0), self.kernels.lse_tensor.fill_(float("-inf"))

    def attend_early(self, host: Selection, *, correct: bool) -> Ahead:
        # Blocks are read off the critical path: the arguments are checked here, where an error is the caller's.
        self._add(self.attention(self.kernels.starting, host, self.kernels.kbar if correct else None), self.length)
        row, launches, numbers = self._taken((host, correct))
        return begin_attending(self.layer, self.kernels, row, launches, numbers, self._keep, host, correct)

    def read_ahead(self, host: Selection) -> None:
        store, kernels = self.store, self.kernels
        arrays = host.blocks, host.counts, store.table, store.pool.block_ptr
        standing = kernels.reading.find(arrays, ())
        if standing is None:
            pool = store.pool
            packed = pool.packed_record_bytes if store.packs else 0
            launch = movers.touch_blocks(*arrays, store.sealed, pool.record_bytes, packed)
            standing = kernels.reading.keep(launch, arrays, (), sealed=store.table.shape[1])
        # The tail is being written, and may not even exist before this step's token arrives.
        self._add(standing)
        begin_reading(self.layer, kernels, *self._taken(None), self._keep)

    def _taken(self, attended: tuple[Selection, bool] | None) -> tuple[Row, tuple[Standing, ...], tuple[int, ...]]:
        """What the worker is to launch and the numbers of it; known from now on as what the next step begins with."""
        kernels, row, launches, numbers = self.kernels, self._row, self._launches, self._numbers
        self._row, self._launches, self._numbers = kernels.others, (), ()
        within = self.store.length % self.block_size != 0  # the first token of a block has no tail before it
        chooses, query = kernels.choosing.standing in launches, self._keep[1]
        if row is kernels.first and within and chooses and isinstance(query, Foreseen):
            self.layer.kernels[EARLY] = EarlyAgain(self.layer, kernels, launches, numbers[3] != 0, query, attended)
        return row, launches, numbers

    # --- moving and counting -----------------------------------------------------------------------------------------

    def learn(self, score: np.ndarray, smoothing: float) -> None:
        """There is no resident set to tell."""

    def recall(self, plan: Plan, clock: Any) -> None:
        """There is nothing to exchange."""

    def compare(self, predicted: Selection, wanted: Selection) -> None:
        self.begin()
        common = common_blocks(predicted.blocks, predicted.counts, wanted.blocks, wanted.counts)
        self.layer.stats.selection_overlap += common / max(wanted.total, 1)
        self.layer.stats.selections += 1
