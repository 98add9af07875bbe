"""A decode step with one memory: planned once, then run by compiled calls over the pool itself; nothing is copied."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hf_offload.attention.merge import merge_partials
from hf_offload.attention.step import Step
from hf_offload.cache.layer import HybridLayer
from hf_offload.cache.view import View
from hf_offload.cpu.kernels import block_topk as choosing
from hf_offload.cpu.kernels import block_topk as selecting
from hf_offload.cpu.kernels import move_records as movers
from hf_offload.cpu.kernels import sparse_decode as cpu_decode
from hf_offload.cpu.kernels.digest_scores import CHUNK_BLOCKS, Digest
from hf_offload.cpu.kernels.merge import join_parts
from hf_offload.cpu.launch import TAGS, Launch, LaunchSequence
from hf_offload.cpu.simd.convert import SHORT, narrow, widen
from hf_offload.policies.base import EVER, Partial, Plan, RunningPartial, Selection
from hf_offload.scores import Scores

LIST_BLOCKS = 16
"""A list of all blocks has room for a multiple of this, known from the length alone: attention is rounded by it."""

Word = tuple[memoryview, int]
"""A number of a launch that changes from step to step."""


class Form(NamedTuple):
    """What a step's launches are made for, beside the view.

    Args:
        query: shape, strides and dtype, as the model gives it.
        key, value: strides.
        scores: the model's.
        fresh: whether the token is still to be written: layers may share keys and values.
        sinks: whether the model has attention sinks.
    """

    query: tuple[torch.Size, tuple[int, ...], torch.dtype]
    key: tuple[int, ...]
    value: tuple[int, ...]
    scores: Scores
    fresh: bool = False
    sinks: bool = False

    @property
    def readable(self) -> bool:
        """Whether launches can read such tensors as they are."""
        return self.query[2] in TAGS and self.query[1][-1] == self.key[-1] == self.value[-1] == 1


class StepBuffers:
    """Where the launches of one layer read queries of one shape and write what they attend, good until the next step.

    Args:
        shape: (B, Hq, D) of the query.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        with torch.inference_mode(False):  # written in inference mode and out of it
            self.out_tensor, self.lse_tensor = torch.empty(shape), torch.empty(shape[:2])
        self.query = np.empty(shape, np.float32)
        self.out, self.lse = self.out_tensor.numpy(), self.lse_tensor.numpy()
        self._partials = [Partial(self.out, self.lse)]
        self.masses = np.empty((*shape[:2], 0), np.float32)
        self.score = np.empty((shape[0], 0, 0), np.float32)
        """`[B, Hkv, N]`, of the last choice."""

    @functools.cached_property
    def nothing(self) -> Partial:
        """A partial over no key."""
        return Partial(np.zeros_like(self.out), np.full_like(self.lse, -np.inf))

    def partial(self, i: int) -> Partial:
        """Where the i-th partial of a plan may lie; the first one lies in `out` and `lse`."""
        while len(self._partials) <= i:
            self._partials.append(Partial(np.empty_like(self.out), np.full_like(self.lse, -np.inf)))
        return self._partials[i]

    def make_room(self, kv_heads: int, blocks: int) -> None:
        """Have room for the masses and the score of so many blocks."""
        if self.score.shape[1] != kv_heads or self.score.shape[2] < blocks:
            width = (max(blocks * 5 // 4, 64) + 15) // 16 * 16
            self.masses = np.empty((*self.masses.shape[:2], width), np.float32)
            self.score = np.empty((self.score.shape[0], kv_heads, width), np.float32)


def buffers_of(layer: HybridLayer, shape: torch.Size) -> StepBuffers:
    """A layer's buffers for queries `[B, Hq, …, D]`."""
    found: StepBuffers | None = layer.kernels.get(shape)
    if found is None:
        found = layer.kernels[shape] = StepBuffers((*shape[:2], shape[-1]))
    return found


Action = Callable[["HostStep"], None]
"""What Python does between launches."""


class HostStep(Step):
    """The decode steps of a layer whose blocks all lie in the memory that the model computes in.

    A policy's plan puts launches into a queue. Where the plan serves later steps, too (`Plan.until`), these run the
    same launches again with other numbers, without asking the policy. Nothing in here holds the step or the layer,
    which holds the step: a cache is freed when its last user lets go of it.

    Args:
        layer: the layer.
        view: what the launches read.
        form: what they are made for.
        query: `[B, Hq, D]` or `[B, Hq, 1, D]`, its last dimension contiguous.
        length: tokens of a row, this step's own included.
        key, value: `[B, Hkv, 1, D]`, if they are to be written.

    Raises:
        ValueError: the view does not cover so many tokens.
    """

    def __init__(
        self, layer: HybridLayer, view: View, form: Form, query: torch.Tensor, length: int,
        key: torch.Tensor | None = None, value: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(layer, length, form.scores)
        self.view, self.form, self.buffers = view, form, buffers_of(layer, query.shape)
        self.model_sinks: torch.Tensor | None = None
        """`[Hq]`, of models that have attention sinks."""
        self._blocks = self.store.sealed, self.num_blocks
        taking = self._launch(widen(query, self.buffers.query), "the query")
        self._arrival, self._places = [taking], [taking.word("source")]
        if key is not None and value is not None:
            last = view.covered - 1  # set at each step
            writing = movers.write_tokens(key, value, view.block_ptr, view.table, last, self.block_size)
            self._arrival.insert(0, self._launch(writing, "an append"))
            self._places += [writing.word(name) for name in ("keys", "values", "start")]
        for launch in self._arrival:
            launch.keep = ()  # it gets other tensors at each step
        self._departure: Launch | None = None
        self._target: Word | None = None
        self._answer = query.new_empty(0)
        self._begin_plan()
        self._arrive(query, key, value, length)

    @property
    def layer(self) -> HybridLayer:
        layer = self._layer()
        assert layer is not None, "a step belongs to its layer"
        return layer

    @layer.setter
    def layer(self, layer: HybridLayer) -> None:
        self._layer = weakref.ref(layer)

    # --- planning and running ----------------------------------------------------------------------------------------

    def _begin_plan(self) -> None:
        self.plan: Plan | None = None
        self._queue: list[Launch | Action] = [*self._arrival]
        self._actions: list[LaunchSequence | Action] = []
        self._lengths: list[Word] = []
        self._block_numbers: list[tuple[Word, Word]] = []
        self._all_counts: np.ndarray | None = None
        self._partials = 0
        self._served = range(EVER)
        """The numbers of blocks for which the launches are good."""
        self._conditions: list[Callable[[], bool]] = []

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, model_sinks: torch.Tensor | None, length: int
    ) -> torch.Tensor:
        """Write a token and attend with it: `[B, 1, Hq, D]` in the dtype of `form`.

        Args:
            query, key, value: of the form that this step is made for.
            model_sinks: `[Hq]`, of models that have attention sinks.
            length: tokens of a row, this one included.

        Raises:
            ValueError: the view does not cover so many tokens.
            MemoryError: a launch could not do all its tasks.
        """
        (batch, heads, _, dim), _, dtype = self.form.query
        self._answer = answer = query.new_empty((batch, 1, heads, dim), dtype=dtype)
        self.model_sinks, self.length, self.num_blocks = model_sinks, length, -(-length // self.block_size)
        self._arrive(query, key, value, length)
        if not self._serves():
            self._make_plan()
            return answer
        self._set_numbers()
        for action in self._actions:
            action.run() if isinstance(action, LaunchSequence) else action(self)
        return answer

    def _make_plan(self) -> None:
        self._begin_plan()
        plan = self.layer.policy.plan(self)
        self._merge(plan.partials)
        if self.form.sinks:
            self._queue.append(_merge_sinks)
        self._give()
        self.serve(range(plan.until))
        self._flush()
        self.plan = plan

    def _serves(self) -> bool:
        """Whether the launches of the last plan are good for this step, too."""
        return (
            self.plan is not None
            and self.num_blocks in self._served
            and self.store.sealed == self.num_blocks - 1
            and (not self._conditions or all(holds() for holds in self._conditions))
        )

    def _arrive(self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, length: int) -> None:
        """Write where a token's tensors are into the launches that take them."""
        if not 0 < length <= self.view.covered:
            raise ValueError(f"length {length} is not within 1..{self.view.covered}, which the arrays cover")
        self._alive = query, key, value
        words, i = self._places[0]
        words[i] = query.data_ptr()
        if key is not None and value is not None and len(self._places) > 1:
            (keys, i), (values, j), (starts, k) = self._places[1:]
            keys[i], values[j], starts[k] = key.data_ptr(), value.data_ptr(), length - 1

    def _set_numbers(self) -> None:
        """Write what depends on the length into the other launches."""
        length, blocks = self.length, (self.store.sealed, self.num_blocks)
        for words, i in self._lengths:
            words[i] = length
        if self._target is not None:
            words, i = self._target
            words[i] = self._answer.data_ptr()
        if blocks != self._blocks:  # of layers that share a block that is full, one sees it sealed, the next begun
            self._blocks = blocks
            for (words, i), (others, j) in self._block_numbers:
                words[i], others[j] = blocks
            if self._all_counts is not None:
                self._all_counts.fill(self.num_blocks)

    def begin(self) -> None:
        """Run what is in the queue now: a plan that looks at results is made anew at each step."""
        self.serve(range(0))
        self._flush()

    def _flush(self) -> None:
        queue, self._queue = self._queue, []
        actions: list[LaunchSequence | Action] = []
        for _, group in itertools.groupby(queue, lambda item: isinstance(item, Launch)):
            items = list(group)
            actions += [LaunchSequence(items)] if isinstance(items[0], Launch) else items  # type: ignore[arg-type]
        self._actions += actions
        self._blocks = self.store.sealed, self.num_blocks
        for action in actions:
            action.run() if isinstance(action, LaunchSequence) else action(self)

    def _launch(self, launch: Launch, what: str) -> Launch:
        launch.label = f"{what} of layer {self.layer.index}"
        return launch

    def add(self, launch: Launch, what: str, *, length: bool = False) -> None:
        """Put a launch into the queue.

        Args:
            launch: to be run in every step that this plan serves.
            what: what an error message calls it.
            length: whether it has a number `length`, the tokens of a row.
        """
        self._queue.append(self._launch(launch, what))
        if length:
            words, i = launch.word("length")
            words[i] = self.length
            self._lengths.append((words, i))

    def then(self, action: Action) -> None:
        """Put something into the queue that Python does in every step that this plan serves; it gets the step."""
        self._queue.append(action)

    def as_long_as(self, holds: Callable[[], bool]) -> None:
        """Let this plan serve later steps only where this is true."""
        self._conditions.append(holds)

    def serve(self, blocks: range) -> None:
        """Let this plan serve steps with so many blocks alone."""
        self._served = range(max(self._served.start, blocks.start), min(self._served.stop, blocks.stop))

    def serve_this_block(self) -> None:
        """Let this plan serve until the next block begins."""
        self.serve(range(self.num_blocks, self.num_blocks + 1))

    # --- choosing blocks ---------------------------------------------------------------------------------------------

    @property
    def query(self) -> np.ndarray:
        self.begin()
        return self.buffers.query

    @property
    def sinks(self) -> tuple[np.ndarray, np.ndarray]:
        """First block and end of each row's sinks, `[B]` each."""
        return self.store.padding.sinks(self.layer.requirements.sinks)

    def score(self, join: str) -> np.ndarray:
        self._choose(join, None)
        self.begin()
        return self.buffers.score

    def choose(self, join: str, blocks: int) -> tuple[np.ndarray, Selection]:
        selection = self._choose(join, blocks)
        assert selection is not None
        return self.buffers.score, selection

    def _choose(self, join: str, blocks: int | None) -> Selection | None:
        """Score the sealed blocks, and choose so many by it unless that is None."""
        store, buffers = self.store, self.buffers
        digests, sealed, size = store.digests, store.sealed, self.block_size
        assert digests is not None, "a policy without a digest cannot score"
        if not digests.frozen or sealed == 0:  # no block has a digest, or all are padding
            buffers.make_room(store.num_kv_heads, sealed)
            buffers.score[:, :, :sealed] = -np.inf
            return None if blocks is None else self.select(buffers.score, blocks)
        # Good for as many blocks as make the same number of tasks.
        chunk = CHUNK_BLOCKS
        first = (sealed - 1) // chunk * chunk + 1
        last = min(first + chunk - 1, self.view.table.shape[1], self.view.holes.shape[1] - 1)
        buffers.make_room(store.num_kv_heads, last)
        unsealed, select, selection = None, None, None
        if join != "raw" and sealed * size < store.length:  # what is there: a layer ahead, this step's token is not
            unsealed = (self.view.block_ptr, self.view.holes, self.view.valid, store.length, size)
        if blocks is not None:
            selection, bounds = self._room(blocks, self.recent_blocks, last + 1)
            chosen = (selection.blocks, selection.counts)
            select = (*bounds, self.recent_blocks, last + 1, blocks, *chosen)
        tail = np.full(buffers.query.shape[:2], -np.inf, np.float32)
        launch = choosing.choose_blocks(
            buffers.query, self._digest(), store.table, last, buffers.masses, tail, buffers.score, join=join,
            **self.scores._asdict(), kv_dtype=store.dtype, unsealed=unsealed, select=select,
        )  # fmt: skip
        self.add(launch, "the choice of blocks", length=unsealed is not None)
        numbers = launch.word("n_sealed"), launch.word("n_blocks")
        for (words, i), value in zip(numbers, (sealed, self.num_blocks), strict=True):
            words[i] = value
        self._block_numbers.append(numbers)
        self.serve(range(first + 1, last + 2))
        return selection

    def _digest(self) -> Digest:
        """What blocks are scored with; where that is made of the query, by Python behind what brings the query."""
        digests, query = self.store.digests, self.buffers.query
        assert digests is not None
        bundle = digests.arrays(query, self.scores.scale)
        if digests.of_query:
            self.then(lambda step: digests.fill(bundle, query, step.scores.scale))
        return bundle

    def select(self, score: np.ndarray, blocks: int) -> Selection:
        return self._select(score, blocks, self.recent_blocks)

    def recent(self, blocks: int) -> Selection:
        unsealed, sinks = self.num_blocks - self.store.sealed, -(-self.layer.requirements.sinks // self.block_size)
        self.buffers.make_room(self.store.num_kv_heads, self.store.sealed)
        return self._select(self.buffers.score, 0, max(blocks - unsealed - sinks, 0))

    def _room(self, blocks: int, recent: int, most: int) -> tuple[Selection, tuple[np.ndarray, np.ndarray]]:
        """An empty selection for `blocks` of `most`, or those that are always kept, and the bounds of the sinks."""
        low, high = self.sinks
        always = max((high - low).tolist(), default=0) + recent + self.num_blocks - self.store.sealed
        shape = (self.store.batch, self.store.num_kv_heads)
        width = min(max(blocks, always), most)
        return Selection(np.empty((*shape, width), np.int32), np.empty(shape, np.int32)), (low, high)

    def _select(self, score: np.ndarray, blocks: int, recent: int) -> Selection:
        """Select now, by a score that is there."""
        selection, bounds = self._room(blocks, recent, self.num_blocks)
        launch = selecting.select_blocks(
            score, self.store.sealed, self.num_blocks, *bounds, recent, blocks, selection.blocks, selection.counts
        )
        launch.run(self.label("selection"))
        self.serve_this_block()
        return selection

    def all_blocks(self) -> Selection:
        shape, last = (self.store.batch, self.store.num_kv_heads), -(-self.num_blocks // LIST_BLOCKS) * LIST_BLOCKS
        blocks = np.broadcast_to(np.arange(last, dtype=np.int32), (*shape, last)).copy()
        self._all_counts = counts = np.full(shape, self.num_blocks, np.int32)
        self.serve(range(last - LIST_BLOCKS + 1, last + 1))
        return Selection(blocks, counts)

    def blocks_from(self, first: int) -> Selection:
        shape = (self.store.batch, self.store.num_kv_heads, self.num_blocks - first)
        blocks = np.broadcast_to(np.arange(first, self.num_blocks, dtype=np.int32), shape).copy()
        self.serve_this_block()
        return Selection(blocks, np.full(shape[:2], shape[2], np.int32))

    def blocks(self, numbers: Sequence[int]) -> Selection:
        listed, shape = self._listed(numbers), (self.store.batch, self.store.num_kv_heads)
        self.serve_this_block()
        wide = np.broadcast_to(listed, (*shape, len(listed))).copy()
        return Selection(wide, np.full(shape, len(listed), np.int32))

    def resident_blocks(self) -> None:
        return None

    def split(self, selection: Selection) -> tuple[None, Selection]:
        return None, selection

    def attend_split(self, device: Selection | None, host: Selection | None) -> tuple[Partial, ...]:
        return () if host is None else (self.attention(host, "CPU attention"),)

    # --- computing ---------------------------------------------------------------------------------------------------

    def room(self) -> Partial:
        """Buffers of the layer for one more partial of this plan, good until the next step."""
        self._partials += 1
        return self.buffers.partial(self._partials - 1)

    def attention(
        self, host: Selection, what: str, scores: np.ndarray | None = None, to: Partial | None = None
    ) -> Partial:
        """Queue attention to blocks with this step's query.

        Args:
            host: the blocks.
            what: what an error message calls it.
            scores: as `cpu.kernels.sparse_decode.sparse_decode` has it.
            to: where the result goes; None: to `room`.

        Returns:
            What is there once the queue has run.
        """
        store, view, buffers, to = self.store, self.view, self.buffers, to or self.room()
        launch = cpu_decode.sparse_decode(
            buffers.query, view.block_ptr, view.table, host.blocks, host.counts, view.holes, view.valid, view.covered,
            *to, None, kv_dtype=store.dtype, block_size=self.block_size,
            **self.scores._asdict(), packed=store.format.packs, scores=scores,
        )  # fmt: skip
        self.add(launch, what, length=True)
        return to

    def attend_host(self, host: Selection) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend blocks now with this step's query: (out `[B, Hq, D]`, lse `[B, Hq]`) fp32, until the next step."""
        self.attention(host, "CPU attention", to=self.buffers.partial(0))
        self.begin()
        return self.buffers.out_tensor, self.buffers.lse_tensor

    def _merge(self, partials: Sequence[Partial | RunningPartial]) -> None:
        """Queue the merge of a plan's partials into the layer's `out` and `lse`."""
        own = self.buffers.partial(0)
        others = [_arrays(partial) for partial in partials]
        others = [other for other in others if other.out.ctypes.data != own.out.ctypes.data]
        if len(others) == len(partials):
            self.then(_attend_nothing)
        for first in range(0, len(others), 2):
            one, two = (*others[first : first + 2], self.buffers.nothing)[:2]
            self.add(join_parts(*own, one, two), "the merge of partials")

    def _give(self) -> None:
        """Queue the copy of what was attended into this step's answer."""
        if self._answer.dtype not in SHORT:
            self.then(_copy_answer)
            return
        if self._departure is None:
            out = self.buffers.out
            self._departure = self._launch(narrow(out.reshape(len(out), -1), self._answer), "the output")
            self._departure.keep = ()
            self._target = self._departure.word("target")
        assert self._target is not None
        words, i = self._target
        words[i] = self._answer.data_ptr()
        self._queue.append(self._departure)

    # --- moving and counting -----------------------------------------------------------------------------------------

    def learn(self, score: np.ndarray, smoothing: float) -> None:
        """There is no resident set to tell."""

    def recall(self, plan: Plan, clock: object) -> None:
        """There is nothing to exchange."""


def _arrays(partial: Partial | RunningPartial) -> Partial:
    """A partial whose launches are queued, or that is there, as arrays that a launch can read.

    Raises:
        ValueError: it runs beside the model, which waits for nobody here.
    """
    if isinstance(partial, RunningPartial):
        raise ValueError("with one memory no part of a plan runs beside the model; ask step.layer.has_slots")
    out, lse = (torch.as_tensor(x).float().contiguous().numpy() for x in (partial.out, partial.lse))
    return Partial(out, lse)


def _attend_nothing(step: HostStep) -> None:
    step.buffers.out_tensor.fill_(0.0)
    step.buffers.lse_tensor.fill_(float("-inf"))


def _merge_sinks(step: HostStep) -> None:
    """The model's attention sinks take their share of the softmax."""
    assert step.model_sinks is not None
    out, lse = step.buffers.out_tensor, step.buffers.lse_tensor
    out.copy_(merge_partials([(out, lse)], step.model_sinks.float().view(1, -1))[0])


def _copy_answer(step: HostStep) -> None:
    step._answer.copy_(step.buffers.out_tensor.unsqueeze(1))


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that launches can read: of a dtype that they know, the last dimension contiguous."""
    if tensor.dtype not in TAGS:
        tensor = tensor.float()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
