"""Decode steps with one memory: launches are planned once, then run by compiled calls on the pool's blocks in place."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from hf_offload.attention.checking import Outcome, check
from hf_offload.attention.draw import Draw
from hf_offload.attention.merge import merge_partials
from hf_offload.attention.step import Step
from hf_offload.blocks.view import View
from hf_offload.cache.layer import HybridLayer
from hf_offload.cpu.kernels import block_topk
from hf_offload.cpu.kernels import move_records as movers
from hf_offload.cpu.kernels.decode_attention import decode_attention
from hf_offload.cpu.kernels.digest_scores import CHUNK_BLOCKS, Digest
from hf_offload.cpu.kernels.draw_pairs import Always
from hf_offload.cpu.kernels.merge import join_parts
from hf_offload.cpu.launch import TAGS, Launch, LaunchSequence
from hf_offload.cpu.simd.convert import SHORT, narrow, widen
from hf_offload.policies.base import EVER, Estimate, HostPartial, Partial, Plan, Selection
from hf_offload.scores import Scores

LIST_BLOCKS = 16
"""Granularity of the list of all blocks. Its size affects rounding, so that it depends on the length alone."""

Word = tuple[memoryview, int]
"""A launch argument that changes from step to step: an array of words and an index."""


class Form(NamedTuple):
    """Properties of a step's inputs that its launches are made for.

    Args:
        query: shape, strides and dtype of the model's query.
        key, value: strides of the model's key and value.
        scores: parameters of the model's scores.
        fresh: whether the step writes its token; not if layers share keys and values and another one has written it.
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
        """Whether launches can read such tensors: a known dtype, the last dimension contiguous."""
        return self.query[2] in TAGS and {self.query[1][-1], *self.key[-1:], *self.value[-1:]} == {1}


class StepBuffers:
    """Buffers of one layer for queries of one shape: query, scores and partials, valid until the next step.

    Args:
        shape: (B, Hq, D) of the query.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        with torch.inference_mode(False):  # no inference tensors, which cannot be written outside inference mode
            self.out_tensor = torch.empty(shape, dtype=torch.float32, device="cpu")
            self.lse_tensor = torch.empty(shape[:2], dtype=torch.float32, device="cpu")
        self.query = np.empty(shape, np.float32)
        self.out, self.lse = self.out_tensor.numpy(), self.lse_tensor.numpy()
        self._partials = [Partial(self.out, self.lse)]
        self.masses = np.empty((*shape[:2], 0), np.float32)
        self.score = np.empty((shape[0], 0, 0), np.float32)
        """fp32 `[B, Hkv, N]`, scores of the last choice."""

    @functools.cached_property
    def nothing(self) -> Partial:
        """An empty partial: lse −inf."""
        return Partial(np.zeros_like(self.out), np.full_like(self.lse, -np.inf))

    def partial(self, i: int) -> Partial:
        """Return the buffers of a plan's i-th partial; the first are `out` and `lse`."""
        while len(self._partials) <= i:
            self._partials.append(Partial(np.empty_like(self.out), np.full_like(self.lse, -np.inf)))
        return self._partials[i]

    def make_room(self, kv_heads: int, blocks: int) -> None:
        """Grow the masses and scores to at least `blocks` blocks."""
        if self.score.shape[1] != kv_heads or self.score.shape[2] < blocks:
            width = (max(blocks * 5 // 4, 64) + 15) // 16 * 16
            self.masses = np.empty((*self.masses.shape[:2], width), np.float32)
            self.score = np.empty((self.score.shape[0], kv_heads, width), np.float32)


def buffers_of(layer: HybridLayer, shape: torch.Size) -> StepBuffers:
    """Return a layer's buffers for queries `[B, Hq, …, D]`."""
    buffers: StepBuffers | None = layer.step_buffers.get(shape)
    if buffers is None:
        buffers = layer.step_buffers[shape] = StepBuffers((*shape[:2], shape[-1]))
    return buffers


Action = Callable[["CpuStep"], None]
"""Python code that runs between launches."""


class CpuStep(Step):
    """Decode steps of a layer with one memory.

    A policy's plan queues launches. While the plan is valid for later steps (`Plan.until`), they run the same launches
    with new arguments, without a call of the policy. The queue holds no reference to the step or the layer, so that a
    cache is freed with its last reference.

    Args:
        layer: the layer.
        view: the arrays that the launches read.
        form: properties of the inputs that the launches are made for.
        query: `[B, Hq, D]` or `[B, Hq, 1, D]`.
        length: tokens of a row, including this step's.
        key, value: `[B, Hkv, 1, D]`, which a fresh form writes.

    Raises:
        ValueError: the view does not cover `length` tokens.
    """

    def __init__(
        self, layer: HybridLayer, view: View, form: Form, query: torch.Tensor, length: int,
        key: torch.Tensor | None = None, value: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(layer, length, form.scores)
        self.view, self.form, self.buffers = view, form, buffers_of(layer, query.shape)
        self.query_shape = query.shape[0], query.shape[1]
        self._readable = form.readable
        query = readable(query)
        self.model_sinks: torch.Tensor | None = None
        """`[Hq]`, logits of the model's attention sinks, or None."""
        self._blocks = self.store.sealed, self.num_blocks
        query_launch = self._launch(widen(query, self.buffers.query), "the query")
        self._input_launches, self._input_words = [query_launch], [query_launch.word("source")]
        if form.fresh:
            assert key is not None
            assert value is not None
            key, value = readable(key), readable(value)
            last = view.covered - 1  # each step writes its own number
            token_launch = movers.write_tokens(
                key, value, view.blocks.block_ptr, view.blocks.table, last, self.block_size
            )
            self._input_launches.insert(0, self._launch(token_launch, "an append"))
            self._input_words += [token_launch.word(name) for name in ("keys", "values", "start")]
        for launch in self._input_launches:
            launch.keep = ()  # each step passes other tensors
        self._output_launch: Launch | None = None
        self._output_word: Word | None = None
        self._output = query.new_empty(0)
        self._begin_plan()
        self._write_addresses(query, key, value, length)

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
        self._queue: list[Launch | Action] = [*self._input_launches]
        self._actions: list[LaunchSequence | Action] = []
        self._lengths: list[Word] = []
        self._block_numbers: list[tuple[Word, ...]] = []
        self._all_counts: np.ndarray | None = None
        self._partials = 0
        self._estimate: Estimate | None = None
        self._valid_blocks = range(EVER)
        """Numbers of blocks for which the launches are valid."""
        self._conditions: list[Callable[[], bool]] = []

    def run(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, model_sinks: torch.Tensor | None, length: int
    ) -> torch.Tensor:
        """Write a token and attend with it.

        Args:
            query, key, value: tensors of this step's form.
            model_sinks: `[Hq]`, logits of the model's attention sinks, or None.
            length: tokens of a row, including this one.

        Returns:
            `[B, 1, Hq, D]` in the form's dtype.

        Raises:
            ValueError: the view does not cover `length` tokens.
            MemoryError: a launch did not complete all its tasks.
        """
        (batch, heads, _, dim), _, dtype = self.form.query
        self._output = output = query.new_empty((batch, 1, heads, dim), dtype=dtype)
        self.model_sinks, self.length, self.num_blocks = model_sinks, length, -(-length // self.block_size)
        if not self._readable:
            query, key, value = readable(query), readable(key), readable(value)
        self._write_addresses(query, key, value, length)
        if not self._serves():
            self._make_plan()
            return output
        self._set_numbers()
        for action in self._actions:
            action.run() if isinstance(action, LaunchSequence) else action(self)
        return output

    def _make_plan(self) -> None:
        self._begin_plan()
        plan = self.make_plan()
        self._merge(plan.partials)
        if self.form.sinks:
            self._queue.append(_merge_sinks)
        self._queue_output()
        self.serve(range(plan.until))
        self._flush()
        self.plan = plan

    def _serves(self) -> bool:
        """Whether the last plan's launches are valid for this step."""
        return (
            self.plan is not None
            and self.num_blocks in self._valid_blocks
            and self.store.sealed == self.num_blocks - 1
            and (not self._conditions or all(holds() for holds in self._conditions))
        )

    def _write_addresses(
        self, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None, length: int
    ) -> None:
        """Write the addresses of a token's tensors into the launches that read them."""
        if not 0 < length <= self.view.covered:
            raise ValueError(f"length {length} is not within 1..{self.view.covered}, which the arrays cover")
        self._inputs = query, key, value
        words, i = self._input_words[0]
        words[i] = query.data_ptr()
        if key is not None and value is not None and self.form.fresh:
            (keys, i), (values, j), (starts, k) = self._input_words[1:]
            keys[i], values[j], starts[k] = key.data_ptr(), value.data_ptr(), length - 1

    def _set_numbers(self) -> None:
        """Write the numbers that depend on the length into the other launches."""
        length, blocks = self.length, (self.store.sealed, self.num_blocks)
        for words, i in self._lengths:
            words[i] = length
        if self._output_word is not None:
            words, i = self._output_word
            words[i] = self._output.data_ptr()
        if blocks != self._blocks:  # a block was sealed or begun, perhaps by a layer that shares it
            self._blocks = blocks
            for numbers in self._block_numbers:
                for (words, i), value in zip(numbers, blocks, strict=False):
                    words[i] = value
            if self._all_counts is not None:
                self._all_counts.fill(self.num_blocks)

    def begin(self) -> None:
        """Run the queued launches now. A plan that reads results is valid for this step only."""
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
        """Queue a launch for all steps of this plan.

        Args:
            launch: the launch.
            what: its name in error messages.
            length: whether it has an argument `length`, the tokens of a row.
        """
        self._queue.append(self._launch(launch, what))
        if length:
            words, i = launch.word("length")
            words[i] = self.length
            self._lengths.append((words, i))

    def then(self, action: Action) -> None:
        """Queue a Python callable for all steps of this plan; it is called with the step."""
        self._queue.append(action)

    def as_long_as(self, holds: Callable[[], bool]) -> None:
        """Reuse this plan in later steps only while `holds()` is true."""
        self._conditions.append(holds)

    def serve(self, blocks: range) -> None:
        """Restrict this plan to steps whose number of blocks is in a range."""
        self._valid_blocks = range(
            max(self._valid_blocks.start, blocks.start), min(self._valid_blocks.stop, blocks.stop)
        )

    def serve_this_block(self) -> None:
        """Restrict this plan to steps before the next block begins."""
        self.serve(range(self.num_blocks, self.num_blocks + 1))

    # --- choosing blocks ---------------------------------------------------------------------------------------------

    @property
    def query(self) -> np.ndarray:
        self.begin()
        return self.buffers.query

    @property
    def sinks(self) -> tuple[np.ndarray, np.ndarray]:
        """First block and end of each row's sinks, int `[B]` each."""
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
        """Queue the scoring of the sealed blocks and, unless `blocks` is None, the choice of as many blocks."""
        store, buffers = self.store, self.buffers
        sealed, size = store.sealed, self.block_size
        if sealed == 0 or store.awaits_digests:
            buffers.make_room(store.num_kv_heads, sealed)
            buffers.score[:, :, :sealed] = -np.inf
            return None if blocks is None else self.select(buffers.score, blocks)
        last = self._last_sealed()
        buffers.make_room(store.num_kv_heads, last)
        unsealed, select, selection = None, None, None
        if join != "raw" and sealed * size < store.length:  # without the token of a predicted query
            unsealed = self.view.blocks
        if blocks is not None:
            selection, bounds = self._new_selection(blocks, self.recent_blocks, last + 1)
            chosen = (selection.items, selection.counts)
            select = (*bounds, self.recent_blocks, last + 1, blocks, *chosen)
        tail = np.full(buffers.query.shape[:2], -np.inf, np.float32)
        launch = block_topk.choose_blocks(
            buffers.query, self._digest(), store.table, last, buffers.masses, tail, buffers.score, join=join,
            **self.scores._asdict(), kv_dtype=store.dtype, unsealed=unsealed, length=store.length, select=select,
        )  # fmt: skip
        self.add(launch, "the choice of blocks", length=unsealed is not None)
        self._number_blocks(launch, "n_sealed", "n_blocks")
        return selection

    def _last_sealed(self) -> int:
        """The largest number of sealed blocks that gives a scoring launch as many tasks as now; serve no others."""
        first = (self.store.sealed - 1) // CHUNK_BLOCKS * CHUNK_BLOCKS + 1
        held = self.view.blocks
        last = min(first + CHUNK_BLOCKS - 1, held.table.shape[1], held.holes.shape[1] - 1)
        self.serve(range(first + 1, last + 2))
        return int(last)

    def _number_blocks(self, launch: Launch, *names: str) -> None:
        """Write the numbers of sealed and of all blocks into a launch's scalars of these names, now and later."""
        numbers = tuple(launch.word(name) for name in names)
        for (words, i), value in zip(numbers, (self.store.sealed, self.num_blocks), strict=False):
            words[i] = value
        self._block_numbers.append(numbers)

    def _digest(self) -> Digest:
        """Return the digest arrays for scoring. If they depend on the query, queue their computation in Python."""
        digests, query = self.digests, self.buffers.query
        bundle = digests.arrays(query, self.scores.scale)
        if digests.of_query:
            self.then(lambda step: digests.fill(bundle, query, step.scores.scale))
        return bundle

    def recent(self, blocks: int) -> Selection:
        unsealed, sinks = self.num_blocks - self.store.sealed, -(-self.layer.requirements.sinks // self.block_size)
        self.buffers.make_room(self.store.num_kv_heads, self.store.sealed)
        return self.select(self.buffers.score, 0, max(blocks - unsealed - sinks, 0))

    def _new_selection(self, blocks: int, recent: int, most: int) -> tuple[Selection, tuple[np.ndarray, np.ndarray]]:
        """Return an uninitialized selection and the bounds of the sinks.

        Args:
            blocks: blocks to select; the selection has room for more if more are always attended.
            recent: newest sealed blocks that are always attended.
            most: number of all blocks, the largest width.
        """
        low, high = self.sinks
        always = max((high - low).tolist(), default=0) + recent + self.num_blocks - self.store.sealed
        shape = (self.store.batch, self.store.num_kv_heads)
        width = min(max(blocks, always), most)
        return self._selection(np.empty((*shape, width), np.int32), np.empty(shape, np.int32)), (low, high)

    def select(self, score: np.ndarray, blocks: int, recent: int | None = None) -> Selection:
        """As in `Step`, at once, by computed scores."""
        recent = self.recent_blocks if recent is None else recent
        selection, bounds = self._new_selection(blocks, recent, self.num_blocks)
        launch = block_topk.select_blocks(
            score, self.store.sealed, self.num_blocks, *bounds, recent, blocks, selection.items, selection.counts
        )
        launch.run(self.label("selection"))
        self.serve_this_block()
        return selection

    def draw(self, join: str, samples: int) -> Selection:
        store, query = self.store, self.buffers.query
        if store.sealed == 0 or store.awaits_digests:
            self.serve_this_block()
            return self.all_blocks()
        last, wants, size = self._last_sealed(), self.layer.requirements, self.block_size // 2
        (low, high), recent = store.padding.sinks(wants.sinks, 2), -(-wants.recent // 2)
        sure = max((high - low).tolist(), default=0) + recent + max(self.num_blocks - store.sealed, 1) * size
        draw = Draw(
            store, self.layer.stats, query.shape[1], samples, join, last, sure=sure, buffer=self.layer.settings.buffer
        )
        covered = min((last + 1) * self.block_size, self.view.covered)
        always = Always(low, high, recent)
        launch = draw.launch(query, self._digest(), always, self.scores, length=covered, unsealed=self.view.blocks)
        self.add(launch, "the draw of pairs", length=True)
        self._number_blocks(launch, "n_sealed")
        return draw.selection

    def _selection(self, blocks: np.ndarray, counts: np.ndarray) -> Selection:
        return Selection(blocks, counts, self.block_size)

    def all_blocks(self) -> Selection:
        shape, last = (self.store.batch, self.store.num_kv_heads), -(-self.num_blocks // LIST_BLOCKS) * LIST_BLOCKS
        blocks = np.broadcast_to(np.arange(last, dtype=np.int32), (*shape, last)).copy()
        self._all_counts = counts = np.full(shape, self.num_blocks, np.int32)
        self.serve(range(last - LIST_BLOCKS + 1, last + 1))
        return self._selection(blocks, counts)

    def blocks_from(self, first: int) -> Selection:
        shape = (self.store.batch, self.store.num_kv_heads, self.num_blocks - first)
        blocks = np.broadcast_to(np.arange(first, self.num_blocks, dtype=np.int32), shape).copy()
        self.serve_this_block()
        return self._selection(blocks, np.full(shape[:2], shape[2], np.int32))

    def blocks(self, numbers: Sequence[int]) -> Selection:
        listed, shape = self._listed(numbers), (self.store.batch, self.store.num_kv_heads)
        self.serve_this_block()
        wide = np.broadcast_to(listed, (*shape, len(listed))).copy()
        return self._selection(wide, np.full(shape, len(listed), np.int32))

    def resident_blocks(self) -> None:
        return None

    def split(self, selection: Selection) -> tuple[None, Selection]:
        return None, selection

    def attend_split(self, device: Selection | None, host: Selection | None) -> tuple[Partial, ...]:
        return () if host is None else (self.attention(host, "CPU attention"),)

    # --- computing ---------------------------------------------------------------------------------------------------

    def output_buffers(self) -> Partial:
        """Return the layer's buffers for one more partial of this plan, valid until the next step."""
        self._partials += 1
        return self.buffers.partial(self._partials - 1)

    def attention(
        self,
        host: Selection,
        what: str,
        scores: np.ndarray | None = None,
        to: Partial | None = None,
        end: int | None = None,
    ) -> Partial:
        """Queue attention to a selection with this step's query.

        Args:
            host: the selection.
            what: its name in error messages.
            scores: as for `cpu.kernels.decode_attention.decode_attention`.
            to: buffers of the result; None: `output_buffers()`.
            end: all selected tokens lie before this one; None: the row's end.

        Returns:
            The buffers, which the queue fills.
        """
        to = to or self.output_buffers()
        launch = decode_attention(
            self.buffers.query, self.view.blocks, host.items, host.counts, end or self.view.covered, *to,
            **self.scores._asdict(), pairs=host.weights, scores=scores,
        )  # fmt: skip
        self.add(launch, what, length=end is None)
        if host.weights is not None:
            self._estimate = Estimate(host, to.lse)
        return to

    def check(self) -> None:
        """Compare the result of the step that has just run with full attention, for the statistics."""
        buffers = self.buffers
        outcome = Outcome(buffers.query, buffers.out, buffers.lse, self._estimate)
        sinks = self.model_sinks if self.form.sinks else None
        check(self.layer, outcome, self.length, self.scores, sinks, self.label("the check"))

    def attend_host(self, host: Selection) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend blocks now with this step's query.

        Returns:
            out `[B, Hq, D]`, lse `[B, Hq]`; fp32, valid until the next step.
        """
        self.attention(host, "CPU attention", to=self.buffers.partial(0))
        self.begin()
        return self.buffers.out_tensor, self.buffers.lse_tensor

    def _merge(self, partials: Sequence[Partial | HostPartial]) -> None:
        """Queue the merge of a plan's partials into the layer's `out` and `lse`."""
        result, others = self.buffers.partial(0), []
        for partial in partials:
            out, lse = self._arrays(partial)
            ours = _same(out, result.out), _same(lse, result.lse)
            if not all(ours):
                others.append(self._moved(out, lse) if any(ours) else Partial(out, lse))
        if len(others) == len(partials):
            self.then(_attend_nothing)
        for first in range(0, len(others), 2):
            one, two = (*others[first : first + 2], self.buffers.nothing)[:2]
            self.add(join_parts(*result, one, two), "the merge of partials")

    def _moved(self, out: np.ndarray, lse: np.ndarray) -> Partial:
        """Queue a copy of a partial of which one array alone is the result's; the merge would overwrite it."""
        moved = Partial(np.empty_like(out), np.empty_like(lse))

        def copy(step: CpuStep) -> None:
            np.copyto(moved.out, out)
            np.copyto(moved.lse, lse)

        self.then(copy)
        return moved

    def _arrays(self, partial: Partial | HostPartial) -> Partial:
        """Return a partial as arrays that a launch can read.

        Raises:
            TypeError, ValueError: as `checked`; or a host partial, for which a step with one memory cannot wait.
        """
        if isinstance(partial, HostPartial):
            raise ValueError("a host partial needs two memories; check step.layer.two_memories first")
        out, lse = self.checked(partial, splits=False)
        return Partial(out.numpy(), lse.numpy())

    def _queue_output(self) -> None:
        """Queue the conversion of the result to this step's output tensor."""
        if self._output.dtype not in SHORT:
            self.then(_copy_output)
            return
        if self._output_launch is None:
            out = self.buffers.out
            self._output_launch = self._launch(narrow(out.reshape(len(out), -1), self._output), "the output")
            self._output_launch.keep = ()
            self._output_word = self._output_launch.word("target")
        assert self._output_word is not None
        words, i = self._output_word
        words[i] = self._output.data_ptr()
        self._queue.append(self._output_launch)

    # --- moving and counting -----------------------------------------------------------------------------------------

    def learn(self, score: np.ndarray, smoothing: float) -> None:
        """Do nothing: there is no resident set."""

    def recall(self, clock: object) -> None:
        """Do nothing: there is no resident set."""


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays begin at one address."""
    return bool(one.ctypes.data == other.ctypes.data)


def _attend_nothing(step: CpuStep) -> None:
    step.buffers.out_tensor.fill_(0.0)
    step.buffers.lse_tensor.fill_(float("-inf"))


def _merge_sinks(step: CpuStep) -> None:
    """Merge the model's attention sinks into the step's result."""
    assert step.model_sinks is not None
    out, lse = step.buffers.out_tensor, step.buffers.lse_tensor
    out.copy_(merge_partials([(out, lse)], step.model_sinks.float().view(1, -1))[0])


def _copy_output(step: CpuStep) -> None:
    step._output.copy_(step.buffers.out_tensor.unsqueeze(1))


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy of it, that launches can read: a known dtype, the last dimension contiguous."""
    if tensor.dtype not in TAGS:
        tensor = tensor.float()
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
