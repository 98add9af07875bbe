"""The contract of a policy: which blocks a step attends, which are resident, and when blocks are copied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from hf_offload.attention.cpu_partial import HostPart
    from hf_offload.attention.step import Step
    from hf_offload.attention.step_cpu import HostStep
    from hf_offload.cache.layer import HybridLayer
    from hf_offload.cache.stats import LayerStats
    from hf_offload.fields import Field, LayerSizes
    from hf_offload.scores import Scores


EVER = 2**31
"""`Plan.until` of a plan that no number of blocks ends."""


@dataclass(slots=True)
class Selection:
    """Logical blocks for each row and KV head.

    Args:
        blocks: `[B, Hkv, C]` int32, ascending; entries from `counts` on mean nothing. Arrays with one memory, tensors
            on the device with two.
        counts: `[B, Hkv]` int32.
        slots: `[B, Hkv, C]` int32, where resident blocks lie.
    """

    blocks: Any
    counts: Any
    slots: Any = None


@dataclass(slots=True)
class Plan:
    """Who computes what in one decode step of one layer; the parts share no block.

    Args:
        device: resident blocks, attended by the device.
        host: blocks attended by the CPU with the query of this step.
        fetched: host blocks that the device attends once they have been copied to it.
        beside: with two memories, a CPU part that was started already (`attention.cpu_partial.HostPart`).
        attended: out `[B, Hq, D]` and lse `[B, Hq]` fp32 of what the policy has attended itself; with two memories also
            in splits, `[B, Hq, S, D]` and `[B, Hq, S]`.
        queue: with one memory, queues launches that attend everything, into the `out` and `lse` of the step's buffers.
        until: with one memory the plan serves later steps, too, as long as the rows have fewer blocks than this and
            nothing has changed that its services depend on; 0: this step alone.
    """

    device: Selection | None = None
    host: Selection | None = None
    fetched: Selection | None = None
    beside: HostPart | None = None
    attended: tuple[torch.Tensor, torch.Tensor] | None = None
    queue: Callable[[HostStep], None] | None = None
    until: int = 0


class LayerState:
    """What a method remembers of one layer. The cache tells it what happens there; each method here does nothing.

    A state lives until `HybridCache.reset`. What it must keep for forks, saved caches, drafts and changes of the rows
    is what `tensors` gives and `load` takes back; a method overrides the others where that would cost too much.
    """

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds of tokens on the model's device."""
        return 0

    @property
    def slots(self) -> int | None:
        """Blocks of a row and KV head for which it wants room on the device; None: as many as the cache has."""
        return None

    # --- what happens ------------------------------------------------------------------------------------------------

    def before_append(self, layer: HybridLayer) -> None:
        """A prompt, a chunk of one or a new turn is about to be stored; it may yet be taken back by `crop`."""

    def append(self, layer: HybridLayer, query: torch.Tensor, scores: Scores) -> None:
        """It was stored; `query` `[B, Hq, Q, D]` is of its tokens."""

    def before_token(self, layer: HybridLayer) -> None:
        """A decode step begins."""

    def token(self, layer: HybridLayer) -> None:
        """A decode step has stored its token and attended; not told of steps that a CUDA graph replays."""

    def placed(self, layer: HybridLayer, query_heads: int | None = None) -> None:
        """With two memories: what is resident was decided and loaded.

        Args:
            layer: the layer.
            query_heads: of the model; None: as many as before.
        """

    def block_opened(self, layer: HybridLayer, block: int) -> None:
        """With two memories: a block that the next token begins got a slot."""

    def unplaced(self, layer: HybridLayer) -> None:
        """What is resident is about to be dropped, and decoding begins anew: append, crop, changed padding."""

    def cancelled(self) -> None:
        """The step that was prepared does not come: undo what `Policy.before_layer` has done to the state."""

    def padding_changed(self, layer: HybridLayer, block: int) -> None:
        """Tokens that were there before, in block `block` or behind it, became valid or invalid."""

    def adopted(self, layer: HybridLayer) -> None:
        """There are tokens of which nothing was told: of a cache that was taken over, or of an interrupted forward."""

    def prepare_crop(self, layer: HybridLayer, length: int) -> None:
        """Do what may fail of the crop that comes."""

    def crop(self, layer: HybridLayer, length: int) -> None:
        """Only the first `length` tokens stay, behind `unplaced`; allocates nothing that `prepare_crop` could have."""

    def select_rows(self, layer: HybridLayer, rows: torch.Tensor) -> None:
        """The rows of an index stay, int64 `[n]`, in its order."""
        self.load(layer, {name: x[rows.to(x.device)] if x.ndim else x.clone() for name, x in self.tensors().items()})

    def settle(self) -> None:
        """Wait for what it has in flight, before anything moves, is freed, copied or saved.

        Raises:
            WorkerError: that failed.
        """

    # --- what lasts --------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        """What it must keep between two forwards, by name.

        For `select_rows` as it is here the first dimension is the rows', or there is none.
        """
        return {}

    def load(self, layer: HybridLayer, tensors: dict[str, torch.Tensor]) -> None:
        """Be what a state was that gave these; nothing: as new. They are the caller's: what is kept is copied.

        Tensors that a captured CUDA graph reads are written in place.
        """

    def share(self, layer: HybridLayer, source: Any) -> None:
        """Be, in a fork, what the state `source` is of the same layer in the cache that was forked."""
        self.load(layer, source.tensors())

    def snapshot(self) -> Any:
        """What `restore` goes back to when the decode steps from here on are taken back."""
        return {name: x.clone() for name, x in self.tensors().items()}

    def restore(self, layer: HybridLayer, snapshot: Any) -> None:
        """Go back; the tokens are cropped already."""
        self.load(layer, snapshot)

    def report(self, stats: LayerStats) -> None:
        """Fill in the statistics that it knows of."""


@dataclass(frozen=True)
class Policy(ABC):
    """Base class of policies: which blocks a decode step attends, which are resident, and when blocks are copied.

    A policy is a frozen dataclass of its knobs, which `__post_init__` checks. It has a `name` and implements `plan`.
    `register_policy` makes it known.
    """

    name: ClassVar[str]
    block_size: ClassVar[int] = 32
    """Tokens of a block by default."""

    @property
    def digest_name(self) -> str | None:
        """The digest that blocks need, or None."""
        return None

    @property
    def sink_tokens(self) -> int:
        """Tokens at the start of each row, the first real one counted first, that are always attended and resident."""
        return 0

    @property
    def recent_tokens(self) -> int:
        """Newest sealed tokens that are always attended and resident; the unsealed tail comes on top."""
        return 0

    @property
    def budget_tokens(self) -> int | None:
        """Tokens a row and KV head attends in a step, or None for all of them."""
        return None

    @property
    def leaves_out(self) -> bool:
        """Whether a step may leave out tokens that are cached."""
        return self.budget_tokens is not None

    @property
    def retrieves(self) -> bool:
        """Whether the CPU itself chooses what it attends: digests lie there; what is always attended is resident."""
        return False

    @property
    def attends_blocks(self) -> bool:
        """Whether steps attend blocks; otherwise the policy's states hold what is attended, apart from all blocks."""
        return True

    @property
    def capturable(self) -> bool:
        """Whether a decode step can be captured as a CUDA graph: the host decides nothing in it."""
        return self.attends_blocks and not self.retrieves

    def state_bytes(self, sizes: LayerSizes, slots: int) -> tuple[int, int]:
        """Bytes that a layer's state holds on the device and on the host, if decoding starts with these sizes.

        Args:
            sizes: of the layer.
            slots: blocks of a row and KV head that are resident; 0 with one memory.
        """
        return 0, 0

    @property
    def reads_prompts(self) -> bool:
        """Whether it learns from a prompt's queries, so that keys and values alone are not all that it knows."""
        return self.query_window > 0 and (self.retrieves or not self.attends_blocks)

    def window_tokens(self, length: int) -> int | None:
        """Tokens of the window, of `length` that are cached; None: as many as are resident."""
        return None

    @property
    def query_window(self) -> int:
        """How many of a prompt's last queries are kept, for `place` and for whoever learns from them."""
        return 0

    def check_blocks(self, block_size: int) -> None:
        """Raise ValueError if the knobs make no sense with this block size."""
        budget = self.budget_tokens
        least = self.always_blocks(block_size) * block_size
        if budget is not None and budget < least:
            raise ValueError(
                f"budget={budget} is less than the {least} tokens that sinks, recent tokens and the tail take in "
                f"blocks of {block_size}; raise budget or lower sinks, recent or block_size"
            )

    def check_memories(self, *, two: bool) -> None:
        """Raise ValueError if the knobs make no sense with one memory, or with two."""
        return

    def for_memories(self, *, two: bool) -> Policy:
        """This policy where a saved cache is loaded: without knobs that make no sense there but changed no token."""
        return self

    def always_blocks(self, block_size: int) -> int:
        """Blocks that are always attended: sinks, recent ones and the tail (sinks behind padding may need one more)."""
        sinks, recent = -(-self.sink_tokens // block_size), -(-self.recent_tokens // block_size)
        return sinks + recent + 1

    def new_state(self, layer: HybridLayer) -> LayerState:
        """What this method remembers of one layer, whose store is there and empty."""
        return LayerState()

    def state_fields(self, sizes: LayerSizes) -> dict[str, Field]:
        """What `LayerState.tensors` gives for a layer, if it gives anything: saved caches are compared with it."""
        return {}

    def must_be_resident(self, layer: HybridLayer, blocks: int) -> torch.Tensor:
        """Which of a layer's first blocks, the newest aside, a step relies on being resident: bool `[B, blocks]`."""
        assert layer.store is not None
        needed = torch.zeros(layer.batch_size, blocks, dtype=torch.bool)
        if self.retrieves:
            low, high = (torch.from_numpy(end)[:, None] for end in layer.store.padding.sinks(self.sink_tokens))
            number = torch.arange(blocks)
            needed |= (number >= low) & (number < high)
            needed[:, max(layer.store.sealed - -(-self.recent_tokens // layer.store.block_size), 0) :] = True
        return needed

    def for_model(self, identity: Callable[[], dict[str, Any]]) -> Policy:
        """This policy for a model, with what has to be read for it.

        Args:
            identity: tells what identifies the model in whatever dtype (`cache.fingerprint.likeness`).
        """
        return self

    def looks_ahead(self, layer: HybridLayer) -> bool:
        """Whether `before_layer` wants this layer's predicted query one layer early."""
        return False

    def may_look_ahead(self, *, beside_device: bool) -> bool:
        """Whether `looks_ahead` may become true for a layer once tokens are there.

        Args:
            beside_device: whether the model lies on a device beside the CPU.
        """
        return type(self).looks_ahead is not Policy.looks_ahead

    def before_layer(self, step: Step) -> None:
        """Layer-ahead work: called one decoder layer early, with `step.query` predicted."""
        return

    @abstractmethod
    def plan(self, step: Step) -> Plan:
        """Who computes what in a decode step."""

    def after_layer(self, step: Step, plan: Plan) -> None:
        """Recall, averages; called when the layer's attention is done."""
        return

    def place(self, step: Step, slots: int) -> Selection:
        """Which blocks are resident (at most `slots` for a row and KV head) when decoding starts.

        `step.query` holds the prompt's last queries, `[B, Hq, query_window, D]`, or that of the step that comes where
        nobody has kept them.
        """
        if self.retrieves:  # no sink may be left out for a newer block
            return step.recent(min(slots, self.always_blocks(step.block_size)))
        return step.recent(slots)
